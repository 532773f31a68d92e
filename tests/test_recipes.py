"""The code of README.md, and of docs/recipes: two programs that end in the same losses.

A page is the only source of its code. What is in a `diff` block, or under the headings
"Before" and "After", differs between the old and the new program; blocks above that are
in both, and blocks below it are in the new one. Both programs fill a list `losses`.

Both run as they are printed, and with every half precision replaced by float32. A page
that needs a package says so in its front matter (`needs: jmp`). Where the package is
missing, the programs that import it are only compiled.
"""

import functools
import importlib.util
import linecache
import re
from pathlib import Path

import jax
import numpy as np
import pytest

from benchmarks import peers

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
# Blocks of code, each with the heading above it.
BLOCKS = re.findall(r"```(?:python|diff)\n.*?```", README, flags=re.DOTALL)
NAMES = "Linen NNX own_loop nonfinite explain resume"
HEADINGS = dict(zip(NAMES.split(), BLOCKS, strict=True))
RECIPES = ROOT / "docs" / "recipes"
INDEX = RECIPES / "README.md"
PAGES = sorted(path for path in RECIPES.glob("*.md") if path != INDEX)
# A recipe for Linen and one for NNX run on every JAX, the others on one.
ON_EVERY_JAX = ("linen", "nnx")

FLOAT32 = {
    r"\b(bf)?16-mixed\b": "32-true",
    r"\bb?float16\b": "float32",
    r"\buse_mixed_precision=True": "use_mixed_precision=False",  # of mpx
}
NUMBER = re.compile(r"\d+(?:\.\d+)?(?:e[+-]?\d+)?")
TOLERANCE = {"bfloat16": 2e-2, "float16": 5e-3, "float32": 2e-5}


def programs(page):
    """Returns the old and the new program of a page, each line where it is on it."""
    old, new = [], []
    inside, language, side = False, "", "both"
    for line in page.splitlines():
        before = after = ""
        if line.startswith("```"):
            if inside and language == "diff":
                side = "new"
            inside, language = not inside, line[3:].strip()
        elif not inside and line.startswith("## "):
            side = {"## Before": "old", "## After": "new"}.get(line, side)
        elif inside and language == "diff":
            before = line[1:] if not line.startswith("+") else ""
            after = line[1:] if not line.startswith("-") else ""
        elif inside and language == "python":
            before = line if side != "new" else ""
            after = line if side != "old" else ""
        old.append(before)
        new.append(after)
    return "\n".join(old).rstrip() + "\n", "\n".join(new).rstrip() + "\n"


def output_of(page):
    """Returns the output that a page shows, in blocks without a language."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    return "".join(text for language, text in blocks if not language)


def in_float32(program):
    """Returns a program in float32, up to its last loss: the rest ran as printed."""
    last = max(program.rfind("losses.append"), program.rfind("losses = "))
    program = program[: program.find("\n", last)]
    for half, full in FLOAT32.items():
        program = re.sub(half, full, program)
    return program


def half_dtype(program):
    """Returns the half precision that a program names first, that of its losses."""
    word = re.search(r"\b(bf)?16-mixed\b|\b(b)?float16\b", program)
    return "bfloat16" if word and (word[1] or word[2]) else "float16"


@functools.cache
def losses_of(program, name):
    """Runs a program and returns its losses. Tracebacks show the lines of the page."""
    lines = program.splitlines(keepends=True)
    linecache.cache[name] = (len(program), None, lines, name)
    names = {"__name__": "recipe"}
    exec(compile(program, name, "exec"), names)
    losses = np.array([float(loss) for loss in names["losses"]])
    assert losses[-1] < losses[0], f"{name}: the loss does not fall: {losses}"
    return losses


def missing_packages(page):
    """Returns what the front matter of a page needs and is not installed."""
    needs = re.match(r"---\nneeds: (.+)\n---\n", page)
    names = needs[1].split() if needs else []
    return [name for name in names if importlib.util.find_spec(name) is None]


def check(page, name):
    """Runs both programs of a page, and returns the packages that one of them lacks."""
    old, new = programs(page)
    dtype, missing = half_dtype(new), missing_packages(page)
    if any(re.search(rf"^import {name}\b", new, re.M) for name in missing):
        compile(new, name, "exec")
        compile(old, name, "exec")
        return missing
    half = losses_of(new, f"{name} (after)")
    full = losses_of(in_float32(new), f"{name} (after, in float32)")
    assert (half != full).any(), f"{name}: nothing ran in {dtype}"
    np.testing.assert_allclose(half, full, rtol=TOLERANCE[dtype])
    compile(old, name, "exec")
    if missing:
        return missing
    if "import jaxamp" in old:
        peers.load_jaxamp()  # the line that fails on current JAX is corrected
    before = losses_of(old, f"{name} (before)")
    before_full = before
    if re.search("|".join(FLOAT32), old):
        before_full = losses_of(in_float32(old), f"{name} (before, in float32)")
    np.testing.assert_allclose(half, before, rtol=TOLERANCE[dtype])
    np.testing.assert_allclose(full, before_full, rtol=TOLERANCE["float32"])
    return []


# PyTorch warns that it computes in float32 then, which is what is wanted.
@pytest.mark.filterwarnings("ignore:In CPU autocast, but the target dtype")
@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, marks=() if path.stem in ON_EVERY_JAX else pytest.mark.once)
        for path in PAGES
    ],
    ids=lambda path: path.stem,
)
def test_recipe(path, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)  # one saves to "run"
    # Layers of Keras add biases to arrays of another rank.
    promotion = "allow" if path.stem == "keras" else "raise"
    with jax.numpy_rank_promotion(promotion):
        missing = check(path.read_text(), path.name)
    if missing:
        pytest.skip(f"the page needs {', '.join(missing)}")
    if shown := output_of(path.read_text()):
        printed = capsys.readouterr().out
        assert NUMBER.sub("0", shown).split() == NUMBER.sub("0", printed).split()
        # Last digits depend on versions and machines.
        numbers = [[float(x) for x in NUMBER.findall(y)] for y in (shown, printed)]
        assert numbers[0] == pytest.approx(numbers[1], rel=0.3, abs=1e-3)


def test_the_index_lists_every_recipe():
    first_table, *_ = INDEX.read_text().split("\n## ")
    linked = re.findall(r"\]\((\w+)\.md\) \|$", first_table, re.MULTILINE)
    assert sorted(linked) == [path.stem for path in PAGES]


@pytest.mark.parametrize("heading", HEADINGS)
def test_a_block_of_the_readme_runs_alone(heading, tmp_path, monkeypatch, capsys):
    """A diff is two programs."""
    monkeypatch.chdir(tmp_path)  # one saves to "run"
    for program in dict.fromkeys(programs(HEADINGS[heading])):  # the new one last
        names = {"__name__": "readme"}
        exec(compile(program.lstrip("\n"), "readme.py", "exec"), names)
        printed = capsys.readouterr().out
    if "metrics" in names:
        assert names["metrics"]["grads_finite"]
    below = README.split(HEADINGS[heading])[1]
    if shown := re.search(r"\A\n\n```\n(.*?)```", below, re.DOTALL):
        # The page prints the beginning, with another name of the file.
        lines = shown[1].replace("train.py", "readme.py").split("...")[0]
        assert lines.strip() in printed


def test_the_site_shows_the_first_of_them():
    index = (ROOT / "docs" / "index.md").read_text()
    assert re.findall(r"```diff\n.*?```", index, flags=re.DOTALL) == BLOCKS[:1]


def test_the_tables_of_the_first_page_are_those_of_the_report():
    """`python -m benchmarks report` makes them from stored figures."""
    made = (ROOT / "benchmarks" / "results" / "README.md").read_text()
    tables = re.findall(r"(?:^\| .*\n)+", made.partition("## Summary")[0], re.M)
    assert len(tables) == 2
    for page in README, (ROOT / "docs" / "index.md").read_text():
        assert all(table in page for table in tables)
