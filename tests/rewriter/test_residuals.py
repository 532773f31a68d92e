"""Which values are stored for the backward pass, and in which precision."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jax import lax

from _transformer import (
    CONTEXTS,
    HEADS,
    MODES,
    bfloat16,
    inputs,
    scanned,
    weights,
)
from flax_amp import amp
from helpers import both_halves, dtypes_of

W, X = weights()["out"][0], inputs()
LARGE = {"batch": 16, "length": 32, "size": 64}

# --- residuals -----------------------------------------------------------------------


def residuals(fn, p, x):
    """The avals of what the backward pass of `fn` reads, arguments left out."""
    _, pullback = jax.eval_shape(functools.partial(jax.vjp, fn), p, x)
    arguments = {(a.shape, a.dtype) for a in jax.tree.leaves((p, x))}
    leaves = jax.tree.leaves(pullback)
    return [a for a in leaves if (a.shape, a.dtype) not in arguments]


def memory(fn, p, x):
    return sum(a.size * a.dtype.itemsize for a in residuals(fn, p, x))


class FlaxBlock(nn.Module):
    """The block with dtypes set by hand."""

    @nn.compact
    def __call__(self, x, _):
        dense = functools.partial(nn.Dense, use_bias=False, dtype=jnp.bfloat16)
        layer_norm = functools.partial(nn.LayerNorm, dtype=jnp.bfloat16)
        batch, length, size = x.shape
        qkv = dense(3 * size)(layer_norm()(x)).reshape(batch, length, 3, HEADS, -1)
        mask = nn.make_causal_mask(jnp.ones((batch, length)))
        h = nn.dot_product_attention(
            *jnp.moveaxis(qkv, 2, 0), mask=mask, dtype=jnp.bfloat16
        )
        x = x + dense(size)(h.reshape(x.shape))
        h = dense(size)(nn.gelu(dense(4 * size)(layer_norm()(x))))
        return x + h, None


def in_layers(activation):
    def loss(p, x):
        layer = lambda x, w: (activation(x @ w), None)  # noqa: E731
        return lax.scan(layer, x, p["out"])[0].sum()

    return loss


ACTIVATIONS = "silu gelu softmax".split()
LOOPS = {name: in_layers(getattr(jax.nn, name)) for name in ACTIVATIONS}
LOOPS |= {"exp": in_layers(jnp.exp), "transformer": scanned}


@pytest.mark.parametrize("name", LOOPS)
def test_no_large_float32_in_loops(name):
    """Between the loops travel low-precision activations and small statistics."""
    p, x = weights(3, LARGE["size"]), inputs(**LARGE)
    found = residuals(bfloat16(LOOPS[name]), p, x)
    full = [a for a in found if a.dtype == jnp.float32 and a.ndim > 1]
    assert all(math.prod(a.shape[1:]) < x.size for a in full), full
    assert any(a.dtype == jnp.bfloat16 and a.size >= 3 * x.size for a in found)


def test_memory_in_loops():
    """Less than half of what storing everything takes, or hand-set dtypes."""
    p, x = weights(3, LARGE["size"]), inputs(**LARGE)
    memory_of = {m: memory(bfloat16(scanned, recompute=m), p, x) for m in MODES}
    assert memory_of["auto"] < memory_of["never"] / 2
    # The mean behind the loop is a region, too, which stores its input.
    assert memory_of["always"] <= memory_of["auto"] + 2 * x.size

    model = nn.scan(
        FlaxBlock, variable_axes={"params": 0}, split_rngs={"params": True}, length=3
    )()
    by_hand = jax.eval_shape(model.init, jax.random.key(0), x, None)

    def loss(p, x):
        return jnp.mean(model.apply(p, x, None)[0].astype(jnp.float32) ** 2)

    assert memory_of["auto"] < memory(loss, by_hand, x.astype(jnp.bfloat16))


@pytest.mark.parametrize("name", ["straight", "jit", "cond", "vmap", "shard_map"])
def test_memory_elsewhere(name):
    """In straight code, too, the modes store ever less."""
    p, x = weights(2, LARGE["size"]), inputs(**LARGE)
    loss = CONTEXTS[name]
    never, auto, always = (memory(bfloat16(loss, recompute=m), p, x) for m in MODES)
    assert always <= auto < 0.8 * never


# --- softmax -------------------------------------------------------------------------


def over_scan(fn):
    """The same function, run by a loop that adds up its results."""

    def looped(w, x):
        return lax.scan(lambda sum_, x: (sum_ + fn(w, x[None]), None), 0.0, x)[0]

    return looped


@pytest.mark.parametrize(
    "mode, wrap",
    [("never", over_scan), ("auto", lambda f: f), ("always", lambda f: f)],
)
def test_softmax_of_large_logits(mode, wrap):
    """Logits of 1e4 in float16: no overflow, forward or backward."""

    def loss(w, x):
        logits = x @ w * 1e4 / jnp.abs(x @ w).max()
        return jnp.sum(jax.nn.softmax(logits) @ w) - jax.nn.log_softmax(logits)[0, 0, 0]

    fn = amp(wrap(loss), compute_dtype=jnp.float16, recompute=mode)
    value, gradients = jax.jit(jax.value_and_grad(fn, (0, 1)))(W, X)
    assert all(np.isfinite(g).all() for g in jax.tree.leaves((value, gradients)))


def masked(number):
    """Attention weights of a batch in which the first row may see nothing."""

    def loss(w, x):
        is_seen = jnp.tril(jnp.ones((x.shape[-2], w.shape[-1]), bool), -1)
        weights = jax.nn.softmax(jnp.where(is_seen, x @ w, number))
        return jnp.sum((weights @ w) ** 2)

    return loss


LOWEST = float(jnp.finfo(jnp.float32).min)


@both_halves
@pytest.mark.parametrize("number", [LOWEST, -float("inf")])
def test_masks_stay_low(number, dtype):
    """The mask is applied in the compute dtype, and the constant is made in it."""
    for loss in (masked(number), over_scan(masked(number))):
        fn = amp(loss, compute_dtype=dtype)
        chosen = dtypes_of(fn, W, X, primitive="select_n")
        floats = [dtypes[1:] for dtypes in chosen if dtypes[1] != "bool"]
        assert floats == [(jnp.dtype(dtype).name,) * 2]
        # What nothing reads is not compiled.
        text = jax.jit(fn).lower(W, X).as_text()
        assert not re.search(r"constant dense<-[^>]*> : tensor<[\dx]+xf32>", text)
        # Casts of arguments to float16 saturate, with constants of their own.
        is_bfloat16 = dtype == jnp.bfloat16
        made = re.search(r"dims = \[\] :[^\n]*4x8xf32", text)
        assert not made or not is_bfloat16
