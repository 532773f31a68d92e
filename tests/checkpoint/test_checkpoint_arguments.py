"""The arguments of the Orbax helpers, and programs that end without closing."""

import signal
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from flax_amp import AmpTrainState, __main__, checkpoint
from flax_amp.checkpoint import _steps

pytestmark = pytest.mark.once


def small():
    return AmpTrainState.create(params={"w": jnp.ones(2)}, tx=optax.sgd(0.1))


def at(state, step):
    return state.replace(step=jnp.int32(step))


@pytest.mark.parametrize(
    "options, error, message",
    [
        (dict(max_to_keep=0), ValueError, "max_to_keep is 0; expected at least 1. Use"),
        (dict(max_to_keep="3"), TypeError, "max_to_keep is a str; expected an integer"),
        (dict(save_interval_steps=0), ValueError, "interval_steps is 0; expected at l"),
        (dict(save_interval_steps=2.5), TypeError, "is a float; expected an integer"),
        (dict(best_metric=3), TypeError, "best_metric=3; expected the name of one"),
        (dict(best_mode="best"), ValueError, "best_mode='best'; expected 'max' or 'mi"),
        (dict(best_mode="max"), ValueError, "best_mode='max' was given without"),
        (dict(best_mode="min"), ValueError, "best_mode='min' was given without"),
        (dict(step_prefix="ckpt"), ValueError, "steps under their plain numbers"),
        (dict(step_format_fixed_length=8), ValueError, "steps under their plain numb"),
    ],
)
def test_settings_that_are_wrong_are_named(tmp_path, options, error, message):
    with pytest.raises(error, match=f"checkpoint.manager: .*{message}"):
        checkpoint.manager(tmp_path, **options)


def test_orbax_has_a_way_of_its_own_to_choose_the_best(tmp_path):
    checkpoint.manager(tmp_path, best_mode="min", best_fn=lambda x: x["loss"]).close()


@pytest.mark.parametrize("read", [checkpoint.restore, checkpoint.migrate])
def test_steps_are_integers(tmp_path, read):
    with checkpoint.manager(tmp_path) as manager:
        assert checkpoint.save(manager, at(small(), 3))
    deleted = jnp.array(3)
    deleted.delete()
    for step in (3, np.int64(3), jnp.int32(3), jnp.array(3)):
        assert int(read(tmp_path, small(), step=step).step) == 3
    for step, seen in [
        ("3", "a str"),
        (3.0, "a float"),
        (jnp.float32(3), r"float32\[\]"),
        (jnp.arange(2), r"int32\[2\]"),
        (deleted, "deleted, its memory was donated"),
    ]:
        with pytest.raises(TypeError, match=f"step is {seen}; .* Pass an int"):
            read(tmp_path, small(), step=step)


def test_a_step_of_another_run_is_kept_with_a_warning(tmp_path, monkeypatch):
    with checkpoint.manager(tmp_path) as manager:
        assert checkpoint.save(manager, small())
        assert not checkpoint.save(manager, small())  # silent: it was saved here
    monkeypatch.setattr(_steps, "met", defaultdict(set))  # as in another process
    other = small().replace(params=jax.tree.map(jnp.zeros_like, small().params))
    with checkpoint.manager(tmp_path) as manager:
        with pytest.warns(
            checkpoint.CheckpointWarning, match="neither saved nor restored; it is kept"
        ) as told:
            assert not checkpoint.save(manager, other)
        assert told[0].filename == __file__
        restored = checkpoint.restore(manager, other)
        assert not checkpoint.save(manager, restored)  # silent: it was restored
    assert jax.tree.all(jax.tree.map(jnp.array_equal, restored.params, small().params))


def test_arguments_in_the_wrong_place_are_named(tmp_path):
    state = small()
    with checkpoint.manager(tmp_path) as manager:
        for first in (str(tmp_path), state, None):
            with pytest.raises(TypeError, match="first argument .* expected a manager"):
                checkpoint.save(first, state)
        for other in ({"step": 1}, manager):
            with pytest.raises(
                TypeError, match="state is .* expected an AmpTrainState.*StandardSave"
            ):
                checkpoint.save(manager, other)
        with pytest.raises(TypeError, match="metrics is a float; expected a dict"):
            checkpoint.save(manager, state, 0.5)
        for value in (jnp.ones(3), "x", None):
            with pytest.raises(
                TypeError, match="metric 'loss' is .* expected one numb"
            ):
                checkpoint.save(manager, state, {"loss": value})
        for step, seen in [
            (jnp.ones(2), r"float32\[2\]"),
            (jnp.ones(2, bool), r"bool\[2\]"),
            (jnp.float32(2), r"float32\[\]"),
        ]:
            with pytest.raises(TypeError, match=f"state's step is {seen};"):
                checkpoint.save(manager, state.replace(step=step))
        message = r"step has the values \[0, 1, 2\]; expected runs that are at one step"
        with pytest.raises(ValueError, match=message):
            checkpoint.save(manager, state.replace(step=jnp.arange(3)))
        with pytest.raises(
            ValueError, match="step is -1; expected at least 0. Use 0 or"
        ):
            checkpoint.save(manager, at(state, -1))
        assert not manager.all_steps()
    for call in (
        lambda: checkpoint.restore(state, state),
        lambda: checkpoint.restore(None, state),
        lambda: checkpoint.verify(3),
        lambda: checkpoint.manager(state),
    ):
        with pytest.raises(TypeError, match="the directory is a .* expected a path or"):
            call()


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
closed = manager("closed")
checkpoint.save(closed, state)
closed.close()
save("gone")
gc.collect()
thread = threading.Thread(target=save, args=["by a daemon thread"], daemon=True)
thread.start()
thread.join()
plain = ocp.CheckpointManager(pathlib.Path(sys.argv[1], "of Orbax"))
checkpoint.save(plain, state)
tree = manager("a tree")
tree.save(0, args=ocp.args.StandardSave({"w": state.params["w"]}))
unused = manager("unused")
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


@pytest.mark.parametrize(
    "name",
    [
        "the last line",
        *(pytest.param(name, marks=pytest.mark.slow) for name in [*ENDINGS][1:]),
    ],
)
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
    assert len(directories) == (7 if last == MORE else 1)
    for directory in directories:
        reports = checkpoint.verify(directory)
        saved = directory.name != "unused"
        assert [(x.step, x.problem) for x in reports] == [(0, "")] * saved, directory


@pytest.mark.parametrize("name", ["run[1]", "lr[0.1]/x"])
def test_brackets_in_a_path_are_refused(name, tmp_path):
    """Orbax would save there, and find nothing of it."""
    with pytest.raises(ValueError, match="brackets in its path.*Rename the directory"):
        checkpoint.manager(tmp_path / name)


def test_damage_that_another_process_found_is_told(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    gathered = "flax_amp.checkpoint._steps.multihost_utils.process_allgather"
    monkeypatch.setattr(gathered, lambda kind: np.array([0, 1]))
    message = "process 1 found damage. Its own error names the files"
    with pytest.raises(checkpoint.CorruptCheckpointError, match=message):
        _steps.agreed(lambda: None)


def test_command_line_without_a_directory(tmp_path, capsys):
    assert __main__.main(["checkpoint", str(tmp_path / "nowhere")]) == 2
    assert "nowhere is not a directory" in capsys.readouterr().err
    assert __main__.main(["checkpoint", str(tmp_path)]) == 0
    assert "no steps in" in capsys.readouterr().out
