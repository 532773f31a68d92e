"""Precision functions and keys of a policy: right forms, and errors of wrong forms."""

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

W, X = jnp.eye(4), jnp.ones((2, 4))


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
