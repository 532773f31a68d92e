"""Precision functions that users write: what is wrong with one is said by its key."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from flax_amp import amp, default_amp_policy, use_compute_precision, use_precision
from helpers import dtypes_of

W, X = jnp.eye(4), jnp.ones((2, 4))


def scoped(w, x):
    with jax.named_scope("head"):
        return x @ w


def of_two_arguments(compute_dtype, invars):
    return invars, {}


def without_params(compute_dtype, original_dtypes, *invars):
    return invars, {}


def of_one_operand(compute_dtype, original_dtypes, x, **params):
    return [x], params


def returning(result):
    def function(compute_dtype, original_dtypes, *invars, **params):
        return result(list(invars), params)

    return function


NO_CALL = r"cannot be called for dot_general with 2 operands and the parameters \["
SIGNATURE = (
    r"expected the signature \(compute_dtype, original_dtypes, \*invars, "
    r"\*\*bind_params\)"
)
PAIR = r"for dot_general; expected \(invars, bind_params\): the 2 operands"
WRITE = (
    r"Write `def f\(compute_dtype, original_dtypes, \*invars, \*\*bind_params\): "
    r"return invars, bind_params`\."
)

WRONG = {
    "no parameters": (lambda: ([], {}), NO_CALL, SIGNATURE),
    "two parameters": (of_two_arguments, NO_CALL, SIGNATURE),
    "no keywords": (without_params, NO_CALL, SIGNATURE),
    "one operand": (of_one_operand, NO_CALL, SIGNATURE),
    "nothing": (returning(lambda xs, p: None), "returned a NoneType ", PAIR),
    "an array": (returning(lambda xs, p: xs[0]), "returned a .*Tracer ", PAIR),
    "operands only": (returning(lambda xs, p: (*xs, xs[0])), "a tuple of 3 ", PAIR),
    "a list": (returning(lambda xs, p: xs), "a .*Tracer as bind_params ", PAIR),
    "swapped": (returning(lambda xs, p: (p, xs)), "a list as bind_params ", PAIR),
    "bare operand": (
        returning(lambda xs, p: (xs[0], p)),
        "a .*Tracer as invars ",
        PAIR,
    ),
    "too few": (returning(lambda xs, p: (xs[:1], p)), "returned 1 operands ", PAIR),
    "too many": (returning(lambda xs, p: (xs + xs, p)), "returned 4 operands ", PAIR),
    "none": (
        returning(lambda xs, p: ([None, xs[1]], p)),
        "NoneType as operand 0",
        PAIR,
    ),
    "a string": (
        returning(lambda xs, p: ([xs[0], "x"], p)),
        "a str as operand 1",
        PAIR,
    ),
    "a shape": (
        returning(lambda xs, p: ([xs[0], xs[1].T[:3]], p)),
        r"operand 1 of shape \(3, 4\) for \(4, 4\) ",
        PAIR,
    ),
    "no params": (
        returning(lambda xs, p: (xs, {})),
        r"for dot_general that lacks the parameters \['dimension_numbers', ",
        r"expected all that it was given. Return operands, bind_params\.",
    ),
    "unknown parameter": (
        returning(lambda xs, p: ([xs[0], xs[1].astype("float16")], p | {"mode": 3})),
        r"operands of dtypes \(float32, float16\) and the parameters \[.*'mode'",
        "which cannot be computed with these",
        WRITE,
    ),
    "other results": (
        returning(lambda xs, p: (xs, p | dict(dimension_numbers=(((), ()), ((), ()))))),
        r"results of shapes \[\(2, 4, 4, 4\)\]; expected \[\(2, 4\)\]",
        "Change dtypes only",
    ),
}


@pytest.mark.parametrize("key", ["head", lax.dot_general_p, "amp_default"])
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_precision_function(name, key):
    function, *messages = WRONG[name]
    policy = {} if key == "amp_default" else default_amp_policy
    lowered = amp(scoped, amp_policy={**policy, key: function})
    shown = key if isinstance(key, str) else key.name
    with pytest.raises(TypeError) as error:
        jax.eval_shape(lowered, W, X)
    assert f"amp_policy: the precision function {function.__qualname__} of key " in str(
        error.value
    )
    assert f"of key {shown!r} " in str(error.value)
    if SIGNATURE in messages or PAIR in messages:
        messages.append(WRITE)
    for message in messages:
        assert error.match(message)


def test_errors_of_the_function_are_its_own():
    def fails(compute_dtype, original_dtypes, *invars, **params):
        raise TypeError("mine")

    with pytest.raises(TypeError, match="^mine"):
        amp(scoped, amp_policy=default_amp_policy | {"head": fails})(W, X)


class Callable:
    def __call__(self, *args, **params):
        return use_compute_precision(*args, **params)


RIGHT = {
    "lists": returning(lambda xs, p: [[x.astype(jnp.float16) for x in xs], p]),
    "tuples": returning(lambda xs, p: (tuple(x.astype(jnp.float16) for x in xs), p)),
    "an object": Callable(),
    "a partial": functools.partial(use_compute_precision),
    "named operands": lambda c, o, x, w, **params: use_compute_precision(
        c, o, x, w, **params
    ),
    "keywords": lambda c, o, *xs, precision, **params: use_compute_precision(
        c, o, *xs, precision=precision, **params
    ),
    "a dtype": use_precision(jnp.float16),
}


@pytest.mark.parametrize("name", RIGHT)
def test_precision_functions_of_any_form(name):
    lowered = amp(scoped, amp_policy=default_amp_policy | {"head": RIGHT[name]})
    assert dtypes_of(lowered, W, X) == [("float16", "float16")]
    gradient = jax.grad(lambda w, x: lowered(w, x).sum())(W, X)
    assert gradient.dtype == jnp.float32
