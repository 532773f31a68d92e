"""Custom derivatives: the user's rule decides, rewritten but never dropped."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from flax_amp import amp, emit, transform
from helpers import both_halves, jit


@jax.custom_vjp
def clipped(x):
    return x * 1.0


clipped.defvjp(lambda x: (clipped(x), None), lambda _, ct: (jnp.clip(ct, -1e-3, 1e-3),))


@jax.custom_jvp
def wrong(x):
    return x * 1.0


wrong.defjvp(lambda p, t: (wrong(p[0]), 7.0 * t[0]))

RULE_CASES = {  # x -> scalar, x, what the user's own rule says
    "clipped": (lambda w, x: 100.0 * clipped((x * w).sum()), 0.0, 1e-3),
    "clipped_low": (lambda w, x: 100.0 * clipped((x @ w).sum()), 0.0, 1e-3),
    "relu_at_0": (lambda w, x: jax.nn.relu((x @ w).sum()), 0.0, 0.0),
    "relu_above_0": (lambda w, x: jax.nn.relu((x @ w).sum()), 2.0, 1.0),
    "relu6_at_0": (lambda w, x: jax.nn.relu6((x @ w).sum()), 0.0, 0.0),
    "wrong": (lambda w, x: wrong((x @ w).sum()), 2.0, 7.0),
}


@both_halves
@pytest.mark.parametrize("name", RULE_CASES)
def test_user_rule_decides_the_gradient(name, dtype):
    """Under grad, jit, scan and vmap of grad: the user's number, not the true one."""
    fn, at, slope = RULE_CASES[name]
    w = jnp.ones((1, 1))
    lowered = amp(functools.partial(fn, w), compute_dtype=dtype)
    x = jnp.full((1, 1), at)
    slope = float(jnp.asarray(slope, dtype)) if "low" in name else slope
    tolerance = 1e-2 * slope
    assert abs(float(jax.grad(lowered)(x)[0, 0]) - slope) <= tolerance
    scanned = lambda x: lax.scan(lambda c, _: (c, lowered(c)), x, None, 2)[1].sum()  # noqa: E731
    assert abs(float(jit(jax.grad(amp(scanned)))(x)[0, 0]) - 2 * slope) <= 2 * tolerance
    batch = jit(jax.vmap(jax.grad(lowered)))(jnp.stack([x, x]))
    assert batch.shape == (2, 1, 1)
    np.testing.assert_allclose(batch, slope, atol=tolerance)


@both_halves
def test_custom_jvp_under_jvp_and_twice(dtype):
    """Forward mode and grad of grad go through the user's rule as well."""
    lowered = amp(lambda x: wrong(wrong(x) * x), compute_dtype=dtype)
    # d/dx wrong(wrong(x) x) = 7 (7 x + x) = 56 x.
    _, tangent = jax.jvp(lowered, (jnp.float32(1.5),), (jnp.float32(1.0),))
    assert float(tangent) == 84.0
    assert float(jax.grad(jax.grad(lowered))(jnp.float32(1.5))) == 7 * (7 + 7)
    assert float(jax.jvp(jax.grad(lowered), (1.5,), (1.0,))[1]) == 7 * (7 + 7)


@both_halves
def test_where_guard_keeps_gradients_finite(dtype):
    """The double `where` of a safe log, and logsumexp and softmax far out."""

    def fn(w, x):
        y = x @ w
        safe = jnp.where(y > 0, jnp.log(jnp.where(y > 0, y, 1.0)), 0.0)
        return safe.sum() + jax.nn.logsumexp(y * 100) + jax.nn.softmax(y * 100)[0, 0]

    w, x = jnp.eye(3), jnp.array([[0.0, -1.0, 2.0]])
    grads = jit(jax.grad(amp(fn, compute_dtype=dtype), argnums=(0, 1)))(w, x)
    assert all(bool(jnp.isfinite(g).all()) for g in grads)


def test_what_jax_shows_of_a_function_is_short():
    """JAX writes the repr of callables into its debug information, at every call."""
    shown = []

    class Recorder(emit.Emitter):
        def emit(self, plan, operands):
            shown.extend(map(repr, (self, plan)))
            return super().emit(plan, operands)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transform, "Emitter", Recorder)
        jax.make_jaxpr(jax.grad(amp(lambda x: jax.nn.relu(x * 2).sum())))(jnp.ones(3))

    assert len(shown) > 2
    assert max(map(len, shown)) < 200
