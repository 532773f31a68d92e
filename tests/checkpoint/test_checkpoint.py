"""The Orbax helpers: what they read and write, and every message."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from _models import MODELS, changed, make_batch
from flax_amp import checkpoint
from flax_amp._training.scaler import init_scaler
from flax_amp._training.train_state import AmpTrainState
from flax_amp._training.train_step import make_train_step

PARAMS = {"w": jnp.arange(3.0), "b": jnp.ones(1)}


class ExtraState(AmpTrainState):
    """A subclass with one more field."""

    extra: Any


def small(params=None, tx=None, cls=AmpTrainState, **options):
    params = params or PARAMS
    options = {"precision": "16-mixed"} | options  # it has a scaler
    return cls.create(params=params, tx=tx or optax.adam(0.1), **options)


def save(directory, state, **options):
    with checkpoint.manager(directory, **options) as manager:
        assert checkpoint.save(manager, state)


def files(directory):
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file()
    }


def at(state, step):
    return state.replace(step=jnp.int32(step))


# What comes back


@pytest.mark.parametrize("name", MODELS)
def test_restore_goes_on_with_one_compiled_step(name, tmp_path):
    make, loss = MODELS[name]
    step = make_train_step(loss, has_aux=True)
    state = make(scaler=init_scaler(scaler=16, patience=1))
    for i in range(3):
        state, _ = step(state, make_batch(i, poisoned=i == 1))
    with checkpoint.manager(tmp_path) as manager:
        assert checkpoint.save(manager, state)
        whole, _ = step(state, make_batch(7))  # donated while it is being written
        # The arrays of `state` are gone by now, its shapes are enough.
        restored = checkpoint.restore(manager, state)
    # Targets may be abstract, and managers paths.
    again = checkpoint.restore(str(tmp_path), jax.eval_shape(make))
    assert not changed(restored, again)
    assert jax.tree.structure(again.params) == jax.tree.structure(restored.params)
    resumed, _ = step(restored, make_batch(7))
    assert not changed(whole, resumed)
    assert step._cache_size() == 1


def test_hyperparameters_come_from_disk(tmp_path):
    unusual = init_scaler(
        scaler=48, patience=7, adjust_factor=3, min_scaler=0.5, max_scaler=64
    )
    save(tmp_path, small(scaler=unusual))
    restored = checkpoint.restore(tmp_path, small())
    assert jax.tree.map(float, restored.scaler) == jax.tree.map(float, unusual)


@pytest.mark.parametrize("abstract", [False, True])
def test_scaler_keys_that_are_missing_are_filled_in(tmp_path, abstract):
    state = small(scaler=init_scaler(scaler=64, patience=5))
    old = state.replace(scaler={k: state.scaler[k] for k in ("scaler", "count")})
    save(tmp_path, old)
    target = small(scaler=init_scaler(patience=9))
    if abstract:
        target = jax.eval_shape(lambda: target)
    restored = checkpoint.restore(tmp_path, target)
    assert set(restored.scaler) == set(state.scaler)
    assert float(restored.scaler["scaler"]) == 64
    assert int(restored.scaler["patience"]) == (2000 if abstract else 9)
    assert float(restored.scaler["max_scaler"]) == 2.0**24


def test_a_state_without_any_scaler_gets_one(tmp_path):
    state = small()
    save(tmp_path, state.replace(scaler={}))
    restored = checkpoint.restore(tmp_path, state)
    assert not changed(state, restored)


def test_another_mesh(tmp_path, mesh):
    def sharded(devices):
        line = jax.sharding.Mesh(np.array(devices), ("data",))
        split = NamedSharding(line, PartitionSpec("data"))
        whole = NamedSharding(line, PartitionSpec())

        def place(leaf):
            return jax.device_put(leaf, split if leaf.shape == (16,) else whole)

        return jax.tree.map(place, small({"w": jnp.arange(16.0)}))

    state = sharded(jax.devices())
    save(tmp_path, state)
    for count in (8, 4, 1):
        target = sharded(jax.devices()[:count])
        restored = checkpoint.restore(tmp_path, target)
        assert not changed(state, restored)
        for leaf, like in zip(
            jax.tree.leaves(restored), jax.tree.leaves(target), strict=True
        ):
            assert leaf.sharding == like.sharding


def test_chooses_the_newest_or_the_named_step(tmp_path):
    with checkpoint.manager(tmp_path) as manager:
        for step in (1, 2, 5):
            assert checkpoint.save(manager, at(small(), step))
        assert int(checkpoint.restore(manager, small()).step) == 5
        assert int(checkpoint.restore(manager, small(), step=2).step) == 2


# The manager


def test_keeps_the_newest(tmp_path):
    with checkpoint.manager(tmp_path, max_to_keep=2) as manager:
        for step in range(4):
            checkpoint.save(manager, at(small(), step))
        manager.wait_until_finished()
        assert list(manager.all_steps()) == [2, 3]


@pytest.mark.once
@pytest.mark.parametrize(
    "mode, options, kept",
    [
        ("max", dict(max_to_keep=1), [1, 4]),
        ("min", dict(max_to_keep=1), [2, 4]),
        ("max", dict(max_to_keep=2), [0, 1, 4]),
        ("max", dict(max_to_keep=None), [0, 1, 2, 3, 4]),
        ("max", dict(max_to_keep=1, keep_period=3), [0, 1, 3, 4]),
    ],
)
def test_keeps_the_best_and_the_newest(tmp_path, mode, options, kept):
    """A run that was preempted goes on from the newest."""
    options |= dict(best_metric="accuracy", best_mode=mode)
    with checkpoint.manager(tmp_path, **options) as manager:
        for step, accuracy in enumerate((0.5, 0.9, 0.1, 0.3, 0.2)):
            metrics = {"accuracy": jnp.float32(accuracy)}
            assert checkpoint.save(manager, at(small(), step), metrics)
        manager.wait_until_finished()
        assert list(manager.all_steps()) == kept
        assert manager.best_step() == (1 if mode == "max" else 2)
    assert int(checkpoint.restore(tmp_path, small()).step) == 4


@pytest.mark.once
@pytest.mark.parametrize("mode, best", [("max", 0.9), ("min", 0.1)])
def test_a_metric_that_is_nan_or_missing_is_the_worst(tmp_path, mode, best):
    with checkpoint.manager(tmp_path, best_metric="loss") as manager:
        checkpoint.save(manager, at(small(), 1), {"loss": 0.5})  # another metric
    options = dict(best_metric="accuracy", best_mode=mode, max_to_keep=2)
    with checkpoint.manager(tmp_path, **options) as manager:
        for step, value in enumerate((0.5, best, np.nan, np.nan), start=2):
            assert checkpoint.save(manager, at(small(), step), {"accuracy": value})
            manager.wait_until_finished()
        assert manager.best_step() == 3
        assert 3 in manager.all_steps()


@pytest.mark.once
@pytest.mark.parametrize("content", [b"\xff\xfe", b"[1]", b'{"loss": "x"}', b"{}"])
@pytest.mark.filterwarnings("ignore:.*metrics of step 1 cannot be read")
def test_damaged_metrics_do_not_matter(tmp_path, content):
    with checkpoint.manager(tmp_path, best_metric="loss") as manager:
        checkpoint.save(manager, at(small(), 1), {"loss": 0.5})
    (tmp_path / "1/metrics/metrics").write_bytes(content)
    assert int(checkpoint.restore(tmp_path, small()).step) == 1
    assert not checkpoint.verify(tmp_path)[0].problem
    with checkpoint.manager(tmp_path, best_metric="loss", max_to_keep=1) as manager:
        assert checkpoint.save(manager, at(small(), 2), {"loss": 0.1})
        assert manager.best_step() == 2


def test_saves_at_intervals_and_when_forced(tmp_path):
    with checkpoint.manager(tmp_path, save_interval_steps=10) as manager:
        assert checkpoint.save(manager, at(small(), 0))
        assert not checkpoint.save(manager, at(small(), 3))
        assert checkpoint.save(manager, at(small(), 4), force=True)
        assert not checkpoint.save(manager, at(small(), 4), force=True)  # it is there
        assert checkpoint.save(manager, at(small(), 10))


def test_relative_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save("here/steps", small())
    assert (tmp_path / "here/steps/0").is_dir()
    assert not changed(small(), checkpoint.restore("here/steps", small()))


# What does not fit


MISFITS = {  # what differs in the saved state and in the target, and what is told
    "another layer": (
        dict(params={"v": jnp.arange(3.0), "b": jnp.ones(1)}),
        {},
        [
            r"params/v: float32\[3\] on disk, not in the target",
            r"params/w: not on disk, float32\[3\] in the target",
            r"opt_state/inner_state/0/mu/w: not on disk",
        ],
    ),
    "another size": (
        dict(params=PARAMS | {"w": jnp.arange(4.0)}),
        {},
        [
            r"params/w: float32\[4\] on disk, float32\[3\] in the target",
            r"opt_state/inner_state/0/nu/w: float32\[4\] on disk",
        ],
    ),
    "another dtype": (
        dict(params=PARAMS | {"w": jnp.arange(3)}),
        {},
        [r"params/w: int32\[3\] on disk, float32\[3\] in the target"],
    ),
    "no optimizer state": (
        dict(tx=optax.sgd(0.1)),
        {},
        [r"0/count: not on disk, int32\[\] in the target"],
    ),
    "more optimizer state": (
        {},
        dict(tx=optax.sgd(0.1)),
        [r"0/count: int32\[\] on disk, not in the target"],
    ),
    "no random keys": (
        {},
        dict(rngs={"dropout": jax.random.key(0)}),
        [r"rngs/dropout: not on disk, uint32\[2\]"],
    ),
    "more variables": (
        dict(variables={"batch_stats": {"m": jnp.ones(2)}}),
        {},
        [r"variables/batch_stats/m: float32\[2\] on disk, not in"],
    ),
    "no field": (
        {},
        dict(cls=ExtraState, extra={"e": jnp.ones(2)}),
        [r"extra/e: not on disk, float32\[2\]"],
    ),
    "one more field": (
        dict(cls=ExtraState, extra={"e": jnp.ones(2)}),
        {},
        [r"extra/e: float32\[2\] on disk, not in"],
    ),
}


@pytest.mark.parametrize("name", MISFITS)
def test_what_does_not_fit_is_named_leaf_by_leaf(tmp_path, name):
    saved, other, lines = MISFITS[name]
    save(tmp_path, small(**saved))
    before, target = files(tmp_path), small(**other)
    copy = jax.tree.map(jnp.copy, target)
    with pytest.raises(ValueError, match="step 0 in .* does not fit") as error:
        checkpoint.restore(tmp_path, target)
    for line in lines:
        assert error.match(line)
    assert error.match("Make the target with the model and tx that were saved")
    assert files(tmp_path) == before
    assert not changed(copy, target)


def test_a_whole_other_model_is_one_error(tmp_path):
    make, _ = MODELS["nnx"]
    save(tmp_path, make())
    with pytest.raises(ValueError, match="does not fit") as error:
        checkpoint.restore(tmp_path, MODELS["linen"][0]())
    for path in ("params/first/kernel", "params/Dense_0/kernel", "rngs/dropout"):
        assert path in str(error.value)
    assert "step:" not in str(error.value)  # which both have


def test_an_unknown_scaler_key_is_dropped_with_a_note(tmp_path):
    state = small(scaler=init_scaler(scaler=64))
    save(tmp_path, state.replace(scaler=state.scaler | {"hysteresis": jnp.int32(1)}))
    with pytest.warns(checkpoint.CheckpointWarning, match=r"dropped .*'hysteresis'"):
        restored = checkpoint.restore(tmp_path, small())
    assert not changed(state, restored)


def test_missing_checkpoints_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere is not a directory"):
        checkpoint.restore(tmp_path / "nowhere", small())
    with pytest.raises(FileNotFoundError, match=r"holds the steps \[\]; expected a c"):
        checkpoint.restore(tmp_path, small())
    save(tmp_path, small())
    with pytest.raises(FileNotFoundError, match=r"steps \[0\]; expected step 7"):
        checkpoint.restore(tmp_path, small(), step=7)


def test_targets_that_are_no_state_are_named(tmp_path):
    with pytest.raises(TypeError, match="target is a dict; expected an AmpTrainState"):
        checkpoint.restore(tmp_path, {"w": jnp.ones(2)})


def test_other_items_are_named(tmp_path):
    with checkpoint.manager(tmp_path) as manager:
        args = ocp.args.Composite(mine=ocp.args.StandardSave({"w": jnp.ones(2)}))
        manager.save(0, args=args)
    with pytest.raises(ValueError, match="step 0 in .* holds no item 'default'"):
        checkpoint.restore(tmp_path, small())


@pytest.mark.once
@pytest.mark.parametrize(
    "spoil, message",
    [
        (
            lambda s: s.replace(params=jax.tree.map(lambda x: x[:0], s.params)),
            r"params/b: empty, its shape is \(0,\); params/w: empty",
        ),
        (lambda s: s.replace(rngs={"note": "text"}), "rngs/note: a str"),
        (lambda s: s.params["w"].delete() or s, "params/w: deleted.*Save the state"),
    ],
)
def test_what_cannot_be_saved_is_named_and_leaves_the_rest(tmp_path, spoil, message):
    with checkpoint.manager(tmp_path) as manager:
        checkpoint.save(manager, small())
        manager.wait_until_finished()
        before = files(tmp_path)
        with pytest.raises(ValueError, match=message):
            checkpoint.save(manager, at(spoil(small()), 1))
        assert files(tmp_path) == before
        assert not changed(small(), checkpoint.restore(manager, small()))
        assert checkpoint.save(manager, at(small(), 1))


def test_a_missing_best_metric_is_named(tmp_path):
    with checkpoint.manager(tmp_path, best_metric="accuracy") as manager:
        for metrics in (None, {"loss": 1.0}):
            with pytest.raises(ValueError, match="expected the best_metric 'accuracy'"):
                checkpoint.save(manager, small(), metrics)
        assert checkpoint.save(manager, small(), {"accuracy": 1.0})


def test_what_holds_no_array_is_no_difference(tmp_path):
    """A stateless part of the optimizer, a list for a tuple, an empty collection."""
    params = {"layers": [{"w": jnp.ones(2)}, {"w": jnp.zeros(2)}], "none": None}
    save(tmp_path, small(params, optax.adam(0.1), variables={"empty": {}}))
    as_dicts = {"layers": {str(i): x for i, x in enumerate(params["layers"])}}
    for target in (params, as_dicts):
        target = small(target, optax.adamw(0.1))
        restored = checkpoint.restore(tmp_path, target)
        assert jax.tree.leaves(restored.params)[0].tolist() == [1, 1]
        assert jax.tree.structure(restored) == jax.tree.structure(target)


def test_numpy_arrays_and_numbers_come_back(tmp_path):
    state = small(cls=ExtraState, extra={})
    state = state.replace(extra={"i": np.arange(3), "f": np.float64(0.1)})
    save(tmp_path, state)
    restored = checkpoint.restore(tmp_path, state)
    assert restored.extra["i"].dtype == np.int64
    assert float(restored.extra["f"]) == 0.1
    assert not changed(state, restored)
    assert not checkpoint.verify(tmp_path)[0].problem
    assert checkpoint.restore(tmp_path, state.replace(step=0)).step == 0


def test_shardings_that_do_not_fit_are_named(tmp_path, mesh):
    save(tmp_path, small())
    split = NamedSharding(mesh, PartitionSpec("data"))
    target = jax.eval_shape(small)
    w = jax.ShapeDtypeStruct((3,), jnp.float32, sharding=split)
    target = target.replace(params=target.params | {"w": w})
    with pytest.raises(ValueError, match=r"params/w: \[3\] not to be split by Named"):
        checkpoint.restore(tmp_path, target)
