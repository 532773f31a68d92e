"""A checkpoint fits other devices, other meshes and other numbers of processes."""

import json
import os
import socket
import subprocess
import sys

import pytest

import _topology

pytestmark = pytest.mark.slow


def run(directory, layout, devices, processes=1):
    """Restores, trains and saves with so many processes; returns their report."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    report = directory / "report.json"
    report.unlink(missing_ok=True)
    flags = os.environ["XLA_FLAGS"].split()  # compiles quickly, on other devices
    kept = [flag for flag in flags if "device_count" not in flag]
    environment = os.environ | {"XLA_FLAGS": " ".join(kept)}
    arguments = [directory / "run", report, layout, devices, processes]
    children, logs = [], []
    for i in range(processes):
        logs.append(directory / f"log{i}")
        with logs[-1].open("w") as log:  # a pipe would fill up while another is read
            command = [sys.executable, _topology.__file__, *map(str, arguments)]
            command += [str(i), str(port)]
            children.append(subprocess.Popen(command, env=environment, stderr=log))
    try:
        ends = [child.wait(timeout=100) for child in children]
    finally:
        for child in children:
            child.kill()
            child.wait()
    assert not any(ends), "\n".join(log.read_text() for log in logs)
    return json.loads(report.read_text())


def test_one_checkpoint_after_another_on_other_devices(tmp_path):
    """Every bit comes back; `migrate` reads the same.

    Processes agree on the step to fall back to, although one reads what is damaged.
    """
    first = run(tmp_path, "fsdp", 8)
    second = run(tmp_path, "fsdp", 2, processes=2)
    assert second["restored"] == first["saved"] and not second["told"]
    for path in (tmp_path / "run" / "2").rglob("ocdbt.process_1/d/*"):
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    again = run(tmp_path, "fsdp", 2, processes=2)
    assert again["restored"] == first["saved"]
    assert "step 2 is damaged" in again["told"][0]
    last = run(tmp_path, "tensor", 4, processes=2)
    assert last["restored"] == again["saved"] and not last["told"]
