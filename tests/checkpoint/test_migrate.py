"""Checkpoints made by other libraries, by other optimizers, and of other models."""

import jax
import jax.numpy as jnp
import jaxamp
import numpy as np
import optax
import pytest
from flax import nnx, serialization
from flax.training.dynamic_scale import DynamicScale
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from _foreign import by_manager, by_standard_checkpointer, image_state, image_step, run
from _models import (
    changed,
    linen_state,
    make_batch,
    nnx_state,
    optimizer,
)
from flax_amp import AmpTrainState, checkpoint, init_scaler, no_scaler
from flax_amp._training.scaler import update_scaler
from helpers import assert_identical


def by_msgpack(directory, tree):
    return serialization.msgpack_restore(serialization.to_bytes(tree))


def by_nobody(directory, tree):
    return tree


LIBRARIES = [
    by_manager,
    by_standard_checkpointer,
    by_msgpack,
    by_nobody,
]


@pytest.mark.filterwarnings("ignore:Sharding info not provided")
@pytest.mark.parametrize("library", LIBRARIES, ids=lambda library: library.__name__)
def test_a_flax_state_goes_on_as_it_was(image, library, tmp_path):
    target = linen_state()
    state = checkpoint.migrate(library(tmp_path, image), target)
    assert isinstance(state, AmpTrainState)
    assert int(state.step) == 3
    assert_identical(state.params, image.params)
    assert_identical(state.opt_state.inner_state, image.opt_state)
    assert_identical(state.variables, {"batch_stats": image.batch_stats})
    assert_identical(state.rngs, target.rngs)
    assert float(state.scaler["scaler"]) == float(image.dynamic_scale.scale) == 2.0**15
    assert int(state.scaler["count"]) == int(image.dynamic_scale.fin_steps) == 1
    assert int(state.scaler["patience"]) == 2000  # Flax does not save its interval


# Scalers


@pytest.mark.once
def test_the_count_of_dynamic_scale_goes_on(image):
    """From any count, the two scalers grow on the same step."""
    theirs = image.dynamic_scale
    target = linen_state(scaler=init_scaler(patience=theirs.growth_interval))
    ours = checkpoint.migrate(image, target).scaler
    for i in range(12):
        w = jnp.float32(jnp.inf if i == 9 else 1.0)
        theirs, finite, _, _ = theirs.value_and_grad(lambda x: x * x)(w)
        ours = update_scaler(ours, finite)
        assert float(ours["scaler"]) == float(theirs.scale)
    assert float(ours["scaler"]) == 2.0**16  # grew twice, fell once


@pytest.mark.once
def test_the_scaler_of_jaxamp(tmp_path):
    saved = jaxamp.DynamicScalerState(patience=jnp.array(2))
    grad = jaxamp.dynamic_scale_value_and_grad(lambda w, x: jnp.sum(w * x))
    for i in range(5):
        x = jnp.full(3, jnp.inf if i == 0 else 1.0)
        saved, _ = grad(jnp.ones(3), x, dynamic_scaler_state=saved)
    params = {"w": jnp.ones(3)}
    tree = {
        "step": jnp.int32(5),
        "params": params,
        "opt_state": optax.sgd(0.1).init(params),
        "my_scaler": saved,
    }
    fp16 = dict(params={"w": jnp.zeros(3)}, tx=optax.sgd(0.1), precision="16-mixed")
    state = checkpoint.migrate(by_manager(tmp_path, tree), AmpTrainState.create(**fp16))
    assert_identical(state.params, params)
    for key in ("scaler", "count", "patience", "adjust_factor"):
        assert float(state.scaler[key]) == float(getattr(saved, key)), key


@pytest.mark.once
@pytest.mark.parametrize(
    "saved, expected",
    [(jnp.inf, 2.0**24), (0.0, 2.0**-24), (jnp.nan, 64.0), (3.0, 3.0)],
)
def test_a_scale_without_limits_is_brought_within_them(image, saved, expected):
    broken = image.replace(dynamic_scale=DynamicScale(scale=saved))
    state = checkpoint.migrate(broken, linen_state(scaler=init_scaler(scaler=64)))
    assert float(state.scaler["scaler"]) == expected


@pytest.mark.once
def test_between_float16_and_bfloat16(tmp_path, image):
    """The scale is what the new run was made with, and all else goes on."""
    half = linen_state(scaler=init_scaler(scaler=8, patience=9))
    for old, new, moves in (
        (half, linen_state(scaler=no_scaler()), "never moves"),
        (linen_state(scaler=no_scaler()), half, "moves, unlike that on"),
    ):
        directory = tmp_path / moves
        with checkpoint.manager(directory) as manager:
            checkpoint.save(manager, old.replace(step=old.step + 3))
        with pytest.warns(checkpoint.CheckpointWarning, match=moves) as told:
            state = checkpoint.restore(directory, new)
        assert told[0].filename == __file__ and len(told) == 1
        assert int(state.step) == 3
        assert_identical(state.scaler, new.scaler)
    state = checkpoint.migrate(image, linen_state(scaler=no_scaler()))
    assert_identical(state.scaler, no_scaler())


# Names

TO_NNX = {
    "variables/batch_stats": "variables",
    "Dense_0": "first",
    "Dense_1": "last/0",
    "BatchNorm_0": "norm",
    "rngs": None,
    "variables/dropout": None,
}


@pytest.mark.once
def test_linen_into_nnx(tmp_path):
    linen = run(linen_state(), 3)
    state = checkpoint.migrate(by_manager(tmp_path, linen), nnx_state(), rename=TO_NNX)
    x = make_batch()["x"]
    model = state.merge_model()
    model.eval()
    variables = {"params": linen.params, **linen.variables}
    np.testing.assert_array_equal(model(x), linen.apply_fn(variables, x, train=False))
    moment = state.opt_state.inner_state[1][0].mu["last"][0]["kernel"]
    assert_identical(moment, linen.opt_state.inner_state[1][0].mu["Dense_1"]["kernel"])


def pair(tx, seed=0):
    model = nnx.Linear(6, 3, rngs=nnx.Rngs(seed))
    return model, nnx.Optimizer(model, tx, wrt=nnx.Param)


@pytest.mark.once
def test_into_and_out_of_nnx_objects(tmp_path):
    """`nnx.state` of a model and its optimizer, with `value` at the end of paths."""
    model, plain = pair(optax.adam(0.1))
    tree = {"net": nnx.state(model), "optimizer": nnx.state(plain)}
    names = {"net": "0", "optimizer": "1"}
    new = pair(optax.adam(0.1), seed=1)
    found = checkpoint.migrate(by_manager(tmp_path, tree), new, rename=names)
    assert found is new
    assert_identical(nnx.to_pure_dict(nnx.state(new[0])), nnx.to_pure_dict(tree["net"]))
    params = nnx.state(pair(optax.adam(0.1), seed=2)[0], nnx.Param)
    params = checkpoint.migrate(tmp_path, {"p": params}, rename={"net": "p"})["p"]
    assert_identical(nnx.to_pure_dict(params), nnx.to_pure_dict(tree["net"]))


@pytest.mark.once
def test_parameters_only_and_a_new_head(image):
    target = linen_state(tx=optax.sgd(0.1))
    found = checkpoint.migrate(image, {"params": target.params})
    assert_identical(found["params"], image.params)
    names = {"Dense_1": None, "dynamic_scale": None}
    state = checkpoint.migrate(image, linen_state(), rename=names)
    assert_identical(state.params["Dense_0"], image.params["Dense_0"])
    assert_identical(state.params["Dense_1"], linen_state().params["Dense_1"])


@pytest.mark.once
def test_back_to_a_plain_state():
    saved = run(linen_state(), 3)
    target = image_state(dynamic_scale=DynamicScale())
    counters = ("notfinite_count", "last_finite", "total_notfinite")
    left_out = dict.fromkeys(("scaler", "dynamic_scale", "rngs", *counters))
    names = {"variables/batch_stats": "batch_stats", "inner_state/1": "1"}
    state = checkpoint.migrate(saved, target, rename={**names, **left_out})
    assert_identical(state.params, saved.params)
    assert_identical(state.opt_state, saved.opt_state.inner_state)
    assert_identical(state.batch_stats, saved.variables["batch_stats"])
    assert int(image_step(state, make_batch()).step) == 4


@pytest.mark.once
def test_optimizers_with_other_wrappers():
    saved = run(linen_state(), 4)
    every_second = optax.MultiSteps(optimizer(), 2)
    counts = ("mini_step", "gradient_step", "acc_grads", "skip_state")
    names = {"inner_state": "inner_state/inner_opt_state"} | dict.fromkeys(counts[:3])
    state = checkpoint.migrate(saved, linen_state(tx=every_second), rename=names)
    inner = state.opt_state.inner_state.inner_opt_state
    assert_identical(inner, saved.opt_state.inner_state)
    before = jax.tree.map(jnp.copy, state.params)
    state = run(state, 1)
    assert not changed(before, state.params)
    assert changed(before, run(state, 1).params)


@pytest.mark.once
def test_names_that_fall_together_or_are_none(image):
    tree = {"params": {"0_": np.float32(0), "1_": np.float32(1)}}
    target = {"params": {"w": np.float32(0)}}
    for names in ({"0_": "w", "1_": "w"}, {"0_": "w", "1_": "w/value"}):
        both = {"params": {"w": np.float32(0), "w/value": np.float32(1)}}
        with pytest.raises(
            ValueError, match="two arrays have the name params/w|not in"
        ):
            checkpoint.migrate(tree, target, rename=names)
        with pytest.raises(ValueError, match="two arrays have the name|not in the"):
            checkpoint.migrate(both, target)
    for name in ("Dense", "params/Dense_7", "head"):
        with pytest.raises(ValueError, match=f"{name}', which is in no path on disk"):
            checkpoint.migrate(image, linen_state(), rename={name: "x"})
    haiku = {"params": {"linear/~/w": jnp.ones(2)}}
    found = checkpoint.migrate(haiku, {"params": {"linear/~/w": jnp.zeros(2)}})
    assert_identical(found, haiku)


# Where arrays lie, and as what


@pytest.mark.once
def test_a_sharded_target(image, mesh):
    rows, whole = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())
    target = linen_state()
    shardings = jax.tree.map(
        lambda x: rows if x.shape and x.shape[0] % 8 == 0 else whole, target
    )
    target = jax.device_put(target, shardings)
    state = checkpoint.migrate(image, target)
    assert_identical(state.params, image.params)
    for leaf, like in zip(jax.tree.leaves(state), jax.tree.leaves(target), strict=True):
        assert leaf.sharding == like.sharding and leaf.committed


@pytest.mark.once
def test_an_abstract_target(image):
    target = jax.eval_shape(linen_state)
    with pytest.raises(ValueError, match="rngs/dropout: to stay as in the target"):
        checkpoint.migrate(image, target)
    state = linen_state(scaler=init_scaler(scaler=64))
    assert not changed(checkpoint.migrate(state, target), state)


@pytest.mark.once
@pytest.mark.parametrize(
    "value, dtype",
    [
        (np.int32(-1), jnp.uint32),
        (np.uint32(4_000_000_000), jnp.int32),
        (np.float32(0.5), jnp.int32),
        (np.float32(1e30), jnp.float16),
        (np.arange(3) / 7, jnp.float32),  # of float64
    ],
)
def test_no_value_is_changed(value, dtype):
    target = {"x": jnp.zeros(np.shape(value), dtype)}
    with pytest.raises(ValueError, match=r"x: \w+\[3?\] on disk, \w+\[3?\] in the"):
        checkpoint.migrate({"x": value}, target)


@pytest.mark.once
@pytest.mark.parametrize(
    "value, dtype",
    [
        (np.int64(3), jnp.int32),
        (np.float32([1, np.nan, -0.0]), jnp.bfloat16),
        (np.array([0.1, np.inf], jnp.bfloat16), jnp.float32),
        (0.1, jnp.float32),  # a Python number
    ],
)
def test_values_that_stay_the_same_are_cast(value, dtype):
    target = {"x": jnp.zeros(np.shape(value), dtype)}
    found = checkpoint.migrate({"x": value}, target)["x"]
    assert found.dtype == dtype
    np.testing.assert_array_equal(
        np.asarray(found, np.float32), np.asarray(value, np.float32)
    )


# What must not happen in silence


@pytest.mark.once
def test_all_that_does_not_fit_is_one_error(image):
    broken = image.replace(
        params={
            "Dense_0": image.params["Dense_0"] | {"kernel": jnp.ones((2, 2))},
            "Dense_2": image.params["Dense_1"],
        }
    )
    target = linen_state()
    copy = jax.tree.map(jnp.copy, target)
    with pytest.raises(ValueError, match="checkpoint.migrate: the tree does not") as e:
        checkpoint.migrate(broken, target)
    for line in [
        "params/Dense_0/kernel: float32[2, 2] on disk, float32[6, 8] in the target",
        "params/Dense_1/bias: not on disk, float32[3] in the target",
        "params/Dense_2/kernel: float32[8, 3] on disk, not in the target",
        "Map names on disk to those of the target with rename=",
    ]:
        assert line in str(e.value)
    assert "opt_state" not in str(e.value)
    assert not changed(copy, target)


@pytest.mark.once
@pytest.mark.parametrize(
    "field, told",
    [
        # Statistics are no scaler.
        ({"seen": dict.fromkeys(("scaler", "count", "mean"), 1.0)}, "seen/scaler"),
        ({"rngs": {"a": jax.random.key(0)}}, "rngs/a"),
        ({"config": {"name": "dense"}}, "config/name"),
    ],
)
def test_what_has_no_place_is_named_and_can_be_left_out(field, told):
    tree = {"step": 1, "params": {"w": jnp.ones(2)}, **field}
    target = AmpTrainState.create(params={"w": jnp.zeros(2)}, tx=optax.sgd(1))
    with pytest.raises(ValueError, match=f"{told}: .* on disk, not in the target"):
        checkpoint.migrate(tree, target)
    state = checkpoint.migrate(tree, target, rename=dict.fromkeys(field))
    assert int(state.step) == 1


@pytest.mark.once
def test_sources_that_are_none_are_named(tmp_path):
    target = linen_state()
    with pytest.raises(FileNotFoundError, match="nowhere is not a directory"):
        checkpoint.migrate(tmp_path / "nowhere", target)
    with pytest.raises(FileNotFoundError, match=r"holds the steps \[\]"):
        checkpoint.migrate(tmp_path, target)
    for source in (3, None, object(), {}, b"msgpack"):
        with pytest.raises(TypeError, match="cannot read a .*; expected a path, a man"):
            checkpoint.migrate(source, target)
    with pytest.raises(TypeError, match="the whole of the target is a"):
        checkpoint.migrate({"step": 1}, "target")
