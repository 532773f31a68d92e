"""Times: of work that takes turns, and of the stages before a step runs."""

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import jax

T = TypeVar("T")


def in_turns(
    calls: Sequence[Callable[[], T]], rounds: int, warm_up: int = 1
) -> list[list[T]]:
    """Calls each function once in each round; returns what each of them gave.

    The order rotates, so that other work on the machine and the drift of clocks hit
    all alike. What the rounds to warm up give is left out: JAX compiles in them.
    """
    found: list[list[T]] = [[] for _ in calls]
    for turn in range(warm_up + rounds):
        for i in range(len(calls)):
            now = (turn + i) % len(calls)
            found[now].append(calls[now]())
    return [each[warm_up:] for each in found]


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
