"""Traces, lowers and compiles a jitted function, and times each stage."""

import dataclasses
import time
from typing import Any

import jax


@dataclasses.dataclass(frozen=True)
class Build:
    """A compiled step and what it took to make it.

    Attributes:
      compiled: the executable; made for a described device, it cannot be called.
      trace_s: seconds of tracing (Python to jaxpr).
      lower_s: seconds of lowering (jaxpr to StableHLO).
      compile_s: seconds of XLA.
    """

    compiled: jax.stages.Compiled
    trace_s: float
    lower_s: float
    compile_s: float


@dataclasses.dataclass(frozen=True)
class Lowering:
    """A lowered step and what it took to make it, without XLA.

    Attributes:
      lowered: what may be compiled.
      trace_s: seconds of tracing.
      lower_s: seconds of lowering.
      cpu_s: seconds of the processor for both.
    """

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
    lowering = lower(jitted, *args)
    start = time.perf_counter()
    compiled = lowering.lowered.compile()
    seconds = time.perf_counter() - start
    return Build(compiled, lowering.trace_s, lowering.lower_s, seconds)
