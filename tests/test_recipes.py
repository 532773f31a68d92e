"""The recipes of docs/recipes: each page is two programs that end in the same losses.

A page is the only source of its code. What is in a `diff` block, or under the headings
"Before" and "After", differs between the old and the new program; blocks above that are
in both, and blocks below it are in the new one. Both programs fill a list `losses`.

Both run as they are printed, and with every half precision replaced by float32. A page
whose old program needs a package says so in its front matter (`needs: jmp`). Where the
package is missing, the old program is only compiled.
"""

import contextlib
import functools
import importlib.util
import linecache
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks import peers

RECIPES = Path(__file__).parents[1] / "docs" / "recipes"
INDEX = RECIPES / "README.md"
PAGES = sorted(path for path in RECIPES.glob("*.md") if path != INDEX)

FLOAT32 = {
    r"\b(bf)?16-mixed\b": "32-true",
    r"\bb?float16\b": "float32",
    r"\buse_mixed_precision=True": "use_mixed_precision=False",  # of mpx
}
TOLERANCE = {"bfloat16": 2e-2, "float16": 5e-3, "float32": 2e-5}


def programs(page):
    """Returns the old and the new program of a page, each line where it is on it."""
    old, new = [], []
    fence, side = "", "both"
    for line in page.splitlines():
        before = after = ""
        if line.startswith("```"):
            if fence == "diff":
                side = "new"
            fence = "" if fence else line[3:].strip()
        elif not fence and line.startswith("## "):
            side = {"## Before": "old", "## After": "new"}.get(line, side)
        elif fence == "diff":
            before = line[1:] if not line.startswith("+") else ""
            after = line[1:] if not line.startswith("-") else ""
        elif fence == "python":
            before = line if side != "new" else ""
            after = line if side != "old" else ""
        old.append(before)
        new.append(after)
    return "\n".join(old), "\n".join(new)


def in_float32(program):
    for half, full in FLOAT32.items():
        program = re.sub(half, full, program)
    return program


def half_dtype(program):
    """Returns the half precision of a program, the narrower one if it has both."""
    wide = not re.search(r"(?<!b)float16|(?<!bf)16-mixed", program)
    return "bfloat16" if wide else "float16"


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
    needs = re.match(r"---\nneeds: (.+)\n---\n", page)
    names = needs[1].split() if needs else []
    if "jaxamp" in names and importlib.util.find_spec("jaxamp"):
        peers.load_jaxamp()  # it gets the line corrected that fails on current JAX
    return [name for name in names if importlib.util.find_spec(name) is None]


def check(page, name):
    """Runs both programs of a page, and returns what is missing to run the old one."""
    old, new = programs(page)
    dtype, missing = half_dtype(new), missing_packages(page)
    half = losses_of(new, f"{name} (after)")
    full = losses_of(in_float32(new), f"{name} (after, in float32)")
    assert (half != full).any(), f"{name}: nothing ran in {dtype}"
    np.testing.assert_allclose(half, full, rtol=TOLERANCE[dtype])
    compile(old, name, "exec")
    if missing:
        return missing
    before = losses_of(old, f"{name} (before)")
    before_full = losses_of(in_float32(old), f"{name} (before)")
    np.testing.assert_allclose(half, before, rtol=TOLERANCE[dtype])
    np.testing.assert_allclose(full, before_full, rtol=TOLERANCE["float32"])
    return []


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_recipe(path):
    if missing := check(path.read_text(), path.name):
        pytest.skip(f"the program before needs {', '.join(missing)}")
