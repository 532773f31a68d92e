"""Work that takes turns."""

from collections.abc import Callable, Sequence
from typing import TypeVar

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
