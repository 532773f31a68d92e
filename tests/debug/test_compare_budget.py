"""The cheapest policy within a budget for the error of the gradients."""

import json

import jax
import jax.numpy as jnp

import flax_amp
from flax_amp import compare_precision

SQUARE, X = (jax.random.normal(jax.random.key(i), (8, 8)) for i in range(2))


def test_the_cheapest_policy_within_a_budget():
    """Each of three modules loses digits: for a small budget, one is not enough."""

    def fun(w, x, offsets):
        for name, offset in offsets.items():
            x = x @ w
            with jax.named_scope(name):
                x = (x + offset) - offset
            x = jnp.tanh(x)
        return jnp.mean(jnp.square(x @ w))

    offsets = {"first": 60.0, "second": 60.0, "third": 20.0}
    args = 0.5 * SQUARE, X, {n: jnp.full((1, 8), x) for n, x in offsets.items()}
    every = compare_precision(fun, budget=1e-9)(*args)
    assert every.cheapest is None and "within the budget of 1e-09" in str(every)
    as_it_is, *single, two, all_three = (*every.settings, *every.remedies)
    assert (two.name, all_three.name) == ("best 2", "all 3")
    alone = min(run.gradient_error for run in single)
    assert two.gradient_error < alone < as_it_is.gradient_error

    def cheapest(budget):
        found = compare_precision(fun, budget=budget)(*args)
        assert found.cheapest.gradient_error <= budget
        assert f"within the budget of {budget:g} is" in str(found)
        saved = json.loads(json.dumps(found.to_dict(), allow_nan=False))
        assert saved["cheapest"]["policy"] == found.cheapest.policy
        return found.cheapest

    assert cheapest(as_it_is.gradient_error) == as_it_is
    assert cheapest(alone).name in offsets
    found = cheapest(two.gradient_error)
    assert found == two
    pasted = eval(f"{{{found.policy}}}") | flax_amp.default_amp_policy
    again = compare_precision(fun, amp_policy=pasted, remedies=0)(*args)
    assert again.cheapest is None  # without a budget
    assert again.settings[0].gradient_error == found.gradient_error
