"""What has no effect says so at trace time; nothing else says anything."""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from jax import lax

import flax_amp
from _programs import WITHIN
from flax_amp import PolicyWarning, amp, default_amp_policy

SIZE = 4
W, X = jnp.eye(SIZE), jnp.ones((2, SIZE))


def warned(fn, *args, traced=True):
    """Returns the messages of `fn(*args)`, which is traced, not run."""

    def call():
        fn(*args)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        jax.eval_shape(call) if traced else call()
    assert {warning.category for warning in caught} <= {PolicyWarning}
    return [str(warning.message) for warning in caught]


def with_keys(fn, *keys, **options):
    policy = default_amp_policy | dict.fromkeys(keys, jnp.bfloat16)
    return amp(fn, amp_policy=policy, **options)


def scoped(w, x):
    with jax.named_scope("outer"):
        with jax.named_scope("inner"):
            x = x @ w
        return x @ w


class Tied(nn.Module):
    def setup(self):
        self.embed = nn.Embed(SIZE, SIZE)
        self.encoder = nn.Dense(SIZE)

    def __call__(self, tokens):
        return self.embed.attend(self.encoder(self.embed(tokens)))


def tied(tokens):
    return Tied().init_with_output(jax.random.key(0), tokens)[0]


TOKENS = jnp.arange(SIZE)

# --- keys that match nothing ---------------------------------------------------------

MISSED = {  # name: (function, arguments, key, what the message says of it)
    "a letter": (scoped, (W, X), "otter", "nearest: 'outer'"),
    "module": (tied, (TOKENS,), "*/embde", "nearest: 'Tied/embed'"),
    "no scopes": (jnp.dot, (X, W), "head", "it has no scopes)"),
    # Names of parameters are no keys: without a scope, nothing opens one.
    "parameter": (lambda p, x: x @ p["head"], ({"head": W}, X), "head", "no scopes"),
}


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
        AROUND[name](with_keys(scoped, "otter"))
    assert {warning.filename for warning in caught} == {__file__}


INSIDE = WITHIN | {
    "grad": lambda f: jax.grad(lambda w, x: f(w, x).sum()),
    "stopped": flax_amp.amp_stop,
}


@pytest.mark.parametrize("name", INSIDE)
def test_scopes_inside_count_and_one_trace_warns_once(name):
    fn = INSIDE[name](scoped)
    keys = "outer", "*/inner", "outer/inner", "inner"  # the outermost decides for all
    assert warned(with_keys(fn, *keys), W, X) == []
    # Differentiation, batching and compilation trace the function once.
    lowered = with_keys(fn, "otter")
    assert len(warned(lowered, W, X)) == 1
    assert len(warned(jax.jit(lowered).trace, W, X)) == 1
    assert len(warned(jax.linearize, lowered, W, X)) == 1


class Parts(nn.Module):
    """A model with a part that only one of its methods calls."""

    def setup(self):
        self.body, self.sampler = nn.Dense(SIZE), nn.Dense(SIZE)

    def __call__(self, x):
        return self.body(x)

    def sample(self, x):
        return self.sampler(self.body(x))


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


# --- programs without a product in half precision -------------------------------------


NOTHING = {  # what the message says: policy
    "scope inner (1)": {"inner": jnp.float32},
    "primitive dot_general (2)": (
        default_amp_policy | {lax.dot_general_p: jnp.float32}
    ),
}


@pytest.mark.parametrize("said", NOTHING)
def test_a_policy_that_lowers_nothing(said):
    (message,) = warned(amp(scoped, amp_policy=NOTHING[said]), W, X)
    assert "no matrix product or convolution of this program runs in bf" in message
    assert said in message and "flax_amp.default_amp_policy | {" in message


IN_OTHER_DTYPES = [  # dtype of the batch, precision, the reason
    ("float64", None, "float64 operand (1)"),
    ("float32", "highest", "it asks for precision: precision="),
]


@pytest.mark.parametrize("dtype, precision, reason", IN_OTHER_DTYPES)
def test_matmuls_in_other_dtypes(dtype, precision, reason):
    fn = functools.partial(jnp.dot, precision=precision)
    args = np.ones((2, 4), dtype), np.eye(4, dtype="float32")
    with jax.enable_x64(True):
        (message,) = warned(amp(fn), *args)
        assert warned(amp(fn, compute_dtype=jnp.float32), *args) == []
    assert f"runs in bfloat16 by amp: {reason}" in message
    assert "cast what is float64, leave out dtype=, precision=, pref" in message


def stopped(w, x):
    with flax_amp.amp_stop():
        return x @ w


def by_hand(w, x):
    return x.astype(jnp.float16) @ w.astype(jnp.float16)


mine = lambda compute, dtypes, *xs, **params: (xs, params)  # noqa: E731
DEFAULT = default_amp_policy
QUIET = {  # name: (function, policy, compute dtype)
    "float32": (scoped, {"none": jnp.float32}, jnp.float32),
    "stopped": (stopped, DEFAULT, jnp.float16),
    "a function": (scoped, {lax.dot_general_p: mine}, jnp.float16),
    "by hand": (by_hand, DEFAULT, jnp.float16),
}  # fmt: skip


@pytest.mark.parametrize("name", QUIET)
def test_no_false_alarm(name):
    fn, policy, dtype = QUIET[name]
    assert warned(amp(fn, amp_policy=policy, compute_dtype=dtype), W, X) == []


# --- the steps -----------------------------------------------------------------------


def test_a_rule_that_runs_as_written():
    """The only matmul stands in it."""
    fn = jax.custom_vjp(lambda x: x @ x)
    fn.defvjp(lambda x: (x.value @ x.value, None), lambda _, g: (g,), True)
    with pytest.warns(PolicyWarning, match="which operands are perturbed"):
        amp(lambda x: jnp.sin(fn(x)))(jnp.eye(2))
