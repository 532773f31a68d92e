"""`gpu`: steps timed on the GPU that is here, with the memory that they take.

The variants of a model take turns, in another order each time, so that noise and the
drift of clocks hit all alike. A turn is a burst of steps that ends when the device is
idle.
"""

import functools
import math
import sys
import time
from collections.abc import Iterable
from typing import Any

import jax

from benchmarks import hlo, models, request, variants
from benchmarks.request import Request, in_turns
from benchmarks.results import Figures

_WARM_UP = 10  # steps; a loss scale finds its size in them
_TURN_S = 0.1


def run(asked: Request, platform: str = "cuda", rounds: int = 30) -> None:
    """Measures every cell on a device that is here."""
    jax.config.update("jax_platforms", platform)
    try:
        device = jax.devices()[0].device_kind
    except RuntimeError as error:
        sys.exit(f"error: no device of the platform {platform}: {error}")

    def measure(model: str, names: list[str]) -> Iterable[tuple[str, Figures]]:
        return time_model(asked, model, names, rounds).items()

    request.run_cells(asked, device, measure)


def time_model(
    asked: Request, model: str, names: list[str], rounds: int
) -> dict[str, Figures]:
    """Compiles, runs and times variants of a model."""
    task = models.problem(model, asked.size)
    keys = jax.random.split(jax.random.key(0))
    initial = jax.device_get(jax.jit(task.init)(keys[0]))  # the same for all of them
    batch = jax.jit(task.batch)(keys[1])
    running: dict[str, _Running] = {}

    def start(name: str) -> Figures:
        training = variants.training(name, model, asked.size)
        carry = training.start(*jax.device_put(initial))
        running[name] = _Running(training.step, carry, batch)
        return {}

    found = {name: request.guarded(start, name) for name in names}
    calls = [functools.partial(request.guarded, x.turn) for x in running.values()]
    turns = in_turns(calls, rounds, warm_up=0)
    for name, told in zip(running, turns, strict=True):
        found[name] = next((x for x in told if "error" in x), told[-1])
    return found


class _Running:
    """A compiled step on a device; it donates its carry."""

    def __init__(self, step: Any, carry: Any, batch: Any) -> None:
        self._carry, self._batch = carry, batch
        self._step = jax.jit(step, donate_argnums=0).lower(carry, batch).compile()
        self._seconds(_WARM_UP)
        burst = max(1, min(1000, math.ceil(_TURN_S / self._seconds(3))))
        self._figures = hlo.measure(self._step) | {"step_ms": [], "burst": burst}

    def turn(self) -> Figures:
        """Times a burst of steps; returns the figures with its milliseconds."""
        self._figures["step_ms"].append(1e3 * self._seconds(self._figures["burst"]))
        return self._figures | {"loss": float(self._loss)}

    def _seconds(self, steps: int) -> float:
        """Takes steps and waits for the device; returns the seconds of one."""
        began = time.perf_counter()
        for _ in range(steps):
            self._carry, self._loss = self._step(self._carry, self._batch)
        jax.block_until_ready((self._carry, self._loss))
        return (time.perf_counter() - began) / steps
