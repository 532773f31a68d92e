"""Work that takes turns, and steps that are timed."""

import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

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


class Running:
    """A compiled step on a device; `told` is what its last call returned with a carry.

    It donates its carry.
    """

    def __init__(self, step: Callable[..., Any], carry: Any, batch: Any) -> None:
        self._carry, self._batch = carry, batch
        self.told: Any = None
        jitted = jax.jit(step, donate_argnums=0)
        self.compiled = jitted.lower(carry, batch).compile()

    def seconds(self, steps: int = 1) -> float:
        """Takes steps and waits for the device; returns the seconds."""
        began = time.perf_counter()
        for _ in range(steps):
            self._carry, self.told = self.compiled(self._carry, self._batch)
        jax.block_until_ready((self._carry, self.told))
        return time.perf_counter() - began
