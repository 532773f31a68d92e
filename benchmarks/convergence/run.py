"""Trains a task in one way, once for each seed, compiled once."""

import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax

import flax_amp
from benchmarks.convergence.task import Carry, Program, Task, Way

EVALUATIONS = 20  # at equal distances
Run = dict[str, Any]


def train(
    task: Task, way: Way, seeds: Sequence[int], steps: int | None = None
) -> Iterator[tuple[int, Run]]:
    """Yields the seed and the figures of each run.

    The seed determines the first parameters and the batches, whatever the way. The
    steps are not in one scan: XLA's convolutions for CPUs are slow inside of loops.
    """
    program = task.build(way)
    every = max(1, (steps or task.steps) // EVALUATIONS)
    count = (steps or task.steps) // every

    def numbered(carry: Carry, data: Any, key: jax.Array, index: Any) -> Carry:
        return program.step(carry, data, jax.random.fold_in(key, index))

    start, step = jax.jit(program.start), jax.jit(numbered, donate_argnums=0)
    evaluate, data = jax.jit(program.evaluate), jax.device_put(program.data)
    for seed in seeds:
        began, key = time.process_time(), jax.random.key(seed)
        carry, curve = start(key), []
        for index in range(count * every):
            carry = step(carry, data, key, index)
            if (index + 1) % every == 0:
                curve.append(float(f"{float(evaluate(carry, data)):.5g}"))
        took = time.process_time() - began
        yield seed, {"curve": curve, "every": every, **_told(program, carry, took)}


def _told(program: Program, carry: Carry, took: float) -> Run:
    states = [carry[name] for name in program.losses]
    return {
        "skipped": [int(s.opt_state.total_notfinite) for s in states],
        "scale": [float(s.scaler["scaler"]) for s in states],
        "seconds": round(took, 1),
    }


def low_share(program: Program) -> list[float]:
    """Returns the share of FLOPs of products in half precision, for each state."""
    key = jax.random.key(0)
    carry = jax.eval_shape(program.start, key)
    batches = jax.eval_shape(program.batches, carry, program.data, key)
    found = []
    for name, loss_fn in program.losses.items():
        told = flax_amp.explain(carry[name], loss_fn, batches[name], backward=False)
        found.append(float(f"{told.totals.low_share:.4g}"))
    return found
