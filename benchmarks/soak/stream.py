"""The batches of the run, and what is wrong with them, by their numbers alone.

A state counts its steps, skipped ones included, so `state.step` is the number of
batches that the run has seen, and a run that is restarted goes on with the batch of
that number: nothing else has to be saved.
"""

import functools
from typing import NamedTuple

import numpy as np

FEATURES, CLASSES, EXAMPLES = 32, 10, 32
BLOCK = 250  # batches in which there is at most one burst, or one quiet stretch
_CALM = 2000  # batches at the start without quiet stretches: the loss falls fast there
_NOISE = 0.1  # the share of labels that are random, below which no model gets
_BAD = {"NaN": np.nan, "inf": np.inf, "1e30": 1e30}
# Streams of random numbers for each seed
_DATA, _FAULT, _BLOCKS = range(3)


class Fault(NamedTuple):
    """What is wrong with a batch.

    Attributes:
      bad: the kind of a value that no precision can train on, or "".
      weight: by which all losses of the batch are multiplied. A large one overflows in
        float16 unless the scale falls; with a small one the scale grows to its limit.
    """

    bad: str = ""
    weight: float = 1.0


def fault(seed: int, number: int) -> Fault:
    """Returns what is wrong with a batch."""
    chance = np.random.default_rng((seed, _FAULT, number))
    bad = str(chance.choice([*_BAD])) if chance.random() < 0.01 else ""
    start, end, weight = _block(seed, number // BLOCK)
    return Fault(bad, weight if start <= number % BLOCK < end else 1.0)


@functools.lru_cache(maxsize=4)
def _block(seed: int, block: int) -> tuple[int, int, float]:
    """Returns from where to where in a block the losses are weighted, and how much."""
    chance = np.random.default_rng((seed, _BLOCKS, block))
    kind = chance.random()
    if kind < 0.25:  # a burst
        start = int(chance.integers(BLOCK))
        return start, start + int(chance.integers(1, 21)), 2.0 ** chance.integers(9, 16)
    if kind < 0.31 and block * BLOCK >= _CALM:
        return 0, BLOCK, 2.0**-8
    return 0, 0, 1.0


def clean_batch(seed: int, number: int) -> dict[str, np.ndarray]:
    """Returns a batch without its fault."""
    chance = np.random.default_rng((seed, _DATA, number))
    x = chance.normal(size=(EXAMPLES, FEATURES)).astype(np.float32)
    hidden, out = _teacher()
    y = np.argmax(np.tanh(x @ hidden) @ out, axis=1)
    noisy = chance.random(EXAMPLES) < _NOISE
    y = np.where(noisy, chance.integers(0, CLASSES, EXAMPLES), y).astype(np.int32)
    return {"x": x, "y": y, "weight": np.ones(EXAMPLES, np.float32)}


def batch(seed: int, number: int, faults: int | None = None) -> dict[str, np.ndarray]:
    """Returns a batch with its fault. One of its examples has the bad value.

    Args:
      seed: of the run.
      number: that of the batch.
      faults: the seed of another run, to have its faults.
    """
    faults = seed if faults is None else faults
    found, wrong = clean_batch(seed, number), fault(faults, number)
    found["weight"] *= np.float32(wrong.weight)
    if wrong.bad:
        chance = np.random.default_rng((faults, _FAULT, number, 1))
        at = int(chance.integers(EXAMPLES)), int(chance.integers(FEATURES))
        found["x"][at] = _BAD[wrong.bad]
    return found


@functools.cache
def _teacher() -> tuple[np.ndarray, np.ndarray]:
    """Returns the network that knows the labels, the same for every seed."""
    chance = np.random.default_rng(0)
    hidden = chance.normal(size=(FEATURES, 16)) / np.sqrt(FEATURES) * 2
    return hidden.astype(np.float32), chance.normal(size=(16, CLASSES)).astype(
        np.float32
    )
