"""One process of the topology test: restores, trains one step, saves, reports.

Usage: python _topology.py DIRECTORY REPORT LAYOUT DEVICES PROCESSES INDEX PORT

DEVICES are those of each process. The report holds fingerprints of the whole state, as
it was restored and as it was saved, whatever devices it lay on.
"""

import hashlib
import json
import pathlib
import sys
import warnings

import jax

sys.path[:0] = [str(pathlib.Path(__file__).parents[1])]

import absl.logging  # noqa: E402
import numpy as np  # noqa: E402
from jax.experimental import multihost_utils  # noqa: E402
from jax.sharding import NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

import flax_amp  # noqa: E402
from examples.digits import data  # noqa: E402
from examples.sharded import (  # noqa: E402
    create_state,
    fully_sharded,
    loss_fn,
    make_mesh,
    shardings_of,
    tensor_parallel,
)
from flax_amp import checkpoint  # noqa: E402


def fingerprint(state):
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(state):
        if jax.process_count() > 1:
            leaf = multihost_utils.process_allgather(leaf, tiled=True)
        digest.update(np.asarray(leaf).tobytes())
    return digest.hexdigest()


def make_layout(name):
    """Returns a mesh over all devices and the shardings of the state."""
    devices = jax.device_count()
    if name == "tensor":
        mesh = make_mesh(data=2, model=devices // 2)
        return mesh, shardings_of(create_state, mesh, tensor_parallel)
    mesh = make_mesh(data=devices)
    return mesh, shardings_of(create_state, mesh, fully_sharded)


def main(directory, layout):
    mesh, shardings = make_layout(layout)
    state = jax.jit(create_state, out_shardings=shardings)()
    report = {}
    if pathlib.Path(directory).exists():
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always", checkpoint.CheckpointWarning)
            restored = checkpoint.restore(directory, state)
            migrated = checkpoint.migrate(directory, state)
        report["restored"] = fingerprint(restored)
        report["step"] = int(restored.step)
        report["told"] = [str(warning.message) for warning in told]
        assert fingerprint(migrated) == report["restored"]
        for other in (restored, migrated):
            assert jax.tree.map(lambda x: x.sharding, other) == shardings
        state = restored
    images, _ = data.load(split_seed=0)
    batch = data.batch_at(images, int(state.step), batch_size=64, seed=0)
    mine = slice(jax.process_index(), None, jax.process_count())
    examples = NamedSharding(mesh, P("data"))
    batch = {
        name: jax.make_array_from_process_local_data(examples, x[mine])
        for name, x in batch.items()
    }
    step = flax_amp.make_train_step(loss_fn, state_shardings=shardings)
    state, metrics = step(state, batch)
    assert bool(metrics["grads_finite"])
    with checkpoint.manager(directory) as manager:
        assert checkpoint.save(manager, state)
    return report | {"saved": fingerprint(state)}


if __name__ == "__main__":
    where, report_file, kind, count, processes, index, port = sys.argv[1:]
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", int(count))
    absl.logging.set_verbosity("fatal")
    if int(processes) > 1:
        jax.distributed.initialize(f"localhost:{port}", int(processes), int(index))
    found = main(where, kind)
    if int(index) == 0:
        pathlib.Path(report_file).write_text(json.dumps(found))
    if int(processes) > 1:
        jax.distributed.shutdown()
