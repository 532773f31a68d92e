"""The seeds' promises: jaxamp's README as it stands, and what its own tests expect.

The README contradicts itself in two places, which are corrected here: it builds a
`DynamicLossScaler`, a name that it defines nowhere (`DynamicScalerState` is meant), and
it writes `"amp_step"` for the scope that it calls `"amp_stop"` elsewhere. Its training
loop is that of `docs/recipes/jaxamp.md`, which `test_recipes.py` runs.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import flax_amp as jaxamp
from helpers import dtypes_of

F16, F32 = jnp.float16, jnp.float32
amp = functools.partial(jaxamp.amp, compute_dtype=jnp.float16)  # jaxamp's default
POLICIES = (jaxamp.default_amp_policy, jaxamp.jaxamp_policy)
policies = pytest.mark.parametrize("policy", POLICIES, ids=["default", "jaxamp"])


# --- the README ----------------------------------------------------------------------


def make_problem():
    keys = jax.random.split(jax.random.key(0), 3)
    model_state = {
        "w1": jax.random.normal(keys[0], (4, 16)) / 2,
        "w2": jax.random.normal(keys[1], (16, 3)) / 4,
    }
    x = jax.random.normal(keys[2], (32, 4))
    return model_state, (x, jnp.argmax(x[:, :3], -1))


def loss_fn(model_state, minibatch):
    x, labels = minibatch
    logits = jax.nn.relu(x @ model_state["w1"]) @ model_state["w2"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def test_readme_first_example():
    model, minibatch = make_problem()
    scaler_state = jaxamp.DynamicScalerState()
    grad_fn = jaxamp.dynamic_scale_grad(amp(loss_fn))
    scaler_state, grad = grad_fn(model, minibatch, dynamic_scaler_state=scaler_state)
    assert jax.tree.map(jnp.shape, grad) == jax.tree.map(jnp.shape, model)
    assert int(scaler_state["count"]) == 1


def test_readme_amp_stop():
    def high_precision_with_context(W, x):
        y = jnp.dot(W, x)
        with jaxamp.amp_stop():
            return jnp.dot(W, y)

    args, full = (jnp.eye(3), jnp.ones(3)), ("float32",) * 2
    assert dtypes_of(amp(jaxamp.amp_stop(jnp.dot)), *args) == [full]
    in_context = dtypes_of(amp(high_precision_with_context), *args)
    assert in_context == [("float16",) * 2, full]


def test_readme_precision_function():
    def use_compute_precision(compute_dtype, original_dtypes, *invars, **bind_params):
        assert all(dtype == F32 for dtype in original_dtypes)
        invars = [x.astype(compute_dtype) for x in invars]
        if "preferred_element_type" in bind_params:
            bind_params = dict(bind_params, preferred_element_type=compute_dtype)
        return invars, bind_params

    policy = jaxamp.default_amp_policy | {
        jax.lax.dot_general_p: use_compute_precision,
        "exact": jaxamp.use_original_precision,
    }

    def fn(w, x):
        with jax.named_scope("exact"), jax.named_scope("inner"):
            y = x @ w
        return y @ w

    w, x = jnp.eye(3), jnp.ones((2, 3))
    amp_fn = amp(fn, compute_dtype=F16, amp_policy=policy)
    assert dtypes_of(amp_fn, w, x) == [("float32",) * 2, ("float16",) * 2]
    np.testing.assert_allclose(amp_fn(w, x), fn(w, x))


# --- what jaxamp's own tests expect --------------------------------------------------


def linear(params, x):
    with jax.named_scope("Linear"):
        return params["weight"] @ x + params["bias"]


def linear_in_half(params, x):
    half = jax.tree.map(lambda p: p.astype(F16), params)
    return linear(half, x.astype(F16)).astype(F32)


def linear_with_half_weight(params, x):
    product = params["weight"].astype(F16) @ x.astype(F16)
    return product.astype(F32) + params["bias"]


@pytest.mark.filterwarnings("ignore:.*of this program runs in:flax_amp.PolicyWarning")
@policies
def test_linear(policy, key):
    with_policy = functools.partial(amp, amp_policy=policy)
    weight = jax.random.uniform(key, (10, 2), minval=-1)
    params, x = {"weight": weight, "bias": weight[:, 0]}, jnp.array([5.0, 2.0])
    full, half = linear(params, x), linear_in_half(params, x)
    assert not np.allclose(full, half)
    # The seed's policy adds the bias in half precision, too.
    wanted = linear_with_half_weight(params, x) if policy is POLICIES[0] else half
    np.testing.assert_allclose(with_policy(linear)(params, x), wanted)
    np.testing.assert_allclose(with_policy(linear_in_half)(params, x), half)
    np.testing.assert_allclose(with_policy(jaxamp.amp_stop(linear))(params, x), full)
    by_scope = amp(
        linear, amp_policy=policy | {"Linear": jaxamp.use_original_precision}
    )
    np.testing.assert_allclose(by_scope(params, x), full)


@policies
def test_static_arguments(policy):
    class Norm:  # not a pytree: static
        eps = 1e-5

    def normalize(module, state, data, *, axis):
        assert isinstance(module, Norm) and axis == 0

        def one(x):
            mean = jax.lax.pmean(x, "batch")
            var = jax.lax.pmean(jnp.square(x - mean), "batch")
            return (x - mean) * jax.lax.rsqrt(var + module.eps), mean

        out, mean = jax.vmap(one, axis_name="batch", out_axes=(0, None))(data)
        return out, {**state, "mean": mean, "name": "norm"}

    args = Norm(), {"mean": jnp.zeros((2, 4)), "steps": 3}, jnp.ones((3, 2, 4))
    value, new = normalize(*args, axis=0)
    amp_value, amp_new = amp(normalize, amp_policy=policy)(*args, axis=0)
    np.testing.assert_allclose(amp_value, value)
    assert (amp_new["name"], amp_new["steps"]) == (new["name"], new["steps"])
    np.testing.assert_allclose(amp_new["mean"], new["mean"])
