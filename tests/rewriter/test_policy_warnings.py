"""A policy that has no effect says so at trace time; no other one says anything."""

import functools
import warnings

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen as nn
from flax import nnx
from jax import lax

import flax_amp
from _programs import WITHIN
from flax_amp import PolicyWarning, amp, default_amp_policy
from helpers import assert_identical, jit

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
    policy = default_amp_policy | dict.fromkeys(keys, jnp.float32)
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
    "case": (scoped, (W, X), "*/Inner", "nearest: 'outer/inner'"),
    "order": (scoped, (W, X), "inner/outer", "nearest: 'outer'"),
    "module": (tied, (TOKENS,), "*/embde", "nearest: 'Tied/embed'"),
    "method": (tied, (TOKENS,), "*/embed.lookup", "nearest: 'Tied/embed'"),
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


def test_it_is_said_where_the_function_is_called():
    lowered = with_keys(scoped, "otter")
    with pytest.warns(PolicyWarning) as caught:
        lowered(W, X)
    assert caught[0].filename == __file__


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


def custom(differentiate):
    """A function with a rule of its own, in which there is another scope."""

    def rule(w, x):
        with jax.named_scope("rule"):
            return x @ w

    if differentiate is jax.custom_jvp:
        fn = jax.custom_jvp(lambda w, x: x @ w)
        fn.defjvp(lambda xs, ts: (fn(*xs), rule(xs[0], ts[1]) + rule(ts[0], xs[1])))
        return fn
    fn = jax.custom_vjp(lambda w, x: x @ w)
    fn.defvjp(lambda w, x: (x @ w, (w, x)), lambda r, ct: (r[0], rule(r[0], ct)))
    return fn


@pytest.mark.parametrize("kind", [jax.custom_jvp, jax.custom_vjp])
@pytest.mark.parametrize("within", ["plain", "scan"])
def test_scopes_in_rules_that_are_not_taken(kind, within):
    fn = WITHIN[within](custom(kind))
    assert warned(with_keys(fn, "rule"), W, X) == []
    assert len(warned(with_keys(fn, "ruel"), W, X)) == 1


def test_rules_that_cannot_be_traced_are_given_the_benefit_of_doubt():
    fn = jax.custom_vjp(lambda x: x)
    fn.defvjp(lambda x: (x, None), lambda residuals, ct: 1 / 0)
    assert warned(with_keys(fn, "rule"), X) == []


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

    def direct(self, x):
        return self.sampler(x)


def initialized():
    init = functools.partial(Parts().init, method="sample")
    return jit(init)(jax.random.key(0), X)


def test_a_part_that_is_not_called_here():
    """A policy serves training and evaluation, which call other parts."""
    model = Parts()
    params = initialized()
    assert warned(with_keys(model.apply, "*/sampler"), params, X) == []
    sample = lambda params, x: model.apply(params, x, method="sample")  # noqa: E731
    assert warned(with_keys(sample, "*/sampler", "*/body"), params, X) == []
    assert len(warned(with_keys(model.apply, "*/smapler"), params, X)) == 1

    call = lambda model, x: model(x)  # noqa: E731
    model = NnxParts(nnx.Rngs(0))
    assert warned(with_keys(call, "*/sampler", "sampler"), model, X) == []
    assert len(warned(with_keys(call, "*/smapler"), model, X)) == 1


# --- policies that lower nothing -----------------------------------------------------


def convolution(w, x):
    return lax.conv(x[None, :, :, None], w[:2, :, None, None][:, :2], (1, 1), "SAME")


NOTHING = {
    "without the default": ({"inner": jnp.float32}, scoped, "'amp_default'"),
    "by a primitive": (
        default_amp_policy | {lax.dot_general_p: jnp.float32},
        scoped,
        "'dot_general'",
    ),
    "convolution": ({}, convolution, "'amp_default'"),
}


@pytest.mark.parametrize("name", NOTHING)
def test_a_policy_that_lowers_nothing(name):
    policy, fn, key = NOTHING[name]
    (message,) = warned(amp(fn, amp_policy=policy, compute_dtype=jnp.bfloat16), W, X)
    assert "nothing in this program runs in bfloat16" in message
    assert f"(by {key})" in message and "flax_amp.default_amp_policy | {" in message


def stopped(w, x):
    with flax_amp.amp_stop():
        return x @ w


def by_hand(w, x):
    return x.astype(jnp.float16) @ w.astype(jnp.float16)


mine = lambda compute, dtypes, *xs, **params: (xs, params)  # noqa: E731
DEFAULT = default_amp_policy
QUIET = {  # name: (function, policy, compute dtype)
    "no product": (lambda w, x: jnp.tanh(x) + w[:1], {}, jnp.float16),
    "float32": (scoped, {"none": jnp.float32}, jnp.float32),
    "stopped": (stopped, DEFAULT, jnp.float16),
    "a function": (scoped, {lax.dot_general_p: mine}, jnp.float16),
    "highest": (
        lambda w, x: jnp.dot(x, w, precision="highest"), DEFAULT, jnp.float16
    ),
    "by hand": (by_hand, DEFAULT, jnp.float16),
    "seed": (scoped, flax_amp.jaxamp_policy, jnp.bfloat16),
    "absent": (scoped, DEFAULT | {lax.fft_p: jnp.float32}, jnp.float16),
}  # fmt: skip


@pytest.mark.parametrize("name", QUIET)
def test_no_false_alarm(name):
    fn, policy, dtype = QUIET[name]
    assert warned(amp(fn, amp_policy=policy, compute_dtype=dtype), W, X) == []


# --- layers with a dtype of their own ------------------------------------------------


def layers(*dtypes, **options):
    options |= dict(features=SIZE)
    return nn.Sequential([nn.Dense(dtype=dtype, **options) for dtype in dtypes])


def nnx_layers(*dtypes):
    rngs = nnx.Rngs(0)
    layers = [nnx.Linear(SIZE, SIZE, dtype=dtype, rngs=rngs) for dtype in dtypes]
    return nnx.Sequential(*layers)


HALF, OTHER, FULL = jnp.bfloat16, jnp.float16, jnp.float32


SAID = {  # dtypes of the layers: what is said of them
    (HALF,): "1 of the 1 ",
    (HALF, HALF, None): "2 of the 3 ",
    (OTHER, OTHER): "2 of the 2 ",
    (HALF, FULL): "1 of the 2 ",
    (None, None): None,
    (FULL, FULL): None,
    (HALF, None, None): None,  # one on purpose
}


@pytest.mark.parametrize("dtypes", SAID)
def test_layers_that_have_a_half_dtype(dtypes):
    said, model = SAID[dtypes], layers(*dtypes)
    params = jit(model.init)(jax.random.key(0), X)
    run = functools.partial(model.apply, params)
    for fn, args in (
        (run, (X,)),
        (jax.jit(run), (X,)),
        (lambda model, x: model(x), (nnx_layers(*dtypes), X)),
    ):
        messages = warned(amp(fn, compute_dtype=HALF), *args)
        if said:
            (message,) = messages
            assert said in message
            assert f"run in {jnp.dtype(dtypes[0])} without amp" in message
            assert "leave out their dtype=" in message and "amp_stop" in message
            assert fn is not run or "such as Sequential/layers_0" in message
        else:
            assert messages == []
        assert warned(amp(fn, compute_dtype=jnp.float32), *args) == []
        assert warned(amp(flax_amp.amp_stop(fn)), *args) == []


def test_amp_over_amp():
    """What amp lowered has no dtype of its own."""
    for dtype in (HALF, OTHER):
        model = layers(None, None)
        params = jit(model.init)(jax.random.key(0), X)
        inner = amp(model.apply, compute_dtype=dtype)
        assert warned(amp(inner, compute_dtype=dtype), params, X) == []


# --- the steps -----------------------------------------------------------------------


def test_the_steps_warn_once_and_train_all_the_same():
    model = Parts()
    params = initialized()["params"]
    loss = lambda p, x: (model.apply({"params": p}, x) ** 2).mean()  # noqa: E731
    state = flax_amp.AmpTrainState.create(
        apply_fn=model.apply, params=params, tx=optax.sgd(0.1)
    )
    policy = default_amp_policy | {"*/bdoy": jnp.float32}
    results = []
    for entries, expected in ((policy, 1), (default_amp_policy, 0), (None, 0)):
        options = dict(amp_policy=entries, compute_dtype=HALF)
        step = flax_amp.make_train_step(loss, donate=False, **options)
        evaluate = flax_amp.make_eval_step(loss, **options)
        assert len(warned(step, state, X, traced=False)) == expected
        assert len(warned(step, state, X, traced=False)) == 0  # compiled
        assert len(warned(evaluate, state, X)) == expected
        results.append(step(state, X)[0].params)
    assert_identical(*results[1:])
