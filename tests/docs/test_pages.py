"""The code of the documentation runs, and prints what the pages show below it.

What the pages name exists, and the API reference has every public name. The examples in
docstrings are run by pytest itself (`--doctest-modules`).

After a change of docs/tour.ipynb, `python tests/docs/test_pages.py` runs it and stores
its outputs anew.
"""

import contextlib
import io
import json
import os
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx

import flax_amp
from _models import CLASSES, FEATURES, cross_entropy, make_batch
from flax_amp import __main__

pytestmark = pytest.mark.once

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
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


LONG = (
    "compare_training",
    "nonfinite",
    "performance",
    "tour",
)  # they compile and run several models


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


# --- the table of docs/start.md: Linen and NNX take the same lines, and all run ------

SECTION = (DOCS / "start.md").read_text().partition("## Linen and NNX side by side")[2]


def table():
    """Returns each row: its name, and the lines of both columns."""
    for line in SECTION.splitlines():
        name, *cells = line.strip("| ").split(" | ")
        if line.startswith("| ") and "`" in line:
            yield name, *(re.findall("`([^`]+)`", cell) for cell in cells)


def names_of(tmp_path):
    """What both columns begin with."""

    def logits(params, batch):
        return batch["x"] @ params["w"]

    names = {name: getattr(flax_amp, name) for name in flax_amp.__all__}
    names |= {"flax_amp": flax_amp, "nnx": nnx, "optax": optax, "jax": jax}
    (code,) = re.findall("```python\n(.*?)```", SECTION, re.DOTALL)
    exec(code, names)
    return names | {
        "tx": optax.adam(0.1),
        "batch": make_batch(),
        "params": {"w": jnp.ones((FEATURES, CLASSES))},
        "loss_fn": lambda p, b: cross_entropy(logits(p, b), b["y"]),
        "predict": lambda p, b: logits(p, b).argmax(-1),
        "model": nnx.Linear(FEATURES, CLASSES, rngs=nnx.Rngs(0)),
        "nnx_loss": lambda m, b: cross_entropy(m(b["x"]), b["y"]),
        "nnx_predict": lambda m, b: m(b["x"]).argmax(-1),
        "manager": flax_amp.checkpoint.manager(tmp_path / "run"),
        "run": tmp_path / "run",
        "orbax": ocp.StandardCheckpointer(),
        "folder": tmp_path / "orbax",
    }


@pytest.mark.parametrize("side", [0, 1], ids=["linen", "nnx"])
def test_each_line_runs(side, tmp_path):
    names, train = names_of(tmp_path), ""

    def now():
        """The parameters, in memory that no step takes."""
        of_linen = lambda: names["state"].params["w"]  # noqa: E731
        return jnp.copy(names["model"].kernel[...] if side else of_linen())

    for name, *columns in table():
        lines = columns[side]
        for line in lines:
            exec(line, names)
            if "orbax.save" in line:
                names["orbax"].wait_until_finished()
            if "checkpoint.save" in line:
                names["manager"].close()
        train = lines[0] if name == "train" else train
        if train:  # what was made last trains
            before = now()
            exec(train, names)
            assert names["metrics"]["grads_finite"], name
    assert int(names["metrics"]["skipped_total"]) == 0
    held = names["state"] if side == 0 else names["optimizer"]
    ema = held.ema["w"] if side == 0 else held.ema.kernel[...]
    assert (ema != now()).any() and (ema != before).any()  # between the two


def test_no_column_is_longer():
    rows = [*table()]
    assert len(rows) == 16
    for name, linen, of_nnx in rows:
        assert len(linen) == 1 and len(of_nnx) - len(linen) <= 1, name


# --- the public surface: documented; one version number; what pages name exists -----

PUBLIC = [name for name in flax_amp.__all__ if not name.startswith("__")]
TEXTS = [ROOT / f"{name}.md" for name in ("README", "ARCHITECTURE", "CONTRIBUTING")]
for folder in ("docs", "flax_amp", "benchmarks"):
    # `make docs` makes copies of pages that stand elsewhere.
    TEXTS += [x for x in (ROOT / folder).rglob("*.md") if "_repository" not in x.parts]


def test_the_api_reference_has_every_public_name():
    """All but the factories of `optim`, which are those of optax."""
    pages = (DOCS / "api").glob("*.md")
    page = "\n".join(path.read_text() for path in pages)
    rooms = (flax_amp.checkpoint, flax_amp.debug, flax_amp.metrics)
    names = {name for room in rooms for name in dir(room) if name[0] != "_"}
    listed = {*re.findall(r"^\.\. (?:auto\w+|data):: .*?(\w+)$", page, re.M)}
    assert {*PUBLIC, *names} - listed <= {"checkpoint", "debug", "metrics", "optim"}


def test_one_version_number():
    project = (ROOT / "pyproject.toml").read_text()
    assert [flax_amp.__version__] == re.findall(r'(?m)^version = "(.+)"', project)
    cited = (ROOT / "CITATION.cff").read_text().splitlines()
    assert f"version: {flax_amp.__version__}" in cited


def test_the_command_prints_the_version(capsys):
    with pytest.raises(SystemExit) as ended:
        __main__.main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"flax_amp {flax_amp.__version__}\n"


@pytest.mark.parametrize("page", TEXTS, ids=lambda page: page.name)
def test_what_a_page_names_exists(page):
    """Links and their headings, files of the project, and targets of make."""
    text = page.read_text()
    for link, heading in re.findall(r"\]\((?!http)([^)#]*)#?([\w-]*)\)", text):
        if "_repository/" in link:  # copies, which `make docs` makes
            link = Path("..", *Path(link).parts[1:])
        target = page.parent / link if link else page
        assert target.exists(), link
        if heading:
            titles = re.findall(r"(?m)^#+ (.+)$", target.read_text())
            slugs = [
                re.sub(r"[^\w -]", "", t).lower().replace(" ", "-") for t in titles
            ]
            assert heading in slugs, f"{link} has no heading {heading}"
    for path in re.findall(r"`((?:flax_amp|tests|\.ci)/[\w./]+)`", text):
        assert (ROOT / path).exists(), path
    targets = re.findall(r"(?m)^([a-z-]+):", (ROOT / "Makefile").read_text())
    assert {*re.findall(r"(?m)(?:^|`)make ([a-z-]+)", text)} <= {*targets}


if __name__ == "__main__":
    store_tour()
