"""Saves, restores and their messages, over _manager.py, _state.py, _steps.py."""

import re
import signal
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx

from _models import MODELS, changed, make_batch
from flax_amp import AmpTrainState, checkpoint, init_scaler, make_train_step, optim
from helpers import assert_identical

PARAMS = {"w": jnp.arange(3.0), "b": jnp.ones(1)}
FP16 = {"precision": "16-mixed"}  # it has a scaler
TOLD = checkpoint.CheckpointWarning


class ExtraState(AmpTrainState):
    """A subclass with one more field."""

    extra: Any


def small(step=0, params=None, tx=None, cls=AmpTrainState, **options):
    options = FP16 | options
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
def test_a_run_goes_on_bit_for_bit_with_one_compiled_step(name, tmp_path):
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
        plain = manager.restore(3, args=ocp.args.StandardRestore(make()))
    # Targets may be abstract, and managers paths.
    again = checkpoint.restore(str(tmp_path), jax.eval_shape(make))
    assert not changed(restored, again) and not changed(restored, plain)
    assert jax.tree.structure(again.params) == jax.tree.structure(restored.params)
    resumed, _ = step(restored, make_batch(7))
    assert not changed(whole, resumed)
    assert step._cache_size() == 1


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
    """A Python number is saved with the dtype that JAX gives it."""
    state = small(cls=ExtraState, extra={}).replace(step=3)
    state = state.replace(extra={"i": np.arange(3), "f": np.float64(0.1), "n": 0.5})
    save(tmp_path, state)
    restored = checkpoint.restore(tmp_path, state)
    assert restored.extra["i"].dtype == np.int64 and restored.extra["f"] == 0.1
    assert (restored.extra["n"], restored.step) == (0.5, 3)
    array = checkpoint.restore(tmp_path, state.replace(step=jnp.int32(0))).step
    assert array == 3 and array.dtype == jnp.int32


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


def pair(rate=0.1, width=3):
    model = nnx.Linear(2, width, rngs=nnx.Rngs(0))
    tx = optim.adam(rate).to_optax(in_state=True)
    return model, nnx.Optimizer(model, tx, wrt=nnx.Param)


def trained(model, optimizer, steps):
    @nnx.jit
    def step(model, optimizer, x):
        grads = nnx.grad(lambda m: jnp.mean((m(x) - 1) ** 2))(model)
        optimizer.update(model, grads)

    for i in range(steps):
        step(model, optimizer, jnp.full((4, 2), 1.0 + i))
    return model, optimizer


def test_nnx_objects_go_on_as_they_were_or_stay_as_they_are(tmp_path):
    objects, new = trained(*pair(), 3), pair()
    with checkpoint.manager(tmp_path) as manager:
        assert checkpoint.save(manager, objects) and manager.all_steps() == [3]
    restored = checkpoint.restore(tmp_path, new)
    assert restored[0] is new[0] and restored[1] is new[1]
    trained(*objects, 2), trained(*new, 2)
    assert_identical(*(jax.tree.leaves(nnx.state(x)) for x in (objects, new)))
    with pytest.warns(TOLD, match="learning_rate.* is 0.1 on disk and 0.5"):
        checkpoint.restore(tmp_path, pair(0.5))
    other = pair(width=5)
    before = jax.tree.map(jnp.copy, nnx.state(other))
    with pytest.raises(ValueError, match=r"0/kernel/value: float32\[2, 3\] on disk"):
        checkpoint.restore(tmp_path, other)
    assert_identical(*(jax.tree.leaves(x) for x in (before, nnx.state(other))))


# What a run that is resumed is told


FALL = optax.linear_schedule(0.1, 0.0, 10)
INJECT = optax.inject_hyperparams(optax.sgd)
RATE = "rate is 0.1 on disk and 0.5 in the target.*the values on disk"
CHANGES = {  # the optimizers of a checkpoint and of the code, and what is told
    "optim": (optim.sgd(0.1), optim.sgd(0.5), RATE),
    "inject": (INJECT(0.1), INJECT(0.5), RATE),
    "inside": (optim.chain(optim.sgd(0.1)), optim.chain(optim.sgd(0.5)), RATE),
    # The values of schedules are of a step, and the code's rate is that of plain optax.
    "plain": (optax.sgd(0.1), optax.sgd(0.5), None),
    "a schedule": (optim.sgd(FALL), optim.sgd(FALL), None),
    "injected": (INJECT(FALL), INJECT(FALL), None),
    # Adam and Adamax have the same arrays.
    "adamax": (optax.adam(1), optax.adamax(1), "adam on disk and scale_by_adamax in"),
    "both": (optim.adam(1), optim.adamax(1), "is adam on disk and adamax in the"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_the_code_has_changed_is_named(name, tmp_path):
    old, new, message = CHANGES[name]
    saved = small(tx=old, scaler=init_scaler(patience=7))
    saved = saved.apply_gradients(grads=jax.tree.map(jnp.ones_like, PARAMS))
    save(tmp_path, saved)
    target = small(tx=new, scaler=init_scaler(patience=7))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        restored = checkpoint.restore(tmp_path, target)
        assert not changed(saved, restored)  # what is on disk wins
        assert len(told) == bool(message)
        checkpoint.restore(tmp_path, jax.eval_shape(lambda: small(tx=new)))
    if message:
        assert told[0].filename == __file__ and told[0].category is TOLD
        assert re.search(message, str(told[0].message))
    with pytest.warns(TOLD, match="scaler/patience is 7 on disk and 2000 in"):
        checkpoint.restore(tmp_path, small(tx=old))


# The manager


@pytest.mark.once
def test_chooses_the_newest_or_the_named_step_at_intervals(tmp_path):
    with checkpoint.manager(tmp_path / "a", max_to_keep=2) as manager:
        for step in (1, 2, 5):
            assert checkpoint.save(manager, small(step))
        manager.wait_until_finished()
        assert list(manager.all_steps()) == [2, 5]
        assert int(checkpoint.restore(manager, small()).step) == 5
        for step in (2, np.int64(2), jnp.int32(2)):
            assert int(checkpoint.restore(manager, small(), step=step).step) == 2
    with checkpoint.manager(tmp_path / "b", save_interval_steps=10) as manager:
        assert checkpoint.save(manager, small(0))
        assert not checkpoint.save(manager, small(3))
        assert checkpoint.save(manager, small(4), force=True)
        assert not checkpoint.save(manager, small(4), force=True)  # it is there
        assert checkpoint.save(manager, small(10))


@pytest.mark.once
@pytest.mark.parametrize(
    "mode, keep, kept",
    [
        ("max", 1, [1, 4]),
        ("min", 1, [2, 4]),
        ("max", 2, [0, 1, 4]),
        ("max", None, [0, 1, 2, 3, 4]),
    ],
)
def test_keeps_the_best_and_the_newest(tmp_path, mode, keep, kept):
    """A run that was preempted goes on from the newest."""
    options = dict(best_metric="accuracy", best_mode=mode, max_to_keep=keep)
    with checkpoint.manager(tmp_path, **options) as manager:
        for step, accuracy in enumerate((0.5, 0.9, 0.1, 0.3, 0.2)):
            metrics = {"accuracy": jnp.float32(accuracy)}
            assert checkpoint.save(manager, small(step), metrics)
        manager.wait_until_finished()
        assert list(manager.all_steps()) == kept
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
    assert not checkpoint.verify(tmp_path)[0].problem
    with checkpoint.manager(tmp_path, best_metric="loss", max_to_keep=1) as manager:
        with pytest.raises(ValueError, match="expected the best_metric 'loss'"):
            checkpoint.save(manager, small(2), {"accuracy": 1.0})
        for step in (2, 3):
            assert checkpoint.save(manager, small(step), {"loss": 1 / step})
        manager.wait_until_finished()
        assert manager.best_step() == 2 and manager.all_steps() == [2, 3]


# Messages


def a_link(directory):
    (directory / "link").symlink_to(directory / "nowhere")
    return checkpoint.manager(directory / "link")


def read_only(directory):
    save(directory, small())
    with checkpoint.manager(directory, read_only=True) as manager:
        assert int(checkpoint.restore(manager, small()).step) == 0
        checkpoint.save(manager, small(1))


def saving(spoil):
    """Saves a state that is spoiled; the one that is there stays as it is."""

    def call(directory):
        with checkpoint.manager(directory) as manager:
            checkpoint.save(manager, small())
            manager.wait_until_finished()
            before = files(directory)
            try:
                checkpoint.save(manager, spoil(small(1)))
            finally:
                assert before.items() <= files(directory).items()
                assert checkpoint.save(manager, small(1))

    return call


def with_params(**params):
    return saving(lambda state: small(1, params))


def at_step(step):
    return saving(lambda state: state.replace(step=step))


def deleted(state):
    state = jax.tree.map(jnp.copy, state)
    state.params["w"].delete()
    return state


MANAGER, RESTORE, SAVE = checkpoint.manager, checkpoint.restore, checkpoint.save
TWICE = {"enc.w": jnp.zeros(1), "enc": {"w": jnp.ones(1)}}
WHOLE = "expected an integer of at least"
PATH = r"expected a path, such as 'run' or pathlib.Path\('run'\)"
MESSAGES = [
    (lambda d: MANAGER(d, max_to_keep=0), f"max_to_keep=0; {WHOLE} 1"),
    (lambda d: MANAGER(d, save_interval_steps=0), f"interval_steps=0; {WHOLE} 1"),
    (lambda d: MANAGER(d, best_mode="best"), "best_mode` must be one of"),
    (lambda d: MANAGER(d, step_prefix="ckpt"), "steps under their plain numbers"),
    (lambda d: MANAGER(d / "run[1]"), "brackets in its path.*Rename the directory"),
    (lambda d: MANAGER(""), "the directory is ''; expected a path"),
    *(
        (
            lambda d, x=x: MANAGER(x),
            f"the directory is {seen}; {PATH}. Pass the folder of the steps",
        )
        for x, seen in ((3, r"int32\[\]"), (None, "a NoneType"), (b"run", "a bytes"))
    ),
    (lambda d: RESTORE(3, small()), rf"is int32\[\]; {PATH}, or a manager. Pass"),
    (a_link, "link is a file, or a link that leads nowhere"),
    (read_only, "read_only=True; expected a manager that may write"),
    (lambda d: RESTORE(d / "nowhere", small()), "nowhere is not a directory"),
    (lambda d: RESTORE(d, small()), r"holds the steps \[\]; expected a checkpoint"),
    (lambda d: save(d, small()) or RESTORE(d, small(), step=7), r"\[0\]; .* step 7"),
    (lambda d: RESTORE(d, small(), step="3"), f"step='3'; {WHOLE} 0"),
    (lambda d: RESTORE(d, PARAMS), "target is a dict; expected an AmpTrainState"),
    (lambda d: SAVE(str(d), small()), "first argument is a str, .*expected a man"),
    (saving(lambda s: {"step": 1}), "state is a dict; .*StandardSave"),
    (saving(lambda s: pair()[:1]), "expected an AmpTrainState, or NNX objects"),
    (at_step(jnp.float32(2)), rf"step is \[2.0\]; {WHOLE} 0"),
    (at_step(jnp.int32(-1)), rf"step is \[-1\]; {WHOLE} 0"),
    (at_step(jnp.arange(2)), rf"step is \[0, 1\]; {WHOLE} 0"),
    (with_params(**TWICE), "params.enc.w, .*several arrays on disk; .*different names"),
    (saving(deleted), r"params\['w'\] was deleted .*an earlier step took its memory"),
    # What JAX or Orbax says
    (saving(lambda s: s.replace(rngs={"note": "text"})), "written: .*'rngs', 'note'"),
    (with_params(b=jnp.ones(0)), "could not be written: .*zero size: .*params.b"),
]


@pytest.mark.once
@pytest.mark.parametrize("number", range(len(MESSAGES)))
def test_messages(tmp_path, number):
    call, message = MESSAGES[number]
    kinds = ValueError, TypeError, OSError, RuntimeError
    with pytest.raises(kinds, match=message):
        call(tmp_path)


MISFITS = [  # of one state, and of another one
    r"opt_state/inner_state/0/count: not on disk, int32\[\] in the target",
    r"params/b: int32\[4\] on disk, float32\[1\] in the target",
    r"params/v: float32\[3\] on disk, not in the target",
    r"params/w: not on disk, float32\[3\] in the target",
    r"extra/e: not on disk, float32\[2\] in the target",
    r"rngs/dropout: not on disk, uint32\[2\] in the target",
    r"variables/batch_stats/m: float32\[2\] on disk, not in the target",
    "Make the target with the model and tx that were saved",
]


def test_what_does_not_fit_is_named_leaf_by_leaf(tmp_path):
    params = {"v": jnp.arange(3.0), "b": jnp.arange(4)}
    statistics = {"batch_stats": {"m": jnp.ones(2)}}
    save(tmp_path, small(0, params, optax.sgd(0.1), variables=statistics))
    rngs, extra = {"dropout": jax.random.key(0)}, {"e": jnp.ones(2)}
    target = small(cls=ExtraState, rngs=rngs, extra=extra)
    before, copy = files(tmp_path), jax.tree.map(jnp.copy, target)
    with pytest.raises(ValueError, match="step 0 in .* does not fit") as error:
        checkpoint.restore(tmp_path, target)
    for line in MISFITS:
        assert error.match(line)
    assert files(tmp_path) == before
    assert not changed(copy, target)


def test_other_items_are_named_and_can_be_migrated(tmp_path):
    with checkpoint.manager(tmp_path) as manager:
        args = ocp.args.Composite(mine=ocp.args.StandardSave({"w": jnp.ones(2)}))
        manager.save(0, args=args)
    for read in (checkpoint.restore, checkpoint.migrate):
        with pytest.raises(ValueError, match=r"holds no item 'default' but \['mine'\]"):
            read(tmp_path, small())
    found = checkpoint.migrate(tmp_path / "0/mine", {"w": jnp.zeros(2)})
    assert found["w"].tolist() == [1, 1]


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
