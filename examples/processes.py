"""Several processes, each with its own devices, train one sharded model together.

One command starts all of them on this machine. They train on handwritten digits:

    python -m examples.processes --workdir=runs/processes

Kill it whenever you like. Run it again, and it continues from the newest checkpoint. On
SIGTERM it saves first and then ends. On a cluster, start it once on every machine, with
a workdir on a disk that all of them see: with `--cluster` under Slurm, on Cloud TPU and
on GKE, elsewhere with `--coordinator` and `--process`.
"""

import argparse
import hashlib
import os
import signal
import socket
import subprocess
import sys
import time

import jax
import numpy as np
from absl import logging
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import flax_amp
from examples.digits import data
from examples.sharded import (
    create_state,
    fully_sharded,
    loss_fn,
    make_mesh,
    shardings_of,
)


def train(args):
    mesh = make_mesh(data=jax.device_count())
    shardings = shardings_of(create_state, mesh, fully_sharded)
    # The state is created sharded: no process ever holds all of it.
    state = jax.jit(create_state, out_shardings=shardings)()
    train_step = flax_amp.make_train_step(loss_fn, state_shardings=shardings)
    manager = flax_amp.checkpoint.manager(os.path.join(args.workdir, "checkpoints"))
    if manager.latest_step() is not None:
        state = flax_amp.checkpoint.restore(manager, state)
        say(f"resumed at step {int(state.step)}")

    images, _ = data.load(split_seed=0)
    examples = NamedSharding(mesh, P("data"))
    mine = slice(jax.process_index(), None, jax.process_count())
    with manager:
        for step in range(int(state.step) + 1, args.steps + 1):
            batch = data.batch_at(images, step, batch_size=64, seed=0)
            # Each process passes its own part of the global batch.
            batch = {
                name: jax.make_array_from_process_local_data(examples, x[mine])
                for name, x in batch.items()
            }
            state, metrics = train_step(state, batch)
            # If one process gets SIGTERM, all of them agree on the step to stop at.
            told_to_stop = multihost_utils.reached_preemption_sync_point(step)
            last = told_to_stop or step == args.steps
            if last or step % args.save_every == 0:
                flax_amp.checkpoint.save(manager, state)
            if last or step % args.log_every == 0:
                say(f"step {step} loss {float(metrics['loss']):.6f}")
                flax_amp.check_progress(state, metrics)
            if told_to_stop:
                break
    say(
        "Each process ends with a fingerprint, the SHA-256 of its own part of the "
        "state.\nThe parts differ, so the fingerprints do. A run that was killed and "
        "resumed ends\nwith the same ones as a run that was not: it is the same to the "
        "bit."
    )
    multihost_utils.sync_global_devices("the fingerprints are explained first")
    found = hashlib.sha256()
    for leaf in jax.tree.leaves(state):
        for shard in leaf.addressable_shards:
            found.update(np.asarray(shard.data).tobytes())
    print(f"process {jax.process_index()} ends with {found.hexdigest()}", flush=True)


def say(text):
    if jax.process_index() == 0:
        print(text, flush=True)


def launch(args):
    """Starts the processes on this machine and waits for them."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        coordinator = f"localhost:{free.getsockname()[1]}"
    command = [sys.executable, "-m", "examples.processes", *sys.argv[1:]]
    command += ["--local", f"--coordinator={coordinator}"]
    children = [
        subprocess.Popen([*command, f"--process={i}"]) for i in range(args.processes)
    ]
    for i, child in enumerate(children):
        print(f"process {i} has pid {child.pid}", flush=True)

    def pass_on(*_):
        for child in children:
            child.terminate()

    signal.signal(signal.SIGTERM, pass_on)
    # If one process dies, the others are killed: they would wait for it for minutes.
    try:
        while any(child.poll() is None for child in children):
            if any(child.poll() for child in children):
                return 1
            time.sleep(0.2)
        return max(abs(child.returncode) for child in children)
    finally:
        for child in children:
            child.kill()
            child.wait()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workdir", default="runs/processes")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--save-every", type=int, default=50)
    parser.add_argument("--log-every", type=int, default=20)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--process", type=int, help="the index of this process")
    parser.add_argument("--coordinator", help="host:port of the first process")
    parser.add_argument(
        "--cluster", action="store_true", help="JAX finds all processes"
    )
    parser.add_argument("--local", action="store_true", help="use four CPU devices")
    args = parser.parse_args()
    if args.process is None and not args.cluster:
        sys.exit(launch(args))
    if args.local:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", 4)
    logging.set_verbosity(logging.ERROR)  # Orbax logs a lot
    address = (args.coordinator, args.processes, args.process)
    jax.distributed.initialize(*() if args.cluster else address)
    train(args)
    jax.distributed.shutdown()


if __name__ == "__main__":
    main()
