"""What jaxamp's own test of a linear layer expects, under both policies.

The training loop of its README is that of `docs/recipes/jaxamp.md`, which
`test_recipes.py` runs.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flax_amp as jaxamp

F16, F32 = jnp.float16, jnp.float32
amp = functools.partial(jaxamp.amp, compute_dtype=jnp.float16)  # jaxamp's default
POLICIES = (jaxamp.default_amp_policy, jaxamp.jaxamp_policy)
policies = pytest.mark.parametrize("policy", POLICIES, ids=["default", "jaxamp"])


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
