"""In float32 `amp` is the identity, unless the policy asks for another dtype."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from _programs import PROGRAMS, W, X, loss_of
from flax_amp import amp, default_amp_policy
from helpers import assert_all_in, rewritten_in_float32

identity = functools.partial(amp, compute_dtype=jnp.float32)


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_program_is_that_of_plain_jax(name):
    fn = PROGRAMS[name]
    actual, expected = (
        jax.make_jaxpr(jax.grad(loss_of(f)))(W, X) for f in (identity(fn), fn)
    )
    assert str(actual) == str(expected)


def test_the_function_runs_once_and_sees_its_arguments(count_traces):
    seen = []

    def fn(*args, **kwargs):
        seen.append((args, kwargs))
        return args, kwargs

    args, kwargs = (W, "name", 3, None, np.ones(2)), {"key": len}
    assert identity(fn)(*args, **kwargs) == (args, kwargs)
    ((found_args, found_kwargs),) = seen
    assert all(map(lambda x, y: x is y, found_args, args))
    assert found_kwargs == kwargs

    fn, traces = count_traces(PROGRAMS["mlp"])
    jax.jit(jax.grad(loss_of(identity(fn))))(W, X)
    assert traces() == 1


# --- policies that ask for another dtype ---------------------------------------------


def own(compute_dtype, original_dtypes, *invars, **bind_params):
    return [x.astype(jnp.bfloat16) for x in invars], bind_params


ASKING = {
    "dtype": {lax.dot_general_p: jnp.bfloat16},
    "name of a dtype": {lax.dot_general_p: "bfloat16"},
    "function of the user's": {lax.dot_general_p: own},
    "scope": {"head": jnp.bfloat16},
}


@pytest.mark.parametrize("entries", ASKING.values(), ids=ASKING)
def test_a_policy_may_ask_for_another_dtype(entries):
    def fn(w, x):
        with jax.named_scope("head"):
            return x @ w

    lowered = identity(fn, amp_policy=default_amp_policy | entries)
    assert_all_in(lowered, W, X, dtype=jnp.bfloat16, count=1)


def test_the_tests_of_the_rewriter_rewrite():
    """Their function for float32 is not the identity."""
    seen = []
    rewritten_in_float32(lambda w, x: seen.append(x) or x @ w)(W, X)
    assert isinstance(seen[-1], jax.core.Tracer)
