"""Every file of a step x every kind of damage x everything that reads it.

Whatever lies on the disk, nothing but a state that was saved comes back, the step that
is damaged is named, and the one before it is found.
"""

import json
import re
import shutil
import subprocess
import sys
import warnings
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from etils import epath
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from _models import changed
from benchmarks.faults.files import empty, flip, truncate
from flax_amp import AmpTrainState, __main__, checkpoint, init_scaler
from flax_amp.checkpoint import _checksums, _steps

pytestmark = pytest.mark.once

METADATA = "_CHECKPOINT_METADATA"


def make_state(step=0):
    # Random bits: Orbax compresses others, and their bytes have a checksum then.
    params = {"w": jax.random.normal(jax.random.key(step), (16, 64)), "b": jnp.ones(5)}
    return AmpTrainState.create(
        params=params,
        tx=optax.adam(0.1),
        rngs={"dropout": jax.random.key(0)},
        scaler=init_scaler(scaler=2.0**step),
    ).replace(step=jnp.int32(step))


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A directory with the steps 1 and 2, and neighbours that are none."""
    directory = tmp_path_factory.mktemp("steps")
    with checkpoint.manager(directory, best_metric="loss") as manager:
        for step in (1, 2):
            assert checkpoint.save(manager, make_state(step), {"loss": 1.0})
    for name in ("eval_100", "03", "+4", "notes"):
        (directory / name).mkdir()
    (directory / "2024").write_text("a file")
    return directory


@pytest.fixture
def steps(written, tmp_path):
    return shutil.copytree(written, tmp_path / "steps")


def put(text):
    return lambda path: path.write_text(text)


def replace(make):
    def damage(path):
        path.unlink()
        make(path)

    return damage


DAMAGE = {
    "missing": lambda path: path.unlink(),
    "empty": empty,
    "truncated": truncate,
    "flipped": flip,
    "a directory": replace(lambda path: path.mkdir()),
    "a link to nothing": replace(lambda path: path.symlink_to("nowhere")),
    "a link to itself": replace(lambda path: path.symlink_to(path.name)),
}
TEXTS = {
    "no JSON": put('{"item_handlers": '),
    "deep JSON": put("[" * 100_000 + "]" * 100_000),
    **{text: put(text) for text in ("{}", "[]", "null")},
    "a text": put('"custom_metadata item_handlers"'),
    "lists": put('{"item_handlers": [], "custom_metadata": [], "tree_metadata": [1]}'),
    "texts": put('{"item_handlers": 1, "custom_metadata": "x", "tree_metadata": "x"}'),
    "no record": put('{"item_handlers": {}, "custom_metadata": {"flax_amp": null}}'),
}
DAMAGE |= TEXTS


def files_of(directory):
    """Returns the files of step 2, with names that are the same in every run."""
    folder = directory / "2"
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return [str(path.relative_to(folder)) for path in files]


def largest_file(directory):
    """Returns the file of step 2 that holds most of its arrays."""
    files = [path for path in (directory / "2").rglob("d/*") if path.is_file()]
    return max(files, key=lambda path: path.stat().st_size)


def read(directory, reader):
    """Returns the step that came back, after making sure that it is what was saved."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        state = reader(directory, make_state())
    step = int(state.step)
    assert not changed(make_state(step), state)
    expected = re.compile("step 2 is damaged: .*Restored step 1 instead")
    named = [w for w in told if expected.search(str(w.message))]
    assert len(named) == len(told) == (step == 1), told
    return step


def check(directory, *, everything=True):
    """Returns the step that all readers find."""
    step = read(directory, checkpoint.restore)
    first, second = checkpoint.verify(directory)
    assert (first.step, first.problem) == (1, "")
    assert (second.step, bool(second.problem)) == (2, step == 1), second
    if everything:
        assert read(directory, checkpoint.migrate) == step
        assert __main__.main(["checkpoint", str(directory)]) == (step == 1)
    return step


def test_neighbours_are_no_steps(steps):
    assert check(steps) == 2
    with checkpoint.manager(steps) as manager:
        assert list(manager.all_steps()) == [1, 2]
    reports = checkpoint.verify(steps)
    assert [report.step for report in reports] == [1, 2]
    assert all(report.has_checksums and not report.problem for report in reports)
    assert [report.scaler["scaler"] for report in reports] == [2.0, 4.0]
    assert all(report.size > 16 * 64 * 4 for report in reports)


@pytest.mark.parametrize("kind", DAMAGE)
def test_metadata(steps, kind):
    DAMAGE[kind](steps / "2" / METADATA)
    # The byte that is flipped is one of a date, which says nothing of the state.
    assert check(steps, everything=False) == (2 if kind == "flipped" else 1)


def is_text(path):
    return path.read_bytes().isascii()


@pytest.mark.slow
@pytest.mark.parametrize("kind", DAMAGE)
def test_every_file(steps, kind, tmp_path):
    """Each file in turn; all readers together meet each kind, and each file."""
    outcomes, turn = {}, list(DAMAGE).index(kind)
    # What a text says matters only in the place of another text.
    files = [
        x for x in files_of(steps) if kind not in TEXTS or is_text(steps / "2" / x)
    ]
    for at, name in enumerate(files):
        directory = shutil.copytree(steps, tmp_path / "broken")
        DAMAGE[kind](directory / "2" / name)
        outcomes[name] = check(directory, everything=(at + turn) % 4 == 0)
        shutil.rmtree(directory)
    arrays = [step for name, step in outcomes.items() if name.startswith("default/d/")]
    assert set(arrays) <= {1} and bool(arrays) == (kind not in TEXTS), outcomes
    # Every other file is checked but the metadata, which Orbax writes last.
    assert {name for name in outcomes if outcomes[name] == 2} <= {
        "commit_success.txt",
        "metrics/metrics",
        "metrics/commit_success.txt",
        METADATA if kind == "flipped" else "",
    }


def test_a_flipped_byte_of_an_array_is_named(steps):
    """Orbax itself restores it without a word."""
    found = []
    for path in sorted((steps / "2/default").rglob("d/*")):
        whole = path.read_bytes()
        for at in np.linspace(0, 1, 6):
            flip(path, at)
            try:
                restored = checkpoint.restore(steps, make_state(), step=2)
                assert not changed(make_state(2), restored)
            except checkpoint.CorruptCheckpointError as error:
                found.append(str(error))
            path.write_bytes(whole)
    assert all("changed on disk" in text for text in found) and found, found


@pytest.mark.parametrize("name", ["default", "metrics", "default/d", ""])
def test_a_file_in_the_place_of_a_folder(steps, name):
    folder = steps / "2" / name
    shutil.rmtree(folder)
    if name:
        folder.write_text("{}")
        assert check(steps) == (2 if name == "metrics" else 1)
    else:
        folder.mkdir()
        assert check(steps) == 1


def test_every_block_of_a_file_is_checked(steps, monkeypatch):
    monkeypatch.setattr(_checksums, "_BLOCK", 1000)
    folder = epath.Path(steps / "2")
    _checksums.write(folder)
    for part in ((0, 1), (1, 3)):
        _checksums.check(folder, part)
    path = largest_file(steps)
    whole = path.read_bytes()
    for damaged in (whole + b"x", whole[:-1], whole[:-2000], whole[::-1]):
        path.write_bytes(damaged)
        with pytest.raises(checkpoint.CorruptCheckpointError, match=path.name):
            _checksums.check(folder)
    for at in range(0, len(whole), 500):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(checkpoint.CorruptCheckpointError, match=path.name):
            _checksums.check(folder)


OUTAGES = [
    OSError(24, "Too many open files"),
    PermissionError(13, "Permission denied"),
    MemoryError("no memory"),
    ValueError("UNAVAILABLE: connection lost"),
]


@pytest.mark.parametrize("error", OUTAGES, ids=lambda error: type(error).__name__)
def test_an_outage_is_not_taken_for_damage(steps, error, monkeypatch):
    """No other step is restored, and none is set aside."""

    def fail(*args, **kwargs):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(ocp.Checkpointer, "restore", fail)
        for read in (checkpoint.restore, checkpoint.migrate):
            with pytest.raises(OSError, match="may be intact all the same"):
                read(steps, make_state())
    with checkpoint.manager(steps) as manager:
        assert checkpoint.save(manager, make_state(3), {"loss": 1.0})
        assert manager.all_steps() == [1, 2, 3]


def test_no_intact_step_is_one_error_that_names_all(steps):
    for step in "12":
        (steps / step / "default/_METADATA").write_text("{")
    with pytest.raises(checkpoint.CorruptCheckpointError) as error:
        checkpoint.restore(steps, make_state())
    for text in ("step 2 is damaged", "step 1 is damaged", "from a backup"):
        assert text in str(error.value)


def test_a_misfit_is_not_taken_for_damage(steps):
    other = AmpTrainState.create(params={"v": jnp.ones(2)}, tx=optax.adam(0.1))
    with pytest.raises(ValueError, match="step 2 in .* does not fit the target"):
        checkpoint.restore(steps, other)


def test_names_of_several_kinds_are_not_guessed_between(steps, tmp_path):
    """Of other programs; where there are steps of a manager, they are the steps."""
    for name in ("checkpoint_3", "eval_100"):
        shutil.copytree(steps / "1", tmp_path / "other" / name)
    message = "different names, `checkpoint_<number>` and `eval_<number>`; expected one"
    with pytest.raises(ValueError, match=message):
        checkpoint.migrate(tmp_path / "other", make_state())
    shutil.rmtree(tmp_path / "other/eval_100")
    assert int(checkpoint.migrate(tmp_path / "other", make_state()).step) == 1


# The record and the list of checksums


def sign(files):
    return zlib.crc32(json.dumps(files, sort_keys=True).encode())


LISTS = {
    "missing": None,
    "not signed": {"files": {}, "checksum": 0},
    "not a dict": [1],
    "files are a text": {"files": "abc", "checksum": sign("abc")},
    "of another step": {"files": {"default/x": [1]}, "checksum": sign({})},
}


def test_a_damaged_list_of_checksums(steps):
    path = steps / "2" / _checksums.NAME
    for name, content in LISTS.items():
        path.unlink() if content is None else path.write_text(json.dumps(content))
        assert check(steps, everything=False) == 1, name
        problem = checkpoint.verify(steps)[1].problem
        said = "is missing" if content is None else "list of checksums is damaged"
        assert said in problem, name


def write_record(directory, record):
    path = directory / "2" / METADATA
    content = json.loads(path.read_text())
    content["custom_metadata"]["flax_amp"] = record
    path.write_text(json.dumps(content))


def test_a_newer_format_is_named(steps):
    write_record(steps, {"format": 3, "step": 2})
    message = "format 3; expected at most 2.*Update flax_amp"
    with pytest.raises(ValueError, match=message):
        checkpoint.restore(steps, make_state())


def test_a_damaged_record_is_damage(steps):
    write_record(steps, [1])
    assert check(steps) == 1
    assert (
        "its record in the metadata is damaged" in checkpoint.verify(steps)[1].problem
    )


def test_a_step_without_checksums_is_taken_as_it_is(steps):
    """The version before had digests of arrays in its record."""
    (steps / "2" / _checksums.NAME).unlink()
    digests = [[["step"], [], "int32", "0" * 16]]
    write_record(steps, {"format": 1, "step": 2, "leaves": digests, "checksum": "0"})
    assert read(steps, checkpoint.restore) == 2
    assert not checkpoint.verify(steps)[1].has_checksums


def test_a_step_under_another_number_is_named(steps):
    shutil.copytree(steps / "1", steps / "9")
    with pytest.warns(
        checkpoint.CheckpointWarning, match="step 9 is damaged: .*those of step 1"
    ):
        assert int(checkpoint.restore(steps, make_state()).step) == 2
    assert "those of step 1" in checkpoint.verify(steps)[-1].problem
    with pytest.raises(checkpoint.CorruptCheckpointError, match="those of step 1"):
        checkpoint.migrate(steps, make_state(), step=9)


def test_plain_orbax_reads_ours_and_what_it_saved_is_taken_as_it_is(steps):
    with ocp.CheckpointManager(steps) as manager:
        read = manager.restore(2, args=ocp.args.StandardRestore(make_state()))
        manager.save(3, args=ocp.args.StandardSave(make_state(3)))
    assert not changed(make_state(2), read)
    assert not changed(make_state(3), checkpoint.restore(steps, make_state()))
    report = checkpoint.verify(steps)[-1]
    assert not report.problem and not report.has_checksums


def test_a_sharded_checkpoint(tmp_path, mesh):
    sharding = NamedSharding(mesh, P("data"))
    state = make_state(1)
    w = jax.device_put(state.params["w"], sharding)
    split = state.replace(params=state.params | {"w": w})
    with checkpoint.manager(tmp_path) as manager:
        checkpoint.save(manager, split)
        (report,) = checkpoint.verify(manager)
    assert report.has_checksums and not report.problem


# Saving after damage


def test_the_run_that_went_on_from_an_older_step_is_saved(steps):
    """Damaged files stay, under another name."""
    (steps / "2/default/_METADATA").unlink()
    damaged = files_of(steps)
    with checkpoint.manager(steps) as manager:
        with pytest.warns(checkpoint.CheckpointWarning, match="step 2 is damaged"):
            state = checkpoint.restore(manager, make_state())
        state = state.replace(step=jnp.int32(2))
        with pytest.warns(
            checkpoint.CheckpointWarning, match=r"damaged steps \[2\] are renamed"
        ) as told:
            assert checkpoint.save(manager, state, {"loss": 1.0})
        assert told[0].filename == __file__
        assert manager.all_steps() == [1, 2]
    assert not changed(state, checkpoint.restore(steps, make_state(), step=2))
    folder = steps / "2.damaged"
    assert damaged == sorted(
        str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()
    )


def test_intact_steps_are_not_moved(steps):
    with checkpoint.manager(steps) as manager:
        checkpoint.restore(manager, make_state(), step=1)
        for step, problem in ((1, "newer than the state"), (2, "neither saved nor")):
            with pytest.warns(
                checkpoint.CheckpointWarning, match=f"step 2,.* {problem}"
            ):
                assert not checkpoint.save(manager, make_state(step))
    assert not changed(make_state(2), checkpoint.restore(steps, make_state()))


# Steps that a writer removes


@pytest.mark.parametrize("part", ["default/d", "default", METADATA])
def test_an_old_step_that_is_half_deleted_is_no_damage(steps, part, capsys):
    path = steps / "1" / part
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    first, second = checkpoint.verify(steps)
    assert first.half_deleted and first.problem and not second.half_deleted
    assert not first.has_checksums and first.scaler == {}
    assert __main__.main(["checkpoint", str(steps)]) == 0
    assert "half deleted, a newer step is intact" in capsys.readouterr().out
    shutil.rmtree(steps / "2")
    assert __main__.main(["checkpoint", str(steps)]) == 1  # nothing is intact


@pytest.fixture
def beside_a_writer(steps, monkeypatch):
    """A directory where step 1 is removed for step 2 when it is read first."""
    hidden = (steps / "2").rename(steps / "hidden")
    read = _steps.Step.verified_tree

    def wrapped(*args):
        if hidden.exists():
            hidden.rename(steps / "2")
            shutil.rmtree(steps / "1")
        return read(*args)

    monkeypatch.setattr(_steps.Step, "verified_tree", wrapped)
    return steps


@pytest.mark.parametrize("reader", [checkpoint.restore, checkpoint.migrate])
def test_a_reader_beside_a_writer_lists_again(beside_a_writer, reader):
    assert read(beside_a_writer, reader) == 2


@pytest.mark.parametrize("reader", [checkpoint.restore, checkpoint.migrate])
def test_a_step_that_was_asked_for_and_has_gone_is_named(beside_a_writer, reader):
    with pytest.raises(FileNotFoundError, match=r"steps \[2\]; expected step 1"):
        reader(beside_a_writer, make_state(), step=1)


def test_verify_beside_a_writer_lists_again(beside_a_writer):
    (report,) = checkpoint.verify(beside_a_writer)
    assert (report.step, report.problem) == (2, "")


# What is said


def test_command_line(steps, capsys):
    assert __main__.main(["checkpoint", str(steps)]) == 0
    told = capsys.readouterr().out.splitlines()
    assert told[0].split() == ["step", "MB", "scale", "resets", "integrity"]
    assert [line.split()[0] for line in told[1:]] == ["1", "2"]
    assert all(line.endswith("intact") for line in told[1:])

    flip(largest_file(steps))
    assert __main__.main(["checkpoint", str(steps)]) == 1
    assert "DAMAGED: default/" in capsys.readouterr().out


QUIET = """
import runpy, sys, flax_amp.checkpoint as checkpoint, jax, optax, jax.numpy as jnp
from flax_amp import AmpTrainState
target = AmpTrainState.create(
    params={"w": jnp.ones((16, 64)), "b": jnp.ones(5)},
    tx=optax.adam(0.1),
    rngs={"dropout": jax.random.key(0)},
)
assert checkpoint.restore(sys.argv[1], target).step == 1
checkpoint.migrate(sys.argv[1], target, step=1)
sys.argv.insert(1, "checkpoint")
runpy.run_module("flax_amp", run_name="__main__")
"""


@pytest.mark.slow
def test_one_warning_is_all_that_is_said(steps):
    """Not a hundred lines of tracebacks out of the threads that went on reading."""
    for path in (steps / "2/default/d").iterdir():
        truncate(path)
    done = subprocess.run(
        [sys.executable, "-c", QUIET, str(steps)], capture_output=True, text=True
    )
    assert done.returncode == 1, done.stderr  # of `python -m flax_amp`
    assert done.stdout.count("intact") == 1 and "DAMAGED: default/d" in done.stdout
    assert len(done.stderr.splitlines()) <= 2, done.stderr
    assert "CheckpointWarning" in done.stderr
