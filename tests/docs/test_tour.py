"""The notebook docs/tour.ipynb runs from top to bottom, and prints what it shows.

After a change, `python tests/docs/test_tour.py` runs it and stores its outputs anew.
"""

import contextlib
import io
import json
import re
from pathlib import Path

import pytest

TOUR = Path(__file__).parents[2] / "docs" / "tour.ipynb"
NUMBER = re.compile(r"\d+(?:\.\d+)?(?:e[+-]\d+)?")


def code_cells(notebook):
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def run(notebook):
    """Runs the code cells in one namespace, and returns what each of them prints."""
    names = {"__name__": "__main__"}
    printed = []
    for cell in code_cells(notebook):
        with contextlib.redirect_stdout(io.StringIO()) as text:
            exec(compile("".join(cell["source"]), TOUR.name, "exec"), names)
        printed.append(text.getvalue())
    return printed


def stored(notebook):
    """Returns the text under each code cell. Nothing but text is stored."""
    cells = code_cells(notebook)
    assert [cell["execution_count"] for cell in cells] == [*range(1, len(cells) + 1)]
    return [
        "".join(line for output in cell["outputs"] for line in output["text"])
        for cell in cells
    ]


def store(notebook, printed):
    for index, cell in enumerate(code_cells(notebook)):
        lines = printed[index].splitlines(keepends=True)
        stream = {"name": "stdout", "output_type": "stream", "text": lines}
        cell |= {"execution_count": index + 1, "outputs": [stream] if lines else []}
    return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"


def test_it_prints_what_it_shows(monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    notebook = json.loads(TOUR.read_text())
    for shown, printed in zip(stored(notebook), run(notebook), strict=True):
        assert NUMBER.sub("0", shown).split() == NUMBER.sub("0", printed).split()
        # Versions and machines differ in last digits, which add up while it trains.
        numbers = [[*map(float, NUMBER.findall(text))] for text in (shown, printed)]
        assert numbers[0] == pytest.approx(numbers[1], rel=0.3, abs=0.02)


if __name__ == "__main__":
    tour = json.loads(TOUR.read_text())
    TOUR.write_text(store(tour, run(tour)))
