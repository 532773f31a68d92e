"""Faults of files: truncated, emptied, flipped, deleted, or from the future."""

import json
import pathlib
import shutil
import warnings
from collections import Counter
from collections.abc import Callable, Iterator

from benchmarks.faults.training import Reference, Row, new_state, train
from benchmarks.process import new_folder
from flax_amp import AmpTrainState, checkpoint

_NEWEST = 2


def truncate(path: pathlib.Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def empty(path: pathlib.Path) -> None:
    path.write_bytes(b"")


def flip(path: pathlib.Path, at: float = 0.5) -> None:
    """Flips a bit, at so much of the length of a file."""
    content = bytearray(path.read_bytes())
    if content:
        content[int(at * (len(content) - 1))] ^= 0x10
    path.write_bytes(content)


FAULTS: dict[str, Callable[[pathlib.Path], None]] = {
    "truncated": truncate,
    "emptied": empty,
    "one byte flipped": flip,
    "deleted": pathlib.Path.unlink,
}


def every_file(reference: Reference) -> Iterator[Row]:
    """Damages every file of the newest of two steps, one at a time."""
    with new_folder() as around:
        whole = _two_steps(around / "whole", reference)
        folder = whole / str(_NEWEST)
        files = [p.relative_to(whole) for p in folder.rglob("*") if p.is_file()]
        for fault, damage in FAULTS.items():
            steps: Counter[int] = Counter()
            good, told = True, ""
            for file in sorted(files):
                broken = shutil.copytree(whole, around / "broken")
                damage(broken / file)
                state, warning = _restore(broken, reference)
                step = int(state.step)
                steps[step] += 1
                good &= reference.goes_on(state) and bool(warning) == (step != _NEWEST)
                told = warning.replace(str(broken), "DIR") or told
                shutil.rmtree(broken)
            outcome = (
                f"{steps[_NEWEST]} files: the step itself, nothing of it was in them; "
                f"{steps[_NEWEST - 1]}: the step before"
            )
            yield Row(f"any file of a step {fault}", len(files), outcome, told, good)


def whole_steps(reference: Reference) -> Iterator[Row]:
    """A step that is half deleted, and one that a newer version wrote."""
    with new_folder() as around:
        directory = _two_steps(around / "run", reference)
        newest = directory / str(_NEWEST)

        metadata = newest / "_CHECKPOINT_METADATA"
        text = metadata.read_text()
        content = json.loads(text)
        content["custom_metadata"]["flax_amp"]["format"] = 99
        metadata.write_text(json.dumps(content))
        told = ""
        try:
            _restore(directory, reference)
        except ValueError as error:
            told = str(error).replace(str(directory), "DIR")
        state, _ = _restore(directory, reference, step=_NEWEST - 1)
        good = "Update flax_amp" in told and reference.goes_on(state)
        outcome = "an error; the step before restores when asked for"
        yield Row("a newer format", 1, outcome, told, good)
        metadata.write_text(text)

        shutil.rmtree(newest / "default")
        state, told = _restore(directory, reference)
        good = int(state.step) == _NEWEST - 1 and reference.goes_on(state)
        told = told.replace(str(directory), "DIR")
        yield Row("a half-deleted step", 1, "the step before", told, good)

        with warnings.catch_warnings(), checkpoint.manager(directory) as manager:
            warnings.simplefilter("ignore", checkpoint.CheckpointWarning)
            checkpoint.save(manager, train(state, _NEWEST))
        state, told = _restore(directory, reference)
        good = int(state.step) == _NEWEST and reference.goes_on(state) and not told
        outcome = "the damaged step is renamed, with the time, and the new one saved"
        yield Row("the same step saved again after that", 1, outcome, "", good)


def _two_steps(directory: pathlib.Path, reference: Reference) -> pathlib.Path:
    with checkpoint.manager(directory) as manager:

        def save(state: AmpTrainState) -> None:
            checkpoint.save(manager, state)

        train(new_state(reference.width), _NEWEST, save)
    return directory


def _restore(
    directory: pathlib.Path, reference: Reference, step: int | None = None
) -> tuple[AmpTrainState, str]:
    """Returns a state, and what was said about it."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", checkpoint.CheckpointWarning)
        state = checkpoint.restore(directory, reference.target, step=step)
    messages = [
        str(w.message)
        for w in said
        if issubclass(w.category, checkpoint.CheckpointWarning)
    ]
    return state, " ".join(messages)
