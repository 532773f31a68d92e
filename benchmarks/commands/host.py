"""`host`: what Python does before the first step, measured on the CPU.

Tracing and lowering of the models in full size costs no more than that of tiny ones.
"""

import functools
import gc
import time
from collections.abc import Iterator

import jax

from benchmarks import request, variants
from benchmarks.request import Request, in_turns
from benchmarks.results import Figures

REPEATS = 3


def run(asked: Request) -> None:
    """Traces and lowers every cell."""
    jax.config.update("jax_platforms", "cpu")

    def measure(model: str, names: list[str]) -> Iterator[tuple[str, Figures]]:
        once = functools.partial(request.guarded, _trace_once, asked, model)
        turns = in_turns([functools.partial(once, name) for name in names], REPEATS)
        for name, told in zip(names, turns, strict=True):
            failed = [figures for figures in told if "error" in figures]
            yield name, (failed or sorted(told, key=lambda x: x["cpu_s"]))[0]

    request.run_cells(asked, "cpu", measure)


def _trace_once(asked: Request, model: str, variant: str) -> Figures:
    """Traces and lowers a variant of a model, with nothing cached."""
    training = variants.training(variant, model, asked.size)
    shapes = training.shapes()
    request.free_memory()
    # Or a full garbage collection, of all that JAX and Flax hold, falls into some cells
    # and not into others: 0.25 s, which is half of a float32 cell.
    gc.freeze()
    began = time.thread_time()
    jax.jit(training.step, donate_argnums=0).trace(*shapes).lower()
    return {"cpu_s": time.thread_time() - began}
