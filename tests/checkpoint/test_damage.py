"""Every file of a step x every kind of damage x everything that reads it.

Whatever lies on the disk, nothing but a state that was saved comes back, the step that
is damaged is named, and the one before it is found.
"""

import json
import shutil
import subprocess
import sys
import warnings
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from _models import changed
from benchmarks.faults.files import empty, flip, truncate
from flax_amp import AmpTrainState, __main__, checkpoint
from flax_amp.checkpoint import _checksums, _restore, _steps, _verify

METADATA = "_CHECKPOINT_METADATA"


def make_state(step=0):
    params = {"w": jax.random.normal(jax.random.key(step), (16, 16))}
    state = AmpTrainState.create(params=params, tx=optax.sgd(0.1))
    return state.replace(step=jnp.int32(step))


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
    "no JSON": put('{"item_handlers": '),
    "deep JSON": put("[" * 100_000 + "]" * 100_000),
    "{}": put("{}"),
    "[]": put("[]"),
    "null": put("null"),
    "a text": put('"custom_metadata item_handlers"'),
    "lists": put('{"item_handlers": [], "custom_metadata": [], "tree_metadata": [1]}'),
    "texts": put('{"item_handlers": 1, "custom_metadata": "x", "tree_metadata": "x"}'),
    "no record": put('{"item_handlers": {}, "custom_metadata": {"flax_amp": null}}'),
}


def files_of(directory):
    """Returns the files of step 2, with names that are the same in every run."""
    folder = directory / "2"
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return [str(path.relative_to(folder)) for path in files]


def read(directory, reader):
    """Returns the step that came back, after making sure that it is what was saved."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        state = reader(directory, make_state())
    step = int(state.step)
    assert not changed(make_state(step), state)
    named = [str(w.message) for w in told if "step 2 is damaged: " in str(w.message)]
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


def test_damage_that_another_process_found_is_told(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    gathered = "flax_amp.checkpoint._steps.multihost_utils.process_allgather"
    monkeypatch.setattr(gathered, lambda kind: np.array([0, 1]))
    message = "process 1 found damage. Its own error names the files"
    with pytest.raises(checkpoint.CorruptCheckpointError, match=message):
        _steps.agreed(lambda: None)


def test_names_of_several_kinds_are_not_guessed_between(steps, tmp_path):
    """Of other programs; where there are steps of a manager, they are the steps."""
    for name in ("checkpoint_3", "eval_100"):
        shutil.copytree(steps / "1", tmp_path / "other" / name)
    message = "different names, `checkpoint_<number>` and `eval_<number>`; expected one"
    with pytest.raises(ValueError, match=message):
        checkpoint.migrate(tmp_path / "other", make_state())
    shutil.rmtree(tmp_path / "other/eval_100")
    assert int(checkpoint.migrate(tmp_path / "other", make_state()).step) == 1


@pytest.mark.parametrize("kind", DAMAGE)
def test_metadata(steps, kind):
    DAMAGE[kind](steps / "2" / METADATA)
    # The byte that is flipped is one of a date, which says nothing of the state.
    assert check(steps, everything=False) == (2 if kind == "flipped" else 1)


@pytest.mark.slow
@pytest.mark.parametrize("kind", DAMAGE)
def test_every_file(steps, kind, tmp_path):
    outcomes = {}
    for name in files_of(steps):
        directory = shutil.copytree(steps, tmp_path / "broken")
        DAMAGE[kind](directory / "2" / name)
        outcomes[name] = check(directory)
        shutil.rmtree(directory)
    arrays = [step for name, step in outcomes.items() if name.startswith("default/d/")]
    assert set(arrays) == {1}, outcomes
    # Every other file is checked but the metadata, which Orbax writes last.
    assert {name for name in outcomes if outcomes[name] == 2} <= {
        "commit_success.txt",
        "metrics/metrics",
        "metrics/commit_success.txt",
        METADATA if kind == "flipped" else "",
    }


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


def test_a_step_without_digests_of_this_version_is_taken_as_it_is(steps):
    """The version before had digests of arrays in its record."""
    (steps / "2" / _checksums.NAME).unlink()
    path = steps / "2" / METADATA
    content = json.loads(path.read_text())
    record = {"format": 1, "step": 2, "leaves": [[["step"], [], "int32", "0" * 16]]}
    content["custom_metadata"]["flax_amp"] = record | {"checksum": "0" * 16}
    path.write_text(json.dumps(content))
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


# Steps that a writer removes


@pytest.mark.parametrize("part", ["default/d", "default", METADATA])
def test_an_old_step_that_is_half_deleted_is_no_damage(steps, part, capsys):
    path = steps / "1" / part
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    first, second = checkpoint.verify(steps)
    assert first.half_deleted and first.problem and not second.half_deleted
    assert __main__.main(["checkpoint", str(steps)]) == 0
    assert "half deleted, a newer step is intact" in capsys.readouterr().out
    shutil.rmtree(steps / "2")
    assert __main__.main(["checkpoint", str(steps)]) == 1  # nothing is intact


@pytest.fixture
def beside_a_writer(steps, monkeypatch):
    """Removes step 1 for step 2 while `module.name` reads step 1 for the first time."""
    (steps / "2").rename(steps / "hidden")

    def install(module, name):
        read = getattr(module, name)

        def wrapped(directory, step, *args):
            if (steps / "hidden").exists():
                (steps / "hidden").rename(steps / "2")
                shutil.rmtree(steps / "1")
            return read(directory, step, *args)

        monkeypatch.setattr(module, name, wrapped)

    return steps, install


def test_a_reader_beside_a_writer_lists_again(beside_a_writer):
    steps, install = beside_a_writer
    install(_restore, "_read_step")
    assert read(steps, checkpoint.restore) == 2


def test_a_step_that_was_asked_for_and_has_gone_is_named(beside_a_writer):
    steps, install = beside_a_writer
    install(_restore, "_read_step")
    with pytest.raises(FileNotFoundError, match=r"steps \[2\]; expected step 1"):
        checkpoint.restore(steps, make_state(), step=1)


def test_verify_beside_a_writer_lists_again(beside_a_writer):
    steps, install = beside_a_writer
    install(_verify, "describe")
    (report,) = checkpoint.verify(steps)
    assert (report.step, report.problem) == (2, "")


# What is said


QUIET = """
import sys, flax_amp.checkpoint as checkpoint, optax, jax.numpy as jnp
from flax_amp import AmpTrainState
target = AmpTrainState.create(params={"w": jnp.ones((16, 16))}, tx=optax.sgd(0.1))
assert checkpoint.restore(sys.argv[1], target).step == 1
checkpoint.migrate(sys.argv[1], target, step=1)
checkpoint.verify(sys.argv[1])
"""


@pytest.mark.slow
def test_one_warning_is_all_that_is_said(steps):
    """Not a hundred lines of tracebacks out of the threads that went on reading."""
    for path in (steps / "2/default/d").iterdir():
        truncate(path)
    done = subprocess.run(
        [sys.executable, "-c", QUIET, str(steps)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stderr.splitlines()) <= 2, done.stderr
    assert "CheckpointWarning" in done.stderr
