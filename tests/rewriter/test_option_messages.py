"""Wrong options: each maker says what it got and what it expected."""

import functools

import jax
import jax.numpy as jnp
import pytest

from _programs import W, X, recurrent
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
