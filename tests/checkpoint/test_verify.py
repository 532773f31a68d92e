"""`verify` and the command line over it."""

import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from flax_amp import AmpTrainState, __main__, checkpoint, init_scaler


def make_state(step):
    return AmpTrainState.create(
        params={"w": jax.random.normal(jax.random.key(step), (16, 64))},
        tx=optax.sgd(0.1),
        rngs={"dropout": jax.random.key(0)},
        scaler=init_scaler(scaler=2.0**step),
    ).replace(step=jnp.int32(step))


@pytest.fixture
def steps(tmp_path):
    with checkpoint.manager(tmp_path / "run") as manager:
        for step in (1, 2, 3):
            assert checkpoint.save(manager, make_state(step))
    return tmp_path / "run"


def test_a_scaler_of_others_may_have_strings(tmp_path):
    tree = {"scaler": {"kind": "dynamic", "scale": jnp.float32(2)}}
    with ocp.CheckpointManager(tmp_path) as manager:
        manager.save(1, args=ocp.args.PyTreeSave(tree))
    (report,) = checkpoint.verify(tmp_path)
    assert not report.problem and report.scaler == {"scale": 2.0}


def damage(directory, step):
    """Flips a byte of the largest file, which holds the arrays."""
    files = [p for p in (directory / str(step)).rglob("*") if p.is_file()]
    largest = max(files, key=lambda path: path.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 1
    largest.write_bytes(content)


def test_all_intact(steps):
    reports = checkpoint.verify(steps)
    assert [report.step for report in reports] == [1, 2, 3]
    assert all(report.has_checksums and not report.problem for report in reports)
    assert [report.scaler["scaler"] for report in reports] == [2.0, 4.0, 8.0]
    assert all(report.size > 16 * 64 * 4 for report in reports)


def test_a_damaged_step_is_named(steps):
    damage(steps, 2)
    problems = [report.problem for report in checkpoint.verify(steps)]
    assert problems[0] == problems[2] == ""
    assert "changed on disk" in problems[1]


def test_a_half_deleted_step_is_named(steps):
    shutil.rmtree(steps / "3/default/d")
    report = checkpoint.verify(steps)[-1]
    assert report.problem and report.has_checksums is False and report.scaler == {}


def test_a_sharded_checkpoint(tmp_path, mesh):
    sharding = NamedSharding(mesh, P("data"))
    state = make_state(1)
    split = state.replace(params=jax.device_put(state.params, sharding))
    with checkpoint.manager(tmp_path) as manager:
        checkpoint.save(manager, split)
        (report,) = checkpoint.verify(manager)
    assert report.has_checksums and not report.problem


def test_plain_checkpoints_are_readable(tmp_path):
    with ocp.CheckpointManager(tmp_path) as manager:
        manager.save(1, args=ocp.args.StandardSave(make_state(1)))
    (report,) = checkpoint.verify(tmp_path)
    assert not report.problem and not report.has_checksums


def test_command_line(steps, capsys):
    assert __main__.main(["checkpoint", str(steps)]) == 0
    told = capsys.readouterr().out.splitlines()
    assert told[0].split() == ["step", "MB", "scale", "resets", "integrity"]
    assert [line.split()[0] for line in told[1:]] == ["1", "2", "3"]
    assert all(line.endswith("intact") for line in told[1:])

    damage(steps, 2)
    assert __main__.main(["checkpoint", str(steps)]) == 1
    assert "DAMAGED: default/" in capsys.readouterr().out


def test_command_line_without_a_directory(tmp_path, capsys):
    assert __main__.main(["checkpoint", str(tmp_path / "nowhere")]) == 2
    assert "nowhere is not a directory" in capsys.readouterr().err
    assert __main__.main(["checkpoint", str(tmp_path)]) == 0
    assert "no steps in" in capsys.readouterr().out


@pytest.mark.slow
def test_as_a_module(steps):
    result = subprocess.run(
        [sys.executable, "-m", "flax_amp", "checkpoint", str(steps)],
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0 and result.stdout.count("intact") == 3
    assert not result.stderr
