"""Warnings of keys that match nothing, and of programs without a matmul in half."""

import functools
import warnings

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from flax import nnx
from jax import lax

import flax_amp
from _programs import WITHIN
from flax_amp import (
    PolicyWarning,
    amp,
    default_amp_policy,
)

SIZE = 4
W, X = jnp.eye(SIZE), jnp.ones((2, SIZE))
KEY = jax.random.key(0)
F16, BF16, F32 = jnp.float16, jnp.bfloat16, jnp.float32


def warned(fn, *args):
    """Returns the messages of `fn(*args)`, which is traced, not run."""

    def call():
        fn(*args)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        jax.eval_shape(call)
    assert {warning.category for warning in caught} <= {PolicyWarning}
    return [str(warning.message) for warning in caught]


def with_keys(fn, *keys, **options):
    policy = default_amp_policy | dict.fromkeys(keys, jnp.bfloat16)
    return amp(fn, amp_policy=policy, **options)


def nested(w, x):
    with jax.named_scope("outer"):
        with jax.named_scope("inner"):
            x = x @ w
        return x @ w


class Parts(nn.Module):
    """A model with a part that only one of its methods calls."""

    def setup(self):
        self.body, self.sampler = nn.Dense(SIZE), nn.Dense(SIZE)

    def __call__(self, x):
        return self.body(x)

    def sample(self, x):
        return self.sampler(self.body(x))


# --- keys that match nothing ---------------------------------------------------------

MISSED = {  # name: (function, arguments, key, what the message says of it)
    "a letter": (nested, (W, X), "otter", "nearest: 'outer'"),
    "module": (
        lambda x: Parts().init_with_output(jax.random.key(0), x)[0],
        (X,), "*/bdoy", "nearest: 'Parts/body'",
    ),
    "no scopes": (jnp.dot, (X, W), "head", "the program has no scopes)"),
    # Names of parameters are no keys: without a scope, nothing opens one.
    "parameter": (lambda p, x: x @ p["head"], ({"head": W}, X), "head", "no scopes"),
}  # fmt: skip


@pytest.mark.parametrize("name", MISSED)
def test_a_key_that_matches_nothing(name):
    fn, args, key, said = MISSED[name]
    (message,) = warned(with_keys(fn, key, "none", "amp_stop", "amp_default"), *args)
    assert f"{key!r} (" in message and said in message and "'none' (" in message
    assert "'amp_stop' (" not in message
    assert "expected the name of a jax.named_scope" in message


AROUND = {
    "call": lambda f: f(W, X),
    "scan": lambda f: lax.scan(lambda c, x: (c, f(c, x)), W, X),
    "nnx": lambda f: nnx.jit(nnx.grad(lambda w: f(w, X).sum()))(W),
}


@pytest.mark.parametrize("name", AROUND)
def test_it_points_to_the_line_of_the_user(name):
    """Not into JAX, Flax or this package."""
    with pytest.warns(PolicyWarning) as caught:
        AROUND[name](with_keys(nested, "otter"))
    assert {warning.filename for warning in caught} == {__file__}


INSIDE = WITHIN | {
    "grad": lambda f: jax.grad(lambda w, x: f(w, x).sum()),
    "stopped": flax_amp.amp_stop,
}


@pytest.mark.parametrize("name", INSIDE)
def test_scopes_inside_count_and_one_trace_warns_once(name):
    fn = INSIDE[name](nested)
    keys = "outer", "*/inner", "outer/inner", "inner"  # the outermost decides for all
    assert warned(with_keys(fn, *keys), W, X) == []
    # Differentiation, batching and compilation trace the function once.
    lowered = with_keys(fn, "otter")
    assert len(warned(lowered, W, X)) == 1
    assert len(warned(jax.jit(lowered).trace, W, X)) == 1
    assert len(warned(jax.linearize, lowered, W, X)) == 1


class NnxParts(nnx.Module):
    def __init__(self, rngs):
        self.body = nnx.Linear(SIZE, SIZE, rngs=rngs)
        self.sampler = nnx.Linear(SIZE, SIZE, rngs=rngs)

    def __call__(self, x):
        return self.body(x)


def test_a_part_that_is_not_called_here():
    """A policy serves training and evaluation, which call other parts."""
    model = Parts()
    params = model.init(jax.random.key(0), X, method="sample")
    assert warned(with_keys(model.apply, "*/sampler"), params, X) == []
    sample = lambda params, x: model.apply(params, x, method="sample")  # noqa: E731
    assert warned(with_keys(sample, "*/sampler", "*/body"), params, X) == []
    assert len(warned(with_keys(model.apply, "*/smapler"), params, X)) == 1

    call = lambda model, x: model(x)  # noqa: E731
    model = NnxParts(nnx.Rngs(0))
    assert warned(with_keys(call, "*/sampler", "sampler"), model, X) == []
    assert len(warned(with_keys(call, "*/smapler"), model, X)) == 1


# --- programs without a matmul in half precision -------------------------------------


def matmul(w, x, precision=None):
    return jnp.dot(x, w, precision=precision)


by_rule = jax.custom_vjp(matmul)
by_rule.defvjp(lambda w, x: (x.value @ w.value, None), lambda _, g: (g, g), True)
OF_POLICY = "flax_amp.default_amp_policy | {"
OF_DTYPES = "cast float64 arrays, leave out dtype=, precision=, pref"
FULL = default_amp_policy | {lax.dot_general_p: jnp.float32}
NOTHING = {  # the reason that the message gives: (function, policy, what is advised)
    "scope inner (1)": (nested, {"inner": jnp.float32}, OF_POLICY),
    "primitive dot_general (2)": (nested, FULL, OF_POLICY),
    "float64 operand (1)": (matmul, None, OF_DTYPES),
    "it asks for precision=HIGHEST": (
        functools.partial(matmul, precision="highest"), None, OF_DTYPES
    ),
    "which operands are perturbed": (by_rule, None, ""),
}  # fmt: skip


@pytest.mark.parametrize("said", NOTHING)
def test_a_program_without_a_matmul_in_half(said):
    fn, policy, advised = NOTHING[said]
    with jax.enable_x64(True):
        x = X.astype("float64" if "float64" in said else "float32")
        (message,) = warned(amp(fn, amp_policy=policy), W, x)
    assert "no matmul or convolution of this program runs in bf" in message
    assert said in message and advised in message


def stopped(w, x):
    with flax_amp.amp_stop():
        return x @ w


def by_hand(w, x, dtype=F16):
    return (x.astype(dtype) @ w.astype(dtype)).astype(F32)


with_float32_rule = jax.custom_vjp(by_hand, nondiff_argnums=(2,))
with_float32_rule.defvjp(
    lambda w, x, dtype: (by_hand(w, x, dtype), (w, x)),
    lambda dtype, saved, g: (saved[1].T @ g, g @ saved[0].T),
)
with_float32_tangents = jax.custom_jvp(by_hand, nondiff_argnums=(2,))


@with_float32_tangents.defjvp
def by_float32(dtype, primals, tangents):
    (w, x), (dw, dx) = primals, tangents
    return by_hand(w, x, dtype), dx @ w + x @ dw


mine = lambda compute, dtypes, *xs, **params: (xs, params)  # noqa: E731
DEFAULT = default_amp_policy
QUIET = {  # name: (function, policy, compute dtype)
    "float32": (nested, {"none": jnp.float32}, jnp.float32),
    "stopped": (stopped, DEFAULT, jnp.float16),
    "a function": (nested, {lax.dot_general_p: mine}, jnp.float16),
    "partly by hand": (lambda w, x: by_hand(w, x) @ w, DEFAULT, jnp.float16),
    "stopped by hand": (flax_amp.amp_stop(by_hand), DEFAULT, jnp.float16),
    # `amp` rounds the float32 factor, and the float32 result.
    "one half factor": (lambda w, x: x.astype(F16) @ w, DEFAULT, jnp.float16),
    "a float32 result": (
        lambda w, x: jnp.dot(x.astype(F16), w.astype(F16), preferred_element_type=F32),
        DEFAULT, jnp.float16,
    ),
    "another key": (
        by_hand, DEFAULT | {lax.dot_general_p: flax_amp.use_float32_result}, F16
    ),
    "a rule of its own": (with_float32_rule, DEFAULT, jnp.float16),
    "a forward rule of its own": (with_float32_tangents, DEFAULT, jnp.float16),
}  # fmt: skip


@pytest.mark.parametrize("name", QUIET)
def test_no_false_alarm(name):
    fn, policy, dtype = QUIET[name]
    assert warned(amp(fn, amp_policy=policy, compute_dtype=dtype), W, X) == []


OWN_DTYPES = {  # name: (function, arguments)
    "casts": (by_hand, (W, X)),
    "casts to the second half dtype": (functools.partial(by_hand, dtype=BF16), (W, X)),
    "scan": (
        lambda w, x: lax.scan(lambda c, _: (by_hand(w, c), None), x, None, 3), (W, X)
    ),
    "inputs": (jnp.dot, (X.astype(BF16), W.astype(BF16))),
    "amp inside": (amp(lambda w, x: x @ w), (W, X)),
    "linen": (lambda x: nn.Dense(4, dtype=BF16).init_with_output(KEY, x)[0], (X,)),
    "nnx": (
        lambda model, x: model(x), (nnx.Linear(4, 4, dtype=BF16, rngs=nnx.Rngs(0)), X)
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OWN_DTYPES)
def test_a_program_with_half_factors_of_its_own(name):
    """`amp` has nothing to change, and cannot keep the equations between in float32."""
    fn, args = OWN_DTYPES[name]
    (message,) = warned(amp(fn, compute_dtype=F16), *args)
    assert "is in half precision without this amp (1)" in message
    assert "leave out dtype= and param_dtype=" in message
