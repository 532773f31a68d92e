"""Precision functions that users write: what is wrong with one is said by its key."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from flax_amp import amp, default_amp_policy, use_compute_precision, use_precision
from helpers import dtypes_of

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
SCALARS = dict(dimension_numbers=(((), ()), ((), ())))

WRONG = {
    "two parameters": (of_two_arguments, NO_CALL, SIGNATURE, WRITE),
    "one operand": (of_one_operand, NO_CALL, SIGNATURE, WRITE),
    # Results that are no pair of operands and parameters.
    "nothing": (returning(lambda xs, p: None), "a NoneType ", PAIR, WRITE),
    "an array": (returning(lambda xs, p: xs[0]), "a .*Tracer ", PAIR, WRITE),
    "three": (returning(lambda xs, p: (*xs, xs[0])), "a tuple of 3 ", PAIR, WRITE),
    "a list": (returning(lambda xs, p: xs), "Tracer as bind_params ", PAIR, WRITE),
    "bare": (returning(lambda xs, p: (xs[0], p)), "Tracer as invars ", PAIR, WRITE),
    # Other operands.
    "too few": (returning(lambda xs, p: (xs[:1], p)), "1 operands ", PAIR, WRITE),
    "none": (
        returning(lambda xs, p: ([None, xs[1]], p)), "a NoneType as", PAIR, WRITE
    ),
    "a string": (
        returning(lambda xs, p: ([xs[0], "x"], p)), "str as operand 1", PAIR, WRITE
    ),
    "a shape": (
        returning(lambda xs, p: ([xs[0], xs[1].T[:3]], p)),
        r"operand 1 of shape \(3, 4\) for \(4, 4\) ", PAIR, WRITE,
    ),
    # Other parameters.
    "no params": (
        returning(lambda xs, p: (xs, {})),
        r"for dot_general that lacks the parameters \['dimension_numbers', ",
        r"expected all that it was given. Return operands, bind_params\.",
    ),
    "unknown parameter": (
        returning(lambda xs, p: ([xs[0], xs[1].astype("float16")], p | {"mode": 3})),
        r"operands of dtypes \(float32, float16\) and the parameters \[.*'mode'",
        "which cannot be computed with these", WRITE,
    ),
    "other results": (
        returning(lambda xs, p: (xs, p | SCALARS)),
        r"results of shapes \[\(2, 4, 4, 4\)\]; expected \[\(2, 4\)\]",
        "Change dtypes only",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_precision_function(name):
    function, *messages = WRONG[name]
    for key in ("head", lax.dot_general_p, "amp_default"):
        policy = {} if key == "amp_default" else default_amp_policy
        lowered = amp(scoped, amp_policy={**policy, key: function})
        shown = key if isinstance(key, str) else key.name
        with pytest.raises(TypeError) as error:
            jax.eval_shape(lowered, W, X)
        who = f"the precision function {function.__qualname__} of key {shown!r} "
        assert f"amp_policy: {who}" in str(error.value)
        for message in messages:
            assert error.match(message)


def test_errors_of_the_function_are_its_own():
    def fails(compute_dtype, original_dtypes, *invars, **params):
        raise TypeError("mine")

    with pytest.raises(TypeError, match="^mine"):
        amp(scoped, amp_policy=default_amp_policy | {"head": fails})(W, X)


class NotHashable:
    """As a mutable dataclass would be."""

    __hash__ = None

    def __call__(self, *args, **params):
        return use_compute_precision(*args, **params)


def without_signature(*args, **params):
    return use_compute_precision(*args, **params)


without_signature.__signature__ = 0  # `inspect` fails, as it does for some builtins

RIGHT = {
    "lists": returning(lambda xs, p: [[x.astype(jnp.float16) for x in xs], p]),
    "tuples": returning(lambda xs, p: (tuple(x.astype(jnp.float16) for x in xs), p)),
    "an object": NotHashable(),
    "a builtin": without_signature,
    "named operands": lambda c, o, x, w, **p: use_compute_precision(c, o, x, w, **p),
    "a dtype": use_precision(jnp.float16),
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


def test_it_may_read_an_array_in_a_checkpoint():
    ten = jnp.full((1, 4), 10.0)
    tenfold = returning(lambda xs, p: ([xs[0] * ten.astype(xs[0].dtype), xs[1]], p))
    policy = default_amp_policy | {lax.dot_general_p: tenfold}
    lowered = amp(jax.checkpoint(lambda w, x: x @ w), amp_policy=policy)
    value, gradient = jax.value_and_grad(lambda x: lowered(W, x).sum())(X)
    assert value == 10 * X.sum() and (gradient == 10).all()
