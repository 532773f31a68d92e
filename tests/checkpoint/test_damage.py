"""Every file of a step x every kind of damage x everything that reads it.

Whatever lies on the disk, nothing but a state that was saved comes back, the step that
is damaged is named, and the one before it is found.
"""

import functools
import json
import re
import shutil
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from etils import epath

from _models import changed
from flax_amp import AmpTrainState, __main__, checkpoint
from flax_amp.checkpoint import _damage, _steps

pytestmark = pytest.mark.once

METADATA = "_CHECKPOINT_METADATA"
WARNING = checkpoint.CheckpointWarning


@functools.cache
def make_state(step=0):
    # Random bits: Orbax compresses others, and their bytes have a checksum then.
    params = {"w": jax.random.normal(jax.random.key(step), (16, 64)), "b": jnp.ones(5)}
    return AmpTrainState.create(
        params=params, tx=optax.adam(0.1), rngs={"dropout": jax.random.key(0)}
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


def flip(path, at=0.5):
    content = bytearray(path.read_bytes())
    if content:
        content[int(at * (len(content) - 1))] ^= 0x10
    path.write_bytes(content)


def truncate(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


DAMAGE = {
    "missing": lambda path: path.unlink(),
    "empty": lambda path: path.write_bytes(b""),
    "truncated": truncate,
    "flipped": flip,
    "a directory": lambda path: path.unlink() or path.mkdir(),
    "a link to itself": lambda path: path.unlink() or path.symlink_to(path.name),
}
TEXTS = {
    "no JSON": put('{"item_handlers": '),
    "deep JSON": put("[" * 100_000 + "]" * 100_000),
    **{text: put(text) for text in ("{}", "[]", "null", '{"default/x": [1, 2]}')},
    "lists": put('{"item_handlers": [], "custom_metadata": [], "tree_metadata": [1]}'),
    "no record": put('{"item_handlers": {}, "custom_metadata": {"flax_amp": null}}'),
}
DAMAGE |= TEXTS


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


def test_neighbours_are_no_steps(steps, capsys):
    assert check(steps) == 2
    lines = capsys.readouterr().out.splitlines()[1:]
    assert [line.split()[0] for line in lines] == ["1", "2"]
    with checkpoint.manager(steps) as manager:
        assert list(manager.all_steps()) == [1, 2]
    for report in checkpoint.verify(steps):
        assert report.has_checksums


# flax_amp reads the first two files itself. Of the third one, only the checksum counts,
# which differs for every text.
DESCRIBED = [(name, kind) for name in (METADATA, _damage.NAME) for kind in DAMAGE]
DESCRIBED += [("default/_METADATA", kind) for kind in DAMAGE if kind not in TEXTS]


@pytest.mark.parametrize("name, kind", DESCRIBED)
def test_a_file_that_describes(steps, name, kind):
    DAMAGE[kind](steps / "2" / name)
    # The byte that is flipped is one of a date, which says nothing of the state.
    harmless = name == METADATA and kind == "flipped"
    assert check(steps, everything=False) == (2 if harmless else 1)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind in DAMAGE if kind not in TEXTS])
def test_every_file(steps, kind, tmp_path):
    """Each file in turn; all readers together meet each kind, and each file."""
    outcomes, turn = {}, list(DAMAGE).index(kind)
    found = sorted(path for path in (steps / "2").rglob("*") if path.is_file())
    for at, name in enumerate(str(x.relative_to(steps / "2")) for x in found):
        directory = shutil.copytree(steps, tmp_path / "broken")
        DAMAGE[kind](directory / "2" / name)
        outcomes[name] = check(directory, everything=(at + turn) % 4 == 0)
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


def test_a_flipped_byte_of_an_array_is_named(steps):
    """Orbax itself restores it without a word."""
    for path in sorted((steps / "2/default").rglob("d/*")):
        whole = path.read_bytes()
        for at in (0, 0.5, 1):
            flip(path, at)
            with pytest.raises(checkpoint.CorruptCheckpointError, match="changed on d"):
                checkpoint.restore(steps, make_state(), step=2)
            path.write_bytes(whole)


OUTAGES = [
    OSError(24, "Too many open files"),
    PermissionError(13, "Permission denied"),
    MemoryError("no memory"),
    ValueError("UNAVAILABLE: connection lost"),
    RuntimeError("of the client of a bucket, which has errors of its own"),
]
PLACES = {  # what fails when files are read
    "restore": ocp.Checkpointer,
    "crc32": _damage.zlib,
    "read_bytes": type(epath.Path()),
}


@pytest.mark.parametrize("place", PLACES)
def test_an_outage_is_not_taken_for_damage(steps, place, monkeypatch):
    """No other step is restored, and none is set aside."""
    for error in OUTAGES:

        def fail(*args, error=error, **kwargs):
            raise error

        with monkeypatch.context() as patch:
            patch.setattr(PLACES[place], place, fail)
            for reader in (checkpoint.restore, checkpoint.migrate):
                with pytest.raises(OSError, match="may be intact all the same"):
                    reader(steps, make_state())
            if place != "restore":
                with checkpoint.manager(steps) as manager, pytest.raises(OSError):
                    checkpoint.save(manager, make_state(1), {"loss": 1.0})
    assert check(steps) == 2


def test_another_format_and_another_number_are_named(steps):
    shutil.copytree(steps / "1", steps / "9")
    with pytest.warns(WARNING, match="step 9 is damaged: .*the files of step 1"):
        assert int(checkpoint.restore(steps, make_state()).step) == 2
    path = steps / "9" / METADATA
    content = json.loads(path.read_text())
    content["custom_metadata"]["flax_amp"]["format"] = 2
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match="format 2; expected 3. Update flax_amp, or"):
        checkpoint.restore(steps, make_state())


def test_plain_orbax_reads_ours_and_what_it_saved_is_taken_as_it_is(steps):
    with ocp.CheckpointManager(steps) as manager:
        found = manager.restore(2, args=ocp.args.StandardRestore(make_state()))
        manager.save(3, args=ocp.args.StandardSave(make_state(3)))
    assert not changed(make_state(2), found)
    assert not changed(make_state(3), checkpoint.restore(steps, make_state()))
    report = checkpoint.verify(steps)[-1]
    assert not report.problem and not report.has_checksums
    (steps / "3/default/_METADATA").unlink()
    with pytest.warns(WARNING, match="step 3 is damaged"):
        assert int(checkpoint.restore(steps, make_state()).step) == 2


# Saving after damage


@pytest.mark.parametrize("restores", [True, False])
def test_the_run_that_went_on_from_an_older_step_is_saved(steps, restores):
    """Damaged files stay, under another name; whether this process has seen them."""
    (steps / "2/default/_METADATA").unlink()
    with checkpoint.manager(steps, max_to_keep=1) as manager:
        if restores:
            with pytest.warns(WARNING, match="step 2 is damaged"):
                checkpoint.restore(manager, make_state())
        with pytest.warns(WARNING, match=r"damaged steps \[2\] are renamed") as told:
            assert checkpoint.save(manager, make_state(2), {"loss": 1.0})
        assert told[0].filename == __file__
    assert not changed(make_state(2), checkpoint.restore(steps, make_state(), step=2))
    (folder,) = steps.glob("2.damaged-*")
    assert (folder / "default/manifest.ocdbt").exists()


def test_a_damaged_step_before_an_intact_one_stays(steps):
    (steps / "1/default/_METADATA").unlink()
    with (
        checkpoint.manager(steps) as manager,
        pytest.warns(
            WARNING, match="holds step 2, newer than the state; this step stays"
        ),
    ):
        assert not checkpoint.save(manager, make_state(1), {"loss": 1.0})
    assert not changed(make_state(2), checkpoint.restore(steps, make_state()))
    assert (steps / "1").exists()


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


@pytest.mark.parametrize("is_checked", [False, True])
def test_a_reader_beside_a_writer_lists_again(steps, monkeypatch, is_checked):
    """Step 1 is removed for step 2 when it is read, before or after it was checked."""
    hidden = (steps / "2").rename(steps / "hidden")
    check_files = _damage.check

    def wrapped(*args):
        if is_checked:
            check_files(*args)
        if hidden.exists():
            hidden.rename(steps / "2")
            shutil.rmtree(steps / "1")
        if not is_checked:
            check_files(*args)

    monkeypatch.setattr(_damage, "check", wrapped)
    assert read(steps, checkpoint.restore) == 2


def test_no_process_reads_what_another_has_found_damaged(steps, monkeypatch):
    """It would take the damage for an outage, and wait for the others for ever."""
    kinds = iter([1, 0, 0])  # of the other process: step 2 is damaged, step 1 is not
    read_tree, folders = _steps._trees.read_tree, []

    def allgather(kind):
        return np.array([kind, next(kinds)])

    def noted(folder, *args):
        folders.append(folder.parent.name)
        return read_tree(folder, *args)

    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(_steps.multihost_utils, "process_allgather", allgather)
    monkeypatch.setattr(_steps._trees, "read_tree", noted)
    with pytest.warns(WARNING, match="step 2 is damaged: .*another process failed"):
        assert int(checkpoint.restore(steps, make_state()).step) == 1
    assert folders == ["1"]
