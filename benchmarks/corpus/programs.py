"""The programs of the corpus, which are the rows of programs.toml."""

import functools
import importlib
import pathlib
import tomllib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jax.scipy as jsp

from benchmarks.corpus import functions, modules, transformers_models
from benchmarks.corpus.case import Case

KINDS = {
    "matmul": functions.MATMUL,
    "solver": functions.SOLVER,
    "linen": modules.LINEN,
    "nnx": modules.NNX,
    "equinox": modules.EQUINOX,
    "kernel": modules.KERNEL,
    "transformers": transformers_models.TRANSFORMERS,
}


def all_programs() -> dict[str, Callable[[], Case]]:
    """Returns what makes each program, by package and name."""
    text = pathlib.Path(__file__).with_suffix(".toml").read_text()
    found: dict[str, Callable[[], Case]] = {}
    for package, table in tomllib.loads(text).items():
        for row in table["rows"].replace("\n    ", " ").splitlines():
            names, code = row.split(": ", 1)
            for name in names.split():
                make = functools.partial(_make, table, code.replace("@", name))
                found[f"{package}/{name.replace('~', ' ')}"] = make
    return found


def _make(table: dict[str, Any], code: str) -> Case:
    kind, module = KINDS[table["kind"]], importlib.import_module(table["module"])
    names = {"jax": jax, "jnp": jnp, "jsp": jsp, "m": module} | dict(kind.names)
    return kind.case(eval(f"lambda {kind.arguments}: ({code})", names))
