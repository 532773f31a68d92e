"""Restores on other meshes and by other processes, over _state.py and _trees.py."""

import json
import os
import socket
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import _topology
from _models import changed
from flax_amp import AmpTrainState, checkpoint


def sharded(devices):
    """A state whose parameters lie on so many devices."""
    line = jax.sharding.Mesh(np.array(jax.devices()[:devices]), ("data",))
    split, whole = (jax.NamedSharding(line, p) for p in (jax.P("data"), jax.P()))
    state = AmpTrainState.create(params={"w": jnp.arange(16.0)}, tx=optax.adam(0.1))
    place = lambda x: jax.device_put(x, split if x.shape == (16,) else whole)  # noqa: E731
    return jax.tree.map(place, state)


def test_a_chain_of_meshes(tmp_path):
    """Eight devices, one, four: each restores what the one before has saved."""
    state = sharded(8)
    for step, devices in enumerate((8, 1, 4)):
        params = jax.tree.map(lambda x: x + 1, state.params)
        state = state.replace(step=state.step + 1, params=params)
        with checkpoint.manager(tmp_path) as manager:
            assert checkpoint.save(manager, state)
        for count in (8, 4, 1, devices):
            target = sharded(count)
            restored = checkpoint.restore(tmp_path, target)
            assert not changed(state, restored)
            both = zip(jax.tree.leaves(restored), jax.tree.leaves(target), strict=True)
            assert all(leaf.sharding == like.sharding for leaf, like in both)
        assert int(restored.step) == step + 1
        state = restored
    split = sharded(8).params["w"].sharding
    w = jax.ShapeDtypeStruct((3,), jnp.float32, sharding=split)
    with pytest.raises(ValueError, match="partitioned 8 times, but the dimension"):
        checkpoint.restore(tmp_path, state.replace(params={"w": w}))


def run(directory, layout, devices, processes=1):
    """Restores, trains and saves with so many processes; returns their report."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    report = directory / "report.json"
    report.unlink(missing_ok=True)
    flags = os.environ["XLA_FLAGS"].split()  # compiles quickly, on other devices
    flags = [flag for flag in flags if "device_count" not in flag]
    environment = os.environ | {"XLA_FLAGS": " ".join(flags)}
    arguments = [directory / "run", report, layout, devices, processes]
    children, logs = [], []
    for i in range(processes):
        logs.append(directory / f"log{i}")
        with logs[-1].open("w") as log:  # a pipe would fill up while another is read
            command = [sys.executable, _topology.__file__, *map(str, arguments)]
            command += [str(i), str(port)]
            children.append(subprocess.Popen(command, env=environment, stderr=log))
    try:
        ends = [child.wait(timeout=200) for child in children]
    finally:
        for child in children:
            child.kill()
            child.wait()
    assert not any(ends), "\n".join(log.read_text() for log in logs)
    return json.loads(report.read_text())


@pytest.mark.slow
@pytest.mark.once
def test_a_chain_of_processes(tmp_path):
    """8 -> 1 -> 4 devices, then 2 -> 1 processes; every bit comes back.

    Processes agree on the step to fall back to, although one reads what is damaged.
    """
    last = run(tmp_path, "fsdp", 8)
    for layout, devices, processes in [
        ("fsdp", 1, 1),
        ("tensor", 4, 1),
        ("fsdp", 2, 2),
    ]:
        now = run(tmp_path, layout, devices, processes)
        assert now["restored"] == last["saved"] and not now["told"]
        before, last = last, now
    for path in (tmp_path / "run" / "4").rglob("ocdbt.process_1/d/*"):
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    again = run(tmp_path, "fsdp", 2, processes=2)
    assert again["restored"] == before["saved"]
    assert "step 4 is damaged" in again["told"][0]
    alone = run(tmp_path, "fsdp", 8)
    assert alone["restored"] == again["saved"] and not alone["told"]
