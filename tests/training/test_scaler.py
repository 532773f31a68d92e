"""The loss scaler: its arithmetic to the step, and what it refuses."""

import functools
import typing

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from _steps import (
    linear_batch,
    linear_loss,
    linear_state,
    raised,
    run_nnx,
)
from flax_amp import (
    DynamicScalerState,
    all_finite,
    dynamic_scale_grad,
    init_scaler,
    no_scaler,
    scale_loss,
    static_scaler,
    unscale_grads,
    update_scaler,
)
from flax_amp._training.scaler import check_scaler, complete_scaler

SKIP_COUNTS = {"count", "patience", "total_resets"}
KEYS = SKIP_COUNTS | {"scaler", "adjust_factor", "min_scaler", "max_scaler"}
TOP = 2**31 - 1
X = jnp.ones(3)

# Not one of them is a default.
UNUSUAL = dict(
    scaler=48.0, patience=7, adjust_factor=3.0, min_scaler=0.125, max_scaler=4096.0
)


def assert_well_formed(state):
    """Checks keys, shapes, dtypes and strong typing."""
    assert set(state) == KEYS
    for key, leaf in state.items():
        dtype = jnp.int32 if key in SKIP_COUNTS else jnp.float32
        assert (leaf.shape, leaf.dtype) == ((), dtype), key
        assert not leaf.aval.weak_type, key


def numbers(state):
    return {key: leaf.item() for key, leaf in state.items()}


# The state


def test_every_scaler_has_the_same_strongly_typed_keys():
    for state in [
        init_scaler(),
        init_scaler(**UNUSUAL),
        static_scaler(8),
        no_scaler(),
        complete_scaler(DynamicScalerState()),
        complete_scaler(DynamicScalerState(patience=10, scaler=2**15)),
        update_scaler({}, True),
        update_scaler({}, False),
        jax.jit(lambda x: complete_scaler({"scaler": x * 2, "count": 1}))(3.0),
    ]:
        assert_well_formed(state)
    assert set(typing.get_type_hints(DynamicScalerState)) == KEYS


def test_completing_keeps_what_is_there():
    state = init_scaler(**UNUSUAL)
    del state["max_scaler"]
    assert numbers(complete_scaler(state)) == numbers(
        init_scaler(**UNUSUAL | {"max_scaler": 2.0**24})
    )


# The update


def expected(state, grads_finite, loss_finite):
    """The rule in plain Python: every number is a Python number."""
    state = dict(state)
    if not (loss_finite and grads_finite):
        state["total_resets"] = min(state["total_resets"] + 1, TOP)
    if loss_finite and not grads_finite:
        state["scaler"], state["count"] = state["scaler"] / state["adjust_factor"], 0
    elif loss_finite and state["count"] >= state["patience"]:
        state["scaler"], state["count"] = state["scaler"] * state["adjust_factor"], 0
    elif loss_finite:
        state["count"] = min(state["count"] + 1, TOP)
    # Keep within the limits.
    state["scaler"] = max(state["scaler"], state["min_scaler"])
    state["scaler"] = min(state["scaler"], state["max_scaler"])
    return state


@pytest.mark.parametrize(
    "start",
    [
        init_scaler(patience=1),
        init_scaler(**UNUSUAL | {"patience": 1}),
        init_scaler(scaler=2.0**24, patience=0),
        init_scaler(patience=2, adjust_factor=4, max_scaler=2**16),
        # Limits that the factor does not hit exactly.
        init_scaler(patience=0, min_scaler=20000, max_scaler=40000),
        static_scaler(640.0) | {"patience": jnp.int32(1)},
        no_scaler() | {"patience": jnp.int32(0)},
        complete_scaler({"patience": TOP, "count": TOP - 1, "total_resets": TOP - 1}),
    ],
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
    assert_well_formed(state)


@pytest.mark.parametrize(
    "options",
    [{}, dict(min_scaler=2.0**-126, max_scaler=2.0**126), dict(adjust_factor=1e30)],
)
@pytest.mark.parametrize("finite", [True, False])
def test_scale_never_breaks_and_never_sticks(options, finite):
    def step(state, finite):
        return update_scaler(state, finite), state["scaler"]

    start = init_scaler(patience=0, **options)
    state, scales = jax.lax.scan(step, start, jnp.full(400, finite))
    scales = np.asarray(scales)
    assert np.isfinite(scales).all() and (scales > 0).all()
    assert np.isfinite(1 / scales).all() and (1 / scales > 0).all()
    limit = state["max_scaler" if finite else "min_scaler"]
    assert state["scaler"] == limit
    assert update_scaler(state, not finite)["scaler"] != limit


@pytest.mark.parametrize("broken", [0.0, np.inf, np.nan, -1.0])
def test_a_broken_scale_recovers(broken):
    state = complete_scaler({"scaler": broken})
    for finite in (True, False):
        scale = float(update_scaler(state, finite)["scaler"])
        assert 2.0**-14 <= scale <= 2.0**24


# What it refuses

OUT_OF_RANGE = [
    (dict(scaler=0.0), r"scaler=0.0 \(expected between min_scaler="),
    (dict(scaler=-1), "scaler=-1"),
    (dict(scaler=np.nan), "scaler=nan"),
    (dict(scaler=2.0**30), "scaler=1073741824.0 .*max_scaler=16777216.0"),
    (dict(adjust_factor=1.0), "adjust_factor=1.0 .*above 1"),
    (dict(adjust_factor=1 + 1e-9), "adjust_factor=1.0"),
    (dict(adjust_factor=np.inf), "adjust_factor=inf"),
    (dict(patience=-1), "patience=-1"),
    (dict(patience=1.5), "patience=1.5"),
    (dict(min_scaler=0.0), "min_scaler=0.0"),
    (dict(max_scaler=np.inf), "max_scaler=inf"),
    (
        dict(min_scaler=8.0, max_scaler=4.0),
        "scaler=32768.0 .*min_scaler=8.0 and max_scaler=4.0",
    ),
    (dict(patience=-1, adjust_factor=0.5), "adjust_factor=0.5.*patience=-1"),
    (dict(count=-5), "count=-5"),
]
GRAD_FN = dynamic_scale_grad(linear_loss)
WHERE = {
    "AmpTrainState.create: scaler": lambda s: linear_state(scaler=s),
    "dynamic_scaler_state": lambda s: GRAD_FN(
        {"w": jnp.ones(3)}, linear_batch(), dynamic_scaler_state=s
    ),
    "train_step: scaler": lambda s: run_nnx(scaler=s)(),
}


@pytest.mark.parametrize("values, message", OUT_OF_RANGE, ids=str)
def test_values_out_of_range_are_named_wherever_they_are_given(values, message):
    arrays = {key: jnp.asarray(value) for key, value in values.items()}
    for where, use in WHERE.items():
        for scaler in (values, arrays):
            raised(
                lambda use=use, s=scaler: use(s), ValueError, f"{where}: .*{message}"
            )
    raised(lambda: update_scaler(values, True), ValueError, message)
    if "count" not in values:
        raised(lambda: init_scaler(**values), ValueError, f"init_scaler: .*{message}")


@pytest.mark.parametrize(
    "state, error, message",
    [
        (3.0, TypeError, "scaler is a float; expected a dict"),
        ({"growth": 2}, ValueError, r"unknown keys \['growth'\]"),
        ({"scaler": jnp.ones(2)}, ValueError, r"scaler\['scaler'\] has shape \(2,\)"),
        ({"count": "3"}, ValueError, r"scaler\['count'\] is a str"),
        ({"count": None}, ValueError, r"scaler\['count'\] is a NoneType"),
        ({"adjust_factor": "a"}, ValueError, "is a str; expected a scalar"),
        ({"patience": jnp.ones(3)}, ValueError, "has shape"),
    ],
)
def test_what_is_no_scaler_is_named(state, error, message):
    raised(lambda: update_scaler(state, True), error, message)
    if isinstance(state, dict) and state.keys() & UNUSUAL.keys():
        raised(lambda: init_scaler(**state), error, message)


def test_only_what_costs_nothing_is_checked_later_on(monkeypatch):
    """Numbers beside arrays are; nobody waits for arrays, which judge no number."""
    for values, message in [
        (dict(adjust_factor=-2.0), "adjust_factor=-2.0"),
        (dict(patience=np.int32(-1)), "patience=-1"),
        (dict(scaler=8.0, max_scaler=4.0), "scaler=8.0 .*max_scaler=4.0"),
    ]:
        update = lambda state, v=values: update_scaler(state | v, False)  # noqa: E731
        for call in (update, jax.jit(update)):
            raised(functools.partial(call, init_scaler()), ValueError, message)
    given = init_scaler(scaler=2.0**21)
    assert update_scaler(given | {"min_scaler": 2.0**20}, False)["scaler"] == 2.0**20
    given = init_scaler(scaler=2.0, max_scaler=4.0)
    assert update_scaler(given | {"min_scaler": 2.0}, False)["scaler"] == 2.0
    jax.jit(lambda x: check_scaler({"scaler": x}, "here"))(-1.0)
    jax.eval_shape(lambda x: linear_state(scaler={"scaler": x}), jnp.float32(-1))
    state = init_scaler()
    monkeypatch.setattr("flax_amp._training.scaler.values_out_of_range", None)
    for finite in (True, False):
        state = update_scaler(state, finite)
    assert scale_loss(jnp.float32(1), state) == 2.0**14


# In loops of the user's own


@pytest.mark.parametrize("flag", [{"w": X}, X > 0, X[0], 1, 0.0, None, "yes"], ids=str)
def test_flags_that_are_no_flags(flag):
    for name, call in [
        ("grads_finite", lambda: update_scaler(init_scaler(), flag)),
        ("loss_finite", lambda: update_scaler({}, True, loss_finite=flag)),
    ]:
        advice = rf"Pass flax_amp.all_finite\({name[:5].rstrip('_')}\)"
        message = f"update_scaler: {name} is .*; expected True, False or bool.*{advice}"
        raised(call, TypeError, message)


def test_flags():
    update = functools.partial(update_scaler, init_scaler())
    for yes in (True, np.True_, np.array(True), jnp.array(True)):
        for no in (False, np.False_, jnp.array(False)):
            assert update(yes)["count"] == 1
            for skipped in (update(no), update(yes, loss_finite=no)):
                assert (skipped["count"], skipped["total_resets"]) == (0, 1)


def test_losses_that_are_no_numbers():
    for loss in (None, "a", (X, {}), {"loss": X}):
        kind = type(loss).__name__
        message = f"scale_loss: loss is a {kind}; expected a number.* without aux"
        raised(lambda x=loss: scale_loss(x, init_scaler()), TypeError, message)
    message = "scaler is a Arr.*exp"
    raised(lambda: scale_loss(init_scaler(), X[0]), TypeError, message)


@pytest.mark.parametrize("number", [float, np.float32, np.float64, np.array, jnp.array])
def test_numbers_are_leaves(number):
    """A float of Python is a gradient or a loss like an array of it."""
    for wrap in (lambda x: x, lambda x: {"a": x}, lambda x: [0, x]):
        unscaled = unscale_grads(wrap(number(8.0)), init_scaler(scaler=4))
        assert jax.tree.leaves(unscaled)[-1] == 2 and all_finite(wrap(number(8.0)))
        for broken in (jnp.nan, jnp.inf, -jnp.inf):
            assert not all_finite(wrap(number(broken)))
    assert not all_finite(complex("nan"))
