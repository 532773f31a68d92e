"""The loss scaler: its arithmetic to the step, and what it refuses."""

import typing

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax.training.dynamic_scale import DynamicScale

from _steps import (
    linear_batch,
    linear_loss,
    linear_state,
    raised,
    run_nnx,
)
from flax_amp import (
    DynamicScalerState,
    dynamic_scale_grad,
    init_scaler,
    no_scaler,
    scale_loss,
    static_scaler,
    update_scaler,
)
from flax_amp._training.scaler import check_scaler, complete_scaler

SKIP_COUNTS = {"count", "patience", "total_resets"}
KEYS = SKIP_COUNTS | {"scaler", "adjust_factor", "min_scaler", "max_scaler"}
TOP = 2**31 - 1

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


def test_hyperparameters_survive_tree_map_jit_and_orbax(tmp_path):
    before = update_scaler(init_scaler(**UNUSUAL), False)
    mapped = jax.tree.map(lambda x: x, before)
    jitted = jax.jit(lambda state: state)(before)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "scaler", before)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "scaler", init_scaler())
    for after in (mapped, jitted, restored):
        assert_well_formed(after)
        assert numbers(after) == numbers(before)


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


def test_agrees_with_flax_on_random_sequences():
    options = dict(scaler=2.0**16, patience=3, min_scaler=2.0, max_scaler=2.0**126)
    start = (
        init_scaler(**options),
        DynamicScale(
            growth_interval=3,
            scale=jnp.float32(2.0**16),
            fin_steps=jnp.int32(0),
            minimum_scale=2.0,
        ),
    )

    def step(both, finite):
        ours, flax = both
        grad_fn = flax.value_and_grad(lambda w: w * jnp.where(finite, 1.0, jnp.inf))
        ours, flax = update_scaler(ours, finite), grad_fn(jnp.float32(1.0))[0]
        seen = (ours["scaler"], ours["count"]), (flax.scale, flax.fin_steps)
        return (ours, flax), seen

    outcomes = np.random.default_rng(0).random((200, 40)) < 0.7
    run = jax.vmap(lambda outcomes: jax.lax.scan(step, start, outcomes)[1])
    np.testing.assert_array_equal(*jax.jit(run)(outcomes))


# What it refuses

OUT_OF_RANGE = [
    (dict(scaler=0.0), r"scaler=0.0 \(expected between min_scaler="),
    (dict(scaler=0), "scaler=0"),
    (dict(scaler=-1.0), "scaler=-1.0"),
    (dict(scaler=np.nan), "scaler=nan"),
    (dict(scaler=2.0**30), "scaler=1073741824.0 .*max_scaler=16777216.0"),
    (dict(adjust_factor=1.0), "adjust_factor=1.0 .*above 1"),
    (dict(adjust_factor=1 + 1e-9), "adjust_factor=1.0"),
    (dict(adjust_factor=np.inf), "adjust_factor=inf"),
    (dict(patience=-1), "patience=-1"),
    (dict(patience=1.5), "patience=1.5"),
    (dict(patience=np.inf), "patience=inf"),
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


@pytest.mark.parametrize(
    "values, message",
    [
        (dict(adjust_factor=-2.0), "adjust_factor=-2.0"),
        (dict(patience=np.int32(-1)), "patience=-1"),
        (dict(scaler=-1.0), "scaler=-1.0 .*min_scaler="),
        (dict(scaler=8.0, max_scaler=4.0), "scaler=8.0 .*max_scaler=4.0"),
    ],
    ids=str,
)
def test_numbers_beside_arrays_are_checked(values, message):
    """What is on the device is not waited for; what is not costs nothing to check."""
    for jit in (lambda fn: fn, jax.jit):
        update = jit(lambda state: update_scaler(state | values, False))
        raised(lambda update=update: update(init_scaler()), ValueError, message)


def test_numbers_are_not_judged_by_arrays_beside_them():
    given = init_scaler(scaler=2.0**21)
    assert update_scaler(given | {"min_scaler": 2.0**20}, False)["scaler"] == 2.0**20
    given = init_scaler(scaler=2.0, max_scaler=4.0)
    assert update_scaler(given | {"min_scaler": 2.0}, False)["scaler"] == 2.0


def test_scalers_are_not_waited_for_later_on(monkeypatch):
    """On the way from step to step they are arrays; nobody fetches them."""
    state = init_scaler()
    monkeypatch.setattr("flax_amp._training.scaler.values_out_of_range", None)
    for finite in (True, False):
        state = update_scaler(state, finite)
    assert scale_loss(jnp.float32(1), state) == 2.0**14


def test_traced_scalers_are_not_checked():
    jax.jit(lambda x: check_scaler({"scaler": x}, "here"))(-1.0)
    jax.eval_shape(lambda x: linear_state(scaler={"scaler": x}), jnp.float32(-1))
