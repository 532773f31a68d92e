"""In float32 `amp` is the identity, unless the policy asks for another dtype."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

import flax_amp
from _programs import PROGRAMS, WITHIN, W, X, in_scan, loss_of, normal
from flax_amp import amp, default_amp_policy
from helpers import assert_all_in, assert_identical, dtypes_of, rewritten_in_float32

identity = functools.partial(amp, compute_dtype=jnp.float32)


def sinkhorn(costs):
    kernel = jnp.exp(-costs)
    u = v = jnp.ones(len(costs))
    for _ in range(12):
        u = 1 / (kernel @ v)
        v = 1 / (kernel.T @ u)
    return jnp.sum(u[:, None] * kernel * v[None] * costs)


def checkpointed(w, x):
    return jax.checkpoint(lambda x: jnp.tanh(x @ w) @ w)(x)


def in_bfloat16(w, x):
    """Layers that were cast by hand stay in half precision."""
    return (x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)).astype(jnp.float32)


TRANSFORMS = WITHIN | {
    "jit of grad": lambda fn: jax.jit(jax.grad(loss_of(fn))),
    "grad in scan": lambda fn: in_scan(jax.grad(loss_of(fn))),
}
FUNCTIONS = PROGRAMS | {"checkpointed": checkpointed, "in bfloat16": in_bfloat16}


CASES = [(name, "jit of grad") for name in FUNCTIONS]
CASES += [("mlp", transform) for transform in TRANSFORMS]


@pytest.mark.parametrize("name, transform", CASES)
def test_the_program_is_that_of_plain_jax(name, transform):
    fn, wrap = FUNCTIONS[name], TRANSFORMS[transform]
    actual, expected = (jax.make_jaxpr(wrap(f))(W, X) for f in (identity(fn), fn))
    assert str(actual) == str(expected)


@pytest.mark.parametrize("jit", [lambda fn: fn, jax.jit], ids=["eager", "jit"])
def test_gradients_have_the_bits_of_plain_jax(jit):
    costs = jnp.square(normal(2, 16, 16))
    actual, expected = (
        jit(jax.value_and_grad(f))(costs) for f in (identity(sinkhorn), sinkhorn)
    )
    assert_identical(actual, expected)


def test_float64_stays_as_it_is():
    with jax.enable_x64(True):
        w, x = (jnp.asarray(np.asarray(a), jnp.float64) for a in (W, X))
        grads, expected = (
            jax.jit(jax.grad(loss_of(f)))(w, x)
            for f in (identity(PROGRAMS["mlp"]), PROGRAMS["mlp"])
        )
        assert grads.dtype == jnp.float64
        assert_identical(grads, expected)


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


def test_modules_are_changed_in_place():
    """Their structure may change as well: the function is called as it is."""

    class Counting(nnx.Module):
        def __init__(self):
            self.count = nnx.Variable(jnp.zeros(()))

    def call(model, x):
        model.count[...] += x.sum()
        model.seen = nnx.Variable(x)
        return model.count[...] * 2

    found, expected = Counting(), Counting()
    assert_identical(identity(call)(found, X), call(expected, X))
    assert_identical(nnx.to_pure_dict(nnx.state(found)), {"count": X.sum(), "seen": X})


# --- steps ---------------------------------------------------------------------------

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


SILENT = {
    "default": default_amp_policy,
    "empty": {},
    "float32": {"head": jnp.float32, lax.dot_general_p: "float32"},
    "original": {lax.dot_general_p: flax_amp.use_original_precision},
    "no such scope": {"misspelled": flax_amp.use_original_precision},
}


@pytest.mark.parametrize("policy", SILENT.values(), ids=SILENT)
def test_other_policies_change_nothing(policy):
    """They do not warn of keys without effect either: none of them has one here."""
    lowered = identity(PROGRAMS["mlp"], amp_policy=policy)
    actual, expected = (jax.make_jaxpr(f)(W, X) for f in (lowered, PROGRAMS["mlp"]))
    assert str(actual) == str(expected)


def test_the_tests_of_the_rewriter_rewrite():
    """Their function for float32 is not the identity."""
    seen = []
    lowered = rewritten_in_float32(lambda x: seen.append(x) or sinkhorn(x))
    assert set().union(*dtypes_of(lowered, jnp.eye(8))) == {"float32"}
    lowered(jnp.eye(8))
    assert isinstance(seen[-1], jax.core.Tracer)
