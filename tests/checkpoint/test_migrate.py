"""Checkpoints made by other libraries, and by other optimizers and models."""

import warnings

import flax
import jax
import jax.numpy as jnp
import jaxamp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx, serialization
from flax.training import checkpoints as legacy
from flax.training.dynamic_scale import DynamicScale
from flax.training.train_state import TrainState
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from _models import (
    FEATURES,
    LinenNet,
    NnxNet,
    changed,
    cross_entropy,
    linen_loss,
    linen_state,
    make_batch,
    nnx_loss,
    nnx_state,
    optimizer,
)
from flax_amp import AmpTrainState, checkpoint, init_scaler, make_train_step, no_scaler
from flax_amp._training.scaler import update_scaler
from helpers import assert_identical


class ImageState(TrainState):
    """The train state of Flax's ImageNet example."""

    batch_stats: dict
    dynamic_scale: DynamicScale


def image_state(tx=None, cls=ImageState, **fields):
    model = LinenNet()
    variables = model.init(jax.random.key(0), jnp.ones((2, FEATURES)), train=False)
    return cls.create(apply_fn=model.apply, **variables, tx=tx or optimizer(), **fields)


@jax.jit
def image_step(state, batch):
    """A step of that example, without its pmap."""

    def loss_fn(params):
        logits, updates = state.apply_fn(
            {"params": params, "batch_stats": state.batch_stats},
            batch["x"],
            mutable=["batch_stats"],
            rngs={"dropout": jax.random.key(2)},
        )
        return cross_entropy(logits, batch["y"]), updates["batch_stats"]

    grad_fn = state.dynamic_scale.value_and_grad(loss_fn, has_aux=True)
    dynamic_scale, finite, (_, batch_stats), grads = grad_fn(state.params)
    new = state.apply_gradients(grads=grads, batch_stats=batch_stats)
    kept = jax.tree.map(
        lambda new, old: jnp.where(finite, new, old),
        (new.params, new.opt_state, new.batch_stats),
        (state.params, state.opt_state, state.batch_stats),
    )
    params, opt_state, batch_stats = kept
    return new.replace(
        params=params,
        opt_state=opt_state,
        batch_stats=batch_stats,
        dynamic_scale=dynamic_scale,
    )


def trained(steps=3, poisoned=1, **fields):
    fields.setdefault("dynamic_scale", DynamicScale(growth_interval=4))
    state = image_state(**fields)
    for i in range(steps):
        state = image_step(state, make_batch(i, poisoned=i == poisoned))
    return state


@pytest.fixture(scope="module")
def image():
    return trained()


# Every library that saves


def by_manager(directory, tree):
    with ocp.CheckpointManager(directory) as manager:
        manager.save(3, args=ocp.args.StandardSave(tree))
    return directory


def by_standard_checkpointer(directory, tree):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(directory / "model", tree)
    return directory / "model"


def by_named_item(directory, tree):
    with ocp.CheckpointManager(directory) as manager:
        manager.save(
            3,
            args=ocp.args.Composite(
                state=ocp.args.StandardSave(tree), config=ocp.args.JsonSave({"a": 1})
            ),
        )
    return directory


def by_legacy_flax(directory, tree, orbax=False):
    before = flax.config.flax_use_orbax_checkpointing
    flax.config.update("flax_use_orbax_checkpointing", orbax)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Flax Checkpointing will soon be depr")
            legacy.save_checkpoint(directory, tree, 3)
    finally:
        flax.config.update("flax_use_orbax_checkpointing", before)
    return directory


def by_legacy_flax_with_orbax(directory, tree):
    return by_legacy_flax(directory, tree, orbax=True)


def by_to_bytes(directory, tree):
    (directory / "state.msgpack").write_bytes(serialization.to_bytes(tree))
    return directory / "state.msgpack"


def by_nobody(directory, tree):
    return tree


LIBRARIES = [
    by_manager,
    by_standard_checkpointer,
    by_named_item,
    by_legacy_flax,
    by_legacy_flax_with_orbax,
    by_to_bytes,
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


def test_the_migrated_state_trains_like_a_new_one(image):
    traces = []

    def counted(*args, **kwargs):
        traces.append(None)
        return linen_loss(*args, **kwargs)

    counted.__wrapped__ = linen_loss
    step = make_train_step(counted, has_aux=True, donate=False)
    target = linen_state()
    step(target, make_batch())
    state, metrics = step(checkpoint.migrate(image, target), make_batch())
    assert bool(metrics["grads_finite"]) and int(state.step) == 4
    assert len(traces) == 1
    schedule_count = state.opt_state.inner_state[1][0].count
    assert int(schedule_count) == int(image.opt_state[1][0].count) + 1 == 3


# Scalers


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


def jaxamp_state(steps=5):
    scaler = jaxamp.DynamicScalerState(patience=jnp.array(2))
    grad = jaxamp.dynamic_scale_value_and_grad(lambda w, x: jnp.sum(w * x))
    w = jnp.ones(3)
    for i in range(steps):
        x = jnp.full(3, jnp.inf if i == 0 else 1.0)
        scaler, _ = grad(w, x, dynamic_scaler_state=scaler)
    return scaler


@pytest.mark.parametrize("library", [by_manager, by_to_bytes])
def test_the_scaler_of_jaxamp(library, tmp_path):
    saved = jaxamp_state()
    tx = optax.sgd(0.1)
    tree = {
        "step": jnp.int32(5),
        "params": {"w": jnp.ones(3)},
        "opt_state": tx.init({"w": jnp.ones(3)}),
        "dynamic_scaler_state": saved,
    }
    target = AmpTrainState.create(params={"w": jnp.zeros(3)}, tx=tx)
    state = checkpoint.migrate(library(tmp_path, tree), target)
    assert_identical(state.params, tree["params"])
    for key, value in saved._asdict().items():
        assert float(state.scaler[key]) == float(value), key
    assert float(state.scaler["max_scaler"]) == 2.0**24
    assert int(state.scaler["total_resets"]) > 0  # it tried until it was finite


@pytest.mark.parametrize(
    "saved, expected",
    [(jnp.inf, 2.0**24), (0.0, 2.0**-14), (jnp.nan, 64.0), (3.0, 3.0)],
)
def test_a_scale_without_limits_is_brought_within_them(image, saved, expected):
    broken = image.replace(dynamic_scale=DynamicScale(scale=saved))
    state = checkpoint.migrate(broken, linen_state(scaler=init_scaler(scaler=64)))
    assert float(state.scaler["scaler"]) == expected


def resumed(state, target, how, directory):
    if how == "migrate":
        return checkpoint.migrate(state, target)
    with checkpoint.manager(directory) as manager:
        checkpoint.save(manager, state)
    with pytest.warns(checkpoint.CheckpointWarning, match="the target's is used") as w:
        restored = checkpoint.restore(directory, target)
    assert w[0].filename == __file__
    return restored


@pytest.mark.parametrize("how", ["restore", "migrate"])
def test_between_float16_and_bfloat16(how, tmp_path):
    """The number of resets goes on, the scale is what the new run was made with."""
    used = init_scaler(scaler=8, patience=9) | {"total_resets": jnp.int32(4)}
    half = linen_state(scaler=used)
    bfloat16 = resumed(half, linen_state(scaler=no_scaler()), how, tmp_path / "a")
    assert float(bfloat16.scaler["scaler"]) == 1
    assert int(bfloat16.scaler["total_resets"]) == 4
    assert not changed(half.replace(scaler={}), bfloat16.replace(scaler={}))

    again = linen_state(scaler=init_scaler(scaler=256, patience=5))
    half = resumed(bfloat16, again, how, tmp_path / "b")
    assert float(half.scaler["scaler"]) == 256
    assert int(half.scaler["patience"]) == 5
    assert int(half.scaler["total_resets"]) == 4


@pytest.mark.parametrize("dtypes", [("float16", "bfloat16"), ("bfloat16", "float32")])
def test_a_run_changes_its_compute_dtype(dtypes, tmp_path):
    state = linen_state()
    for dtype in dtypes:
        step = make_train_step(linen_loss, has_aux=True, compute_dtype=jnp.dtype(dtype))
        with checkpoint.manager(tmp_path / dtype) as manager:
            state, metrics = step(state, make_batch())
            checkpoint.save(manager, state)
        state = checkpoint.restore(tmp_path / dtype, linen_state())
    assert int(state.step) == 2 and bool(metrics["grads_finite"])


# Optimizers


def every_second(inner):
    return optax.MultiSteps(inner, 2)


def run(state, steps):
    step = make_train_step(linen_loss, has_aux=True, compute_dtype=jnp.float32)
    for i in range(steps):
        state, _ = step(state, make_batch(i))
    return state


def test_a_wrapped_plain_optimizer(tmp_path):
    saved = image_state(
        tx=optax.apply_if_finite(optimizer(), 5), dynamic_scale=DynamicScale()
    )
    saved = image_step(image_step(saved, make_batch(0)), make_batch(1))
    state = checkpoint.migrate(by_manager(tmp_path, saved), linen_state())
    assert_identical(tuple(state.opt_state), tuple(saved.opt_state))


def test_multi_steps_added_later():
    saved = run(linen_state(), 4)
    saved = saved.replace(
        opt_state=saved.opt_state._replace(total_notfinite=jnp.int32(1))
    )
    target = linen_state(tx=every_second(optimizer()))
    with pytest.raises(ValueError, match="does not fit"):
        checkpoint.migrate({"opt_state": saved.opt_state}, target, include="params")
    state = checkpoint.migrate(saved, target)
    inner = state.opt_state.inner_state
    assert_identical(inner.inner_opt_state, saved.opt_state.inner_state)
    assert int(inner.gradient_step) == 3 and int(inner.mini_step) == 0
    assert int(state.opt_state.total_notfinite) == 1
    before = jax.tree.map(jnp.copy, state.params)
    state = run(state, 1)
    assert not changed(before, state.params)
    assert changed(before, run(state, 1).params)


def test_multi_steps_taken_away():
    saved = run(linen_state(tx=every_second(optimizer())), 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        state = checkpoint.migrate(saved, linen_state())
    assert_identical(
        state.opt_state.inner_state, saved.opt_state.inner_state.inner_opt_state
    )
    with pytest.warns(checkpoint.CheckpointWarning, match="gradients of 1 steps") as w:
        checkpoint.migrate(run(saved, 1), linen_state())
    assert w[0].filename == __file__


def test_accumulation_in_the_step_needs_no_migration(tmp_path):
    whole = make_train_step(linen_loss, has_aux=True)
    state, _ = whole(linen_state(), make_batch())
    with checkpoint.manager(tmp_path) as manager:
        checkpoint.save(manager, state)
    state = checkpoint.restore(tmp_path, linen_state())
    parts = make_train_step(linen_loss, has_aux=True, accum_steps=2)
    state, metrics = parts(state, make_batch(1))
    assert int(state.step) == 2 and bool(metrics["grads_finite"])


def test_masked_optimizers_and_those_without_state():
    params = {"w": jnp.ones(3), "n": jnp.int32(1)}
    plain = TrainState.create(apply_fn=None, params={"w": jnp.ones(3)}, tx=optax.sgd(1))
    target = AmpTrainState.create(params=params, tx=optax.adam(1e-3))
    tree = {
        "step": 7,
        "params": params,
        "opt_state": optax.adam(1e-3).init({"w": params["w"]}),
    }
    state = checkpoint.migrate(tree, target)
    assert int(state.step) == 7
    target = AmpTrainState.create(params={"w": jnp.zeros(3)}, tx=optax.sgd(1))
    assert_identical(checkpoint.migrate(plain, target).params, plain.params)


# Other models


def test_parameters_only(image):
    target = linen_state(tx=optax.sgd(0.1))
    state = checkpoint.migrate(image, target, include="params")
    assert_identical(state.params, image.params)
    assert not changed(target.replace(params={}), state.replace(params={}))


def test_names_on_disk_may_be_left_out_as_well(image):
    """They need not be those of the target."""
    target = linen_state(scaler=init_scaler(scaler=64))
    state = checkpoint.migrate(
        image, target, exclude=["dynamic_scale", "batch_stats", "opt_state/1/0/mu"]
    )
    assert float(state.scaler["scaler"]) == 64
    assert not changed(target.variables, state.variables)
    inner = state.opt_state.inner_state[1][0]
    assert not changed(target.opt_state.inner_state[1][0].mu, inner.mu)
    assert_identical(inner.nu, image.opt_state[1][0].nu)
    state = checkpoint.migrate(image, target, include="batch_stats")
    assert_identical(state.variables["batch_stats"], image.batch_stats)
    assert not changed(target.params, state.params)


def test_a_new_head(image):
    """Some parameters stay; a whole subtree is named by its root."""
    target = linen_state(tx=optax.sgd(0.1))
    state = checkpoint.migrate(
        image, target, include=["params", "variables/*"], exclude=["params/Dense_1"]
    )
    assert_identical(state.params["Dense_0"], image.params["Dense_0"])
    assert_identical(state.params["Dense_1"], target.params["Dense_1"])
    assert_identical(state.variables["batch_stats"], image.batch_stats)
    assert int(state.step) == 0


TO_NNX = {
    "variables/batch_stats": "variables",
    "Dense_0": "first",
    r"Dense_(\d+)": "last/0",
    "BatchNorm_0": "norm",
}
TO_LINEN = {
    "variables": "variables/batch_stats",
    "first": "Dense_0",
    r"last/\d": "Dense_1",
    "norm": "BatchNorm_0",
}


def test_linen_and_nnx(tmp_path):
    linen = run(linen_state(), 3)
    by_manager(tmp_path, linen)
    state = checkpoint.migrate(
        tmp_path,
        nnx_state(),
        rename=TO_NNX,
        exclude=["rngs", "variables/dropout"],
    )
    x = make_batch()["x"]
    model = state.merge_model()
    model.eval()
    expected = linen.apply_fn(
        {"params": linen.params, **linen.variables}, x, train=False
    )
    np.testing.assert_array_equal(model(x), expected)
    moment = state.opt_state.inner_state[1][0].mu["last"][0]["kernel"]
    assert_identical(moment, linen.opt_state.inner_state[1][0].mu["Dense_1"]["kernel"])
    back = checkpoint.migrate(
        state,
        linen_state(),
        rename=TO_LINEN,
        exclude=["rngs", "variables/batch_stats/dropout"],
    )
    assert not changed(linen.replace(rngs={}), back.replace(rngs={}))


def test_what_nnx_programs_save(tmp_path):
    """`nnx.state` of a model and its optimizer, with `value` at the end of paths."""
    model = NnxNet(nnx.Rngs(1))
    plain = nnx.Optimizer(model, optimizer(), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, batch):
        grads = nnx.grad(lambda m: nnx_loss(m, batch)[0])(model)
        optimizer.update(model, grads)

    step(model, plain, make_batch())
    params, rest = nnx.state(model, nnx.Param, ...)
    tree = {"params": params, "variables": rest, "optimizer": nnx.state(plain)}
    state = checkpoint.migrate(
        by_manager(tmp_path, tree),
        nnx_state(),
        rename={"optimizer/opt_state": "opt_state", "optimizer/step": "step"},
    )
    assert int(state.step) == 1
    batch = make_batch(2)
    model.eval()
    trained = state.merge_model()
    trained.eval()
    np.testing.assert_array_equal(model(batch["x"]), trained(batch["x"]))
    assert int(state.opt_state.inner_state[1][0].count) == 1


def test_half_precision_parameters_are_widened(image):
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), image.params)
    state = checkpoint.migrate({"params": half}, linen_state(), include="params")
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), half)
    assert_identical(state.params, wide)


# Out again


def test_a_plain_state_reads_an_amp_checkpoint(tmp_path):
    """With the optimizer unwrapped; `scaler` and `rngs` have no place in it."""
    saved = run(linen_state(), 3)
    with checkpoint.manager(tmp_path) as manager:
        checkpoint.save(manager, saved)
    target = image_state(dynamic_scale=DynamicScale())
    state = checkpoint.migrate(tmp_path, target)
    assert isinstance(state, ImageState) and state.step == 3
    assert_identical(state.params, saved.params)
    assert_identical(state.opt_state, saved.opt_state.inner_state)
    assert_identical(state.batch_stats, saved.variables["batch_stats"])
    assert state.dynamic_scale.scale == float(saved.scaler["scaler"])
    assert state.dynamic_scale.fin_steps == 3
    assert int(image_step(state, make_batch()).step) == 4

    params = saved.params
    bare = TrainState.create(apply_fn=None, params=params, tx=optimizer())
    with pytest.raises(ValueError, match="variables/batch_stats/.* not in the target"):
        checkpoint.migrate(tmp_path, bare)
    bare = checkpoint.migrate(tmp_path, bare, exclude="variables")
    assert_identical(bare.params, params)


def test_a_plain_state_reads_an_amp_checkpoint_with_orbax_alone(tmp_path):
    """If its optimizer is wrapped as `create` does it, Orbax's partial restore does."""
    saved = run(linen_state(), 2)
    with checkpoint.manager(tmp_path) as manager:
        checkpoint.save(manager, saved)
    target = TrainState.create(
        apply_fn=None,
        params=jax.tree.map(jnp.zeros_like, saved.params),
        tx=optax.apply_if_finite(optimizer(), 5),
    )
    with ocp.CheckpointManager(tmp_path) as manager:
        arguments = ocp.checkpoint_utils.construct_restore_args(target)
        state = manager.restore(
            2,
            args=ocp.args.PyTreeRestore(
                target, restore_args=arguments, partial_restore=True
            ),
        )
    assert_identical(state.params, saved.params)
    assert_identical(tuple(state.opt_state), tuple(saved.opt_state))


# Out into NNX


def test_into_the_state_of_a_module():
    """`nnx.state`, whose paths end with `value`."""
    state = run_nnx(2)
    params = nnx.state(NnxNet(nnx.Rngs(5)), nnx.Param)
    params = checkpoint.migrate(state, {"params": params}, include="params")["params"]
    assert_identical(nnx.to_pure_dict(params), state.params)


def run_nnx(steps):
    step, state = make_train_step(nnx_loss, has_aux=True), nnx_state()
    for i in range(steps):
        state, _ = step(state, make_batch(i))
    return state


# Where arrays lie


def test_a_sharded_target(image, mesh):
    rows = NamedSharding(mesh, P("data"))
    whole = NamedSharding(mesh, P())
    target = linen_state()
    shardings = jax.tree.map(
        lambda x: rows if x.shape and x.shape[0] % 8 == 0 else whole, target
    )
    target = jax.device_put(target, shardings)
    state = checkpoint.migrate(image, target)
    assert_identical(state.params, image.params)
    for leaf, like in zip(jax.tree.leaves(state), jax.tree.leaves(target), strict=True):
        assert leaf.sharding == like.sharding and leaf.committed


def test_an_abstract_target(image):
    target = jax.eval_shape(linen_state)
    with pytest.raises(ValueError, match="rngs/dropout: to stay as in the target"):
        checkpoint.migrate(image, target)
    key = jax.random.key(1)
    fields = ("step", "params", "opt_state", "batch_stats", "dynamic_scale")
    tree = {name: getattr(image, name) for name in fields} | {"rngs": {"dropout": key}}
    state = checkpoint.migrate(tree, target)
    assert_identical(state.params, image.params)
    assert_identical(state.rngs, {"dropout": key})
    assert float(state.scaler["scaler"]) == 2.0**15
    counters = state.opt_state._replace(inner_state=None)
    assert tuple(counters) == (0, True, 0, None)


def test_numbers_and_numpy_arrays_stay_such(tmp_path):
    target = {"a": 0, "b": 0.0, "c": np.zeros(2), "d": True}
    tree = {"a": 3, "b": 2.5, "c": np.arange(2.0), "d": False}
    state = checkpoint.migrate(by_manager(tmp_path, tree), target)
    assert {k: type(v) for k, v in state.items()} == {
        k: type(v) for k, v in target.items()
    }
    assert_identical(state, tree)


# What must not happen in silence


@pytest.mark.parametrize(
    "value, dtype",
    [
        (np.int32(-1), jnp.uint32),
        (np.int8(-1), jnp.uint8),
        (np.uint32(4_000_000_000), jnp.int32),
        (np.float32(0.5), jnp.int32),
        (np.float32(1e30), jnp.float16),
        (np.arange(3) / 7, jnp.float32),
    ],
)
def test_no_value_is_changed(value, dtype):
    target = {"x": jnp.zeros(np.shape(value), dtype)}
    with pytest.raises(ValueError, match=r"x: \w+\[3?\] on disk, \w+\[3?\] in the"):
        checkpoint.migrate({"x": value}, target)


@pytest.mark.parametrize(
    "value, dtype",
    [
        (np.int64(3), jnp.int32),
        (np.float32([1, np.nan, -0.0]), jnp.bfloat16),
        (0.1, jnp.float32),  # a Python number
        (3, jnp.float32),
    ],
)
def test_values_that_stay_the_same_are_cast(value, dtype):
    target = {"x": jnp.zeros(np.shape(value), dtype)}
    found = checkpoint.migrate({"x": value}, target)["x"]
    assert found.dtype == dtype
    np.testing.assert_array_equal(
        np.asarray(found, np.float32), np.asarray(value, np.float32)
    )


def test_a_static_scale_does_not_go_out():
    """A float16 run elsewhere would begin unscaled."""
    state = linen_state(scaler=no_scaler())
    target = image_state(dynamic_scale=DynamicScale())
    out = checkpoint.migrate(state, target)
    assert out.dynamic_scale == target.dynamic_scale


def test_two_things_in_one_place_are_an_error(image):
    tree = {"batch_stats": image.batch_stats, "variables": {"batch_stats": {}}}
    tree["variables"]["batch_stats"] = image.batch_stats
    with pytest.raises(ValueError, match="would both be variables/batch_stats/.*mean"):
        checkpoint.migrate(tree, linen_state(), include="variables")


def test_statistics_are_no_scaler():
    observed = {"scaler": jnp.ones(()), "count": jnp.ones(()), "mean": jnp.ones(())}
    tree = {"params": {"w": jnp.ones(2)}, "observed": observed}
    target = AmpTrainState.create(params={"w": jnp.zeros(2)}, tx=optax.sgd(1))
    with pytest.raises(
        ValueError, match="observed/mean: .* on disk, not in the target"
    ):
        checkpoint.migrate(tree, target)


def test_random_keys_have_a_place_or_are_named():
    tree = {"step": 1, "params": {"w": jnp.ones(2)}, "rngs": {"a": jax.random.key(0)}}
    target = AmpTrainState.create(params={"w": jnp.zeros(2)}, tx=optax.sgd(1))
    with pytest.raises(ValueError, match="rngs/a: .* on disk, not in the target"):
        checkpoint.migrate(tree, target)
    assert int(checkpoint.migrate(tree, target, exclude="rngs").step) == 1


def test_errors_tell_the_names_on_disk(image):
    target = linen_state(tx=optax.chain(optax.sgd(0.1), optimizer()))
    message = "opt_state/inner_state/1/0/count: .* on disk as opt_state/1/0/count, not"
    with pytest.raises(ValueError, match=message):
        checkpoint.migrate(image, target)
    state = checkpoint.migrate(
        image,
        target,
        rename={"opt_state/1/0": "opt_state/1/1/0", "opt_state/1/2": "opt_state/1/1/2"},
    )
    assert_identical(state.opt_state.inner_state[1], image.opt_state)


def test_names_with_slashes():
    """As Haiku has them."""
    tree = {"params": {"linear/~/w": jnp.ones(2)}}
    target = {"params": {"linear/~/w": jnp.zeros(2)}}
    assert_identical(checkpoint.migrate(tree, target), tree)


def test_strings_are_named_and_can_be_left_out(tmp_path):
    tree = {"model": {"w": jnp.ones(2)}, "config": {"name": "dense"}}
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "x", tree)
    target = {"model": {"w": jnp.zeros(2)}}
    for source in (tmp_path / "x", tree):
        with pytest.raises(
            ValueError, match="config/name: .* on disk, not in the targ"
        ):
            checkpoint.migrate(source, target)
        found = checkpoint.migrate(source, target, exclude="config")
        assert_identical(found["model"], tree["model"])


def test_replicated_states_are_told(image):
    twice = jax.tree.map(lambda x: jnp.stack([x, x]), image)
    with pytest.raises(ValueError, match=r"flax.jax_utils.unreplicate"):
        checkpoint.migrate(twice, linen_state())


@pytest.mark.parametrize(
    "options", [{"step_prefix": "ckpt"}, {"step_format_fixed_length": 8}]
)
def test_steps_of_other_names(image, tmp_path, options):
    with ocp.CheckpointManager(
        tmp_path, options=ocp.CheckpointManagerOptions(**options)
    ) as manager:
        manager.save(7, args=ocp.args.StandardSave(image))
    state = checkpoint.migrate(tmp_path, linen_state(), step=7)
    assert_identical(state.params, image.params)


# Errors


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
        "params/BatchNorm_0/scale: not on disk",
        "Map names on disk to those of the target with rename=",
    ]:
        assert line in str(e.value)
    assert "opt_state" not in str(e.value)
    assert not changed(copy, target)


def test_values_that_a_dtype_cannot_hold_are_named(image):
    wide = jax.tree.map(lambda x: np.asarray(x, np.float64) / 3, image.params)
    with pytest.raises(ValueError, match=r"kernel: float64\[6, 8\] on disk, float32"):
        checkpoint.migrate({"params": wide}, linen_state(), include="params")


@pytest.mark.parametrize(
    "options, message",
    [
        (
            {"include": "parms"},
            r"pattern 'parms' matches no path.*'opt_state', 'params'",
        ),
        ({"exclude": ["step", "head/*"]}, r"pattern 'head/\*' matches no path"),
        ({"rename": {"Dense": "x"}}, r"'Dense', which matches no path on disk"),
        ({"rename": {"Dense_(": "x"}}, r"'Dense_\(': 'x', which does not compile"),
        ({"rename": {"Dense_0": r"\1"}}, r"does not compile: invalid group"),
        ({"rename": {r"Dense_\d": "x"}}, r"gives two arrays the path .*x/bias"),
    ],
)
def test_options_that_are_wrong_are_named(image, options, message):
    with pytest.raises(ValueError, match=message):
        checkpoint.migrate(image, linen_state(), **options)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"include": 3}, r"include=3; expected glob patterns"),
        ({"exclude": [("params",)]}, r"exclude=.*; expected glob patterns"),
        ({"rename": ["a"]}, "rename is a list; expected a dict"),
    ],
)
def test_options_of_a_wrong_type_are_named(image, options, message):
    with pytest.raises(TypeError, match=message):
        checkpoint.migrate(image, linen_state(), **options)


def test_targets_that_are_no_arrays_are_named(image):
    with pytest.raises(TypeError, match="a/0 of the target is a str; expected arrays"):
        checkpoint.migrate(image, {"a": ["x"]})


def test_sources_that_are_none_are_named(tmp_path):
    target = linen_state()
    with pytest.raises(FileNotFoundError, match="nowhere does not exist"):
        checkpoint.migrate(tmp_path / "nowhere", target)
    (tmp_path / "notes").mkdir()
    with pytest.raises(
        ValueError, match=r"holds \['notes'\], but no tree; expected steps"
    ):
        checkpoint.migrate(tmp_path, target)
    by_manager(tmp_path / "run", target)
    assert not changed(target, checkpoint.migrate(tmp_path / "run/3", target))
    with pytest.raises(FileNotFoundError, match=r"holds the steps \[3\]"):
        checkpoint.migrate(tmp_path / "run", target, step=4)
    (tmp_path / "bytes").write_bytes(serialization.to_bytes({"a": np.ones(9)})[:20])
    with pytest.raises(checkpoint.CorruptCheckpointError, match="Unpack failed"):
        checkpoint.migrate(tmp_path / "bytes", target)


def test_sources_of_a_wrong_kind_are_named(tmp_path):
    for source in (3, None, object(), {}):
        with pytest.raises(
            TypeError, match="cannot read a .*; expected a path, a manager"
        ):
            checkpoint.migrate(source, linen_state())
    for source in ({"step": 1}, by_standard_checkpointer(tmp_path, {"step": 1})):
        with pytest.raises(ValueError, match="step=2 of .*; expected a directory with"):
            checkpoint.migrate(source, linen_state(), step=2)
    with pytest.raises(TypeError, match="the whole of the target is a"):
        checkpoint.migrate({"step": 1}, "target")
    with pytest.raises(ValueError, match="rename leaves nothing of step"):
        checkpoint.migrate({"step": 1}, linen_state(), rename={"step": ""})


def test_several_items_are_named(tmp_path):
    with ocp.CheckpointManager(tmp_path) as manager:
        tree = ocp.args.StandardSave({"w": jnp.ones(2)})
        manager.save(1, args=ocp.args.Composite(model=tree, ema=tree))
    with pytest.raises(ValueError, match=r"holds the trees \['ema', 'model'\]") as e:
        checkpoint.migrate(tmp_path, linen_state())
    assert "or that of the tree to take" in str(e.value)
    target = {"w": jnp.zeros(2)}
    state = checkpoint.migrate(tmp_path / "1" / "ema", target)
    assert_identical(state, {"w": jnp.ones(2)})


def test_a_damaged_step_is_passed_over(tmp_path, image):
    directory = by_legacy_flax(tmp_path, image)
    good = (directory / "checkpoint_3").read_bytes()
    (directory / "checkpoint_20").write_bytes(good[: len(good) // 2])
    with pytest.warns(checkpoint.CheckpointWarning, match="step 20 is damaged") as w:
        state = checkpoint.migrate(directory, linen_state())
    assert w[0].filename == __file__
    assert_identical(state.params, image.params)
