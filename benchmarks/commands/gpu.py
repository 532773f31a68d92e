"""`gpu`: steps timed on the GPU that is here, with the memory that they take.

The variants of a model take turns, in another order each time, so that noise and the
drift of clocks hit all alike. A turn is a burst of steps that ends when the device is
idle.
"""

import functools
import math
import sys
import time
from collections.abc import Iterator
from typing import Any

import jax

from benchmarks import hlo, models, request
from benchmarks.request import Figures, Request
from benchmarks.results import Results
from benchmarks.timing import in_turns
from benchmarks.variants import Training

_WARM_UP = 10  # steps; a loss scale finds its size in them
_TURN_S = 0.1

PyTree = Any


def run(asked: Request, platform: str = "cuda", rounds: int = 30) -> None:
    """Measures every cell on a device that is here."""
    jax.config.update("jax_platforms", platform)
    try:
        device = jax.devices()[0].device_kind
    except RuntimeError as error:
        sys.exit(f"error: no device of the platform {platform}: {error}")

    def measure(model: str, names: list[str]) -> Iterator[tuple[str, Figures]]:
        yield from time_model(asked, model, names, rounds).items()

    results = Results.open(asked.folder, "gpu", device, asked.size)
    cells = asked.cells(request.MODELS, request.BFLOAT16 + request.FLOAT16)
    request.run_cells(asked, results, cells, measure)


def time_model(
    asked: Request, model: str, names: list[str], rounds: int
) -> dict[str, Figures]:
    """Compiles, runs and times variants of a model."""
    task = models.problem(model, asked.size)
    keys = jax.random.split(jax.random.key(0))
    variables = jax.device_get(jax.jit(task.init)(keys[0]))  # the same for all of them
    batch = jax.jit(task.batch)(keys[1])
    found: dict[str, Figures] = {}
    running: dict[str, _Running] = {}

    def start(name: str) -> Figures:
        running[name] = _Running(asked.training(name, model), variables, batch)
        return running[name].figures

    for name in names:
        found[name] = request.guarded(start, name)

    def turn(name: str) -> None:
        if "error" not in found[name]:
            found[name] = request.guarded(running[name].turn)

    in_turns([functools.partial(turn, name) for name in names], rounds, warm_up=0)
    return found


class _Running:
    """A compiled variant on the device, and its figures."""

    def __init__(self, training: Training, variables: PyTree, batch: PyTree):
        self._carry = training.start(jax.device_put(variables))
        self._batch = batch
        jitted = jax.jit(training.step, donate_argnums=0)
        self._step = jitted.lower(self._carry, batch).compile()
        memory: Any = self._step.memory_analysis()
        held = memory.argument_size_in_bytes + memory.output_size_in_bytes
        held += memory.temp_size_in_bytes - memory.alias_size_in_bytes
        self._seconds(_WARM_UP)
        burst = math.ceil(_TURN_S / (self._seconds(3) / 3))
        self.figures = hlo.measure(self._step) | {"peak_mb": held / 1e6, "step_ms": []}
        self.figures["burst"] = max(1, min(1000, burst))

    def turn(self) -> Figures:
        """Times a burst of steps; returns the figures."""
        seconds = self._seconds(self.figures["burst"])
        self.figures["step_ms"].append(1e3 * seconds / self.figures["burst"])
        self.figures["loss"] = float(self._loss)
        return self.figures

    def _seconds(self, steps: int) -> float:
        """Takes steps and waits for the device; returns the seconds."""
        start = time.perf_counter()
        for _ in range(steps):
            self._carry, self._loss = self._step(self._carry, self._batch)
        jax.block_until_ready((self._carry, self._loss))
        return time.perf_counter() - start
