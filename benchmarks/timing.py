"""Times the variants of a model on a device, and looks at its memory.

They take turns, in another order each time: noise and the drift of clocks hit all
alike. A turn is a burst of steps that ends when the device is idle.
"""

import dataclasses
import functools
import math
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from benchmarks import hlo, request
from benchmarks.method import Training
from benchmarks.request import Request
from benchmarks.stages import build

_WARM_UP = 10  # steps; a loss scale finds its size in them

PyTree = Any
Cells = dict[str, dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Plan:
    """How to measure.

    Attributes:
      platform: JAX's name of it, "cuda" or "cpu".
      rounds: turns of each variant.
      burst_s: seconds that a turn should take, of many steps where they are short.
    """

    platform: str
    rounds: int
    burst_s: float


def measure(asked: Request, plan: Plan, model: str, names: list[str]) -> Cells:
    """Compiles, runs and times variants of a model.

    Args:
      asked: the request.
      plan: how to measure.
      model: the name of the model.
      names: of the variants.

    Returns:
      The figures of each variant, or why there are none.
    """
    jax.config.update("jax_platforms", plan.platform)
    bench = _Bench()
    for name in names:
        bench.guarded(name, functools.partial(bench.compile, asked, model, name))
        print(f"{'':10}{model:17}{asked.label(name):24}compiled", flush=True)
    # The allocator tells only its highest peak so far, so the smallest goes first.
    for name in sorted(bench.alive(), key=lambda name: bench.cells[name]["peak_mb"]):
        bench.guarded(name, functools.partial(bench.look_at_memory, name))
    for name in bench.alive():
        bench.guarded(name, functools.partial(bench.warm_up, name, plan.burst_s))
    for turn in range(plan.rounds):
        order = bench.alive()
        shift = turn % max(1, len(order))
        for name in order[shift:] + order[:shift]:
            bench.guarded(name, functools.partial(bench.turn, name))
    return bench.cells


@dataclasses.dataclass
class _Running:
    """A variant on the device."""

    step: Any
    carry: PyTree
    batch: PyTree
    loss: Any = None

    def seconds(self, steps: int) -> float:
        """Takes steps and waits for the device; returns the seconds."""
        carry, loss = self.carry, self.loss
        start = time.perf_counter()
        for _ in range(steps):
            carry, loss = self.step(carry, self.batch)
        jax.block_until_ready((carry, loss))
        seconds = time.perf_counter() - start
        self.carry, self.loss = carry, loss
        return seconds


class _Bench:
    """The variants of a model in this process."""

    def __init__(self) -> None:
        self.cells: Cells = {}
        self._trainings: dict[str, Training] = {}
        self._steps: dict[str, Any] = {}
        self._running: dict[str, _Running] = {}
        self._data: tuple[PyTree, PyTree] | None = None

    def alive(self) -> list[str]:
        """Returns the variants that have not failed yet."""
        return [name for name, cell in self.cells.items() if "error" not in cell]

    def guarded(self, name: str, call: Callable[[], None]) -> None:
        """Calls; a variant that fails gets its reason and is out."""
        try:
            call()
        except Exception as error:  # whatever a package or XLA may raise
            self.cells[name] = {"error": request.reason(error)}
            self._running.pop(name, None)

    def compile(self, asked: Request, model: str, name: str) -> None:
        """Compiles a step; later calls find it in JAX's cache."""
        training = asked.training(name, model)
        step = jax.jit(training.step, donate_argnums=0)
        built = build(step, *training.shapes())
        memory: Any = built.compiled.memory_analysis()
        held = memory.argument_size_in_bytes + memory.output_size_in_bytes
        held += memory.temp_size_in_bytes - memory.alias_size_in_bytes
        figures = dataclasses.asdict(hlo.measure(built))
        self.cells[name] = figures | {"peak_mb": held / 1e6}
        self._trainings[name], self._steps[name] = training, step

    def look_at_memory(self, name: str) -> None:
        """Stores the peak of the device's memory in MB, if steps of this one raise it.

        Compiling may have raised it higher, by trying kernels out.
        """
        before = _peak()
        self._started(name).seconds(2)
        after = _peak()
        if before is not None and after is not None and after > before:
            self.cells[name]["device_peak_mb"] = after / 1e6

    def warm_up(self, name: str, burst_s: float) -> None:
        """Takes some steps, and finds how many fill a turn."""
        running = self._running[name] = self._started(name)
        running.seconds(_WARM_UP)
        burst = math.ceil(burst_s / (running.seconds(3) / 3))
        self.cells[name] |= {"burst": max(1, min(1000, burst)), "step_ms": []}

    def turn(self, name: str) -> None:
        """Times a burst of steps."""
        cell, running = self.cells[name], self._running[name]
        seconds = running.seconds(cell["burst"])
        cell["step_ms"].append(1e3 * seconds / cell["burst"])
        cell["loss"] = float(np.asarray(running.loss))

    def _started(self, name: str) -> _Running:
        """Puts a new carry on the device, of the same weights for all."""
        training = self._trainings[name]
        if self._data is None:
            keys = jax.random.split(jax.random.key(0))
            variables = jax.device_get(jax.jit(training.init)(keys[0]))
            self._data = variables, jax.jit(training.batch)(keys[1])
        variables, batch = self._data
        carry = training.start(jax.device_put(variables))
        return _Running(self._steps[name], carry, batch)


def _peak() -> Any:
    stats = jax.devices()[0].memory_stats() or {}
    return stats.get("peak_bytes_in_use")
