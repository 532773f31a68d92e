"""`host`: what Python does before the first step, measured on the CPU.

Tracing and lowering of the models in full size costs no more than that of tiny ones.
"""

import functools
import gc
import time
from collections.abc import Iterable

import jax

from benchmarks import request, variants
from benchmarks.request import Figures, Request
from benchmarks.timing import in_turns

REPEATS = 3


def run(asked: Request) -> None:
    """Traces and lowers every cell."""
    jax.config.update("jax_platforms", "cpu")

    def measure(model: str, names: list[str]) -> Iterable[tuple[str, Figures]]:
        once = functools.partial(request.guarded, _trace_once, asked, model)
        turns = in_turns([functools.partial(once, name) for name in names], REPEATS)
        return zip(names, map(_together, turns), strict=True)

    chosen = request.MODELS, variants.BFLOAT16
    request.run_cells(asked, "host", "cpu", *chosen, measure)


def _together(turns: list[Figures]) -> Figures:
    """Returns the least seconds of all turns, or why there are none."""
    failed = [figures for figures in turns if "error" in figures]
    return failed[0] if failed else min(turns, key=lambda figures: figures["cpu_s"])


def _trace_once(asked: Request, model: str, variant: str) -> Figures:
    """Traces and lowers a variant of a model, with nothing cached."""
    training = asked.training(variant, model)
    shapes = training.shapes()
    request.free_memory()
    # Or a full garbage collection, of all that JAX and Flax hold, falls into some cells
    # and not into others: 0.25 s, which is half of a float32 cell.
    gc.freeze()
    began = time.thread_time()
    jax.jit(training.step, donate_argnums=0).trace(*shapes).lower()
    return {"cpu_s": time.thread_time() - began}
