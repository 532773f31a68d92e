"""What a step with a pytree optimizer costs, in turns with plain optax."""

import importlib.util
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from benchmarks import hlo, stages, targets
from flax_amp import optim

PyTree = Any

LEAVES = 200
OPTIMIZERS = ("sgd", "adam", "adamw", "lion", "adafactor")
HEADER = [
    "optimizer",
    "optax µs",
    "flax_amp.optim µs",
    "ratio",
    "noise",
    "dispatch",
    "trace",
    "compile",
    "v5e",
]
MEANING = f"""A compiled step over {LEAVES} parameters of 64 x 64, in turns with plain
optax, medians of the turns. "ratio": to plain optax; "noise": of plain optax, compiled
a second time, to itself; "dispatch": ratio of the time until the call returns; "trace"
and "compile": ratios of the time for tracing and lowering, and for compiling; "v5e":
ratio of XLA's own estimates of the time on a TPU v5e, which has no noise."""


class _Way(NamedTuple):
    step: Callable[[PyTree, Any], Any]
    params: PyTree
    state: Any


def row(name: str, rounds: int, leaves: int = LEAVES) -> list[str]:
    """Returns the cells of an optimizer after its name; parameters are gradients."""
    params = {f"layer_{i:03}": jnp.full((64, 64), i, float) for i in range(leaves)}
    kind = getattr(optim, name)
    plain = kind.factory(1e-3)

    def plain_step(params: PyTree, state: PyTree) -> Any:
        updates, state = plain.update(params, state, params)
        return optax.apply_updates(params, updates), state

    def step(params: PyTree, tx: Any) -> Any:
        updates, tx = tx.update(params, params)
        return optax.apply_updates(params, updates), tx

    theirs = _Way(plain_step, params, plain.init(params))
    ours = _Way(step, params, kind(1e-3).init(params))
    traces, compilations = zip(*map(_stages, (theirs, ours)), strict=True)
    return [
        *_times([theirs, ours, theirs], rounds),
        _ratio(*traces),
        _ratio(*compilations),
        _ratio(_estimated(theirs), _estimated(ours)),
    ]


def _ratio(theirs: float, ours: float) -> str:
    return f"{ours / theirs:.2f}" if theirs else "–"


def _stages(way: _Way) -> tuple[float, float]:
    """Returns seconds of tracing and lowering, and of compiling: the least of three."""
    jitted = [jax.jit(lambda *args: way.step(*args)) for _ in range(3)]
    built = [stages.build(step, way.params, way.state) for step in jitted]
    return min(b.trace_s + b.lower_s for b in built), min(b.compile_s for b in built)


def _estimated(way: _Way) -> float:
    """Returns seconds on a TPU v5e; 0 where libtpu is not installed."""
    if importlib.util.find_spec("libtpu") is None:
        return 0.0
    devices = targets.tpu_devices()
    built = targets.compile_for(devices, way.step, (way.params, way.state), (0, 1))
    return hlo.estimated_seconds(built.compiled.as_text() or "")


def _times(ways: list[_Way], rounds: int) -> list[str]:
    timers = [_timer(way) for way in ways]
    for timer in timers:
        timer()  # compiles
    turns: list[list[tuple[float, float]]] = []
    for turn in range(rounds):
        order = [(turn + i) % len(ways) for i in range(len(ways))]
        measured = {i: timers[i]() for i in order}
        turns.append([measured[i] for i in range(len(ways))])
    (expected, expected_call), (whole, call), (again, _) = (
        [statistics.median(turn[way][part] for turn in turns) for part in (0, 1)]
        for way in range(len(ways))
    )
    return [
        f"{expected * 1e6:.0f}",
        f"{whole * 1e6:.0f}",
        _ratio(expected, whole),
        _ratio(expected, again),
        _ratio(expected_call, call),
    ]


def _timer(way: _Way) -> Callable[[], Any]:
    step = jax.jit(lambda *args: way.step(*args))

    def burst(steps: int = 20) -> tuple[float, float]:
        """Returns seconds for a step, and until its call returns."""
        now = way.params, way.state
        called = 0.0
        begin = time.perf_counter()
        for _ in range(steps):
            before = time.perf_counter()
            now = step(*now)
            called += time.perf_counter() - before
            jax.block_until_ready(now)
        return (time.perf_counter() - begin) / steps, called / steps

    return burst
