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
from benchmarks.request import Figures, Request
from benchmarks.timing import in_turns

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

    chosen = request.MODELS, variants.BFLOAT16 + variants.FLOAT16
    request.run_cells(asked, "gpu", device, *chosen, measure)


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
        training = asked.training(name, model)
        carry = training.start(jax.device_put(initial))
        running[name] = _Running(training.step, carry, batch)
        return _first_figures(running[name])

    found = {name: request.guarded(start, name) for name in names}

    def turn(name: str) -> None:
        if "error" not in found[name]:
            found[name] = request.guarded(_turn, running[name], found[name])

    in_turns([functools.partial(turn, name) for name in names], rounds, warm_up=0)
    return found


class _Running:
    """A compiled step on a device; `loss` is that of the last step.

    It donates its carry.
    """

    def __init__(self, step: Any, carry: Any, batch: Any) -> None:
        self._carry, self._batch = carry, batch
        self.loss: Any = None
        jitted = jax.jit(step, donate_argnums=0)
        self.compiled = jitted.lower(carry, batch).compile()

    def seconds(self, steps: int) -> float:
        """Takes steps and waits for the device; returns the seconds of one."""
        began = time.perf_counter()
        for _ in range(steps):
            self._carry, self.loss = self.compiled(self._carry, self._batch)
        jax.block_until_ready((self._carry, self.loss))
        return (time.perf_counter() - began) / steps


def _first_figures(running: _Running) -> Figures:
    memory: Any = running.compiled.memory_analysis()
    held = memory.argument_size_in_bytes + memory.output_size_in_bytes
    held += memory.temp_size_in_bytes - memory.alias_size_in_bytes
    running.seconds(_WARM_UP)
    burst = math.ceil(_TURN_S / running.seconds(3))
    found = hlo.measure(running.compiled) | {"peak_mb": held / 1e6, "step_ms": []}
    return found | {"burst": max(1, min(1000, burst))}


def _turn(running: _Running, figures: Figures) -> Figures:
    """Times a burst of steps; returns the figures with its milliseconds."""
    times = [*figures["step_ms"], 1e3 * running.seconds(figures["burst"])]
    return figures | {"step_ms": times, "loss": float(running.loss)}
