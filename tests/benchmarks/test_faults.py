"""Saves that fail, for real: they say so, lose nothing, and can be tried again."""

import resource

import jax
import jax.numpy as jnp
import optax
import pytest

from _models import changed
from benchmarks.commands import faults
from benchmarks.faults.training import Reference
from flax_amp import AmpTrainState, checkpoint
from helpers import orbax_leaves_tasks

pytestmark = [*orbax_leaves_tasks, pytest.mark.once]


@pytest.mark.slow
def test_no_fault_loses_anything():
    """The table of `python -m benchmarks faults`, with few kills and a small state."""
    kills = 2
    with faults.quiet():
        rows = list(faults.every_row(Reference(width=64, steps=12 + 4 * kills), kills))
    assert len(rows) == 12
    assert not [row for row in rows if row.good is False]


def make_state(step):
    params = {"w": jax.random.normal(jax.random.key(step), (64, 256))}
    state = AmpTrainState.create(params=params, tx=optax.adam(0.1))
    return state.replace(step=jnp.int32(step))


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


def names(directory):
    return sorted(path.name for path in directory.iterdir() if path.is_dir())


def test_a_save_that_fails_in_the_background_can_be_tried_again(tmp_path, full_disk):
    with checkpoint.manager(tmp_path) as manager:
        assert checkpoint.save(manager, make_state(1))
        manager.wait_until_finished()
        full_disk(True)
        assert checkpoint.save(manager, make_state(2))
        with pytest.raises(checkpoint.CheckpointSaveError, match=FAILED):
            manager.wait_until_finished()
        full_disk(False)
        assert not changed(make_state(1), checkpoint.restore(manager, make_state(0)))
        assert checkpoint.save(manager, make_state(3))
    assert names(tmp_path) == ["1", "3"]  # what was half-written keeps no room
    assert not changed(make_state(3), checkpoint.restore(tmp_path, make_state(0)))
    with checkpoint.manager(tmp_path) as manager:
        full_disk(True)
        assert checkpoint.save(manager, make_state(4))
        with pytest.raises(checkpoint.CheckpointSaveError):
            manager.wait_until_finished()
        full_disk(False)
        assert checkpoint.save(manager, make_state(4))  # the same step
    assert not changed(make_state(4), checkpoint.restore(tmp_path, make_state(0)))


@pytest.mark.parametrize("where", ["the next save", "close"])
def test_no_failure_goes_unheard(tmp_path, full_disk, where):
    with checkpoint.manager(tmp_path) as manager:
        assert checkpoint.save(manager, make_state(1))
    manager = checkpoint.manager(tmp_path)
    full_disk(True)
    assert checkpoint.save(manager, make_state(2))
    with pytest.raises(checkpoint.CheckpointSaveError, match=FAILED):
        if where == "close":
            manager.close()
        else:
            checkpoint.save(manager, make_state(3))
    full_disk(False)
    manager.close()
    # Closed for good: its lock is free, and its threads do not hold up the process.
    with checkpoint.manager(tmp_path) as manager:
        assert checkpoint.save(manager, make_state(2))


def test_a_directory_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / ".flax_amp.lock").mkdir()
    with (
        checkpoint.manager(tmp_path) as manager,
        pytest.raises(checkpoint.CheckpointSaveError, match="IsADirectoryError"),
    ):
        checkpoint.save(manager, make_state(1))


def test_what_a_killed_run_left_is_removed_by_the_next_one(tmp_path):
    half = tmp_path / "7.orbax-checkpoint-tmp" / "default"
    half.mkdir(parents=True)
    (half / "data").write_bytes(b"x" * 100)
    (tmp_path / "notes").mkdir()
    with checkpoint.manager(tmp_path) as manager:
        assert manager.all_steps() == []
        assert half.exists()  # opening changes nothing
        assert checkpoint.save(manager, make_state(1))
    assert names(tmp_path) == ["1", "notes"]
