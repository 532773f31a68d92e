"""`Problem`: a model, its loss and its data; what is common to all the models."""

import collections
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT
from jax.typing import DTypeLike

PyTree = Any
DType = DTypeLike | None
Batch = dict[str, Any]
Config = Any  # what `config` returns; each model has sizes of its own


@dataclasses.dataclass(frozen=True)
class Problem:
    """Something to train; every function works under `jax.eval_shape`.

    Attributes:
      init: `init(key) -> (params, others)`, where `others` are other collections.
      loss: `loss(params, others, batch) -> (loss, new_others)`.
      batch: `batch(key) -> {"inputs": ..., "labels": ...}`, random; the inputs are an
        array or a dict of arrays. A model with dropout has the data of a key, too.
    """

    init: Callable[[jax.Array], tuple[PyTree, PyTree]]
    loss: Callable[[PyTree, PyTree, Batch], tuple[jax.Array, PyTree]]
    batch: Callable[[jax.Array], Batch]

    def shapes(self) -> tuple[PyTree, PyTree, Batch]:
        """Returns the shapes and dtypes of what the loss takes."""
        key = jax.random.key(0)
        return *jax.eval_shape(self.init, key), jax.eval_shape(self.batch, key)


def config(**sizes: Any) -> Config:
    """Returns the sizes of a model and of its batch: a tuple with names."""
    return collections.namedtuple("Config", sizes)(**sizes)


def sizes(names: str, **sizes: tuple[Any, ...]) -> dict[str, Config]:
    """Returns configurations of a model, by the name of the size: "full", "tiny"."""
    return {
        size: config(**dict(zip(names.split(), values, strict=True)))
        for size, values in sizes.items()
    }


class Module(nn.Module):
    """A module of a model that knows its sizes; `dtype` makes a hand-set one of it."""

    config: Config
    dtype: DType = None


def conv_and_norm(dtype: DType, momentum: float) -> tuple[Any, Any]:
    """Returns a convolution without a bias, and a BatchNorm of what it gives."""
    options: Any = dict(use_running_average=False, momentum=momentum, dtype=dtype)
    conv = functools.partial(nn.Conv, use_bias=False, dtype=dtype)
    return conv, functools.partial(nn.BatchNorm, **options)


def cast(x: jax.Array, dtype: DType) -> jax.Array:
    """Casts a bare parameter to the dtype of a hand-set model."""
    return x if dtype is None else x.astype(dtype)


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Returns the mean cross entropy, in float32 whatever the dtype of the logits."""
    logits = logits.astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def bits(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Returns the mean cross entropy in bits."""
    return cross_entropy(logits, labels) / jnp.log(2.0)


def squared_error(predicted: jax.Array, expected: jax.Array) -> jax.Array:
    """Returns the mean squared error, in float32 whatever the dtype that comes in."""
    return jnp.mean(jnp.square(predicted.astype(jnp.float32) - expected))


def scan(layer: Any, length: int) -> Any:
    """Scans a Linen layer, whose second argument is the same for all layers."""
    return nn.scan(
        layer,
        variable_axes={"params": 0, OVERWRITE_WITH_GRADIENT: 0},
        split_rngs={"params": True},
        in_axes=nn.broadcast,
        length=length,
    )


def problem_of(
    model: Callable[[Config, DType], nn.Module],
    sizes: dict[str, Config],
    batch: Callable[[Config, jax.Array], Batch],
    loss_of: Callable[[jax.Array, jax.Array], jax.Array] = cross_entropy,
    sown: float = 0.01,
) -> Callable[[str, DType], Problem]:
    """Returns what makes the problem of a Linen model, and its data, of a size.

    The model gets the inputs as one argument, and `loss_of(outputs, labels)` is its
    loss. It may have other collections, and may sow terms into "losses", which are
    added `sown` times. If the batch has data of a key as "dropout", dropout draws from
    that key.
    """

    def problem(size: str, dtype: DType) -> Problem:
        if size not in sizes:
            known = ", ".join(sizes)
            raise ValueError(f"the model has no size {size!r}; expected one of {known}")
        module, data = model(sizes[size], dtype), functools.partial(batch, sizes[size])

        def init(key):
            shapes = jax.eval_shape(data, key)["inputs"]
            zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
            others = dict(module.init(key, zeros))
            others.pop("losses", None)
            return others.pop("params"), others

        def loss(params, others, batch):
            variables, changed = {"params": params, **others}, [*others, "losses"]
            rngs = {}
            if "dropout" in batch:
                rngs["dropout"] = jax.random.wrap_key_data(batch["dropout"])
            outputs, updates = module.apply(
                variables, batch["inputs"], mutable=changed, rngs=rngs
            )
            value = loss_of(outputs, batch["labels"])
            if sown and (terms := jax.tree.leaves(updates.get("losses"))):
                value = value + sown * sum(terms)
            return value, {name: updates[name] for name in others}

        return Problem(init, loss, data)

    return problem


def vectors(config: Config, key: jax.Array, *shape: int) -> Batch:
    """Returns float inputs of a shape, with a class for each example."""
    keys = jax.random.split(key)
    labels = jax.random.randint(keys[1], (config.batch,), 0, config.classes)
    return {
        "inputs": jax.random.normal(keys[0], (config.batch, *shape)),
        "labels": labels,
    }


def images(config: Config, key: jax.Array) -> Batch:
    """Returns images with a class for each."""
    return vectors(config, key, config.image, config.image, 3)


def texts(config: Config, key: jax.Array) -> Batch:
    """Returns token sequences with their next tokens as labels."""
    shape = (config.batch, config.length + 1)
    text = jax.random.randint(key, shape, 0, config.vocab)
    return {"inputs": text[:, :-1], "labels": text[:, 1:]}
