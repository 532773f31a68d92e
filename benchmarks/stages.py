"""Traces, lowers and compiles a jitted function, and times each stage."""

import time
from typing import Any, NamedTuple

import jax


class Build(NamedTuple):
    """A compiled step and the seconds that each stage took."""

    compiled: jax.stages.Compiled
    trace_s: float
    lower_s: float
    compile_s: float


class Lowering(NamedTuple):
    """A lowered step; `cpu_s` is processor time, which other work disturbs least."""

    lowered: jax.stages.Lowered
    trace_s: float
    lower_s: float
    cpu_s: float


def lower(jitted: Any, *args: Any) -> Lowering:
    """Traces and lowers a jitted function for its arguments, or for their shapes."""
    start, cpu = time.perf_counter(), time.thread_time()
    traced = jitted.trace(*args)
    traced_at = time.perf_counter()
    lowered = traced.lower()
    end, cpu_end = time.perf_counter(), time.thread_time()
    return Lowering(lowered, traced_at - start, end - traced_at, cpu_end - cpu)


def build(jitted: Any, *args: Any) -> Build:
    """Compiles a jitted function for its arguments, or for their shapes."""
    lowered, trace_s, lower_s, _ = lower(jitted, *args)
    start = time.perf_counter()
    compiled = lowered.compile()
    return Build(compiled, trace_s, lower_s, time.perf_counter() - start)
