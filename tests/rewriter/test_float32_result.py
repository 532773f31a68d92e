"""`use_float32_result`: float32 sums, over policy.py, roles.py, rule.py and emit.py."""

import functools

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from _programs import DERIVATIVES, WITHIN, P, normal, over_devices, squares
from flax_amp import amp, default_amp_policy, explain, use_float32_result
from flax_amp._compat import ragged_dot_general_p
from flax_amp._rewriter.primitives import walk
from helpers import (
    HALVES,
    MATMULS,
    assert_close,
    both_halves,
    exact_jit,
    relative_error,
)

pytestmark = pytest.mark.once

W, X = normal(0, 32, 16), normal(1, 8, 32)


def policy(key):
    return default_amp_policy | {key: use_float32_result}


KEY = policy(jax.lax.dot_general_p)


def rounded(dtype, *arrays):
    return [x.astype(dtype).astype(jnp.float32) for x in arrays]


def dots(fn, *args):
    """The dtypes of the factors and of the result of each matmul."""
    found = []
    for eqn in (visit.eqn for visit in walk(jax.make_jaxpr(fn)(*args))):
        if eqn.primitive.name in MATMULS:
            atoms = *eqn.invars[:2], *eqn.outvars
            found.append(tuple(str(v.aval.dtype) for v in atoms))
    return found


# --- keys ----------------------------------------------------------------------------


def product(w, x):
    with jax.named_scope("model"), jax.named_scope("head"):
        return x @ w


def convolution(w, x):
    return jax.lax.conv(x[None], w.reshape(16, 8, 4), (1,), "SAME")


def experts(w, x):
    return jax.lax.ragged_dot(x, jnp.stack([w, -w]), jnp.array([3, 5]))


class Model(nnx.Module):
    def __init__(self):
        self.head = nnx.Linear(32, 16, use_bias=False, rngs=nnx.Rngs(0))
        self.head.kernel[...] = W

    def __call__(self, x):
        return self.head(x)


KEYS = {
    "dot_general": (jax.lax.dot_general_p, product),
    "convolution": (jax.lax.conv_general_dilated_p, convolution),
    "ragged": (ragged_dot_general_p, experts),
    "scope": ("model/head", product),
    "glob": ("*/head", product),
}


@both_halves
@pytest.mark.parametrize("key, fn", KEYS.values(), ids=KEYS)
def test_a_result_is_the_float32_sum(key, fn, dtype):
    run = functools.partial(amp, fn, compute_dtype=dtype)
    exact = fn(*rounded(dtype, W, X))
    found = exact_jit(run(amp_policy=policy(key)))(W, X)
    assert found.dtype == jnp.float32 and relative_error(found, exact) < 1e-6
    assert relative_error(exact_jit(run())(W, X), exact) > 1e-4
    half = dtype.__name__
    assert dots(run(amp_policy=policy(key)), W, X) == [(half, half, "float32")]


def test_the_path_of_an_nnx_module():
    def fn(model, x):
        return model(x)

    run = amp(fn, amp_policy=policy("Model/head"))
    exact = jnp.matmul(*rounded(jnp.bfloat16, X, W))
    assert relative_error(exact_jit(run)(Model(), X), exact) < 1e-6
    assert relative_error(exact_jit(amp(fn))(Model(), X), exact) > 1e-4


# --- derivatives, loops, devices -----------------------------------------------------


def hidden(w, x):
    return jnp.tanh(x @ w) @ w.T


PLACES = {
    **{name: WITHIN[name] for name in "plain jit scan cond vmap checkpoint".split()},
    "shard_map": lambda fn: over_devices(fn, (P(), P("data"))),
}


# Each place with both dtypes and both values of `recompute`, which are independent.
OPTIONS = [(jnp.bfloat16, True), (jnp.float16, False)]


@pytest.mark.parametrize("dtype, recompute", OPTIONS)
@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
def test_matmuls_of_the_gradient_are_half(place, dtype, recompute):
    fn = place(hidden)
    options = dict(compute_dtype=dtype, recompute=recompute)
    run = amp(lambda w, x: squares(fn(w, x)), amp_policy=KEY, **options)
    half = dtype.__name__
    forward = dots(run, W, X)
    assert set(forward) == {(half, half, "float32")}
    found = dots(jax.grad(run), W, X)
    # What a checkpoint computes again has float32 results, too.
    assert set(found) == {(half, half, "float32"), (half, half, half)}
    # Two for the weights, and one for the activations between the matmuls.
    assert found.count((half, half, half)) >= 3 * len(forward) // 2
    exact = jax.grad(lambda w, x: squares(fn(w, x)))
    both = exact_jit(lambda *args: (jax.grad(run)(*args), exact(*args)))
    assert_close(*both(W, X), dtype, gradient=True)


@pytest.mark.parametrize("name", DERIVATIVES)
def test_derivatives(name):
    # The dtype is no matter of the derivative: each has one.
    derive, dtype = DERIVATIVES[name], HALVES[len(name) % 2]

    def fn(w, x):
        return squares(hidden(w, x)) / 1000

    w, x = W[:8, :4], X[:4, :8]
    run = derive(amp(fn, compute_dtype=dtype, amp_policy=KEY))
    assert {pair[:2] for pair in dots(run, w, x)} == {(dtype.__name__,) * 2}
    both = exact_jit(lambda *args: (run(*args), derive(fn)(*args)))
    assert_close(*both(w, x), dtype, gradient=True)


def test_a_loss_reads_no_rounded_result():
    def loss(w, x):
        return jnp.mean(hidden(w, x))

    assert explain(loss)(W, X).loss_reads
    assert not explain(loss, amp_policy=KEY)(W, X).loss_reads


# --- what is no matmul ---------------------------------------------------------------


def test_all_else_in_the_scope_follows_the_rule():
    def fn(w, x):
        with jax.named_scope("head"):
            y = jax.nn.softmax(x @ w)
            s = jnp.vdot(x, x) + jnp.einsum("bi,bi->b", y, y).sum()
            outer = jnp.einsum("i,j->ij", x[0], w[0])
            return (jnp.tanh(y) @ w.T).sum() + s + outer.sum()

    rows = explain(fn, amp_policy=policy("head"))(W, X).equations
    plain = explain(fn)(W, X).equations
    assert [x.primitive for x in rows] == [x.primitive for x in plain]
    reads = [(x.primitive, str(x.after.operands)) for x in rows]
    assert reads == [(x.primitive, str(x.after.operands)) for x in plain]
    floats = [x for x in rows if x.primitive == "dot_general" and not x.is_low]
    reasons = {x.reason for x in floats}
    assert "an inner product is a sum" in reasons
    assert any("multiplication" in reason for reason in reasons)
    wide = [str(x.after) for x in rows if x.is_low and x.primitive == "dot_general"]
    assert wide == ["bf16 -> f32"] * 2
    # A result that a matmul reads is rounded there.
    (tanh,) = (x for x in rows if x.primitive == "tanh")
    assert tanh.result == "rounded: a matmul reads it later"


@pytest.mark.parametrize("key", [jax.lax.dot_general_p, "model/head", "*"])
def test_in_float32_it_changes_nothing(key):
    run = amp(product, precision="32-true", amp_policy=policy(key))
    assert str(jax.make_jaxpr(run)(W, X)) == str(jax.make_jaxpr(product)(W, X))


# --- what it is for ------------------------------------------------------------------


def nearest(x, centers):
    with jax.named_scope("nearest"):
        squared = (x**2).sum(-1, keepdims=True) - 2 * x @ centers.T
        return jnp.argmin(squared + (centers**2).sum(-1)[None], -1)


def test_nearest_neighbors():
    x, centers = normal(0, 256, 64) + 6, normal(1, 256, 64) + 6
    exact = nearest(x, centers)

    def right(**options):
        return float((exact_jit(amp(nearest, **options))(x, centers) == exact).mean())

    assert right() < 0.6
    assert right(amp_policy=policy("nearest")) > 0.9
