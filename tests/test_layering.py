"""Imports run one way; the core knows no framework; test files mirror the package.

Examples use public names.
"""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import flax_amp

pytestmark = pytest.mark.once

ROOT = Path(__file__).parents[1]
PACKAGE = sorted((ROOT / "flax_amp").rglob("*.py"))
USERS = sorted([*(ROOT / "examples").rglob("*.py"), *(ROOT / "configs").rglob("*.py")])


def room_of(path):
    """The folder of the file in flax_amp, or the file's own name at the top."""
    return path.relative_to(ROOT / "flax_amp").with_suffix("").parts[0]


# room -> the rooms directly below it; it may import those and all below them.
BELOW = {
    "_compat": set(),
    "_source": {"_compat"},
    "_jaxprs": {"_source"},
    "_tree": set(),
    "_checks": {"_tree"},
    "_scope_paths": set(),
    "policy": {"_compat", "_scope_paths"},
    "_rewriter": {"policy", "_jaxprs", "_tree"},
    "optim": {"_checks"},
    "_training": {"_rewriter", "optim"},
    "checkpoint": {"_training"},
    "debug": {"checkpoint"},
    "metrics": set(),
    "__main__": {"debug", "metrics"},
}


def allowed(room):
    assert room in BELOW, f"add flax_amp/{room}, with the rooms directly below it"
    return BELOW[room].union(*map(allowed, BELOW[room]))


# The rewriter's bridges to Flax; the rest of it, and what is below, knows no framework.
BRIDGES = {"nnx_bridge", "nnx_scopes", "policy_warnings"}
CORE = [
    path
    for path in PACKAGE
    if room_of(path) in {"_rewriter", "_checks"} | allowed("_rewriter")
    and path.stem not in BRIDGES
]
FRAMEWORKS = {"flax", "optax", "orbax", "clu"}


def imports(path):
    """Every module that the file imports, in full, wherever in the file it does."""
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = ["flax_amp"] if node.level else []
            base = ".".join(package + ([node.module] if node.module else []))
            yield from (f"{base}.{alias.name}" for alias in node.names)


def test_imports_run_one_way():
    for path in PACKAGE:
        room = room_of(path)
        if room != "__init__":
            names = {n for n in imports(path) if n.startswith("flax_amp.")}
            upward = {n.split(".")[1] for n in names} - {room} - allowed(room)
            assert not upward, f"{path} imports {sorted(upward)}; may: {allowed(room)}"


def test_the_picture_shows_the_rooms():
    shown = re.findall(r"(\w+) imports (\w+)<", (ROOT / "docs/imports.svg").read_text())
    assert sorted(shown) == sorted((room, b) for room in BELOW for b in BELOW[room])


def test_only_compat_touches_jax_src():
    for path in PACKAGE:
        if room_of(path) != "_compat":
            tree = ast.parse(path.read_text())
            names = {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute)}
            assert "_src" not in names.union(*(n.split(".") for n in imports(path)))


def test_the_rewriter_knows_no_framework():
    for path in CORE:
        assert not {n.split(".")[0] for n in imports(path)} & FRAMEWORKS, path


def test_examples_use_public_names_only():
    for path in USERS:
        used = {n.split(".", 1)[1] for n in imports(path) if n.startswith("flax_amp.")}
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                used |= {node.attr} if node.value.id == "flax_amp" else set()
        assert used <= set(flax_amp.__all__), path


# Test files of a behavior, each with the reason why the test file has not the name of a
# source file. CONTRIBUTING.md has a table of these files.
ACROSS_FILES = {
    # the whole project
    "layering": "reads the imports and the names of all files",
    "recipes": "runs the programs of the README and of docs/recipes",
    "types": "is code of users, for type checkers",
    # the rewriter
    "flax_models": "whole models go through all files of the rewriter",
    "float32_result": "a value of a policy, which roles.py, rule.py and emit.py follow",
    "graph_policy": "a policy, whose values roles.py and flow.py follow",
    "hard_losses": "the errors of whole losses depend on all files of the rewriter",
    "numerics": "casts.py, roles.py and primitives.py keep range and digits together",
    "six_lines": "the six lines of the rule hold for all files of the rewriter",
    "upgrade_flags": "_compat.py, transform.py and policy_warnings.py handle the flags",
    # a step
    "messages": "every file of a step has errors for bad arguments, losses and states",
    "metrics": "core.py, loss.py and optimizer.py make the metrics of a step",
    "precision": "a word that policy.py reads, and every step and state takes",
    "settings": "each setting meets each kind of run, through the whole step",
    "sharded": "whole steps over devices have to equal steps on one device",
    "spikes": "core.py, progress.py and optim/_skip_spikes.py skip a step together",
    "writes": "loss.py, loss_checks.py, passes.py and core.py keep what a loss wrote",
    # a directory of checkpoints
    "bucket": "every file of checkpoint/ may read or write a bucket",
    "checkpoint": "a save and its restore go through most files of checkpoint/",
    "kills": "a kill may end a save in any file of checkpoint/",
    "topologies": "_state.py and _trees.py read arrays for other devices and processes",
    # optimizers
    "optim": "optimizers in steps and on disk need _call.py and _optimizer.py",
    "table": "every optimizer of optax goes through all files of the interface",
}


def is_named_after(name, folder):
    """Whether a file in a folder has this name, or the first words of this name."""
    words = name.split("_")
    beginnings = {"_".join(words[: n + 1]) for n in range(len(words))}
    sources = {path.stem.removeprefix("_") for path in folder.glob("*.py")}
    return not sources.isdisjoint(beginnings)


def test_a_test_file_has_the_name_of_its_source_file():
    """A suffix is free: `_nonfinite.py` has `test_nonfinite_inside.py`, too."""
    package, seen = ROOT / "flax_amp", set()
    for folder in {path.parent for path in PACKAGE}:
        room = folder.relative_to(package).as_posix().removeprefix("_")
        for path in (ROOT / "tests" / room).glob("test_*.py"):
            name = path.stem.removeprefix("test_")
            seen.add(name)
            assert is_named_after(name, folder) != (name in ACROSS_FILES), (
                f"{path}: expected the name of a file of {folder}, or else an entry in "
                "ACROSS_FILES, with the reason"
            )
    assert seen >= set(ACROSS_FILES)


def test_the_table_of_behaviors_has_each_of_these_test_files():
    page = (ROOT / "CONTRIBUTING.md").read_text()
    section = page.split("## Which test file pins a file")[1].split("\n## ")[0]
    _, *rows = re.findall(r"(?m)^\|.*\|(.+)\|$", section)
    assert {n for row in rows for n in re.findall(r"`(\w+)`", row)} == {*ACROSS_FILES}


HEAVY = {"orbax", "clu", "tensorboardX", "matplotlib"}
HEAVY |= {"flax_amp.debug", "flax_amp.metrics", "flax_amp.checkpoint"}


def test_import_is_light():
    """What is slow to import is imported when it is first used, under any name.

    It starts no backend either, or nobody could choose the devices after it.
    """
    code = (
        "import sys, jax, flax_amp; print(*sys.modules)\n"
        "jax.config.update('jax_num_cpu_devices', 3)\n"
        "for name in flax_amp.__all__: getattr(flax_amp, name)\n"
        "flax_amp.checkpoint.manager\n"
        "assert len(jax.devices()) == 3"
    )
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        check=True,
        cwd=ROOT,
        env=environment,
        capture_output=True,
    )
    assert not HEAVY.intersection(done.stdout.decode().split())


def test_every_public_name_is_the_one_of_its_room():
    for name in flax_amp._OF_DEBUG:
        assert getattr(flax_amp, name) is vars(flax_amp.debug)[name]
    with pytest.raises(AttributeError, match="has no attribute 'explian'"):
        flax_amp.explian  # noqa: B018
