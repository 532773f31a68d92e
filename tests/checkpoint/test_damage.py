"""Every file of a step x every kind of damage x everything that reads it.

Whatever lies on the disk, nothing but a state that was saved comes back, the step that
is damaged is named, and the one before it is found.
"""

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

from _models import changed
from benchmarks.faults.files import empty, flip, truncate
from flax_amp import AmpTrainState, __main__, checkpoint
from flax_amp.checkpoint import _checksums, _steps

pytestmark = pytest.mark.once

METADATA = "_CHECKPOINT_METADATA"


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
    "a link to itself": replace(lambda path: path.symlink_to(path.name)),
}
TEXTS = {
    "no JSON": put('{"item_handlers": '),
    "deep JSON": put("[" * 100_000 + "]" * 100_000),
    **{text: put(text) for text in ("{}", "[]", "null")},
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
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()][1:] == [
        "1",
        "2",
    ]
    with checkpoint.manager(steps) as manager:
        assert list(manager.all_steps()) == [1, 2]
    reports = checkpoint.verify(steps)
    assert all(report.has_checksums and not report.problem for report in reports)
    assert all(report.size > 16 * 64 * 4 for report in reports)
    assert reports[0].scaler["scaler"] == 1


@pytest.mark.parametrize("kind", DAMAGE)
def test_metadata(steps, kind):
    DAMAGE[kind](steps / "2" / METADATA)
    # The byte that is flipped is one of a date, which says nothing of the state.
    assert check(steps, everything=False) == (2 if kind == "flipped" else 1)


@pytest.mark.slow
@pytest.mark.parametrize("kind", DAMAGE)
def test_every_file(steps, kind, tmp_path):
    """Each file in turn; all readers together meet each kind, and each file."""
    outcomes, turn = {}, list(DAMAGE).index(kind)
    found = sorted(path for path in (steps / "2").rglob("*") if path.is_file())
    # What a text says matters only in the place of another text.
    found = [x for x in found if kind not in TEXTS or x.read_bytes().isascii()]
    for at, name in enumerate(str(x.relative_to(steps / "2")) for x in found):
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
    for path in sorted((steps / "2/default").rglob("d/*")):
        whole = path.read_bytes()
        for at in np.linspace(0, 1, 6):
            flip(path, at)
            with pytest.raises(checkpoint.CorruptCheckpointError, match="changed on d"):
                checkpoint.restore(steps, make_state(), step=2)
            path.write_bytes(whole)


@pytest.mark.parametrize("content", [None, "{}", "[1]", '{"default/x": [1, 2]}'])
def test_a_damaged_list_of_checksums(steps, content):
    path = steps / "2" / _checksums.NAME
    path.unlink() if content is None else path.write_text(content)
    assert check(steps, everything=False) == 1


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
        for reader in (checkpoint.restore, checkpoint.migrate):
            with pytest.raises(OSError, match="may be intact all the same"):
                reader(steps, make_state())
    with checkpoint.manager(steps) as manager:
        assert checkpoint.save(manager, make_state(3), {"loss": 1.0})
        assert manager.all_steps() == [1, 2, 3]


def test_another_format_and_another_number_are_named(steps):
    shutil.copytree(steps / "1", steps / "9")
    with pytest.warns(
        checkpoint.CheckpointWarning, match="step 9 is damaged: .*those of step 1"
    ):
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


# Saving after damage


def test_the_run_that_went_on_from_an_older_step_is_saved(steps):
    """Damaged files stay, under another name."""
    (steps / "2/default/_METADATA").unlink()
    with checkpoint.manager(steps, max_to_keep=1) as manager:
        with pytest.warns(checkpoint.CheckpointWarning, match="step 2 is damaged"):
            state = checkpoint.restore(manager, make_state())
        state = state.replace(step=jnp.int32(2))
        with pytest.warns(
            checkpoint.CheckpointWarning, match=r"damaged steps \[2\] are renamed"
        ) as told:
            assert checkpoint.save(manager, state, {"loss": 1.0})
        assert told[0].filename == __file__
    assert not changed(state, checkpoint.restore(steps, make_state(), step=2))
    (folder,) = steps.glob("2.damaged-*")
    assert (folder / "default/manifest.ocdbt").exists()


@pytest.mark.filterwarnings("ignore:.* holds step 2")
def test_a_step_that_another_run_has_saved_anew_is_kept(steps, tmp_path):
    whole = shutil.copytree(steps / "2", tmp_path / "whole")
    (steps / "2/default/_METADATA").unlink()
    with checkpoint.manager(steps) as manager:
        with pytest.warns(checkpoint.CheckpointWarning, match="step 2 is damaged"):
            checkpoint.restore(manager, make_state())
        shutil.rmtree(steps / "2")
        shutil.move(whole, steps / "2")  # as another process does it
        assert not checkpoint.save(manager, make_state(2), {"loss": 1.0})
    assert not changed(make_state(2), checkpoint.restore(steps, make_state()))


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
    """A directory where step 1 is removed for step 2 when it is read first."""
    hidden = (steps / "2").rename(steps / "hidden")
    verified = _steps.Step.verified_tree

    def wrapped(*args):
        if hidden.exists():
            hidden.rename(steps / "2")
            shutil.rmtree(steps / "1")
        return verified(*args)

    monkeypatch.setattr(_steps.Step, "verified_tree", wrapped)
    return steps


def test_a_reader_beside_a_writer_lists_again(beside_a_writer):
    assert read(beside_a_writer, checkpoint.restore) == 2


def test_verify_beside_a_writer_lists_again(beside_a_writer):
    (report,) = checkpoint.verify(beside_a_writer)
    assert (report.step, report.problem) == (2, "")
