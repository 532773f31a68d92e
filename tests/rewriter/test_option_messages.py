"""Wrong options and precision functions: what was got, and what was expected."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from _programs import recurrent
from flax_amp import (
    amp,
    amp_stop,
    default_amp_policy,
    follow_precision,
    make_eval_step,
    make_nnx_train_step,
    make_train_step,
    use_compute_precision,
    use_original_precision,
    use_precision,
)
from helpers import dtypes_of


def loss(*args):
    return None


AMP = (functools.partial(amp, loss), amp)  # with the function, or as a decorator
STEP = (functools.partial(make_train_step, loss),)
OTHER_STEPS = tuple(
    functools.partial(make, loss) for make in (make_nnx_train_step, make_eval_step)
)
OF_MODE = "recompute: got {!r}; expected one of 'never', 'auto', 'always'"
OF_REDUCE = "reduce_dtype: got {}; expected float32, or None or {}"
F16, BF16, F32 = jnp.float16, jnp.bfloat16, jnp.float32
ENTRIES = {3: follow_precision, jnp.dot: amp, "a": 5}

WRONG = [  # options, error, message, what makes something of them
    (dict(compute_dtype="float12"), TypeError, "compute_dtype: got 'float12'", AMP),
    (dict(compute_dtype=None), TypeError, "compute_dtype: got None", AMP),
    *(
        (dict(compute_dtype=x), TypeError, "got .*; expected jnp.float16", AMP)
        for x in ("int8", jnp.int8, jnp.float64, "half-float", "16-mixed", object())
    ),
    (dict(amp_policy=[1]), TypeError, "amp_policy: got list; expected a dict", AMP),
    (
        dict(amp_policy=ENTRIES),
        TypeError,
        r"(?s)amp_policy: wrong entries.*key 3 of type int.*dot.*of key 'a'",
        AMP,
    ),
    *(
        (dict(recompute=x), ValueError, OF_MODE.format(x), AMP + STEP)
        for x in ("sometimes", True, None, "AUTO", 1)
    ),
    *(
        (
            dict(compute_dtype=compute, reduce_dtype=reduce),
            ValueError,
            OF_REDUCE.format(jnp.dtype(reduce).name, jnp.dtype(compute).name),
            AMP + STEP,
        )
        for reduce, compute in ((F16, BF16), (BF16, F16), ("int32", BF16), (BF16, F32))
    ),
    *(
        (dict(reduce_dtype=x), TypeError, "reduce_dtype: got .*expected a dtype", AMP)
        for x in ("float33", 3, object())
    ),
    (
        dict(merge_layers="no"),
        TypeError,
        r"merge_layers: got 'no'; expected True or False\.",
        AMP + STEP + OTHER_STEPS,
    ),
]


@pytest.mark.parametrize("options, error, message, makers", WRONG)
def test_wrong_options(options, error, message, makers):
    """They fail when a function is made, not when it is called."""
    for make in makers:
        with pytest.raises(error, match=message):
            make(**options)


def test_what_is_no_function():
    with pytest.raises(TypeError, match="amp: got int; expected a function"):
        amp(3)
    for dtype in (F16, BF16, F32):  # which can be called
        with pytest.raises(TypeError, match=r"amp: got .*float.*@amp\(compute_dtype="):
            amp(dtype)
    with pytest.raises(TypeError, match="amp_stop: got str; expected a function"):
        amp_stop("scope")


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

WRONG_FUNCTIONS = {
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


@pytest.mark.parametrize("name", WRONG_FUNCTIONS)
def test_a_wrong_precision_function(name):
    function, *messages = WRONG_FUNCTIONS[name]
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
