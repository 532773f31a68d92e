"""`gpu`: steps timed on the GPU that is here, with the memory that they take.

The variants of a model take turns, in another order each time, so that noise and the
drift of clocks hit all alike. A turn is a burst of steps that ends when the device is
idle. Each model has a process of its own, so that one which fails or fills the memory
does not harm the next.
"""

import concurrent.futures
import dataclasses
import math
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax

from benchmarks import hlo, models, request
from benchmarks.request import Figures, Request
from benchmarks.results import Results
from benchmarks.stages import build
from benchmarks.variants import Training

_WARM_UP = 10  # steps; a loss scale finds its size in them

PyTree = Any


@dataclasses.dataclass(frozen=True)
class Plan:
    """The platform by JAX's name, turns of each variant, and the seconds of a turn."""

    platform: str
    rounds: int
    burst_s: float


def run(
    asked: Request, platform: str = "cuda", rounds: int = 30, burst_ms: float = 100.0
) -> None:
    """Measures every cell on a device that is here."""
    jax.config.update("jax_platforms", "cpu")  # the device is for the other processes
    try:
        device = _in_own_process(_device_kind, platform)
    except Exception as error:  # JAX raises one kind or another
        sys.exit(f"error: no device of the platform {platform}: {error!r}")
    plan = Plan(platform, rounds, burst_ms / 1e3)

    def measure(model: str, names: list[str]) -> Iterator[tuple[str, Figures]]:
        try:
            yield from _in_own_process(time_model, asked, plan, model, names).items()
        except Exception as error:  # also the end of the process
            yield from ((name, {"error": request.reason(error)}) for name in names)

    results = Results.open(asked.folder, "gpu", device, asked.size)
    cells = asked.cells(request.MODELS, request.BFLOAT16 + request.FLOAT16)
    request.run_cells(asked, results, "measured", cells, measure, together=True)


def time_model(
    asked: Request, plan: Plan, model: str, names: list[str]
) -> dict[str, Figures]:
    """Compiles, runs and times variants of a model in this process."""
    jax.config.update("jax_platforms", plan.platform)
    task = models.problem(model, asked.size)
    keys = jax.random.split(jax.random.key(0))
    variables = jax.device_get(jax.jit(task.init)(keys[0]))  # the same for all of them
    batch = jax.jit(task.batch)(keys[1])
    found: dict[str, Figures] = {}
    running: dict[str, _Running] = {}

    def start(name: str) -> None:
        running[name] = _Running(asked.training(name, model), variables, batch)
        found[name] = running[name].figures

    def each(call: Callable[[str], None], order: list[str]) -> None:
        for name in order:
            if "error" in found.get(name, ()):
                continue
            try:
                call(name)
            except Exception as error:  # whatever a package or XLA may raise
                found[name] = {"error": request.reason(error)}
                running.pop(name, None)

    each(start, names)
    each(lambda name: running[name].warm_up(plan.burst_s), names)
    for turn in range(plan.rounds):
        shift = turn % len(names)
        each(lambda name: running[name].turn(), names[shift:] + names[:shift])
    return found


class _Running:
    """A compiled variant on the device, and its figures."""

    def __init__(self, training: Training, variables: PyTree, batch: PyTree):
        self._step = jax.jit(training.step, donate_argnums=0)
        built = build(self._step, *training.shapes())
        memory: Any = built.compiled.memory_analysis()
        held = memory.argument_size_in_bytes + memory.output_size_in_bytes
        held += memory.temp_size_in_bytes - memory.alias_size_in_bytes
        self.figures = hlo.measure(built) | {"peak_mb": held / 1e6}
        self._carry = training.start(jax.device_put(variables))
        self._batch = batch

    def warm_up(self, burst_s: float) -> None:
        """Takes some steps, and finds how many fill a turn."""
        self._seconds(_WARM_UP)
        burst = math.ceil(burst_s / (self._seconds(3) / 3))
        self.figures |= {"burst": max(1, min(1000, burst)), "step_ms": []}

    def turn(self) -> None:
        """Times a burst of steps."""
        seconds = self._seconds(self.figures["burst"])
        self.figures["step_ms"].append(1e3 * seconds / self.figures["burst"])
        self.figures["loss"] = float(self._loss)

    def _seconds(self, steps: int) -> float:
        """Takes steps and waits for the device; returns the seconds."""
        start = time.perf_counter()
        for _ in range(steps):
            self._carry, self._loss = self._step(self._carry, self._batch)
        jax.block_until_ready((self._carry, self._loss))
        return time.perf_counter() - start


def _in_own_process(function: Callable[..., Any], *arguments: Any) -> Any:
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, context) as pool:
        return pool.submit(function, *arguments).result()


def _device_kind(platform: str) -> str:
    jax.config.update("jax_platforms", platform)
    return jax.devices()[0].device_kind
