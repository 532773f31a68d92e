"""The scaler: when its scale moves, and what it refuses."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from _steps import linear_batch, linear_loss, linear_objects, linear_state, raised
from flax_amp import (
    AmpOptimizer,
    DynamicScalerState,
    _tree,
    all_finite,
    dynamic_scale_grad,
    init_scaler,
    no_scaler,
    scale_loss,
    static_scaler,
    unscale_grads,
    update_scaler,
)

X = jnp.ones(3)
TOP = 2**31 - 1


def numbers(scaler):
    return {key: float(value) for key, value in scaler.items()}


def test_it_is_a_plain_dict_of_four_typed_arrays():
    dtypes = {"scaler": jnp.float32, "count": jnp.int32, "patience": jnp.int32}
    dtypes |= {"adjust_factor": jnp.float32}
    makers = init_scaler, no_scaler, DynamicScalerState
    updated = update_scaler(init_scaler(), True)
    for scaler in (*(make() for make in makers), static_scaler(8), updated):
        assert type(scaler) is dict
        assert {key: x.dtype for key, x in scaler.items()} == dtypes
        assert all(x.shape == () and not x.aval.weak_type for x in scaler.values())
    values = {"scaler": 2.0**15, "count": 0, "patience": 2000, "adjust_factor": 2}
    assert numbers(init_scaler()) == numbers(DynamicScalerState()) == values
    assert numbers(no_scaler()) == values | {"scaler": 1, "adjust_factor": 1}


def expected(state, grads, loss):
    """The rule, in Python."""
    scale, factor = state["scaler"], state["adjust_factor"]
    if not loss:
        return state
    if not grads:
        moved = {"scaler": scale / factor, "count": 0}
    elif state["count"] >= state["patience"]:
        moved = {"scaler": scale * factor, "count": 0}
    else:
        moved = {"count": min(state["count"] + 1, TOP)}
    new = state | moved
    return new | {"scaler": min(max(new["scaler"], 2.0**-24), 2.0**24)}


@pytest.mark.parametrize(
    "start",
    [
        init_scaler(patience=1),
        init_scaler(scaler=2.0**24, patience=0),
        init_scaler(scaler=3 * 2.0**-24, patience=0),
        init_scaler(patience=2, adjust_factor=4),
        init_scaler(scaler=100.0, patience=1, adjust_factor=1.5),
        static_scaler(640.0) | {"patience": jnp.int32(1)},
        no_scaler() | {"patience": jnp.int32(0)},
        init_scaler(patience=TOP) | {"count": jnp.int32(TOP - 1)},
    ],
    ids=str,
)
def test_random_runs_follow_the_rule(start):
    """Of finite and other losses and gradients, compiled and eager."""
    outcomes = np.random.default_rng(0).random((24, 2)) < 0.7
    jitted = jax.jit(update_scaler)
    state, wanted = start, numbers(start)
    for step, (grads, loss) in enumerate(outcomes.tolist()):
        new = jitted(state, grads, loss_finite=loss)
        wanted = expected(wanted, grads, loss)
        assert numbers(new) == pytest.approx(wanted, rel=1e-6), step
        if step < 5:
            eager = update_scaler(state, grads, loss_finite=loss)
            assert numbers(eager) == numbers(new)
        state = new
    if start["adjust_factor"] == 1:
        assert state["scaler"] == start["scaler"]


@pytest.mark.parametrize("broken", [0.0, np.inf, np.nan, -1.0])
def test_a_broken_scale_recovers(broken):
    """As plain Orbax calls restore it, unchecked."""
    state = init_scaler() | {"scaler": jnp.float32(broken)}
    for finite in (True, False):
        scale = float(update_scaler(state, finite)["scaler"])
        assert 2.0**-24 <= scale <= 2.0**24


# What it refuses

OUT_OF_RANGE = [
    (dict(scaler=0.0), "scaler=0.0; expected a number between 5.96046e-08 and 1.6"),
    (dict(scaler=np.nan), "scaler=nan"),
    (dict(scaler=2.0**30), "scaler=1073741824.0"),
    (dict(adjust_factor=0.5), "adjust_factor=0.5"),
    (dict(adjust_factor=np.inf), "adjust_factor=inf"),
    (dict(patience=1.5), "patience=1.5; expected an integer between 0"),
    (dict(count=-5), "count=-5"),
]
GRAD_FN = dynamic_scale_grad(linear_loss)
WHERE = {
    "AmpTrainState.create: scaler": lambda s: linear_state(scaler=s),
    "AmpOptimizer: scaler": lambda s: AmpOptimizer(linear_objects()[0], TX, scaler=s),
    "dynamic_scaler_state": lambda s: GRAD_FN(
        {"w": jnp.ones(3)}, linear_batch(), dynamic_scaler_state=s
    ),
}
TX = linear_state().tx


@pytest.mark.parametrize("values, message", OUT_OF_RANGE, ids=str)
def test_values_out_of_range_are_named_wherever_they_are_given(values, message):
    arrays = {key: jnp.asarray(value) for key, value in values.items()}
    for where, use in WHERE.items():
        for given in (values, arrays):
            call = functools.partial(use, init_scaler() | given)
            raised(call, ValueError, f"{where}: .*{message}")
    raised(lambda: update_scaler(init_scaler() | values, True), ValueError, message)
    if "count" not in values:
        raised(lambda: init_scaler(**values), ValueError, f"init_scaler: .*{message}")


@pytest.mark.parametrize(
    "state, message",
    [
        (3.0, r"scaler is float32\[\]; expected a dict of .*init_scaler"),
        ({"scaler": 2}, r"has the keys \['scaler'\]; expected a dict of \['adjust"),
        (init_scaler() | {"growth": 2}, "has the keys .*'growth'"),
        (init_scaler() | {"scaler": X}, r"scaler\['scaler'\] is float32\["),
        (init_scaler() | {"count": None}, "is a NoneType; expected a sca"),
    ],
)
def test_what_is_no_scaler_is_named(state, message):
    raised(lambda: update_scaler(state, True), ValueError, message)


def test_arrays_are_not_waited_for_later_on():
    state = init_scaler() | {"adjust_factor": jnp.float32(0.5)}
    assert update_scaler(state, False)["scaler"] == 2.0**16
    raised(lambda: linear_state(scaler=state), ValueError, "adjust_factor=0.5")


# In loops of the user's own


def test_flags():
    call = functools.partial(update_scaler, init_scaler())
    for yes in (True, np.True_, np.array(True), jnp.array(True)):
        for no in (False, np.False_, jnp.array(False)):
            assert call(yes)["count"] == 1
            assert call(no)["scaler"] == 2.0**14
            assert call(yes, loss_finite=no)["scaler"] == 2.0**15
    for flag in (X[0], 1.0, None, {"w": X}):  # such as a loss instead of its flag
        raised(lambda flag=flag: call(flag), TypeError, "and .*accept|bitwise_and")


@pytest.mark.parametrize("number", [float, np.float32, np.float64, np.array, jnp.array])
def test_numbers_are_leaves(number):
    """A float of Python is a gradient or a loss like an array of it."""
    scaler = init_scaler(scaler=4)
    unscaled = unscale_grads({"a": number(8.0), "n": 0}, scaler)
    assert unscaled == {"a": 2, "n": 0}
    assert scale_loss(number(8.0), scaler) == 32
    assert all_finite([0, number(8.0)])
    assert not all_finite([0, number(jnp.nan)])


LEAVES = {"w": jnp.ones(2), "n": jnp.arange(3), "key": jax.random.key(0), "none": None}


@pytest.mark.parametrize(
    "tree, finite",
    [
        ({}, True),
        (None, True),
        (LEAVES | {"name": "text", "number": 1.5}, True),
        (LEAVES | {"number": float("inf")}, False),
        ([jnp.ones(2), jnp.array([1, jnp.nan])], False),
        ([jnp.ones(2, jnp.bfloat16) * jnp.inf], False),
        ([np.float16("inf")], False),
        ([jnp.complex64(complex(0, np.nan))], False),
    ],
)
def test_all_finite(tree, finite):
    flag = _tree.all_finite(tree)
    assert (flag.dtype, flag.shape, bool(flag)) == (jnp.bool_, (), finite)
