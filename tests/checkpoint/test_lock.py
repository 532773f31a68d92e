"""One process saves into a directory: it has to be the right one, and to let go."""

import errno
import os
import shutil
import threading

import jax.numpy as jnp
import optax
import pytest

from flax_amp import AmpTrainState, checkpoint
from flax_amp.checkpoint import _lock

pytestmark = pytest.mark.once

fcntl = pytest.importorskip("fcntl", reason="there are no such locks here")


def make_state(step):
    state = AmpTrainState.create(params={"w": jnp.ones(2)}, tx=optax.sgd(0.1))
    return state.replace(step=jnp.int32(step))


def is_free(directory):
    """Whether another process could get the lock."""
    file = os.open(directory / _lock.NAME, os.O_RDWR)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(file)
    return True


def test_the_last_manager_lets_go(tmp_path):
    with checkpoint.manager(tmp_path) as first:
        checkpoint.save(first, make_state(1))
        with checkpoint.manager(tmp_path) as second:
            assert checkpoint.save(second, make_state(2))
            assert not is_free(tmp_path)
        assert not is_free(tmp_path)
    assert is_free(tmp_path)


def test_a_second_writer_is_refused_until_the_first_has_ended(tmp_path):
    """A lock of another file descriptor is like one of another process."""
    with checkpoint.manager(tmp_path) as manager:
        checkpoint.save(manager, make_state(1))
    lock = os.open(tmp_path / _lock.NAME, os.O_RDWR)
    fcntl.flock(lock, fcntl.LOCK_EX)
    before = sorted(tmp_path.rglob("*"))
    told = "another process saves into .*Choose another directory"
    with (
        checkpoint.manager(tmp_path) as manager,
        pytest.raises(RuntimeError, match=told),
    ):
        checkpoint.save(manager, make_state(2))
    assert sorted(tmp_path.rglob("*")) == before
    os.close(lock)
    with checkpoint.manager(tmp_path) as manager:
        assert checkpoint.save(manager, make_state(2))


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_file_systems_without_locks_go_without(tmp_path, monkeypatch, code):
    def flock(*args):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(_lock.fcntl, "flock", flock)
    with checkpoint.manager(tmp_path) as manager:
        assert checkpoint.save(manager, make_state(1))


@pytest.mark.parametrize("kind", ["file", "link", "hard link", "broken link"])
def test_what_lies_in_its_place_stays_as_it_is(tmp_path, kind):
    directory, victim = tmp_path / "run", tmp_path / "victim"
    directory.mkdir()
    victim.write_text("precious")
    lock = directory / _lock.NAME
    {
        "file": lambda: shutil.copy(victim, lock),
        "link": lambda: lock.symlink_to(victim),
        "hard link": lambda: os.link(victim, lock),
        "broken link": lambda: lock.symlink_to(tmp_path / "new"),
    }[kind]()
    with checkpoint.manager(directory) as manager:
        if kind in ("file", "hard link"):
            assert checkpoint.save(manager, make_state(1))
            assert lock.read_text() == "precious"
        else:
            with pytest.raises(checkpoint.CheckpointSaveError, match=_lock.NAME):
                checkpoint.save(manager, make_state(1))
    assert victim.read_text() == "precious"
    assert not (tmp_path / "new").exists()


def test_a_closed_manager_saves_nothing_and_holds_nothing(tmp_path):
    with checkpoint.manager(tmp_path) as manager:
        checkpoint.save(manager, make_state(1))
    with pytest.raises(RuntimeError, match="is closed; expected an open one"):
        checkpoint.save(manager, make_state(2))
    assert is_free(tmp_path)
    manager.close()


def test_a_manager_leaves_alone_what_others_write(tmp_path):
    """Those of its process, and names that only look like half-written steps."""
    notes = ("5.orbax-checkpoint-tmp.kept", "best.orbax-checkpoint-tmp", "notes-tmp")
    for name in notes:
        (tmp_path / name).mkdir()
    with checkpoint.manager(tmp_path) as first, checkpoint.manager(tmp_path) as second:
        checkpoint.save(first, make_state(1))
        live = tmp_path / "7.orbax-checkpoint-tmp"
        live.mkdir()
        checkpoint.save(second, make_state(2))
        assert live.exists()
    assert all((tmp_path / name).exists() for name in notes)


@pytest.mark.filterwarnings("ignore:.*newer than the state")
def test_several_threads_save_with_one_manager(tmp_path):
    saved = []

    def work(manager, steps):
        for step in steps:
            if checkpoint.save(manager, make_state(step)):
                saved.append(step)

    with checkpoint.manager(tmp_path, max_to_keep=None) as manager:
        threads = [
            threading.Thread(target=work, args=(manager, range(start, 12, 2)))
            for start in (1, 2)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert manager.all_steps() == sorted(saved)
    assert not any(report.problem for report in checkpoint.verify(tmp_path))
