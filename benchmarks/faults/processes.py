"""Faults that need processes of their own: kills, full disks, two writers."""

import contextlib
import pathlib
import random
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from benchmarks.faults.training import AROUND, Reference, Row, words
from benchmarks.process import Process, new_folder, on_disk

# Of so many kills one must fall into a save; fewer may all miss by chance.
_ENOUGH = 10


class Worker(Process):
    """A process of the run that `faults.training` describes."""

    def __init__(
        self,
        task: str,
        directory: pathlib.Path,
        reference: Reference,
        steps: int,
        prefix: Sequence[str] = (),
    ):
        arguments = [task, str(directory), str(reference.width), str(steps)]
        super().__init__("benchmarks.faults.worker", arguments, prefix)


class _Kill(NamedTuple):
    in_a_save: bool
    lost: bool


def kills(reference: Reference, count: int, seed: int = 0) -> list[Row]:
    """Kills a run at random moments of its saves, and lets it go on each time."""
    chains = min(2, count)
    shares = [count // chains + (i < count % chains) for i in range(chains)]
    with ThreadPoolExecutor(chains) as pool:
        jobs = [
            pool.submit(_chain, reference, share, random.Random(seed + i))
            for i, share in enumerate(shares)
        ]
        results = [job.result() for job in jobs]
    found = [kill for result, _ in results for kill in result]
    ends = [good for _, good in results]
    lost = sum(kill.lost for kill in found)
    within = sum(kill.in_a_save for kill in found)
    hit = within > 0 or count < _ENOUGH
    return [
        Row(
            "`kill -9` at a random moment of a save",
            count,
            f"the newest complete step each time ({within} kills left a half-written "
            f"one); {lost} lost",
            "",
            not lost and all(ends) and hit,
        )
    ]


def _chain(
    reference: Reference, count: int, chance: random.Random
) -> tuple[list[_Kill], bool]:
    found: list[_Kill] = []
    with new_folder() as directory:
        complete = 0  # the newest step that must be there
        there = 0  # the newest step that is there
        duration = 0.1  # of a save, in seconds; learnt on the way
        for turn in range(count + 1):
            worker = Worker("run", directory, reference, reference.steps)
            first = worker.hear()
            step = first["restored"]
            right = first["fingerprint"] == reference[step]
            if turn:
                lost = step != there or there < complete or not right
                found[-1] = found[-1]._replace(lost=lost)
            if turn == count:
                worker.hear_all()
                return found, reference.is_on_disk(directory, reference.steps)
            for _ in range(chance.randint(2, 3)):
                # The one before the step that it names may be under way.
                complete = worker.hear()["saving"] - 2
                before = time.perf_counter()
            if chance.random() < 0.5:
                worker.hear()
                duration = time.perf_counter() - before
                complete += 1
            time.sleep(chance.uniform(0, duration))
            worker.kill()
            there, torn = on_disk(directory)
            found.append(_Kill(torn > 0, lost=False))
    raise AssertionError("the last worker returns")


def two_writers(reference: Reference) -> list[Row]:
    """A second run on the directory of one that is still going."""
    with new_folder() as directory:
        first = Worker("hold", directory, reference, reference.steps)
        while "holding" not in first.hear():
            pass
        told = _error_of(Worker("run", directory, reference, reference.steps))
        first.go_on()
        first.hear_all()
        steps = reference.steps
        went_on = reference.is_on_disk(directory, steps)

        killed = Worker("hold", directory, reference, steps + AROUND)
        resumed = killed.hear()["restored"] == steps
        while "holding" not in killed.hear():
            pass
        killed.kill()
        after = Worker("run", directory, reference, steps + AROUND)
        resumed &= after.hear()["restored"] == steps + 1
        after.hear_all()
        taken_over = resumed and reference.is_on_disk(directory, steps + AROUND)
    return [
        Row(
            "two writers on one directory",
            1,
            "the first goes on; the second saves nothing",
            told.replace(str(directory), "DIR"),
            went_on and "expected one run for each directory" in told,
        ),
        Row("a writer after one that was killed", 1, "goes on", "", taken_over),
    ]


def _error_of(worker: Worker) -> str:
    try:
        worker.hear_all()
    except RuntimeError as error:
        return str(error).split(": ", 1)[-1]
    return ""


def disks(reference: Reference) -> list[Row]:
    """A disk that gets full, and one that cannot be written."""
    if not _may_mount():
        skipped = "not tried: this user may not mount a tmpfs (`unshare`)"
        return [
            Row("the disk is full", 0, skipped, "", None),
            Row("the directory is read-only", 0, skipped, "", None),
        ]
    return [_full_disk(reference), _read_only(reference)]


def _full_disk(reference: Reference) -> Row:
    with new_folder() as directory, _saved(reference, 1) as saved:
        # Room for about three steps, and for four more without the ballast: how much
        # one takes differs by a third when it is small.
        size = 512 * sum(path.stat().st_blocks for path in saved.rglob("*"))
        script = (
            f"mount -t tmpfs -o size={int(7.5 * size)} none {directory} && "
            f"head -c {4 * size} /dev/urandom > {directory}/ballast && "
            'exec "$@"'
        )
        heard = Worker(
            "fill", directory, reference, reference.steps, _mounted(script)
        ).hear_all()
    kept = heard["kept"]
    good = (
        heard["intact"]
        and heard["saved"]
        and kept == list(range(1, heard["full_at"]))
        and heard["fingerprint"] == reference[reference.steps]
    )
    outcome = f"the steps {words(kept)} are intact; after making room, the same step is"
    told = heard["told"].replace(str(directory), "DIR")
    return Row("the disk is full", 1, f"{outcome} saved", told, good)


def _read_only(reference: Reference) -> Row:
    with new_folder() as directory, _saved(reference, 2) as saved:
        script = (
            f"mount --bind {saved} {directory} && "
            f"mount -o remount,bind,ro {directory} && "
            'exec "$@"'
        )
        heard = Worker(
            "read_only", directory, reference, reference.steps, _mounted(script)
        ).hear_all()
    good = heard["restored"] == 2 and heard["fingerprint"] == reference[reference.steps]
    told = heard["told"].replace(str(directory), "DIR")
    outcome = "restores; saving is an error, training can go on"
    return Row("the directory is read-only", 1, outcome, told, good)


@contextlib.contextmanager
def _saved(reference: Reference, steps: int) -> Iterator[pathlib.Path]:
    """A directory with checkpoints of the first steps."""
    with new_folder() as directory:
        Worker("run", directory, reference, steps).hear_all()
        yield directory


def _mounted(script: str) -> list[str]:
    """Returns what to put before a command for it to run with mounts of its own."""
    return ["unshare", "--mount", "--map-root-user", "sh", "-ec", script, "sh"]


def _may_mount() -> bool:
    if shutil.which("unshare") is None:
        return False
    with new_folder() as directory:
        command = _mounted(f"mount -t tmpfs none {directory}")
        return subprocess.run(command, capture_output=True).returncode == 0
