"""Real text that every machine has: the sources of Python's standard library.

The files are chosen by their names, up to a limit, and every tenth one is test text.
The batches are a pure function of (seed, step), so a resumed run sees the same ones as
an uninterrupted one.
"""

import pathlib
import sysconfig

import numpy as np
from ml_collections import ConfigDict

VOCABULARY = 128  # ASCII; every other byte of a source becomes a question mark
Batch = dict[str, np.ndarray]


def encode(source: bytes) -> np.ndarray:
    """Returns the characters as numbers below `VOCABULARY`."""
    tokens = np.frombuffer(source.replace(b"\r\n", b"\n"), np.uint8)
    return np.where(tokens < VOCABULARY, tokens, ord("?")).astype(np.int32)


def load(config: ConfigDict) -> tuple[np.ndarray, np.ndarray]:
    """Returns the training text and the test text as arrays of characters."""
    folder = pathlib.Path(config.text_dir or sysconfig.get_path("stdlib"))
    parts: tuple[list[np.ndarray], list[np.ndarray]] = ([], [])
    size = 0
    for index, path in enumerate(sorted(folder.glob("*.py"))):
        tokens = encode(path.read_bytes())[: config.max_chars - size]
        parts[index % 10 == 9].append(tokens)
        size += len(tokens)
    train_size, test_size = (sum(map(len, part)) for part in parts)
    if min(train_size, test_size) <= config.length:
        raise FileNotFoundError(
            f"{folder} has {train_size} characters of Python sources to train on and "
            f"{test_size} to test on, within max_chars={config.max_chars}; expected "
            f"more than length={config.length} of each, in ten files at least. "
            "Choose a folder with --config.text_dir, or raise --config.max_chars."
        )
    train, test = map(np.concatenate, parts)
    return train, test


def windows(text: np.ndarray, starts: np.ndarray, length: int) -> Batch:
    """Returns inputs and, one character later, targets: both `[windows, length]`."""
    rows = text[starts[:, None] + np.arange(length + 1)]
    return {"input": rows[:, :-1], "target": rows[:, 1:]}


def train_batch(config: ConfigDict, text: np.ndarray, step: int) -> Batch:
    """Returns the batch of one step: windows that start anywhere in the text."""
    rng = np.random.default_rng((config.seed, step))
    starts = rng.integers(0, len(text) - config.length, config.batch_size)
    return windows(text, starts, config.length)


def test_batch(config: ConfigDict, text: np.ndarray) -> Batch:
    """Returns windows at equal distances, from the beginning to the end."""
    last = len(text) - config.length - 1
    starts = np.linspace(0, last, config.eval_windows, dtype=int)
    return windows(text, starts, config.length)


def baselines(train: np.ndarray, test: Batch) -> dict[str, float]:
    """Returns bits per character of tables of counts (unigrams, bigrams) on `test`."""
    pairs = np.bincount(train[:-1] * VOCABULARY + train[1:], minlength=VOCABULARY**2)
    bigrams = pairs.reshape(VOCABULARY, VOCABULARY) + 0.01  # none is impossible
    unigrams = bigrams.sum(axis=0)
    unigram = unigrams / unigrams.sum()
    bigram = bigrams / bigrams.sum(axis=1, keepdims=True)
    return {
        "characters": float(-np.log2(unigram[test["target"]]).mean()),
        "pairs": float(-np.log2(bigram[test["input"], test["target"]]).mean()),
    }
