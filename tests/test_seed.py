"""The seeds' promises: jaxamp's README as it stands, and what its own tests expect.

The README contradicts itself in three places, which are corrected here: it builds a
`DynamicLossScaler`, a name that it defines nowhere (`DynamicScalerState` is meant), it
does not pass the scaler state to the jitted step, and it writes `"amp_step"` for the
scope that it calls `"amp_stop"` elsewhere.
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
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
    return loss, jnp.mean(jnp.argmax(logits, -1) == labels)


def test_readme_first_example():
    model, minibatch = make_problem()
    scaler_state = jaxamp.DynamicScalerState()
    amp_loss = amp(lambda model, minibatch: loss_fn(model, minibatch)[0])
    grad_fn = jaxamp.dynamic_scale_grad(amp_loss)
    scaler_state, grad = grad_fn(model, minibatch, dynamic_scaler_state=scaler_state)
    assert jax.tree.map(jnp.shape, grad) == jax.tree.map(jnp.shape, model)
    assert int(scaler_state["count"]) == 1


@policies
def test_readme_training_loop(policy):
    def train_step(model_state, opt_state, minibatch, dynamic_scaler_state, optimizer):
        amp_loss_fn = amp(loss_fn, amp_policy=policy)
        value_and_grad_fn = jaxamp.dynamic_scale_value_and_grad(
            amp_loss_fn, has_aux=True
        )
        dynamic_scaler_state, ((loss, accuracy), grads) = value_and_grad_fn(
            model_state, minibatch, dynamic_scaler_state=dynamic_scaler_state
        )
        updates, opt_state = optimizer.update(grads, opt_state, model_state)
        model_state = optax.apply_updates(model_state, updates)
        return model_state, opt_state, dynamic_scaler_state, loss, accuracy

    model_state, minibatch = make_problem()
    optimizer = optax.apply_if_finite(optax.adam(1e-2), 10)
    opt_state = optimizer.init(model_state)
    train_step_jit = jax.jit(train_step, static_argnums=4)
    dynamic_scaler_state = jaxamp.DynamicScalerState()
    for _ in range(60):
        model_state, opt_state, dynamic_scaler_state, loss, accuracy = train_step_jit(
            model_state, opt_state, minibatch, dynamic_scaler_state, optimizer
        )
    assert accuracy > 0.9 and loss < 0.4
    assert loss.dtype == jax.tree.leaves(model_state)[0].dtype == F32


def test_readme_amp_stop():
    @jaxamp.amp_stop
    def high_precision_matmul(W, x):
        return jnp.dot(W, x)

    def high_precision_with_context(W, x):
        y = jnp.dot(W, x)
        with jaxamp.amp_stop():
            z = jnp.dot(W, y)
        return z

    W, x = jnp.eye(3), jnp.ones(3)
    decorated = dtypes_of(amp(high_precision_matmul), W, x)
    assert decorated == [("float32", "float32")]
    in_context = dtypes_of(amp(high_precision_with_context), W, x)
    assert in_context == [("float16", "float16"), ("float32", "float32")]


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


@pytest.fixture
def params():
    keys = jax.random.split(jax.random.key(0))
    return {
        "weight": jax.random.uniform(keys[0], (10, 2), minval=-1),
        "bias": jax.random.uniform(keys[1], (10,), minval=-1),
    }


@pytest.mark.filterwarnings("ignore:.*of this program runs in:flax_amp.PolicyWarning")
@policies
def test_linear(params, policy):
    with_policy = functools.partial(amp, amp_policy=policy)
    x = jnp.array([5.0, 2.0])
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

    def normalize(module, state, data, mode="batch", *, axis=0):
        assert isinstance(module, Norm) and mode == "batch" and axis == 0

        def one(x):
            mean = jax.lax.pmean(x, "batch")
            var = jax.lax.pmean(jnp.square(x - mean), "batch")
            return (x - mean) * jax.lax.rsqrt(var + module.eps), mean

        out, mean = jax.vmap(one, axis_name="batch", out_axes=(0, None))(data)
        return out, {**state, "mean": mean, "name": "norm"}

    data, state = jnp.ones((3, 2, 4)), {"mean": jnp.zeros((2, 4)), "steps": 3}
    value, new = normalize(Norm(), state, data)
    amp_value, amp_new = amp(normalize, amp_policy=policy)(Norm(), state, data)
    np.testing.assert_allclose(amp_value, value)
    assert (amp_new["name"], amp_new["steps"]) == (new["name"], new["steps"])
    np.testing.assert_allclose(amp_new["mean"], new["mean"])
