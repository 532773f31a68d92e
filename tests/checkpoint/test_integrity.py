"""Damaged checkpoints are told apart, named and passed over."""

import json
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
from benchmarks.faults.files import empty, flip, truncate
from flax_amp import AmpTrainState, checkpoint
from flax_amp.checkpoint import _checksums

pytestmark = pytest.mark.slow


# Steps


def make_state(step=0):
    # Random bits: what compresses well is compressed, and has a checksum then.
    params = {"w": jax.random.normal(jax.random.key(step), (16, 64)), "b": jnp.ones(5)}
    state = AmpTrainState.create(params=params, tx=optax.adam(0.1))
    return state.replace(step=jnp.int32(step))


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A directory with the steps 1 and 2."""
    directory = tmp_path_factory.mktemp("steps")
    with checkpoint.manager(directory) as manager:
        for step in (1, 2):
            assert checkpoint.save(manager, make_state(step), {"loss": 1.0})
    return directory


@pytest.fixture
def steps(written, tmp_path):
    return shutil.copytree(written, tmp_path / "steps")


def newest_files(directory):
    folder = directory / "2"
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())


def delete(path):
    path.unlink()


FAULTS = dict(
    truncate=truncate,
    empty=empty,
    flip=flip,
    flip_first=lambda path: flip(path, 0),
    flip_late=lambda path: flip(path, 0.9),
    delete=delete,
)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_any_file_costs_nothing_or_one_step(steps, fault, tmp_path):
    """Whatever comes back is bit for bit a state that was saved."""
    target = jax.eval_shape(make_state)
    outcomes = {}
    for name in newest_files(steps):
        directory = shutil.copytree(steps, tmp_path / "broken")
        FAULTS[fault](directory / "2" / name)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always", checkpoint.CheckpointWarning)
            restored = checkpoint.restore(directory, target)
        step = int(restored.step)
        assert not changed(make_state(step), restored), name
        assert bool(told) == (step == 1), name
        outcomes[name] = step
        shutil.rmtree(directory)
    data = [step for name, step in outcomes.items() if name.startswith("default/d/")]
    assert set(data) == {1}, outcomes


def test_a_flipped_byte_of_an_array_is_named(steps):
    """Orbax itself restores it without a word."""
    found = []
    for path in sorted((steps / "2/default").rglob("d/*")):
        whole = path.read_bytes()
        for at in np.linspace(0, 1, 12):
            flip(path, at)
            try:
                restored = checkpoint.restore(steps, make_state(), step=2)
                assert not changed(make_state(2), restored)
            except checkpoint.CorruptCheckpointError as error:
                found.append(str(error))
            path.write_bytes(whole)
    assert all("changed on disk" in text for text in found) and found, found


def test_the_run_that_went_on_from_an_older_step_is_saved(steps):
    """Damaged files stay, under another name."""
    delete(steps / "2/default/_METADATA")
    damaged = newest_files(steps)
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
        with pytest.warns(
            checkpoint.CheckpointWarning, match="holds step 2, newer than the state"
        ):
            assert not checkpoint.save(manager, make_state(1))
        assert not checkpoint.save(manager, make_state(2))
    assert not changed(make_state(2), checkpoint.restore(steps, make_state()))


def test_migrate_passes_over_damage(steps):
    largest = max((steps / "2").rglob("d/*"), key=lambda path: path.stat().st_size)
    flip(largest)
    with pytest.warns(checkpoint.CheckpointWarning, match="default/.*changed on disk"):
        params = checkpoint.migrate(steps, make_state(), include="params").params
    assert not changed(make_state(1).params, params)


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


@pytest.mark.parametrize("fault", ["delete", "empty", "truncate"])
def test_a_step_without_its_metadata_is_passed_over(steps, fault):
    """It may be damaged elsewhere as well, and nothing could tell."""
    FAULTS[fault](steps / "2/_CHECKPOINT_METADATA")
    with pytest.warns(checkpoint.CheckpointWarning, match="step 2 is damaged: "):
        assert int(checkpoint.restore(steps, make_state()).step) == 1


def test_the_warning_says_what_and_what_instead(steps):
    shutil.rmtree(steps / "2/default")
    with pytest.warns(
        checkpoint.CheckpointWarning, match="step 2 is damaged: .*Restored step 1 inst"
    ):
        restored = checkpoint.restore(steps, make_state())
    assert not changed(make_state(1), restored)


def test_no_intact_step_is_one_error_that_names_all(steps):
    for step in "12":
        (steps / step / "default/_METADATA").write_text("{")
    with pytest.raises(checkpoint.CorruptCheckpointError) as error:
        checkpoint.restore(steps, make_state())
    for text in ("step 2 is damaged", "step 1 is damaged", "from a backup"):
        assert text in str(error.value)


def test_an_emptied_step_is_passed_over(steps):
    shutil.rmtree(steps / "2")
    (steps / "2").mkdir()
    with pytest.warns(checkpoint.CheckpointWarning, match="step 2 is damaged"):
        assert int(checkpoint.restore(steps, make_state()).step) == 1


def test_a_misfit_is_not_taken_for_damage(steps):
    other = AmpTrainState.create(params={"v": jnp.ones(2)}, tx=optax.adam(0.1))
    with pytest.raises(ValueError, match="step 2 in .* does not fit the target"):
        checkpoint.restore(steps, other)


def edit_metadata(directory, change):
    path = directory / "2/_CHECKPOINT_METADATA"
    content = json.loads(path.read_text())
    change(content["custom_metadata"])
    path.write_text(json.dumps(content))


def test_a_newer_format_is_named(steps):
    edit_metadata(steps, lambda custom: custom["flax_amp"].update(format=3))
    with pytest.raises(
        ValueError, match="format 3; expected at most 2.*Update flax_amp"
    ):
        checkpoint.restore(steps, make_state())


def test_a_damaged_record_is_damage(steps):
    edit_metadata(steps, lambda custom: custom.update(flax_amp=[1]))
    with pytest.warns(checkpoint.CheckpointWarning, match="record in .* is damaged"):
        assert int(checkpoint.restore(steps, make_state()).step) == 1


def test_every_block_of_a_file_is_checked(steps, monkeypatch):
    monkeypatch.setattr(_checksums, "_BLOCK", 1000)
    folder = epath.Path(steps / "2")
    _checksums.write(folder)
    assert _checksums.check(folder) and _checksums.check(folder, (1, 3))
    path = max((steps / "2").rglob("d/*"), key=lambda path: path.stat().st_size)
    whole = path.read_bytes()
    for damaged in (whole + b"x", whole[:-1], whole[:-2000], whole[::-1]):
        path.write_bytes(damaged)
        with pytest.raises(checkpoint.CorruptCheckpointError, match=path.name):
            _checksums.check(folder)
    for at in range(0, len(whole), 500):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(checkpoint.CorruptCheckpointError, match=path.name):
            _checksums.check(folder)


# Plain Orbax, both ways


def test_plain_orbax_reads_what_was_saved(steps):
    with ocp.CheckpointManager(steps) as manager:
        read = manager.restore(2, args=ocp.args.StandardRestore(make_state()))
    assert not changed(make_state(2), read)


def test_what_plain_orbax_saved_is_taken_as_it_is(tmp_path):
    with ocp.CheckpointManager(tmp_path) as manager:
        manager.save(3, args=ocp.args.StandardSave(make_state(3)))
    assert not changed(make_state(3), checkpoint.restore(tmp_path, make_state()))
