"""Saves that a kill or a full disk ends, over _manager.py, _state.py and _steps.py."""

import random
import resource
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
import pytest

from _models import changed
from flax_amp import AmpTrainState, checkpoint
from helpers import orbax_leaves_tasks

pytestmark = [*orbax_leaves_tasks, pytest.mark.once]

ROOT = Path(__file__).parents[2]
WORKER = """
import pathlib, sys
sys.path[:0] = ["tests", "tests/checkpoint"]
from flax_amp import checkpoint
from test_kills import make_state
step = 0
if any(path.name.isdigit() for path in pathlib.Path(sys.argv[1]).iterdir()):
    step = int(checkpoint.restore(sys.argv[1], make_state(0)).step)
with checkpoint.manager(sys.argv[1]) as manager:
    while True:
        step += 1
        checkpoint.save(manager, make_state(step))
        print(step, flush=True)
"""


def make_state(step):
    params = {"w": jax.random.normal(jax.random.key(step), (64, 256))}
    state = AmpTrainState.create(params=params, tx=optax.adam(0.1))
    return state.replace(step=jnp.int32(step))


@pytest.mark.slow
def test_a_kill_in_the_middle_of_a_save_loses_no_complete_step(tmp_path):
    chance, cut = random.Random(0), 0
    for _ in range(8):
        command = [sys.executable, "-c", WORKER, str(tmp_path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT) as worker:
            for _ in range(chance.randint(3, 6)):
                started = int(worker.stdout.readline())
            time.sleep(chance.uniform(0, 0.05))
            worker.kill()
        # A save waits for the one before it, so that it is complete.
        state = checkpoint.restore(tmp_path, make_state(0))
        assert int(state.step) >= started - 1
        assert not changed(make_state(int(state.step)), state)
        # A kill may cut the removal of an old step, too.
        reports = [x for x in checkpoint.verify(tmp_path) if not x.half_deleted]
        assert not any(report.problem for report in reports)
        cut += any("tmp" in path.name for path in tmp_path.iterdir())
    assert cut  # some kills left a step that is half-written
    with checkpoint.manager(tmp_path) as manager:
        last = int(state.step) + 1
        assert checkpoint.save(manager, make_state(last))
    assert not any("tmp" in path.name for path in tmp_path.iterdir())


@pytest.fixture
def full_disk():
    """A switch: no file can grow beyond 4 kB while it is on."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def switch(on):
        limit = (4096, before[1]) if on else before
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)

    yield switch
    switch(False)


FAILED = r"checkpoint.save: .* could not be written: .*The steps \[1\] are as they were"


@pytest.mark.parametrize("told", ["waiting", "the next save", "close"])
def test_a_full_disk_is_told_and_the_save_can_be_tried_again(tmp_path, full_disk, told):
    with checkpoint.manager(tmp_path) as manager:
        assert checkpoint.save(manager, make_state(1))
    manager = checkpoint.manager(tmp_path)
    full_disk(True)
    assert checkpoint.save(manager, make_state(2))
    with pytest.raises(checkpoint.CheckpointSaveError, match=FAILED):
        if told == "waiting":
            manager.wait_until_finished()
        elif told == "close":
            manager.close()
        else:
            checkpoint.save(manager, make_state(3))
    full_disk(False)
    assert not changed(make_state(1), checkpoint.restore(tmp_path, make_state(0)))
    if told == "close":  # for good: its lock is free
        manager = checkpoint.manager(tmp_path)
    with manager:
        assert checkpoint.save(manager, make_state(2))
    names = sorted(path.name for path in tmp_path.iterdir() if path.is_dir())
    assert names == ["1", "2"]  # what was half-written takes no space
    assert not changed(make_state(2), checkpoint.restore(tmp_path, make_state(0)))
