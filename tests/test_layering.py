"""Imports run one way; the core knows no framework; examples use public names."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

import flax_amp

ROOT = Path(__file__).parents[1]
PACKAGE = sorted((ROOT / "flax_amp").glob("*.py"))
USERS = sorted([*(ROOT / "examples").rglob("*.py"), *(ROOT / "configs").glob("*.py")])

# module -> the modules directly below it; it may import those and all below them.
# Nothing names checkpoint, explain or debug: they stand on top.
BELOW = {
    "_compat": set(),
    "_cast": set(),
    "_keep": set(),
    "_mincut": set(),
    "_tree": {"_compat"},
    "scope_paths": set(),
    "policy": {"_tree", "scope_paths"},
    "precision_call": {"policy"},
    "policy_warnings": {"policy"},
    "plan": {"policy"},
    "facts": {"plan", "_cast"},
    "recurrence": {"facts"},
    "paint": {"recurrence", "precision_call"},
    "residuals": {"plan", "_keep", "_mincut"},
    "regions": {"residuals", "facts"},
    "equality": {"plan"},
    "repeats": {"equality", "facts"},
    "outline": {"repeats"},
    "wide_grad": {"policy"},
    "emit": {"paint", "regions", "outline", "wide_grad"},
    "captures": {"_compat"},
    "custom_rules": {"captures", "emit"},
    "rules": {"custom_rules"},
    "nnx_scopes": set(),
    "nnx_bridge": {"_tree", "nnx_scopes"},
    "transform": {"rules", "nnx_bridge", "policy_warnings"},
    "scaler": {"_tree"},
    "scaled_grad": {"scaler", "nnx_bridge", "_accumulate"},
    "_decisions": set(),
    "_exact": {"_compat", "_decisions"},
    "_arguments": {"_tree", "_exact"},
    "_trial": {"_arguments"},
    "_signatures": set(),
    "_state_dict": set(),
    "_bound": {"_trial", "_signatures", "_state_dict"},
    "_transformation": {"_tree", "_exact"},
    "_values": {"_arguments", "_transformation"},
    "_injected": {"_arguments"},
    "_variables": {"_tree"},
    "_schedule": {"_bound", "_transformation"},
    "_optimizer": {"_schedule", "_values", "_injected", "_variables"},
    "_hyperparams": {"_optimizer"},
    "optim": {"_optimizer"},
    "finite": {"_tree"},
    "_wrap": {"_optimizer", "finite"},
    "train_state": {"scaled_grad", "_hyperparams", "_wrap", "nnx_bridge"},
    "_accumulate": {"nnx_bridge"},
    "_compiled": set(),
    "_loss": {"train_state"},
    "_gradients": {"_accumulate", "_loss", "transform"},
    "train_step": {"_gradients", "_compiled"},
    "nnx_step": {"_gradients", "_compiled"},
    "progress": {"train_state"},
    "_lock": set(),
    "_digest": set(),
    "_layout": set(),
    "_integrity": {"_digest", "_layout"},
    "_reader": set(),
    "_steps": {"_integrity", "_lock", "_reader"},
    "_sources": {"_steps"},
    "_verify": {"_sources"},
    "_paths": {"_layout"},
    "_placement": {"_layout"},
    "_saved_scaler": {"_placement", "scaler"},
    "_saved_optimizer": {"_layout"},
    "_migrate": {"_sources", "_paths", "_saved_scaler", "_saved_optimizer"},
    "_manager": {"_steps"},
    "checkpoint": {"train_step", "_verify", "_migrate", "_manager"},
    "__main__": {"checkpoint"},
    "explain": {"train_step"},
    "debug": {"train_step"},
}
CORE = set(
    """_cast _keep _mincut _tree scope_paths policy precision_call plan facts paint
    residuals regions equality repeats outline wide_grad emit captures custom_rules
    rules transform""".split()
)
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


def allowed(module):
    if module not in BELOW:
        raise AssertionError(
            f"flax_amp/{module}.py is not in BELOW of {Path(__file__).name}: add it, "
            "with the modules that stand directly below it"
        )
    return BELOW[module].union(*map(allowed, BELOW[module]))


def named(paths):
    return [pytest.param(p, id=str(p.relative_to(ROOT))) for p in paths]


@pytest.mark.parametrize("path", named(p for p in PACKAGE if p.stem != "__init__"))
def test_imports_run_one_way(path):
    inside = {n.split(".")[1] for n in imports(path) if n.startswith("flax_amp.")}
    upward = inside & set(BELOW) - allowed(path.stem)
    assert not upward, (
        f"{path.name} imports {sorted(upward)}; may: {allowed(path.stem)}"
    )
    assert inside <= set(BELOW), f"unknown modules: {sorted(inside - set(BELOW))}"


@pytest.mark.parametrize("path", named(PACKAGE))
def test_only_compat_touches_jax_src(path):
    if path.stem != "_compat":
        tree = ast.parse(path.read_text())
        by_name = {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute)}
        assert "_src" not in by_name.union(*(n.split(".") for n in imports(path)))


@pytest.mark.parametrize("path", named(p for p in PACKAGE if p.stem in CORE))
def test_core_knows_no_framework(path):
    assert not {n.split(".")[0] for n in imports(path)} & FRAMEWORKS


@pytest.mark.parametrize("path", named(USERS))
def test_examples_use_public_names_only(path):
    used = {n.split(".", 1)[1] for n in imports(path) if n.startswith("flax_amp.")}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            used |= {node.attr} if node.value.id == "flax_amp" else set()
    assert used <= set(flax_amp.__all__), sorted(used - set(flax_amp.__all__))


def test_an_import_starts_no_backend():
    """Or nobody could choose the devices, or start several processes, after it."""
    code = "import jax, flax_amp; jax.config.update('jax_num_cpu_devices', 3); "
    code += "assert len(jax.devices()) == 3"
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, env=environment)
