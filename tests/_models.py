"""Small models with BatchNorm and dropout, their losses, and comparisons of states."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax import nnx

from flax_amp._training.train_state import AmpTrainState
from helpers import bits

FEATURES, CLASSES = 6, 3
FLOAT16 = {"precision": "16-mixed"}  # it has a scaler, which tests are about


class LinenNet(nn.Module):
    """Dense, BatchNorm, dropout, dense."""

    @nn.compact
    def __call__(self, x, *, train=True):
        x = nn.Dense(8)(x)
        x = nn.BatchNorm(use_running_average=not train, momentum=0.9)(x)
        x = nn.Dropout(0.25, deterministic=not train)(nn.relu(x))
        return nn.Dense(CLASSES)(x)


class NnxNet(nnx.Module):
    """The same for NNX; the layers of a list give its state integer keys."""

    def __init__(self, rngs):
        self.first = nnx.Linear(FEATURES, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, momentum=0.9, rngs=rngs)
        self.dropout = nnx.Dropout(0.25, rngs=rngs)
        self.last = nnx.List([nnx.Linear(8, CLASSES, rngs=rngs)])

    def __call__(self, x):
        x = self.dropout(nnx.relu(self.norm(self.first(x))))
        return self.last[0](x)


def cross_entropy(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def linen_loss(params, batch, *, state, rngs):
    logits, updates = state.apply_fn(
        {"params": params, **state.variables},
        batch["x"],
        mutable=["batch_stats"],
        rngs=rngs,
    )
    accuracy = (logits.argmax(-1) == batch["y"]).mean()
    aux = {"variables": updates, "accuracy": accuracy}
    return cross_entropy(logits, batch["y"]), aux


def nnx_loss(model, batch):
    logits = model(batch["x"])
    accuracy = (logits.argmax(-1) == batch["y"]).mean()
    return cross_entropy(logits, batch["y"]), {"accuracy": accuracy}


def optimizer():
    """Clips, has counts and moments, and a schedule that needs its count."""
    schedule = optax.cosine_decay_schedule(0.05, 50)
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule))


def linen_state(cls=AmpTrainState, tx=None, **options):
    model = LinenNet()
    variables = model.init(jax.random.key(0), jnp.ones((2, FEATURES)), train=False)
    return cls.create(
        apply_fn=model.apply,
        params=variables.pop("params"),
        variables=variables,
        tx=tx or optimizer(),
        rngs={"dropout": jax.random.key(1)},
        **FLOAT16 | options,
    )


def nnx_state(cls=AmpTrainState, tx=None, **options):
    model = NnxNet(nnx.Rngs(0))
    return cls.create(model=model, tx=tx or optimizer(), **FLOAT16 | options)


MODELS = {"linen": (linen_state, linen_loss), "nnx": (nnx_state, nnx_loss)}


def make_batch(seed=0, size=8, poisoned=False):
    generator = np.random.default_rng(seed)
    x = generator.normal(size=(size, FEATURES)).astype(np.float32)
    if poisoned:
        x[size // 2, 1] = np.inf
    return {"x": x, "y": generator.integers(0, CLASSES, size).astype(np.int32)}


def leaves_by_path(tree):
    return {
        jax.tree_util.keystr(path): bits(leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def changed(before, after):
    """The paths of the leaves of which any bit differs."""
    before, after = leaves_by_path(before), leaves_by_path(after)
    assert set(before) == set(after)
    return {path for path in before if before[path] != after[path]}
