"""Two jobs, or two managers, on one directory: what is complete stays as it is."""

import errno
import itertools
import os
import subprocess
import sys
import threading
import warnings

import jax.numpy as jnp
import numpy as np
import pytest

import _job
from flax_amp import checkpoint
from flax_amp.checkpoint import _directory

pytestmark = pytest.mark.once

# What each of two jobs does, in its own order.
FIRST = ["open", "save 1", "save 2", "end"]
SECOND = ["open", "save 1", "end"]
TARGET = {"params": {"w": jnp.zeros(2)}}


class Process:
    """A job in a process of its own."""

    def __init__(self, mark):
        command = [sys.executable, _job.__file__, str(mark)]
        pipe = subprocess.PIPE
        self.child = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)

    def do(self, *words):
        self.child.stdin.write(" ".join(map(str, words)) + "\n")
        self.child.stdin.flush()
        return self.child.stdout.readline().strip()


SLOW = pytest.param("processes", marks=pytest.mark.slow)


@pytest.fixture(scope="module", params=["managers", SLOW])
def jobs(request):
    if request.param == "managers":
        yield [_job.Job(1), _job.Job(2)]
        return
    children = [Process(1), Process(2)]
    yield children
    for job in children:
        job.child.communicate(timeout=60)


def all_orders():
    length = len(FIRST) + len(SECOND)
    for places in itertools.combinations(range(length), len(SECOND)):
        left = [iter(FIRST), iter(SECOND)]
        of = [int(place in places) for place in range(length)]
        yield [(job, next(left[job])) for job in of]


def situations(order):
    """For each save: how far the other job was when its job opened, and is now."""
    done, at_open = [0, 0], [0, 0]
    for job, words in order:
        if words == "open":
            at_open[job] = done[1 - job]
        elif words.startswith("save"):
            yield job, words, at_open[job], done[1 - job]
        done[job] += 1


def alternates(order):
    """Whether a save of one job follows a save of the other at once."""
    saves = [job if words.startswith("save") else None for job, words in order]
    return any({*pair} == {0, 1} for pair in itertools.pairwise(saves))


def orders():
    """Orders in which each save meets every situation that it meets in any order.

    What a save does depends on the steps that the other job had saved when the manager
    was opened, and on its steps now.
    """
    met = set()
    for order in all_orders():
        if new := {*situations(order)} - met:
            met |= new
            yield order


def content(directory):
    """The bytes of all files of each complete step."""
    folders = [path for path in directory.iterdir() if path.name.isdigit()]
    return {
        int(folder.name): {x: x.read_bytes() for x in folder.rglob("*") if x.is_file()}
        for folder in folders
    }


def owners(directory):
    """The mark of the job that each complete step is of."""
    folders = sorted(path for path in directory.iterdir() if path.name.isdigit())
    read = [checkpoint.migrate(x / "default", TARGET)["params"]["w"] for x in folders]
    return {int(x.name): int(w[0]) for x, w in zip(folders, read, strict=True)}


@pytest.mark.parametrize("waits", [True, False])
def test_nothing_complete_is_lost_or_replaced(jobs, waits, tmp_path):
    # Saves that nobody waits for differ from others only where they may overlap.
    tested = [order for order in orders() if waits or alternates(order)]
    assert len(tested) >= 9
    for number, order in enumerate(tested):
        directory = tmp_path / str(number)
        there, saved = {}, {}
        for job, words in order:
            command, *argument = words.split()
            if command == "open":
                argument = [directory]
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", checkpoint.CheckpointWarning)
                answer = jobs[job].do(command, *argument)
                if waits and command == "save":
                    assert jobs[job].do("wait") == "True"
            if command == "save" and answer == "True":
                assert int(argument[0]) not in saved, order
                saved[int(argument[0])] = job + 1
            if waits and directory.exists():
                now = content(directory)
                assert all(now.get(step) == x for step, x in there.items()), order
                there = now
        assert owners(directory) == saved, order
        reports = {x.step: x.problem for x in checkpoint.verify(directory)}
        assert reports == dict.fromkeys(saved, ""), order


def state(step, mark=1):
    return _job.Job(mark).state.replace(step=jnp.int32(step))


def test_a_second_manager_of_a_process_says_what_it_does_not_save(tmp_path):
    with checkpoint.manager(tmp_path) as late, checkpoint.manager(tmp_path) as first:
        for step in (0, 1, 3):
            assert checkpoint.save(first, state(step))
            with pytest.warns(checkpoint.CheckpointWarning, match="neither saved nor"):
                assert not checkpoint.save(late, state(step, 2))
        with pytest.warns(checkpoint.CheckpointWarning, match="newer than the") as told:
            assert not checkpoint.save(late, state(1, 2))
        assert told[0].filename == __file__
        assert checkpoint.save(late, state(4, 2))
        assert not checkpoint.save(late, state(4, 2))  # its own: without a warning
    restored = checkpoint.restore(tmp_path, state(0), step=3)
    np.testing.assert_array_equal(restored.params["w"], [1, 1])


# The lock

fcntl = pytest.importorskip("fcntl", reason="there are no such locks here")


def is_free(directory):
    """Whether another process could get the lock."""
    file = os.open(directory / _directory.LOCK, os.O_RDWR)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(file)
    return True


def test_the_last_manager_lets_go(tmp_path):
    with checkpoint.manager(tmp_path) as first:
        checkpoint.save(first, state(1))
        with checkpoint.manager(tmp_path) as second:
            assert checkpoint.save(second, state(2))
        assert not is_free(tmp_path)
    assert is_free(tmp_path)
    with pytest.raises(RuntimeError, match="is closed; expected an open manager"):
        checkpoint.save(first, state(3))
    assert is_free(tmp_path)
    first.close()


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_file_systems_without_locks_go_without(tmp_path, monkeypatch, code):
    def flock(*args):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(_directory.fcntl, "flock", flock)
    with checkpoint.manager(tmp_path) as manager:
        assert checkpoint.save(manager, state(1))


def test_a_link_in_the_place_of_the_lock_is_not_followed(tmp_path):
    directory, new = tmp_path / "run", tmp_path / "new"
    directory.mkdir()
    (directory / _directory.LOCK).symlink_to(new)
    error = pytest.raises(checkpoint.CheckpointSaveError, match=_directory.LOCK)
    with checkpoint.manager(directory) as manager, error:
        checkpoint.save(manager, state(1))
    assert not new.exists()


def test_only_what_a_killed_run_has_left_is_removed(tmp_path):
    """And that by the next save: opening a manager changes nothing."""
    notes = ("5.orbax-checkpoint-tmp.kept", "best.orbax-checkpoint-tmp", "notes-tmp")
    left = tmp_path / "6.orbax-checkpoint-tmp"
    for name in (*notes, left):
        (tmp_path / name).mkdir()
    with checkpoint.manager(tmp_path) as manager:
        assert left.exists() and manager.all_steps() == []
        assert checkpoint.save(manager, state(1))
    assert not left.exists() and all((tmp_path / name).exists() for name in notes)


@pytest.mark.filterwarnings("ignore:.*newer than the state")
def test_several_threads_save_with_one_manager(tmp_path):
    saved = []

    def work(manager, steps):
        saved.extend(step for step in steps if checkpoint.save(manager, state(step)))

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
