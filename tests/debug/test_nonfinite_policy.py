"""`find_nonfinite`: the policy names what mends, not the victim or the whole model."""

import jax
import jax.numpy as jnp
import pytest

from flax_amp import default_amp_policy, find_nonfinite

scope = jax.named_scope
W = jax.random.normal(jax.random.key(0), (16, 16)) / 4
X = jax.random.normal(jax.random.key(1), (8, 16))


def victim_behind(w, x):
    """Float16 has no number between 3000 and 3002: a zero remains."""
    with scope("cancels"):
        z = jnp.maximum(x @ w, 0.25) + 3000.0
        z = z @ jnp.eye(16) - 3000.0
    with scope("mixes"):
        z = z @ jnp.abs(w)
    with scope("victim"):
        return jnp.log(z).mean()


def backward_alone(w, x):
    with scope("overflows"):
        y = jnp.tanh(x @ w) @ (w * 100)
    with scope("between"):
        y = jnp.tanh(y)
    with scope("large"):
        return (jnp.sin(y @ w * 2e3) @ w).sum()


def overflows(w, x):
    with scope("large"):
        y = jnp.tanh(x @ w) * 6e4
    with scope("overflows"):
        y = y @ w
    with scope("too"):
        y = y @ w
    with scope("last"):
        return (y * 1e-6).mean()


# A program, where its fault is found, and the modules that mend it.
PROGRAMS = {
    "a victim": (victim_behind, "victim", []),
    "in the backward pass": (backward_alone, "overflows", ["overflows"]),
    "in the forward pass": (overflows, "overflows", ["overflows", "too"]),
}


@pytest.mark.parametrize("fun, place, mending", PROGRAMS.values(), ids=PROGRAMS)
def test_the_policy_is_for_what_mends(fun, place, mending):
    def loss(w, x):
        with scope("net"):
            return fun(w, x)

    found = find_nonfinite(loss, compute_dtype=jnp.float16)(W, X)
    assert found.verdict == "precision" and found.finding.path == f"net/{place}"
    assert found.policy == tuple((f"net/{name}", "float32") for name in mending)
    if not mending:
        assert "flax_amp.compare_precision tells" in found.advice
        return
    policy = default_amp_policy | {key: jnp.float32 for key, _ in found.policy}
    again = find_nonfinite(loss, compute_dtype=jnp.float16, amp_policy=policy)(W, X)
    assert again.verdict == "nothing"


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_advice_without_a_policy_fits_the_dtype(dtype):
    """The fault is in no module: a product rounds to one what is a little less."""

    def loss(w, x):
        gate = 1 - 1e-5 * x
        return -jnp.log(1 - (gate @ w)).mean()

    report = find_nonfinite(loss, compute_dtype=dtype)(jnp.eye(8), jnp.ones((4, 8)))
    assert report.verdict == "precision"
    assert "flax_amp.amp_stop" in report.advice
    assert ("train with precision='bf16-mixed'" in report.advice) == (
        dtype == jnp.float16
    )
