"""`host`: what Python does before the first step, measured on the CPU.

Tracing and lowering of the models in full size costs no more than that of tiny ones.
"""

import gc
import re
from collections.abc import Iterator

import jax

from benchmarks import request, stages
from benchmarks.request import Figures, Request
from benchmarks.results import Results

_MODELS = ("gpt_24", *request.MODELS)
REPEATS = 3


def run(asked: Request) -> None:
    """Traces and lowers every cell."""
    jax.config.update("jax_platforms", "cpu")

    def measure(model: str, names: list[str]) -> Iterator[tuple[str, Figures]]:
        yield from trace(asked, model, names).items()

    results = Results.open(asked.folder, "host", "cpu", asked.size)
    cells = asked.cells(_MODELS, request.BFLOAT16)
    request.run_cells(asked, results, cells, measure)


def trace(asked: Request, model: str, names: list[str]) -> dict[str, Figures]:
    """Traces and lowers the variants of a model in turn, with nothing cached."""
    found: dict[str, Figures] = {name: {} for name in names}
    for turn in range(REPEATS + 1):  # the first warms Python up and counts for nothing
        for name, figures in found.items():
            if "error" in figures:
                continue
            once = request.guarded(_trace_once, asked, model, name)
            if "error" in once:
                found[name] = once
            elif turn:
                figures["ops"] = once.pop("ops")
                for key, seconds in once.items():
                    figures.setdefault(key, []).append(seconds)
    return found


def _trace_once(asked: Request, model: str, variant: str) -> Figures:
    training = asked.training(variant, model)
    shapes = training.shapes()
    request.free_memory()
    # Or a full garbage collection, of all that JAX and Flax hold, falls into some cells
    # and not into others: 0.25 s, which is half of a float32 cell.
    gc.freeze()
    found = stages.lower(jax.jit(training.step, donate_argnums=0), *shapes)._asdict()
    text = found.pop("lowered").as_text()
    ops = re.findall(r"^\s*(?:%\S+ = )?\"?stablehlo\.", text, re.M)
    return found | {"ops": len(ops)}
