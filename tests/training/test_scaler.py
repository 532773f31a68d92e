"""The loss scaler: its arithmetic to the step, and the gradients that use it."""

import itertools
import typing

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax.training.dynamic_scale import DynamicScale

from flax_amp._training.scaler import (
    DynamicScalerState,
    complete_scaler,
    init_scaler,
    no_scaler,
    static_scaler,
    update_scaler,
)

DTYPES = dict(
    scaler=jnp.float32,
    count=jnp.int32,
    patience=jnp.int32,
    adjust_factor=jnp.float32,
    total_resets=jnp.int32,
    min_scaler=jnp.float32,
    max_scaler=jnp.float32,
)

# Not one of them is a default.
UNUSUAL = dict(
    scaler=48.0, patience=7, adjust_factor=3.0, min_scaler=0.125, max_scaler=4096.0
)


def assert_well_formed(state):
    """Checks keys, shapes, dtypes and strong typing."""
    assert set(state) == set(DTYPES)
    for key, leaf in state.items():
        assert (leaf.shape, leaf.dtype) == ((), DTYPES[key]), key
        assert not leaf.aval.weak_type, key


def run(state, outcomes):
    """Returns the scale after each finite (1) or non-finite (0) step."""
    scales = []
    for finite in outcomes:
        state = update_scaler(state, bool(finite))
        scales.append(float(state["scaler"]))
    return state, scales


# The state


@pytest.mark.parametrize(
    "state",
    [
        init_scaler(),
        init_scaler(**UNUSUAL),
        static_scaler(8),
        no_scaler(),
        complete_scaler(DynamicScalerState()),
        complete_scaler(DynamicScalerState(patience=10, scaler=2**15)),
        update_scaler({}, True),
        update_scaler({}, False),
    ],
)
def test_every_scaler_has_the_same_strongly_typed_keys(state):
    assert_well_formed(state)


def test_type_names_exactly_the_keys():
    assert set(typing.get_type_hints(DynamicScalerState)) == set(DTYPES)


def test_weakly_typed_tracers_become_strong():
    @jax.jit
    def complete(x):
        return complete_scaler({"scaler": x * 2, "count": x.astype(int)})

    assert_well_formed(complete(3.0))


def test_completing_keeps_what_is_there():
    state = init_scaler(**UNUSUAL)
    del state["max_scaler"]
    assert float(complete_scaler(state)["max_scaler"]) == 2.0**24
    assert float(complete_scaler(state)["adjust_factor"]) == 3.0


@pytest.mark.parametrize(
    "values, message",
    [
        (dict(scaler=0.0), r"scaler=0.0 \(expected between min_scaler="),
        (dict(scaler=2.0**30), "scaler=1073741824.0"),
        (dict(scaler=float("nan")), "scaler=nan"),
        (dict(adjust_factor=1.0), "adjust_factor=1.0"),
        (dict(adjust_factor=float("inf")), "adjust_factor=inf"),
        (dict(patience=-1), "patience=-1"),
        (dict(patience=1.5), "patience=1.5"),
        (dict(patience=float("inf")), "patience=inf"),
        (dict(min_scaler=0.0), "min_scaler=0.0"),
        (dict(max_scaler=float("inf")), "max_scaler=inf"),
        (dict(patience=-1, adjust_factor=0.5), "adjust_factor=0.5.*patience=-1"),
    ],
)
def test_bad_hyperparameters_are_named(values, message):
    with pytest.raises(ValueError, match=message):
        init_scaler(**values)


@pytest.mark.parametrize(
    "state, error, message",
    [
        (3.0, TypeError, "scaler: got float; expected a dict"),
        ({"growth": 2}, ValueError, r"unknown keys \['growth'\]"),
        ({"scaler": jnp.ones(2)}, ValueError, r"scaler\['scaler'\] has shape \(2,\)"),
        ({"count": "3"}, ValueError, r"scaler\['count'\] is a str"),
        ({"count": None}, ValueError, r"scaler\['count'\] is a NoneType"),
    ],
)
def test_bad_scalers_are_named(state, error, message):
    with pytest.raises(error, match=message):
        update_scaler(state, True)


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
        assert {k: float(v) for k, v in after.items()} == {
            k: float(v) for k, v in before.items()
        }


# The update


@pytest.mark.parametrize(
    "options, outcomes, scales, count, resets",
    [
        ({}, [1, 1], [2**15, 2**15], 2, 0),
        ({}, [0, 0, 1], [2**14, 2**13, 2**13], 1, 2),
        (dict(patience=2), [1, 1, 1, 1], [2**15, 2**15, 2**16, 2**16], 1, 0),
        (dict(patience=0), [1, 1], [2**16, 2**17], 0, 0),
        # A back-off starts the count again.
        (dict(patience=1), [1, 0, 1, 1], [2**15, 2**14, 2**14, 2**15], 0, 1),
        (dict(adjust_factor=4, patience=0), [0, 1], [2**13, 2**15], 0, 1),
        (dict(min_scaler=2**14), [0, 0, 0], [2**14, 2**14, 2**14], 0, 3),
        (dict(max_scaler=2**16, patience=0), [1, 1, 0], [2**16, 2**16, 2**15], 0, 1),
        # Limits that the factor does not hit exactly.
        (dict(min_scaler=20000), [0, 0], [20000, 20000], 0, 2),
        (dict(max_scaler=40000, patience=0), [1, 1], [40000, 40000], 0, 0),
    ],
)
def test_scenarios(options, outcomes, scales, count, resets):
    state, seen = run(init_scaler(**options), outcomes)
    assert seen == scales
    assert (int(state["count"]), int(state["total_resets"])) == (count, resets)
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


def test_counters_stop_at_the_largest_int32():
    top = 2**31 - 1
    full = complete_scaler({"patience": top, "count": top - 1, "total_resets": top})
    assert int(update_scaler(full, True)["count"]) == top
    assert int(update_scaler(full, False)["total_resets"]) == top


@pytest.mark.parametrize("make", [lambda: static_scaler(640.0), no_scaler])
def test_static_scalers_stay(make):
    start = make() | {"patience": jnp.int32(1)}
    state, scales = run(start, [0, 1, 1, 1, 1, 0, 1])
    assert set(scales) == {float(start["scaler"])}
    assert int(state["total_resets"]) == 2


@pytest.mark.parametrize("scale, count", [(2.0**4, 0), (2.0**4, 3), (2.0**24, 7)])
def test_a_loss_that_is_not_finite_leaves_scale_and_count_alone(scale, count):
    state = complete_scaler({"scaler": scale, "count": count, "patience": 7})
    for grads_finite in (True, False):
        after = update_scaler(state, grads_finite, loss_finite=False)
        assert (after["scaler"], after["count"]) == (scale, count)
        assert int(after["total_resets"]) == 1
        assert_well_formed(after)


def test_agrees_with_flax_on_random_sequences():
    steps, interval = 40, 3
    generator = np.random.default_rng(0)
    outcomes = generator.random((200, steps)) < 0.7

    @jax.vmap
    def ours(outcomes):
        start = init_scaler(
            scaler=2.0**16, patience=interval, min_scaler=2.0, max_scaler=2.0**126
        )

        def step(state, finite):
            state = update_scaler(state, finite)
            return state, (state["scaler"], state["count"])

        return jax.lax.scan(step, start, outcomes)[1]

    @jax.vmap
    def flax(outcomes):
        start = DynamicScale(
            growth_interval=interval,
            scale=jnp.float32(2.0**16),
            fin_steps=jnp.int32(0),
            minimum_scale=2.0,
        )

        def step(dynamic_scale, finite):
            def loss(w):
                return w * jnp.where(finite, 1.0, jnp.inf)

            out = dynamic_scale.value_and_grad(loss)(jnp.float32(1.0))[0]
            return out, (out.scale, out.fin_steps)

        return jax.lax.scan(step, start, outcomes)[1]

    np.testing.assert_array_equal(jax.jit(ours)(outcomes), jax.jit(flax)(outcomes))


def test_vmap_over_scalers():
    states = jax.vmap(lambda scale: init_scaler(scaler=scale, patience=0))(
        jnp.array([2.0, 8.0, 32.0])
    )
    states = jax.vmap(update_scaler)(states, jnp.array([True, False, True]))
    np.testing.assert_array_equal(states["scaler"], [4.0, 4.0, 64.0])


@pytest.mark.parametrize("outcomes", list(itertools.product([True, False], repeat=3)))
def test_eager_and_jitted_updates_agree(outcomes):
    eager = compiled = init_scaler(**(UNUSUAL | dict(patience=1)))
    for finite in outcomes:
        eager = update_scaler(eager, finite)
        compiled = jax.jit(update_scaler)(compiled, finite)
    assert jax.tree.map(float, eager) == jax.tree.map(float, compiled)


@pytest.mark.parametrize(
    ("value", "message"),
    [("a", "is a str; expected a scalar"), (jnp.ones(3), "has shape")],
)
def test_hyperparameters_are_numbers_before_they_are_in_range(value, message):
    for name in ("scaler", "adjust_factor", "patience"):
        with pytest.raises(ValueError, match=message):
            init_scaler(**{name: value})
