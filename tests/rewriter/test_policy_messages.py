"""Wrong options, precision functions and keys: what was got, and what was expected."""

import functools
import warnings

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from flax import nnx
from jax import lax

import flax_amp
from _programs import WITHIN, recurrent
from flax_amp import (
    PolicyWarning,
    amp,
    default_amp_policy,
    use_compute_precision,
    use_original_precision,
)
from helpers import dtypes_of


def loss(*args):
    return None


F16, BF16, F32 = jnp.float16, jnp.bfloat16, jnp.float32

WRONG = [  # options, error, message
    (dict(compute_dtype="float12"), TypeError, "compute_dtype: got 'float12'"),
    *(
        (dict(compute_dtype=x), TypeError, "got .*; expected jnp.float16")
        for x in ("int8", jnp.int8, jnp.float64, "bf16-mixed", object())
    ),
    (dict(precision="half"), ValueError, "precision is 'half'; expected one of"),
    (dict(precision="fp16", compute_dtype=BF16), TypeError, "got both precision="),
    (dict(amp_policy={"a": 5}), TypeError, "amp_policy: wrong entries:\n  'a': 5\n"),
    *(
        (dict(recompute=x), TypeError, "recompute: got .*; expected True or False")
        for x in ("auto", None, 1)
    ),
    (dict(reduce_in_float32=1), TypeError, "reduce_in_float32: got 1; expected True"),
]


@pytest.mark.parametrize("options, error, message", WRONG)
def test_wrong_options(options, error, message):
    """They fail when a function is made, not when it is called."""
    for make in (functools.partial(amp, loss), amp):  # with the function, or without
        with pytest.raises(error, match=message):
            make(**options)


def test_what_is_no_function():
    with pytest.raises(TypeError, match="amp: got int; expected a function"):
        amp(3)
    for dtype in (F16, BF16, F32):  # which can be called
        with pytest.raises(TypeError, match=r"amp: got .*float.*@amp\(compute_dtype="):
            amp(dtype)


@pytest.mark.filterwarnings("ignore:.*of this program runs in:flax_amp.PolicyWarning")
def test_a_structured_primitive_as_key():
    """A scan or jit can only be left untouched as a whole."""
    scan_p = jax.extend.core.primitives.scan_p
    policy = default_amp_policy | {scan_p: use_compute_precision}
    with pytest.raises(TypeError, match="'scan' is a structured primitive"):
        amp(recurrent, amp_policy=policy)(W, X)
    untouched = default_amp_policy | {scan_p: use_original_precision}
    found = dtypes_of(amp(recurrent, amp_policy=untouched), W, X)
    assert found == [("float32",) * 2]


# --- precision functions that users write --------------------------------------------

W, X = jnp.eye(4), jnp.ones((2, 4))


def scoped(w, x):
    with jax.named_scope("head"):
        return jax.jit(jnp.dot)(x, w)


def returning(result):
    def function(compute_dtype, original_dtypes, *invars, **params):
        return result(list(invars), params)

    return function


SCALARS = dict(dimension_numbers=(((), ()), ((), ())))


def failing(compute_dtype, original_dtypes, *invars, **params):
    raise RuntimeError("mine")


WRONG_FUNCTIONS = {  # name: (function, what the message says)
    "its own error": (failing, "mine"),
    "two parameters": (lambda dtype, invars: (invars, {}), "unexpected keyword"),
    "nothing": (returning(lambda xs, p: None), "unpack"),
    "an array": (returning(lambda xs, p: xs[0]), "."),
    "a string": (returning(lambda xs, p: ([xs[0], "x"], p)), "str"),
    "a shape": (returning(lambda xs, p: ([xs[0], xs[1].T[:3]], p)), "contracting dim"),
    "unknown parameter": (returning(lambda xs, p: (xs, p | {"mode": 3})), "mode"),
    "other results": (
        returning(lambda xs, p: (xs, p | SCALARS)),
        r"results of shapes \[\(2, 4, 4, 4\)\]; expected \[\(2, 4\)\]",
    ),
}


@pytest.mark.parametrize("name", WRONG_FUNCTIONS)
def test_a_wrong_precision_function(name):
    function, message = WRONG_FUNCTIONS[name]
    for key in ("head", lax.dot_general_p, "amp_default"):
        policy = {} if key == "amp_default" else default_amp_policy
        lowered = amp(scoped, amp_policy={**policy, key: function})
        shown = key if isinstance(key, str) else key.name
        with pytest.raises(Exception, match=message) as error:
            jax.eval_shape(lowered, W, X)
        (note,) = [x for x in error.value.__notes__ if x.startswith("amp_policy")]
        assert f"function of key {shown!r}, called for dot_general. Expected" in note


class NotHashable:
    """As a mutable dataclass would be."""

    __hash__ = None

    def __call__(self, *args, **params):
        return use_compute_precision(*args, **params)


RIGHT = {
    "lists": returning(lambda xs, p: [[x.astype(jnp.float16) for x in xs], p]),
    "an object": NotHashable(),
    "a dtype": jnp.float16,
}


@pytest.mark.parametrize("name", RIGHT)
def test_precision_functions_of_any_form(name):
    policy = default_amp_policy | {"head": RIGHT[name]}
    lowered = amp(scoped, compute_dtype=jnp.float16, amp_policy=policy)
    assert dtypes_of(lowered, W, X) == [("float16", "float16")]
    gradient = jax.grad(lambda w, x: lowered(w, x).sum())(W, X)
    assert gradient.dtype == jnp.float32


def test_what_it_does_to_the_values_is_done():
    tenfold = returning(lambda xs, p: ([10 * x for x in xs], p))
    lowered = amp(scoped, amp_policy=default_amp_policy | {"head": tenfold})
    assert (lowered(W, X) == 100 * X).all()


# --- what has no effect says so at trace time; nothing else says anything -------------

SIZE = 4


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


mine = lambda compute, dtypes, *xs, **params: (xs, params)  # noqa: E731
DEFAULT = default_amp_policy
QUIET = {  # name: (function, policy, compute dtype)
    "float32": (nested, {"none": jnp.float32}, jnp.float32),
    "stopped": (stopped, DEFAULT, jnp.float16),
    "a function": (nested, {lax.dot_general_p: mine}, jnp.float16),
    "by hand": (lambda w, x: x.astype(F16) @ w.astype(F16), DEFAULT, jnp.float16),
}  # fmt: skip


@pytest.mark.parametrize("name", QUIET)
def test_no_false_alarm(name):
    fn, policy, dtype = QUIET[name]
    assert warned(amp(fn, amp_policy=policy, compute_dtype=dtype), W, X) == []
