"""Checkpoints of other models, and what must not happen in silence."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx, serialization
from flax.training.dynamic_scale import DynamicScale
from flax.training.train_state import TrainState
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from _foreign import (
    ImageState,
    by_manager,
    by_standard_checkpointer,
    image_state,
    image_step,
    run,
)
from _models import (
    NnxNet,
    changed,
    linen_state,
    make_batch,
    nnx_loss,
    nnx_state,
    optimizer,
)
from flax_amp import AmpTrainState, checkpoint, init_scaler, make_train_step, no_scaler
from helpers import assert_identical

pytestmark = pytest.mark.once


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
        (np.arange(3) / 7, jnp.float32),  # of float64
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
        (np.array([0.1, np.inf], jnp.bfloat16), jnp.float32),
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


def test_of_two_things_in_one_place_each_keeps_its_name(image):
    """Neither is taken for the other in silence."""
    other = jax.tree.map(jnp.zeros_like, image.batch_stats)
    tree = {"batch_stats": other, "variables": {"batch_stats": image.batch_stats}}
    state = checkpoint.migrate(tree, linen_state(), include="variables")
    assert_identical(state.variables["batch_stats"], image.batch_stats)
    with pytest.raises(ValueError, match=r"\n  batch_stats/.* on disk, not in the tar"):
        checkpoint.migrate(tree, linen_state(), exclude=["params", "opt_state", "step"])


@pytest.mark.parametrize(
    "field, told",
    [
        # Statistics are no scaler.
        (
            {"observed": dict.fromkeys(("scaler", "count", "mean"), 1.0)},
            "observed/scaler",
        ),
        ({"rngs": {"a": jax.random.key(0)}}, "rngs/a"),
        ({"config": {"name": "dense"}}, "config/name"),
    ],
)
def test_what_has_no_place_is_named_and_can_be_left_out(field, told):
    tree = {"step": 1, "params": {"w": jnp.ones(2)}, **field}
    target = AmpTrainState.create(params={"w": jnp.zeros(2)}, tx=optax.sgd(1))
    with pytest.raises(ValueError, match=f"{told}: .* on disk, not in the target"):
        checkpoint.migrate(tree, target)
    assert int(checkpoint.migrate(tree, target, exclude=[*field]).step) == 1


def test_errors_tell_the_names_on_disk(image):
    target = linen_state(tx=optax.chain(optax.sgd(0.1), optimizer()))
    with pytest.raises(
        ValueError, match=r"  opt_state/1/0/count: int32\[\] on disk, n"
    ):
        checkpoint.migrate(image, target)
    moments = {"opt_state": jax.tree.map(lambda x: jnp.stack([x, x]), image.opt_state)}
    message = r"inner_state/1/0/count: int32\[2\] on disk as opt_state/1/0/count, int32"
    with pytest.raises(ValueError, match=message):
        checkpoint.migrate(moments, linen_state(), include="opt_state")
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


def test_strings_on_disk_are_named_and_can_be_left_out(tmp_path):
    tree = {"model": {"w": jnp.ones(2)}, "config": {"name": "dense"}}
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "x", tree)
    target = {"model": {"w": jnp.zeros(2)}}
    with pytest.raises(ValueError, match="config/name: .* on disk, not in the target"):
        checkpoint.migrate(tmp_path / "x", target)
    found = checkpoint.migrate(tmp_path / "x", target, exclude="config")
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


@pytest.mark.parametrize(
    "options, error, message",
    [
        (
            {"include": "parms"},
            ValueError,
            r"pattern 'parms' matches no path.*'opt_state', 'params'",
        ),
        (
            {"exclude": ["step", "head/*"]},
            ValueError,
            r"pattern 'head/\*' matches no path",
        ),
        ({"rename": {"Dense": "x"}}, ValueError, "'Dense', which matches no path on d"),
        ({"rename": {"Dense_(": "x"}}, ValueError, r"'Dense_\(': 'x', which does not "),
        ({"rename": {"Dense_0": r"\1"}}, ValueError, "not compile: invalid group"),
        ({"rename": {r"Dense_\d": "x"}}, ValueError, "two arrays the path .*x/bias"),
        ({"include": 3}, TypeError, "include=3; expected glob patterns"),
        ({"exclude": [("params",)]}, TypeError, "exclude=.*; expected glob patterns"),
        ({"rename": ["a"]}, TypeError, "rename is a list; expected a dict"),
    ],
)
def test_options_that_are_wrong_are_named(image, options, error, message):
    with pytest.raises(error, match=message):
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
    with pytest.raises(
        checkpoint.CorruptCheckpointError, match="bytes is not what .*: Unpack failed"
    ):
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
