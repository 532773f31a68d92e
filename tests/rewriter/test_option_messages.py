"""Wrong options and precision functions: what was got, and what was expected."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from _programs import recurrent
from flax_amp import (
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


def of_two_arguments(compute_dtype, invars):
    return invars, {}


def of_one_operand(compute_dtype, original_dtypes, x, **params):
    return [x], params


def returning(result):
    def function(compute_dtype, original_dtypes, *invars, **params):
        return result(list(invars), params)

    return function


SCALARS = dict(dimension_numbers=(((), ()), ((), ())))


def failing(compute_dtype, original_dtypes, *invars, **params):
    raise RuntimeError("mine")


WRONG_FUNCTIONS = {  # name: (function, what the message says)
    "its own error": (failing, "mine"),
    "two parameters": (of_two_arguments, "unexpected keyword"),
    "one operand": (of_one_operand, "positional arguments"),
    "nothing": (returning(lambda xs, p: None), "unpack"),
    "an array": (returning(lambda xs, p: xs[0]), "."),
    "none": (returning(lambda xs, p: ([None, xs[1]], p)), "None"),
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
    "tuples": returning(lambda xs, p: (tuple(x.astype(jnp.float16) for x in xs), p)),
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
