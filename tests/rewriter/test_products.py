"""Of all products, matrix products alone run in half precision.

Inner products are sums, and outer products multiplications.
"""

import jax
import jax.numpy as jnp
import pytest

from flax_amp import amp, explain, use_compute_precision
from helpers import HALVES, assert_close, dtypes_of, jit

COUNT = 3000  # bfloat16 has all integers up to 256, float16 up to 2048
FULL, HALF = ("float32",) * 2, None
KEYS = jax.random.split(jax.random.key(0), 2)
W = jax.random.normal(KEYS[0], (8, 8)) / 3
X = jax.random.normal(KEYS[1], (6, 8))
FREQUENCIES = 1e4 ** (-jnp.arange(8) / 8)


def positions():
    return jnp.arange(COUNT, dtype=jnp.float32)


def test_slots_of_a_mixture_of_experts():
    """A product of counts gives the index of a slot; two tokens must not share one."""

    def fullest(w, x):
        chosen = jax.nn.one_hot((x @ w).argmax(-1), 2)
        place = jnp.einsum("te,te->t", jnp.cumsum(chosen, 0) - 1, chosen)
        slots = jax.nn.one_hot(place.astype(jnp.int32), COUNT)
        return jnp.einsum("te,tc->ec", chosen, slots).max()

    x = jax.random.normal(KEYS[1], (COUNT, 8))
    lowered = amp(fullest)
    assert lowered(W[:, :2], x) == 1
    found = dtypes_of(lowered, W[:, :2], x)
    assert found == [("bfloat16",) * 2, FULL, ("bfloat16",) * 2]


def rotated(w, x):
    angles = jnp.einsum("i,j->ij", positions(), FREQUENCIES)  # as rotary embeddings do
    return jnp.mean((jnp.sin(angles) @ w) ** 2) + jnp.mean((x @ w) ** 2)


def from_input(w, x):
    times = 1000 * jnp.abs(x[:, :1])
    return jnp.sin(times @ FREQUENCIES[None]) @ w


def weighted(w, x):
    losses = jnp.log1p(jnp.exp(x @ w)).sum(1) * 1e4
    return jnp.vdot(losses, jnp.arange(6.0)) * 1e-4  # gradients fit into float16


def penalty(w, x):
    return jnp.vdot(w * 1e-4, w * 1e4) + jnp.vdot(x * 1e3, x * 1e-3)


def of_rows(w, x):
    y = x @ w
    return jnp.log(1 + jnp.einsum("bi,bi->b", y * 200, y))


def layers_with_one_input(w, x):
    first = x[:, :1] @ w[:1]
    narrow = (first @ w)[:, :1]
    return narrow @ w[:1]


# name: function, dtypes of its products
FLOATS = {
    "angles": (rotated, [FULL, HALF, HALF]),
    "angles of an input": (from_input, [FULL, HALF]),
    "weighted losses": (weighted, [HALF, FULL]),
    "penalty of weights": (penalty, [FULL, FULL]),
    "of rows": (of_rows, [HALF, FULL]),
    "layers with one input": (layers_with_one_input, [FULL, HALF, FULL]),
}


@pytest.mark.parametrize("name", FLOATS)
def test_inner_and_outer_products_of_floats(name):
    (fn, wanted), dtype = FLOATS[name], HALVES[len(name) % 2]

    def loss(w, x):
        return jnp.sum(fn(w, x))

    found = dtypes_of(amp(loss, compute_dtype=dtype), W, X)
    assert found == [dtypes or (dtype.__name__,) * 2 for dtypes in wanted]
    actual = jit(jax.value_and_grad(amp(loss, compute_dtype=dtype)))(W, X)
    expected = jit(jax.value_and_grad(loss))(W, X)
    assert_close(actual[0], expected[0], dtype)
    assert_close(actual[1], expected[1], dtype, gradient=True)


def test_a_constant_out_of_range():
    """It does not saturate, as it does not in a multiplication."""

    def fn(w, x):
        return jnp.einsum("i,j->ij", (x @ w)[0], jnp.full(3, 1e6))

    lowered = amp(fn, compute_dtype=jnp.float16)
    assert dtypes_of(lowered, W, X) == [("float16",) * 2, FULL]
    assert_close(lowered(W, X), fn(W, X), jnp.float16)


def test_lengths_that_are_not_known():
    """With symbols as lengths (`jax.export`), a contraction may have any length."""

    def fn(x, y):
        return x @ y.T, jnp.vdot(x, x), jnp.einsum("i,j->ij", x[0], y[0])

    n = jax.export.symbolic_shape("n")[0]
    shape = jax.ShapeDtypeStruct((3, n), jnp.float32)
    lowered = amp(fn, compute_dtype=jnp.bfloat16)
    exported = jax.export.export(jax.jit(lowered))(shape, shape)
    for x in (X[:3], X[:3, :1]):
        assert_close(exported.call(x, x), fn(x, x), jnp.bfloat16)
    empty = X[:3, :0]
    assert_close(lowered(empty, empty), fn(empty, empty), jnp.bfloat16)


def test_a_scope_lowers_all_products():
    def fn(w, x):
        with jax.named_scope("half"):
            y = jnp.einsum("i,j->ij", positions(), jnp.arange(3.0))
            return jnp.vdot(y, y), jnp.vdot(w, w)

    policy = {"half": use_compute_precision}
    found = dtypes_of(amp(fn, amp_policy=policy), W, X)
    assert found == [("bfloat16",) * 2] * 3


def test_explain_counts_matrix_products_only():
    found = explain(lambda w, x: jnp.vdot(x @ w, x))(W, X)
    assert not found.problems
    assert found.totals.low_share == 1
