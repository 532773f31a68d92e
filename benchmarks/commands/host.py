"""`host`: what Python does before the first step, measured on the CPU.

Tracing and lowering of the models in full size costs no more than that of tiny ones.
"""

import functools
import gc
import re
import time
from collections.abc import Iterable

import jax

from benchmarks import request
from benchmarks.request import Figures, Request
from benchmarks.timing import in_turns

REPEATS = 3
_SECONDS = ("trace_s", "lower_s", "cpu_s")


def run(asked: Request) -> None:
    """Traces and lowers every cell."""
    jax.config.update("jax_platforms", "cpu")

    def measure(model: str, names: list[str]) -> Iterable[tuple[str, Figures]]:
        return trace(asked, model, names).items()

    chosen = request.MODELS, request.BFLOAT16
    request.run_cells(asked, "host", "cpu", *chosen, measure)


def trace(asked: Request, model: str, names: list[str]) -> dict[str, Figures]:
    """Traces and lowers the variants of a model in turn, with nothing cached."""
    once = functools.partial(request.guarded, _trace_once, asked, model)
    calls = [functools.partial(once, name) for name in names]
    turns = in_turns(calls, REPEATS)
    return dict(zip(names, map(_together, turns), strict=True))


def _together(turns: list[Figures]) -> Figures:
    """Returns the seconds of all turns, or why there are none."""
    failed = [figures for figures in turns if "error" in figures]
    if failed:
        return failed[0]
    seconds = {key: [figures[key] for figures in turns] for key in _SECONDS}
    return {"ops": turns[-1]["ops"], **seconds}


def _trace_once(asked: Request, model: str, variant: str) -> Figures:
    training = asked.training(variant, model)
    shapes = training.shapes()
    request.free_memory()
    # Or a full garbage collection, of all that JAX and Flax hold, falls into some cells
    # and not into others: 0.25 s, which is half of a float32 cell.
    gc.freeze()
    step = jax.jit(training.step, donate_argnums=0)
    began, cpu_began = time.perf_counter(), time.thread_time()
    traced = step.trace(*shapes)
    traced_at = time.perf_counter()
    lowered = traced.lower()
    ended, cpu_ended = time.perf_counter(), time.thread_time()
    ops = re.findall(r"^\s*(?:%\S+ = )?\"?stablehlo\.", lowered.as_text(), re.M)
    return {
        "ops": len(ops),
        "trace_s": traced_at - began,
        "lower_s": ended - traced_at,
        "cpu_s": cpu_ended - cpu_began,  # which other work disturbs least
    }
