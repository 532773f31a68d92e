"""A small transformer, run in every context, and what is stored of its gradient."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from _programs import norm, over_devices
from flax_amp import amp
from helpers import equations_of

MODES = (False, True)  # of `recompute`
HEADS, SIZE, LENGTH, BATCH = 2, 8, 4, 8

bfloat16 = functools.partial(amp, compute_dtype=jnp.bfloat16)

# Each rounding where it stands in the program: then both modes agree.
exact_jit = functools.partial(
    jax.jit,
    compiler_options={
        "xla_backend_optimization_level": 0,
        "xla_allow_excess_precision": False,
    },
)


def attention(q, k, v):
    logits = jnp.einsum("bqhd,bkhd->bhqk", q, k) / 2
    mask = jnp.tril(jnp.ones(logits.shape[-2:], bool))
    weights = jax.nn.softmax(jnp.where(mask, logits, jnp.finfo(jnp.float32).min))
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v)


def block(p, x):
    """A pre-norm transformer block."""
    batch, length, size = x.shape
    qkv = (norm(x) @ p["qkv"]).reshape(batch, length, 3, HEADS, size // HEADS)
    x = x + attention(*jnp.moveaxis(qkv, 2, 0)).reshape(x.shape) @ p["out"]
    return x + jax.nn.gelu(norm(x) @ p["up"] + p["bias"][None, None]) @ p["down"]


def weights(layers=2, size=SIZE):
    """The weights of the blocks, stacked."""
    key = jax.random.key(0)
    shapes = {
        "qkv": (size, 3 * size),
        "out": (size, size),
        "up": (size, 4 * size),
        "bias": (4 * size,),
        "down": (4 * size, size),
    }
    return {
        name: jax.random.normal(jax.random.fold_in(key, i), (layers, *shape)) * 0.3
        for i, (name, shape) in enumerate(shapes.items())
    }


def inputs(batch=BATCH, length=LENGTH, size=SIZE):
    return jax.random.normal(jax.random.key(7), (batch, length, size))


def layer(p, i):
    return jax.tree.map(lambda w: w[i], p)


def unrolled(p, x, body=block):
    for i in range(len(p["bias"])):
        x = body(layer(p, i), x)
    return jnp.mean(x**2)


def scanned(p, x):
    return jnp.mean(lax.scan(lambda x, p: (block(p, x), None), x, p)[0] ** 2)


def branched(p, x):
    x = lax.cond(x.sum() < 1e6, lambda: block(layer(p, 0), x), lambda: x)
    return jnp.mean(x**2)


def sharded(p, x):
    run = over_devices(lambda p, x: block(layer(p, 0), x), (P(), P("data")))
    return jnp.mean(run(p, x) ** 2)


CONTEXTS = {
    "straight": unrolled,
    "scan": scanned,
    "jit": lambda p, x: unrolled(p, x, jax.jit(block)),
    "cond": branched,
    "shard_map": sharded,
}


def keeps(fn, *args):
    """The marks of what is stored."""
    return equations_of(fn, *args, primitive="flax_amp_stored")
