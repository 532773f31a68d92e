"""`Problem`: a model, its loss and its data; what is common to all the models."""

import dataclasses
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

PyTree = Any
Batch = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class Problem:
    """Something to train; every function works under `jax.eval_shape`.

    Attributes:
      name: the name of the model.
      init: `init(key) -> variables`, a dict with `"params"` and other collections.
      loss: `loss(params, others, batch) -> (loss, new_others)`.
      batch: `batch(key) -> {"inputs": ..., "labels": ...}`, random.
    """

    name: str
    init: Callable[[jax.Array], dict[str, PyTree]]
    loss: Callable[[PyTree, PyTree, Batch], tuple[jax.Array, PyTree]]
    batch: Callable[[jax.Array], Batch]


def cast(x: jax.Array, dtype: DTypeLike | None) -> jax.Array:
    """Casts a bare parameter to the dtype of a hand-set model."""
    return x if dtype is None else x.astype(dtype)


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """The mean cross entropy, in float32 whatever the logits are in."""
    logits = logits.astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def linen_problem(
    name: str, model: nn.Module, batch: Callable[[jax.Array], Batch]
) -> Problem:
    """Makes the problem of a Linen classifier, with or without other collections."""

    def init(key: jax.Array) -> dict[str, PyTree]:
        inputs = jax.eval_shape(batch, key)["inputs"]
        return dict(model.init(key, jnp.zeros(inputs.shape, inputs.dtype)))

    def loss(params: PyTree, others: PyTree, batch: Batch) -> tuple[jax.Array, PyTree]:
        variables = {"params": params, **others}
        logits, updates = model.apply(variables, batch["inputs"], mutable=list(others))
        return cross_entropy(logits, batch["labels"]), {**others, **updates}

    return Problem(name, init, loss, batch)


def vectors(shape: tuple[int, ...], classes: int) -> Callable[[jax.Array], Batch]:
    """Returns a maker of float inputs (images, vectors) with labels."""

    def batch(key: jax.Array) -> Batch:
        keys = jax.random.split(key)
        return {
            "inputs": jax.random.normal(keys[0], shape),
            "labels": jax.random.randint(keys[1], shape[:1], 0, classes),
        }

    return batch


def tokens(size: int, length: int, vocab: int) -> Callable[[jax.Array], Batch]:
    """Returns a maker of token sequences with their next tokens as labels."""

    def batch(key: jax.Array) -> Batch:
        text = jax.random.randint(key, (size, length + 1), 0, vocab)
        return {"inputs": text[:, :-1], "labels": text[:, 1:]}

    return batch
