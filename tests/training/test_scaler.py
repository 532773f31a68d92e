"""The loss scaler: its arithmetic to the step, and the gradients that use it."""

import itertools
import typing

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax.training.dynamic_scale import DynamicScale
from jax.test_util import check_grads

from flax_amp._training.scaled_grad import (
    dynamic_scale_grad,
    dynamic_scale_value_and_grad,
    scale_loss,
    unscale_grads,
)
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


# The gradients: the published expectations of jaxamp, to the step


def split(transform, has_aux, out):
    """Returns `(value, aux, grads)`; what the transform does not give is `None`."""
    if transform is dynamic_scale_grad:
        grads, aux = out if has_aux else (out, None)
        return None, aux, grads
    value, grads = out
    value, aux = value if has_aux else (value, None)
    return value, aux, grads


@pytest.mark.parametrize(
    "transform", [dynamic_scale_grad, dynamic_scale_value_and_grad]
)
@pytest.mark.parametrize("filter", [True, False])
@pytest.mark.parametrize("has_aux", [True, False])
def test_seed_table(transform, filter, has_aux):
    def cube(x):
        return (x**3, 1.0) if has_aux else x**3

    def expect(scale, count, resets, correct=True):
        nonlocal state
        state, out = grad_fn(x, dynamic_scaler_state=state)
        value, aux, grads = split(transform, has_aux, out)
        assert float(state["scaler"]) == scale
        assert (int(state["count"]), int(state["total_resets"])) == (count, resets)
        assert aux == (1.0 if has_aux else None)
        assert value is None or (value == 8.0 and value.dtype == jnp.float16)
        assert not correct or (grads == 12.0 and grads.dtype == jnp.float16)

    x = jnp.float16(2.0)
    options = dict(filter=filter, has_aux=has_aux)
    # 12 * 2**13 is beyond float16, 12 * 2**12 is not.
    grad_fn = jax.jit(transform(cube, redo_on_nan=100, **options))
    state = DynamicScalerState(patience=10)
    for count in range(1, 11):
        expect(2**12, count, 3)
    expect(2**13, 0, 3)
    expect(2**12, 1, 4)

    grad_fn = jax.jit(transform(cube, redo_on_nan=0, **options))
    state = DynamicScalerState(scaler=2**15)
    expect(2**14, 0, 1, correct=False)
    expect(2**13, 0, 2, correct=False)
    expect(2**12, 0, 3, correct=False)
    expect(2**12, 1, 3)


@pytest.mark.parametrize(
    "loss, start",
    [
        (lambda x: x * jnp.inf, init_scaler()),  # no scale helps
        (lambda x: jnp.sqrt(x - 2), static_scaler(8.0)),  # and no lower one is left
    ],
)
def test_redo_stops_where_no_lower_scale_helps(loss, start):
    grad_fn = dynamic_scale_grad(loss, redo_on_nan=50)
    state, _ = grad_fn(jnp.float32(2), dynamic_scaler_state=start)
    assert int(state["total_resets"]) == 1
    assert state["scaler"] == start["scaler"]


@pytest.mark.parametrize(
    "loss, finite",
    [(lambda x: x**2, True), (lambda x: x * jnp.inf, False)],
)
def test_a_scale_that_its_limit_lowers_is_no_reason_to_redo(loss, finite):
    """Of a traced scaler, whose values are not checked."""
    grad_fn = jax.jit(
        lambda state: dynamic_scale_grad(loss, redo_on_nan=5)(
            jnp.float32(2), dynamic_scaler_state=state
        )
    )
    state, _ = grad_fn(init_scaler() | {"max_scaler": jnp.float32(4)})
    assert int(state["count"]) == finite and float(state["scaler"]) == 4
    assert int(state["total_resets"]) == (not finite)


@pytest.mark.parametrize("redo, scale, finite", [(0, 14, 0), (2, 12, 0), (3, 12, 1)])
def test_redo_stops_after_so_many_times(redo, scale, finite):
    grad_fn = dynamic_scale_grad(lambda x: x**3, redo_on_nan=redo)
    state, grads = grad_fn(jnp.float16(2), dynamic_scaler_state={})
    assert float(state["scaler"]) == 2**scale
    assert bool(jnp.isfinite(grads)) == bool(finite)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
def test_loss_and_gradients_are_exact_while_the_scale_moves(dtype):
    grad_fn = jax.jit(dynamic_scale_value_and_grad(lambda x: x**3))
    state = init_scaler(scaler=2.0**10, patience=1)
    moves = [jnp.inf, 2, 2, 2, jnp.inf, 2]  # bad, good, grow, good, bad, grow
    scales = []
    for x in moves:
        state, (loss, grad) = grad_fn(dtype(x), dynamic_scaler_state=state)
        scales.append(float(state["scaler"]))
        assert loss.dtype == grad.dtype == dtype
        if x == 2:
            assert (loss, grad) == (8, 12)
    assert scales == [2.0**e for e in (10, 10, 11, 11, 11, 12)]


def test_scaling_saves_what_float16_would_lose():
    def loss(x):
        return (x * jnp.float16(2.0**-13)).astype(jnp.float32) * 2.0**-13

    x = jnp.float32(1)
    assert jax.grad(lambda x: loss(x.astype(jnp.float16)))(x) == 0
    _, grad = dynamic_scale_grad(lambda x: loss(x.astype(jnp.float16)))(
        x, dynamic_scaler_state={}
    )
    assert grad == 2.0**-26


def test_scale_beyond_float16_works_with_a_float16_loss():
    state = static_scaler(2.0**20)
    assert float(scale_loss(jnp.float16(4), state)) == 2.0**22
    assert float(unscale_grads(jnp.float16(4), state)) == 2.0**-18


def test_value_is_the_loss_even_where_the_scaled_loss_overflows():
    grad_fn = dynamic_scale_value_and_grad(lambda x: x * 1e30)
    state, (loss, grad) = grad_fn(
        jnp.float32(1e3), dynamic_scaler_state=static_scaler(2.0**24)
    )
    assert loss == jnp.float32(1e30) * jnp.float32(1e3)
    assert grad == jnp.float32(1e30)
    assert int(state["total_resets"]) == 0


@pytest.mark.parametrize(
    "fun, resets, scale",
    [
        (lambda w: w["a"] + jax.lax.stop_gradient(w["b"] / 0), 1, 15),  # only the loss
        (lambda w: w["a"] + jnp.sqrt(w["b"] * 0), 1, 14),  # only one gradient
        (lambda w: w["a"] + jnp.sqrt(w["b"] * 0) / 0, 1, 15),  # both
        (lambda w: (w["a"] + w["b"], w["a"] * jnp.inf), 0, 15),  # only aux
        (lambda w: w["a"] * 2 + w["b"], 0, 15),
    ],
)
def test_only_gradients_that_are_not_finite_lower_the_scale(fun, resets, scale):
    params = {"a": jnp.float32(1), "b": jnp.float32(2)}
    grad_fn = dynamic_scale_grad(fun, has_aux=isinstance(fun(params), tuple))
    state, _ = grad_fn(params, dynamic_scaler_state={})
    assert int(state["total_resets"]) == resets
    assert float(state["scaler"]) == 2.0**scale


def test_no_parameters_still_tests_the_loss():
    grad_fn = dynamic_scale_grad(lambda w, x: x * 1.0)
    assert int(grad_fn({}, 1.0, dynamic_scaler_state={})[0]["count"]) == 1
    bad, _ = grad_fn({}, jnp.inf, dynamic_scaler_state={})
    assert (int(bad["count"]), int(bad["total_resets"])) == (0, 1)


@pytest.mark.parametrize("redo", [0, 2])
def test_filter_passes_other_leaves_through(redo):
    params = {
        "w": jnp.float32(2),
        "half": np.float16(3),
        "ints": jnp.arange(3),
        "none": None,
        "name": "layer",
        "number": 4.0,
        "fun": jnp.tanh,
        "key": jax.random.key(0),
    }

    def loss(params, offset):
        assert params["name"] == "layer" and params["none"] is None
        assert isinstance(params["number"], float) and params["fun"] is jnp.tanh
        total = params["w"] * params["number"] * params["ints"].sum() + offset
        aux = dict(key=params["key"], total=total, note=None, five=5)
        return total * params["half"], aux

    grad_fn = dynamic_scale_grad(loss, has_aux=True, redo_on_nan=redo)
    _, (grads, aux) = grad_fn(
        params, offset=1.0, dynamic_scaler_state=static_scaler(16)
    )
    assert grads.pop("w") == 4 * 3 * 3
    half = grads.pop("half")
    assert (half, half.dtype) == (2 * 4 * 3 + 1, jnp.float16)
    assert set(grads.values()) == {None}
    assert aux["total"] == 25 and aux["five"] == 5
    assert jnp.issubdtype(aux["key"].dtype, jax.dtypes.prng_key)


@pytest.mark.parametrize("filter", [True, False])
@pytest.mark.parametrize("argnums", [0, 1, -1, (1,), (0, 1), (1, 0)])
def test_argnums_as_in_jax(filter, argnums):
    def loss(x, y):
        return (x * y).sum() ** 2

    args = jnp.arange(1.0, 4), jnp.float32(3)
    _, grads = dynamic_scale_grad(loss, filter=filter, argnums=argnums)(
        *args, dynamic_scaler_state={}
    )
    expected = jax.grad(loss, argnums=argnums)(*args)
    assert jax.tree.structure(grads) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, grads, expected)


def test_integer_parameters_without_filter_are_jax():
    with pytest.raises(TypeError, match="int32"):
        dynamic_scale_grad(lambda x: x * 1.0, filter=False)(1, dynamic_scaler_state={})
    _, grad = dynamic_scale_grad(lambda x: x * 1.0, filter=False, allow_int=True)(
        1, dynamic_scaler_state={}
    )
    assert grad.dtype == jax.dtypes.float0


def test_gradients_agree_with_finite_differences():
    def loss(w):
        return jnp.sum(jnp.sin(w) ** 3)

    @jax.custom_vjp
    def through_scaler(w):
        return loss(w)

    def forward(w):
        out = dynamic_scale_value_and_grad(loss)(w, dynamic_scaler_state={})[1]
        return out

    through_scaler.defvjp(forward, lambda grads, g: (grads * g,))
    check_grads(
        through_scaler, (jnp.linspace(0.1, 1, 5),), 1, ["rev"], atol=1e-2, rtol=1e-2
    )


def test_one_trace_for_every_kind_of_step(count_traces):
    counted, traces = count_traces(lambda x: x**3)
    grad_fn = jax.jit(dynamic_scale_value_and_grad(counted))
    state = init_scaler(patience=1)
    for x in [jnp.inf, 1.0, 1.0, 1.0, jnp.nan, 1.0]:
        state, _ = grad_fn(jnp.float32(x), dynamic_scaler_state=state)
    assert traces() == 1
    assert grad_fn._cache_size() == 1


def test_vmap_over_scalers_of_a_gradient_that_retries():
    states = jax.vmap(lambda scale: init_scaler(scaler=scale))(
        jnp.array([2.0**15, 2.0**10])
    )
    grad_fn = dynamic_scale_grad(lambda x: x**3, redo_on_nan=8)
    states, grads = jax.vmap(lambda s: grad_fn(jnp.float16(2), dynamic_scaler_state=s))(
        states
    )
    np.testing.assert_array_equal(states["scaler"], [2.0**12, 2.0**10])
    np.testing.assert_array_equal(grads, [12, 12])


def test_keeps_the_name_and_docstring():
    def my_loss(x):
        """Mine."""
        return x

    for transform in (dynamic_scale_grad, dynamic_scale_value_and_grad):
        wrapped = transform(my_loss)
        assert (wrapped.__name__, wrapped.__doc__) == ("my_loss", "Mine.")


def vector_loss(x):
    return x


def pair_loss(x):
    return x.sum(), {}


@pytest.mark.parametrize(
    "fun, options, message",
    [
        (vector_loss, {}, r"vector_loss returned float32\[3\] as its loss.*\.mean\(\)"),
        (lambda x: x.sum().astype(int), {}, r"int32\[\].*scalar float"),
        (lambda x: x.sum() + 0j, {}, r"complex64\[\].*scalar float"),
        (lambda x: None, {}, "a NoneType as its loss"),
        (pair_loss, {}, "pair_loss returned a tuple as its loss.*has_aux=True"),
        (vector_loss, dict(has_aux=True), r"expected a \(loss, aux\) pair"),
        (vector_loss, dict(argnums=1), "argnums=1 names an argument"),
        (vector_loss, dict(argnums=None), "argnums=None; expected an integer.* Leave"),
        (vector_loss, dict(argnums=(0, "x")), r"argnums=\(0, 'x'\); expected an int"),
    ],
)
@pytest.mark.parametrize(
    "transform", [dynamic_scale_grad, dynamic_scale_value_and_grad]
)
def test_bad_losses_are_named(transform, fun, options, message):
    with pytest.raises(TypeError, match=message):
        transform(fun, **options)(jnp.ones(3), dynamic_scaler_state={})


def test_missing_state_and_bad_redo_are_named():
    for transform in (dynamic_scale_grad, dynamic_scale_value_and_grad):
        name = transform.__name__
        with pytest.raises(TypeError, match=f"^{name}: .*scaler_state is missing"):
            transform(vector_loss)(jnp.ones(3))
        with pytest.raises(TypeError, match=f"^{name}: argnums=1"):
            transform(vector_loss, argnums=1)(jnp.ones(3), dynamic_scaler_state={})
    for redo in (-1, 1.5, None):
        with pytest.raises(ValueError, match=f"redo_on_nan={redo}"):
            dynamic_scale_grad(vector_loss, redo_on_nan=redo)


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
