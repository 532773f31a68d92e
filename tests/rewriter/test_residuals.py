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
    exact_jit,
    inputs,
    scanned,
    unrolled,
    weights,
)
from flax_amp import amp
from flax_amp._rewriter.recompute.residuals import is_stored
from flax_amp._rewriter.recompute.stored import EVERYWHERE, NOWHERE, ON_GPU, mark_stored
from helpers import (
    assert_close,
    both_halves,
    dtypes_of,
    equations,
    relative_error,
)

KEEP = "flax_amp_stored"
stored = functools.partial(jax.checkpoint, policy=is_stored, prevent_cse=False)

# --- residuals -----------------------------------------------------------------------


def residuals(fn, p, x):
    """The avals of what the backward pass of `fn` reads, arguments left out."""
    _, pullback = jax.eval_shape(functools.partial(jax.vjp, fn), p, x)
    arguments = {(a.shape, a.dtype) for a in jax.tree.leaves((p, x))}
    leaves = jax.tree.leaves(pullback)
    return [a for a in leaves if (a.shape, a.dtype) not in arguments]


def memory(fn, p, x):
    return sum(a.size * a.dtype.itemsize for a in residuals(fn, p, x))


LARGE = {"batch": 16, "length": 32, "size": 64}


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


def test_no_large_float32_in_loops():
    """Between the loops travel low-precision activations and small statistics."""
    p, x = weights(3, LARGE["size"]), inputs(**LARGE)
    found = residuals(bfloat16(scanned), p, x)
    full = [a for a in found if a.dtype == jnp.float32 and a.ndim > 1]
    assert all(math.prod(a.shape[1:]) < x.size for a in full), full
    assert any(a.dtype == jnp.bfloat16 and a.size >= 3 * x.size for a in found)


def test_memory_in_loops():
    """Less than half of what storing everything takes, or hand-set dtypes."""
    p, x = weights(3, LARGE["size"]), inputs(**LARGE)
    memory_of = {m: memory(bfloat16(scanned, recompute=m), p, x) for m in MODES}
    assert memory_of["auto"] < memory_of["never"] / 2
    assert memory_of["always"] <= memory_of["auto"]

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


def normalized(exponential):
    return exponential / exponential.sum(-1, keepdims=True)


def by_hand(x):
    return normalized(jnp.exp(x - x.max(-1, keepdims=True)))


def exponential(fn, *args):
    """The dtypes that the only exponential reads, and what it leaves behind."""
    jaxpr = jax.make_jaxpr(fn)(*args)
    (read,) = [e.invars[0] for _, e in equations(jaxpr) if e.primitive.name == "exp"]
    subs = [e for _, e in equations(jaxpr) if e.primitive.name == "sub"]
    rounded = [e for _, e in equations(jaxpr) if e.params.get("name") == "rounded_exp"]
    left = {str(e.outvars[0].aval.dtype) for e in rounded} or {"float32"}
    return (
        {str(v.aval.dtype) for e in subs for v in e.invars},
        str(read.aval.dtype),
        left,
    )


def attend(softmax):
    """A softmax between two products."""
    return lambda w, x: softmax(x @ w) @ w


@both_halves
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("softmax", [jax.nn.softmax, by_hand])
def test_softmax_leaves_low_exponentials(softmax, mode, dtype):
    """The exponential of `x - max(x)` is computed in float32 and then rounded."""
    fn = amp(attend(softmax), compute_dtype=dtype, recompute=mode)
    subs, read, left = exponential(fn, weights()["out"][0], inputs())
    assert (subs, read, left) == ({"float32"}, "float32", {jnp.dtype(dtype).name})


@both_halves
@pytest.mark.parametrize(
    "fn",
    [
        attend(lambda x: normalized(jnp.exp(x))),
        attend(jax.nn.log_softmax),
        lambda w, x: jax.nn.logsumexp(x @ w, -1),
        lambda w, x: -jax.nn.log_softmax(x @ w)[..., 0].mean(),
        lambda w, x: jnp.exp(x @ w - (x @ w).mean(-1, keepdims=True)).sum(-1),
    ],
    ids=["unnormalized", "log_softmax", "logsumexp", "cross entropy", "no maximum"],
)
def test_other_exponentials_stay_in_float32(fn, dtype):
    """Nothing says that they lie between 0 and 1, or that they are read rounded."""
    fn = amp(fn, compute_dtype=dtype)
    _, read, left = exponential(fn, weights()["out"][0], inputs())
    assert (read, left) == ("float32", {"float32"})


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("is_scan", [False, True])
def test_softmax_of_large_logits(mode, is_scan):
    """Logits of 1e4 in float16: no overflow, forward or backward."""

    def loss(w, x):
        logits = x @ w * 1e4 / jnp.abs(x @ w).max()
        return jnp.sum(jax.nn.softmax(logits) @ w) - jax.nn.log_softmax(logits)[0, 0, 0]

    fn = amp(over_scan(loss) if is_scan else loss, recompute=mode)
    value, gradients = jax.jit(jax.value_and_grad(fn, (0, 1)))(
        weights()["out"][0], inputs()
    )
    assert all(np.isfinite(g).all() for g in jax.tree.leaves((value, gradients)))


def over_scan(fn):
    """The same function, run by a loop that adds up its results."""

    def looped(w, x):
        return lax.scan(lambda sum_, x: (sum_ + fn(w, x[None]), None), 0.0, x)[0]

    return looped


MASKED = (-1e9, float(jnp.finfo(jnp.float32).min))


def masked(number):
    """Attention weights of a batch in which the first row may see nothing."""

    def loss(w, x):
        is_seen = jnp.tril(jnp.ones((x.shape[-2], w.shape[-1]), bool), -1)
        weights = jax.nn.softmax(jnp.where(is_seen, x @ w, number))
        return jnp.sum((weights @ w) ** 2)

    return loss


@both_halves
@pytest.mark.parametrize("number", MASKED)
@pytest.mark.parametrize("mode", ["never", "always"])
def test_fully_masked_rows(mode, number, dtype):
    """A row of masks is uniform, not NaN, and its gradient is that of float32."""
    args = weights()["out"][0], inputs()
    loss = masked(number)
    fn = amp(loss, compute_dtype=dtype, recompute=mode)
    actual = exact_jit(jax.value_and_grad(fn))(*args)
    expected = exact_jit(jax.value_and_grad(loss))(*args)
    assert_close(actual, expected, dtype, gradient=True)


@both_halves
@pytest.mark.parametrize("number", [MASKED[1], -float("inf")])
def test_masks_stay_low(number, dtype):
    """The mask is applied in the compute dtype, and the constant is made in it."""
    args = weights()["out"][0], inputs()
    for loss in (masked(number), over_scan(masked(number))):
        fn = amp(loss, compute_dtype=dtype)
        chosen = dtypes_of(fn, *args, primitive="select_n")
        floats = [dtypes[1:] for dtypes in chosen if dtypes[1] != "bool"]
        assert floats == [(jnp.dtype(dtype).name,) * 2]
        # What nothing reads is not compiled.
        text = jax.jit(fn).lower(*args).as_text()
        assert not re.search(r"constant dense<-[^>]*> : tensor<[\dx]+xf32>", text)
        # Casts of arguments to float16 saturate, with constants of their own.
        is_bfloat16 = dtype == jnp.bfloat16
        made = re.search(r"dims = \[\] :[^\n]*4x8xf32", text)
        assert not made or not is_bfloat16


# --- keep ----------------------------------------------------------------------------


def marked(x, platforms=ON_GPU):
    return jnp.sum(jnp.sin(mark_stored(jnp.cos(x) * 2, platforms)))


def plain(x):
    return jnp.sum(jnp.sin(jnp.cos(x) * 2))


IDENTITIES = {
    "call": lambda f, x: f(x),
    "jit": lambda f, x: jax.jit(f)(x),
    "vmap": lambda f, x: jax.vmap(f)(jnp.stack([x, 2 * x], 1).T),
    "jvp": lambda f, x: jax.jvp(f, (x,), (x,)),
    "grad": lambda f, x: jax.grad(f)(x),
    "grad of grad": lambda f, x: jax.grad(lambda x: jax.grad(f)(x).sum())(x),
    "grad of vmap": lambda f, x: jax.grad(lambda x: jax.vmap(f)(x[None]).sum())(x),
    "scan": lambda f, x: jax.grad(
        lambda x: lax.scan(lambda c, x: (c + f(x), c * f(x)), 0.0, x)[1].sum()
    )(x),
    "checkpoint": lambda f, x: jax.grad(stored(f))(x),
    "checkpoint in scan": lambda f, x: jax.grad(
        lambda x: lax.scan(lambda c, x: (stored(f)(x + c), c), 0.0, x)[0]
    )(x),
    "checkpoint in jit": lambda f, x: jax.jit(jax.grad(stored(f)))(x),
    "hessian": lambda f, x: jax.hessian(stored(f))(x),
    "linearize": lambda f, x: jax.linearize(stored(f), x)[1](x),
    "vmap of checkpoint": lambda f, x: jax.vmap(jax.grad(stored(f)))(x[:, None]),
}


@pytest.mark.parametrize("transform", IDENTITIES)
@pytest.mark.parametrize("platforms", [NOWHERE, ON_GPU, EVERYWHERE])
def test_keep_is_the_identity(transform, platforms):
    """Under every transformation `mark_stored` changes no number."""
    x = jnp.linspace(0.1, 1, 4)
    apply = IDENTITIES[transform]
    actual = apply(functools.partial(marked, platforms=platforms), x)
    assert relative_error(actual, apply(plain, x)) < 1e-6


def test_keep_is_what_is_stored():
    """With `is_stored` the marked value is stored; with a user's policy it is not."""
    x = jnp.ones(16)

    def primitives(policy):
        grad = jax.grad(jax.checkpoint(marked, policy=policy))
        found = [(path, e) for path, e in equations(jax.make_jaxpr(grad)(x))]
        again = [e.primitive.name for path, e in found if path]
        return again.count("cos"), [
            e.params["in_backward"]
            for path, e in found
            if e.primitive.name == KEEP and path
        ]

    # The derivative of sin is one cosine; the other computes the marked value again.
    assert primitives(is_stored) == (1, [True])
    assert primitives(jax.checkpoint_policies.nothing_saveable) == (2, [False])


BARRIERS = [
    (NOWHERE, ()),
    (ON_GPU, ("cuda", "rocm")),
    (EVERYWHERE, ("cpu", "cuda", "rocm", "tpu")),
]


def barriers(fn, *args):
    """How many barriers there are in a function compiled for each platform."""
    traced = jax.jit(fn).trace(*args)
    return {
        platform: traced.lower(lowering_platforms=(platform,))
        .as_text()
        .count("optimization_barrier")
        for platform in EVERYWHERE
    }


@pytest.mark.parametrize("platforms, expected", BARRIERS)
def test_barriers_of_keep(platforms, expected):
    """The backward pass reads the value through a barrier, on some platforms."""
    fn = stored(functools.partial(marked, platforms=platforms))
    x = jnp.ones(16)
    assert barriers(fn, x) == dict.fromkeys(EVERYWHERE, 0)
    assert barriers(jax.grad(fn), x) == {p: int(p in expected) for p in EVERYWHERE}


@pytest.mark.parametrize(
    "mode, loss, expected",
    [
        ("never", unrolled, ()),
        ("auto", unrolled, ("cuda", "rocm")),
        ("always", unrolled, EVERYWHERE),
        ("auto", scanned, ()),
        ("always", scanned, ()),
    ],
)
def test_barriers_of_a_model(mode, loss, expected):
    """None in loops and forward passes; in straight code as the mode says."""
    args = weights(1), inputs()
    fn = bfloat16(loss, recompute=mode)
    assert not any(barriers(fn, *args).values())
    found = {p for p, count in barriers(jax.grad(fn), *args).items() if count}
    assert found == set(expected)
