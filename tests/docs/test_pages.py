"""The code of the documentation runs, and prints what the pages show below it.

After a change of docs/tour.ipynb, `python tests/docs/test_pages.py` runs it and stores
its outputs anew.
"""

import contextlib
import io
import json
import os
import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.once

DOCS = Path(__file__).parents[2] / "docs"
TOUR = DOCS / "tour.ipynb"
PAGES = {path.stem: path for path in [*sorted(DOCS.glob("*.md")), TOUR]}
# A code block, and the output right below it. Output that varies between versions is
# marked `text`, and is not compared.
BLOCK = re.compile(r"^```python\n(.*?)^```\n(?:\n```\n(.*?)^```\n)?", re.DOTALL | re.M)
WIDTH = "100"  # of reports, which are as wide as the terminal
SOURCE = re.compile(r"\S+\.(?:py|md|ipynb):\d+")
NUMBER = re.compile(r"\d+(?:\.\d+)?(?:e[+-]?\d+)?")


def parts(path):
    """Yields the code blocks or cells of a page, and what is shown below each."""
    text = path.read_text()
    if path == TOUR:
        for cell in code_cells(json.loads(text)):
            shown = [line for output in cell["outputs"] for line in output["text"]]
            yield "".join(cell["source"]), "".join(shown)
        return
    for block in BLOCK.finditer(text):
        # The line of an error is that in the page.
        yield "\n" * text.count("\n", 0, block.start(1)) + block[1], block[2] or ""


def code_cells(notebook):
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def run(path):
    """Yields what each block prints, and what is shown.

    In one page, blocks use what those before them have defined.
    """
    names = {"__name__": path.stem}
    for code, shown in parts(path):
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(compile(code, path.name, "exec"), names)
        yield printed.getvalue(), shown


def words(text):
    return " ".join(NUMBER.sub("0", SOURCE.sub("file", text)).split())


def numbers(text):
    return [float(number) for number in NUMBER.findall(SOURCE.sub("file", text))]


LONG = "nonfinite", "performance", "tour"  # they compile and run several models


@pytest.mark.parametrize(
    "page", [pytest.param(p, marks=[pytest.mark.slow] * (p in LONG)) for p in PAGES]
)
def test_code_runs_and_prints_what_is_shown(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", WIDTH)
    for printed, shown in run(PAGES[page]):
        is_complete = words(shown) == words(printed)
        # A page may show only a part of the output.
        assert is_complete or (page != "tour" and words(shown) in words(printed))
        if is_complete:
            # Last digits depend on versions and machines, and add up in training.
            assert numbers(shown) == pytest.approx(numbers(printed), rel=0.3, abs=0.02)


def store_tour():
    os.environ["COLUMNS"] = WIDTH
    notebook = json.loads(TOUR.read_text())
    outputs = [printed for printed, _ in run(TOUR)]
    for index, cell in enumerate(code_cells(notebook)):
        lines = outputs[index].splitlines(keepends=True)
        stream = {"name": "stdout", "output_type": "stream", "text": lines}
        cell |= {"execution_count": index + 1, "outputs": [stream] if lines else []}
    TOUR.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    store_tour()
