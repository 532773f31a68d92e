"""`gpu` and `cpu`: steps and forward passes, timed on the device that is here.

The variants of a model take turns, in another order each time, so that noise and the
drift of clocks hit all alike. A turn is a burst of steps that ends when the device is
idle, and a burst of forward passes. Memory is that of the step.
"""

import functools
import math
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import hlo, models, request, variants
from benchmarks.commands.error import relative_error
from benchmarks.request import Request, in_turns
from benchmarks.results import Figures, processor

PyTree = Any

_PLATFORMS = {"gpu": "cuda", "cpu": "cpu"}
_WARM_UP = 10  # steps; a loss scale finds its size in them
_TURN_S = 0.1


def run(asked: Request, rounds: int = 30) -> None:
    """Measures every cell on a device that is here."""
    platform = _PLATFORMS[asked.command]
    jax.config.update("jax_platforms", platform)
    try:
        device = jax.devices()[0].device_kind
    except RuntimeError as error:
        sys.exit(f"error: no device of the platform {platform}: {error}")

    def measure(model: str, names: list[str]) -> Iterable[tuple[str, Figures]]:
        return time_model(asked, model, names, rounds).items()

    target = processor() if platform == "cpu" else device
    request.run_cells(asked, target, measure)


def time_model(
    asked: Request, model: str, names: list[str], rounds: int
) -> dict[str, Figures]:
    """Compiles, runs and times variants of a model."""
    task = models.problem(model, asked.size)
    keys = jax.random.split(jax.random.key(0))
    initial = jax.jit(task.init)(keys[0])  # the same for all of them
    batch = jax.jit(task.batch)(keys[1])
    exact = variants.training("float32", model, asked.size).gradients
    # Gradients are compared as this CPU computes them.
    reference = jax.jit(exact)(*initial, batch) if asked.command == "cpu" else None
    running: dict[str, _Running] = {}

    def start(name: str) -> Figures:
        training = variants.training(name, model, asked.size)
        figures: Figures = {}
        if reference is not None:
            grads = jax.jit(training.gradients)(*initial, batch)
            figures["grad_error"] = 100 * relative_error(grads, reference)
        running[name] = _Running(training, initial, batch, figures)
        return {}

    found = {name: request.guarded(start, name) for name in names}
    calls = [functools.partial(request.guarded, x.turn) for x in running.values()]
    turns = in_turns(calls, rounds, warm_up=0)
    for name, told in zip(running, turns, strict=True):
        found[name] = next((x for x in told if "error" in x), told[-1])
    return found


class _Running:
    """A compiled step, which donates its carry, and a forward pass, on a device."""

    def __init__(
        self,
        training: variants.Training,
        initial: tuple[PyTree, PyTree],
        batch: PyTree,
        figures: Figures,
    ) -> None:
        self._batch = batch
        self._carry = training.start(*jax.tree.map(jnp.copy, initial))
        step = jax.jit(training.step, donate_argnums=0)
        self._step = step.lower(self._carry, batch).compile()
        self._bursts = {"step_ms": self._take_step}
        if training.forward is not None:
            forward = jax.jit(training.forward).lower(*initial, batch).compile()
            self._bursts["forward_ms"] = lambda: forward(*initial, batch)
        _seconds(self._take_step, _WARM_UP)
        self._sizes = {}
        for key, call in self._bursts.items():
            size = math.ceil(_TURN_S / _seconds(call, 3))
            self._sizes[key] = max(1, min(1000, size))
        samples: Figures = {key: [] for key in self._bursts}
        bursts = {"burst": self._sizes["step_ms"]}
        self._figures = hlo.measure(self._step) | figures | samples | bursts

    def turn(self) -> Figures:
        """Times a burst of each; returns the figures with their milliseconds."""
        for key, call in self._bursts.items():
            ms = 1e3 * _seconds(call, self._sizes[key])
            self._figures[key].append(ms)
        return self._figures | {"loss": float(self._loss)}

    def _take_step(self) -> PyTree:
        self._carry, self._loss = self._step(self._carry, self._batch)
        return self._carry, self._loss


def _seconds(call: Callable[[], PyTree], times: int) -> float:
    """Makes calls and waits for the device; returns the seconds of one."""
    began = time.perf_counter()
    for _ in range(times):
        result = call()
    jax.block_until_ready(result)
    return (time.perf_counter() - began) / times
