"""What a step with a pytree optimizer costs, in turns with plain optax."""

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from benchmarks import stages
from flax_amp import optim

PyTree = Any

LEAVES = 200
OPTIMIZERS = ("sgd", "adam", "adamw", "lion", "adafactor")
HEADER = ["optimizer", "optax µs", "flax_amp.optim µs", "step", "noise", "compile"]
MEANING = f"""A compiled step over {LEAVES} parameters of 64 x 64, in turns with plain
optax, medians of the turns. "step": ratio of the times of a step; "noise": the same of
plain optax, compiled a second time, to itself; "compile": ratio of the times for
tracing, lowering and compiling, the least of three."""


class _Way(NamedTuple):
    step: Callable[[PyTree, Any], Any]
    params: PyTree
    state: Any


def row(name: str, rounds: int) -> list[str]:
    """Returns the cells of an optimizer after its name; parameters are gradients."""
    params = {f"layer_{i:03}": jnp.full((64, 64), i, float) for i in range(LEAVES)}
    kind = getattr(optim, name)
    plain = kind.wrapped_factory(1e-3)

    def plain_step(params: PyTree, state: PyTree) -> Any:
        updates, state = plain.update(params, state, params)
        return optax.apply_updates(params, updates), state

    def step(params: PyTree, tx: Any) -> Any:
        updates, tx = tx.update(params, params)
        return optax.apply_updates(params, updates), tx

    theirs = _Way(plain_step, params, plain.init(params))
    ours = _Way(step, params, kind(1e-3).init(params))
    expected, found, again = _times([theirs, ours, theirs], rounds)
    compiled = _compile_time(ours) / _compile_time(theirs)
    ratios = (found / expected, again / expected, compiled)
    return [
        f"{expected * 1e6:.0f}",
        f"{found * 1e6:.0f}",
        *(f"{ratio:.2f}" for ratio in ratios),
    ]


def _compile_time(way: _Way) -> float:
    jitted = [jax.jit(lambda *args: way.step(*args)) for _ in range(3)]
    built = [stages.build(step, way.params, way.state) for step in jitted]
    return min(b.trace_s + b.lower_s + b.compile_s for b in built)


def _times(ways: list[_Way], rounds: int) -> list[float]:
    """Returns seconds for a step of each, medians of the turns."""
    steps = [jax.jit(lambda *args, way=way: way.step(*args)) for way in ways]
    turns: list[list[float]] = [[] for _ in ways]
    for turn in range(rounds + 1):
        for i in range(len(ways)):
            way = (turn + i) % len(ways)
            turns[way].append(_burst(steps[way], ways[way]))
    return [statistics.median(times[1:]) for times in turns]  # the first compiles


def _burst(step: Any, way: _Way, steps: int = 20) -> float:
    now = way.params, way.state
    begin = time.perf_counter()
    for _ in range(steps):
        now = step(*now)
        jax.block_until_ready(now)
    return (time.perf_counter() - begin) / steps
