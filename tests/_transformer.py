"""A small transformer, run in every context, and what is stored of its gradient."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from _programs import norm, normal, over_devices
from flax_amp import amp
from helpers import equations_of

MODES = (False, True)  # of `recompute`
SIZE, LENGTH, BATCH = 8, 4, 8

bfloat16 = functools.partial(amp, compute_dtype=jnp.bfloat16)


def block(p, x):
    """A pre-norm transformer block."""
    q, k, v = jnp.split(norm(x) @ p["qkv"], 3, axis=-1)
    x = x + jax.nn.softmax(q @ k.mT) @ v @ p["out"]
    return x + jax.nn.gelu(norm(x) @ p["up"] + p["bias"][None, None]) @ p["down"]


def weights(layers=2, size=SIZE):
    """The weights of the blocks, stacked."""
    square = normal(0, layers, 4 * size, size) * 0.3
    return {
        "qkv": square[:, : 3 * size].mT,
        "out": square[:, 3 * size :],
        "up": square.mT,
        "bias": square[..., 0],
        "down": square[:, ::-1],
    }


def inputs(batch=BATCH, length=LENGTH, size=SIZE):
    return normal(7, batch, length, size)


def layer(p, i):
    return jax.tree.map(lambda w: w[i], p)


def unrolled(p, x, body=block):
    for i in range(len(p["bias"])):
        x = body(layer(p, i), x)
    return jnp.mean(x**2)


def scanned(p, x):
    return jnp.mean(lax.scan(lambda x, p: (block(p, x), None), x, p)[0] ** 2)


def sharded(p, x):
    run = over_devices(lambda p, x: block(layer(p, 0), x), (P(), P("data")))
    return jnp.mean(run(p, x) ** 2)


CONTEXTS = {
    "straight": unrolled,
    "scan": scanned,
    "jit": lambda p, x: unrolled(p, x, jax.jit(block)),
    "shard_map": sharded,
}


def keeps(fn, *args):
    """The marks of what is stored."""
    return equations_of(fn, *args, primitive="flax_amp_stored")
