"""What is saved and comes back, what a manager keeps, and every message."""

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from _models import MODELS, changed, make_batch
from flax_amp import AmpTrainState, checkpoint, init_scaler, make_train_step

PARAMS = {"w": jnp.arange(3.0), "b": jnp.ones(1)}


class ExtraState(AmpTrainState):
    """A subclass with one more field."""

    extra: Any


def small(step=0, params=None, tx=None, cls=AmpTrainState, **options):
    options = {"precision": "16-mixed"} | options  # it has a scaler
    state = cls.create(params=params or PARAMS, tx=tx or optax.adam(0.1), **options)
    return state.replace(step=jnp.int32(step))


def save(directory, state, **options):
    with checkpoint.manager(directory, **options) as manager:
        assert checkpoint.save(manager, state)


def files(directory):
    found = [path for path in directory.rglob("*") if path.is_file()]
    return {str(path.relative_to(directory)): path.read_bytes() for path in found}


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


def test_another_mesh(tmp_path, mesh):
    def sharded(devices):
        line = jax.sharding.Mesh(np.array(devices), ("data",))
        split = NamedSharding(line, PartitionSpec("data"))
        whole = NamedSharding(line, PartitionSpec())

        def place(leaf):
            return jax.device_put(leaf, split if leaf.shape == (16,) else whole)

        return jax.tree.map(place, small(params={"w": jnp.arange(16.0)}))

    state = sharded(jax.devices())
    save(tmp_path, state)
    for count in (8, 4, 1):
        target = sharded(jax.devices()[:count])
        restored = checkpoint.restore(tmp_path, target)
        assert not changed(state, restored)
        both = zip(jax.tree.leaves(restored), jax.tree.leaves(target), strict=True)
        assert all(leaf.sharding == like.sharding for leaf, like in both)
    w = jax.ShapeDtypeStruct((3,), jnp.float32, sharding=state.params["w"].sharding)
    with pytest.raises(ValueError, match="partitioned 8 times, but the dimension"):
        checkpoint.restore(tmp_path, state.replace(params={"w": w}))


def test_what_holds_no_array_is_no_difference(tmp_path):
    """A stateless part of the optimizer, a list for a tuple, an empty collection."""
    params = {"layers": [{"w": jnp.ones(2)}, {"w": jnp.zeros(2)}], "none": None}
    save(tmp_path, small(0, params, optax.adam(0.1), variables={"empty": {}}))
    as_dicts = {"layers": {str(i): x for i, x in enumerate(params["layers"])}}
    for target in (params, as_dicts):
        target = small(0, target, optax.adamw(0.1))
        restored = checkpoint.restore(tmp_path, target)
        assert jax.tree.leaves(restored.params)[0].tolist() == [1, 1]
        assert jax.tree.structure(restored) == jax.tree.structure(target)


def test_numpy_arrays_and_numbers_come_back(tmp_path):
    state = small(cls=ExtraState, extra={})
    state = state.replace(extra={"i": np.arange(3), "f": np.float64(0.1)})
    save(tmp_path, state)
    restored = checkpoint.restore(tmp_path, state)
    assert restored.extra["i"].dtype == np.int64
    assert not changed(state, restored)
    assert not checkpoint.verify(tmp_path)[0].problem
    assert checkpoint.restore(tmp_path, state.replace(step=0)).step == 0


def sweep(rates=(0.1, 0.2, 0.4)):
    def create(rate):
        return small(params={"w": jnp.full(2, rate)}, scaler=init_scaler(patience=1))

    return jax.vmap(create)(jnp.array(rates))


def test_a_sweep_is_one_checkpoint(tmp_path):
    state = sweep()
    state = state.replace(step=state.step + 3, params={"w": state.params["w"] + 1})
    save(tmp_path, state)
    (report,) = checkpoint.verify(tmp_path)
    assert (report.step, report.problem) == (3, "")
    for read in (checkpoint.restore, checkpoint.migrate):
        for target in (sweep(), jax.eval_shape(sweep)):
            assert not changed(state, read(tmp_path, target))
        with pytest.raises(ValueError, match=r"scaler/scaler: float32\[3\] on dis"):
            read(tmp_path, sweep([0.1, 0.2]))


# The manager


def test_chooses_the_newest_or_the_named_step(tmp_path):
    with checkpoint.manager(tmp_path, max_to_keep=2) as manager:
        for step in (1, 2, 5):
            assert checkpoint.save(manager, small(step))
        manager.wait_until_finished()
        assert list(manager.all_steps()) == [2, 5]
        assert int(checkpoint.restore(manager, small()).step) == 5
        for step in (2, np.int64(2), jnp.int32(2)):
            assert int(checkpoint.restore(manager, small(), step=step).step) == 2
    for step in ("3", 3.0, jnp.arange(2)):
        with pytest.raises(TypeError, match="step is .*; expected an integer. Pass an"):
            checkpoint.restore(tmp_path, small(), step=step)


@pytest.mark.once
@pytest.mark.parametrize(
    "mode, keep, kept",
    [("max", 1, [1, 4]), ("min", 1, [2, 4]), ("max", 2, [0, 1, 4]), ("max", None, 5)],
)
def test_keeps_the_best_and_the_newest(tmp_path, mode, keep, kept):
    """A run that was preempted goes on from the newest."""
    options = dict(best_metric="accuracy", best_mode=mode, max_to_keep=keep)
    with checkpoint.manager(tmp_path, **options) as manager:
        for step, accuracy in enumerate((0.5, 0.9, 0.1, 0.3, 0.2)):
            metrics = {"accuracy": jnp.float32(accuracy)}
            assert checkpoint.save(manager, small(step), metrics)
        manager.wait_until_finished()
        assert list(manager.all_steps()) == (list(range(5)) if kept == 5 else kept)
        assert manager.best_step() == (1 if mode == "max" else 2)
    assert int(checkpoint.restore(tmp_path, small()).step) == 4


@pytest.mark.once
@pytest.mark.parametrize(
    "content", [b"\xff\xfe", b"[1]", b'{"loss": "x"}', b"{}", None]
)
def test_a_metric_that_is_damaged_missing_or_nan_is_the_worst(tmp_path, content):
    with checkpoint.manager(tmp_path, best_metric="loss") as manager:
        checkpoint.save(manager, small(1), {"loss": 0.5 if content else np.nan})
    if content:
        (tmp_path / "1/metrics/metrics").write_bytes(content)
    assert int(checkpoint.restore(tmp_path, small()).step) == 1
    assert not checkpoint.verify(tmp_path)[0].problem
    with checkpoint.manager(tmp_path, best_metric="loss", max_to_keep=1) as manager:
        with pytest.raises(ValueError, match="expected the best_metric 'loss'"):
            checkpoint.save(manager, small(2), {"accuracy": 1.0})
        assert checkpoint.save(manager, small(2), {"loss": 0.1})
        assert manager.best_step() == 2


def test_saves_at_intervals_and_when_forced(tmp_path):
    with checkpoint.manager(tmp_path, save_interval_steps=10) as manager:
        assert checkpoint.save(manager, small(0))
        assert not checkpoint.save(manager, small(3))
        assert checkpoint.save(manager, small(4), force=True)
        assert not checkpoint.save(manager, small(4), force=True)  # it is there
        assert checkpoint.save(manager, small(10))


@pytest.mark.once
@pytest.mark.parametrize(
    "options, message",
    [
        (dict(max_to_keep=0), "max_to_keep is 0; expected at least 1"),
        (dict(save_interval_steps=0), "interval_steps is 0; expected at least 1"),
        (dict(best_mode="best"), "best_mode` must be one of"),
        (dict(step_prefix="ckpt"), "steps under their plain numbers"),
        (dict(directory="run[1]"), "brackets in its path.*Rename the directory"),
    ],
)
def test_settings_that_are_wrong_are_named(tmp_path, options, message):
    directory = tmp_path / options.pop("directory", "")
    with pytest.raises(ValueError, match=message):
        checkpoint.manager(directory, **options)


# What does not fit

STATISTICS = {"batch_stats": {"m": jnp.ones(2)}}
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
    "another dtype": (
        dict(params=PARAMS | {"w": jnp.arange(4)}),
        {},
        [r"params/w: int32\[4\] on disk, float32\[3\] in the target"],
    ),
    "another optimizer": (
        dict(tx=optax.sgd(0.1)),
        {},
        [r"0/count: not on disk, int32\[\] in the target"],
    ),
    "keys and variables": (
        dict(variables=STATISTICS),
        dict(rngs={"dropout": jax.random.key(0)}),
        [
            r"rngs/dropout: not on disk, uint32\[2\]",
            r"variables/batch_stats/m: float32\[2\] on disk, not in",
        ],
    ),
    "a field": (
        {},
        dict(cls=ExtraState, extra={"e": jnp.ones(2)}),
        [r"extra/e: not on disk, float32\[2\]"],
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


def test_missing_checkpoints_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere is not a directory"):
        checkpoint.restore(tmp_path / "nowhere", small())
    with pytest.raises(FileNotFoundError, match=r"holds the steps \[\]; expected a c"):
        checkpoint.restore(tmp_path, small())
    save(tmp_path, small())
    with pytest.raises(FileNotFoundError, match=r"steps \[0\]; expected step 7"):
        checkpoint.restore(tmp_path, small(), step=7)


def test_other_items_are_named_and_can_be_migrated(tmp_path):
    with checkpoint.manager(tmp_path) as manager:
        args = ocp.args.Composite(mine=ocp.args.StandardSave({"w": jnp.ones(2)}))
        manager.save(0, args=args)
    for read in (checkpoint.restore, checkpoint.migrate):
        with pytest.raises(ValueError, match=r"holds no item 'default' but \['mine'\]"):
            read(tmp_path, small())
    found = checkpoint.migrate(tmp_path / "0/mine", {"w": jnp.zeros(2)})
    assert found["w"].tolist() == [1, 1]


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
        (lambda s: s.replace(step=jnp.int32(-1)), "step is -1; expected at least 0"),
        (lambda s: s.replace(step=jnp.arange(2)), r"has the values \[0, 1\]; expected"),
    ],
)
def test_what_cannot_be_saved_is_named_and_leaves_the_rest(tmp_path, spoil, message):
    with checkpoint.manager(tmp_path) as manager:
        checkpoint.save(manager, small())
        manager.wait_until_finished()
        before = files(tmp_path)
        with pytest.raises(ValueError, match=message):
            checkpoint.save(manager, spoil(small(1)))
        assert files(tmp_path) == before
        assert not changed(small(), checkpoint.restore(manager, small()))
        assert checkpoint.save(manager, small(1))


@pytest.mark.once
def test_arguments_in_the_wrong_place_are_named(tmp_path):
    state = small()
    with checkpoint.manager(tmp_path) as manager:
        for first in (str(tmp_path), state, ocp.CheckpointManager(tmp_path)):
            with pytest.raises(TypeError, match="first argument .* expected a manager"):
                checkpoint.save(first, state)
        with pytest.raises(TypeError, match="state is a dict; .*StandardSave"):
            checkpoint.save(manager, {"step": 1})
        with pytest.raises(TypeError, match=r"state's step is float32\[\];"):
            checkpoint.save(manager, state.replace(step=jnp.float32(2)))
        assert not manager.all_steps()
    with pytest.raises(TypeError, match="target is a dict; expected an AmpTrainState"):
        checkpoint.restore(tmp_path, {"w": jnp.ones(2)})
    for call in (checkpoint.verify, checkpoint.manager):
        with pytest.raises(TypeError, match="the directory is a .* expected a path or"):
            call(state)


# Programs that end without closing

ENDING = """
import gc, os, pathlib, signal, sys, threading, time
import jax.numpy as jnp, optax, orbax.checkpoint as ocp
from flax_amp import AmpTrainState, checkpoint

state = AmpTrainState.create(params={"w": jnp.ones(2**20)}, tx=optax.sgd(0.1))

def manager(name):
    return checkpoint.manager(pathlib.Path(sys.argv[1], name))

def save(name):
    checkpoint.save(manager(name), state)

left_open = manager("left open")
checkpoint.save(left_open, state)
"""
MORE = """
save("gone")
gc.collect()
thread = threading.Thread(target=save, args=["by a daemon thread"], daemon=True)
thread.start()
thread.join()
tree = manager("a tree")
tree.save(0, args=ocp.args.StandardSave({"w": state.params["w"]}))
"""
ENDINGS = {  # what the program does last, and its exit code
    "the last line": (MORE, 0),
    "an error": ("raise KeyError", 1),
    "an interrupt": (
        # A shell makes what it starts in the background ignore interrupts.
        "signal.signal(signal.SIGINT, signal.default_int_handler); "
        "os.kill(os.getpid(), signal.SIGINT); time.sleep(60)",
        -signal.SIGINT,
    ),
}


@pytest.mark.once
@pytest.mark.slow
@pytest.mark.parametrize("name", ENDINGS)
def test_a_program_that_ends_without_closing_saves(tmp_path, name):
    last, code = ENDINGS[name]
    ended = subprocess.run(
        [sys.executable, "-c", ENDING + last, str(tmp_path)],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        timeout=120,
    )
    assert ended.returncode == code, ended.stderr
    assert bool(ended.stderr) == (code != 0), ended.stderr
    directories = sorted(tmp_path.iterdir())
    assert len(directories) == (4 if last == MORE else 1)
    for directory in directories:
        reports = checkpoint.verify(directory)
        assert [(x.step, x.problem) for x in reports] == [(0, "")], directory
