"""One process of the resume test: restores with plain Orbax, trains, reports its state.

Usage: python _resume.py DIRECTORY REPORT
"""

import hashlib
import json
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

import absl.logging  # noqa: E402
import jax  # noqa: E402
import orbax.checkpoint as ocp  # noqa: E402

from _models import MODELS, leaves_by_path, make_batch  # noqa: E402
from flax_amp._training.scaler import init_scaler  # noqa: E402
from flax_amp._training.train_step import make_train_step  # noqa: E402

STEPS, HALF = 6, 3
POISONED = (1, 4)  # one before the stop, one after it


def new_state(name):
    make, _ = MODELS[name]
    return make(scaler=init_scaler(scaler=64, patience=1, adjust_factor=4))


def open_manager(directory):
    return ocp.CheckpointManager(
        directory,
        options=ocp.CheckpointManagerOptions(
            async_options=ocp.AsyncOptions(create_directories_asynchronously=False)
        ),
    )


def trained(name, state, steps):
    """Returns the state after some steps, and what a process reports of it."""
    step = make_train_step(MODELS[name][1], has_aux=True, donate=False)
    losses = []
    for i in steps:
        state, metrics = step(state, make_batch(i, poisoned=i in POISONED))
        losses.append(repr(float(metrics["loss"])))
    return state, {
        "losses": losses,
        "scale": float(state.scaler["scaler"]),
        "skipped": int(state.opt_state.total_notfinite),
        "leaves": {
            path: hashlib.sha256(repr(leaf).encode()).hexdigest()
            for path, leaf in leaves_by_path(state).items()
        },
    }


def main(directory, report):
    results = {}
    for name in MODELS:
        state = new_state(name)
        # One target of each kind.
        target = state if name == "linen" else jax.eval_shape(lambda s=state: s)
        with open_manager(Path(directory) / name) as manager:
            state = manager.restore(HALF, args=ocp.args.StandardRestore(target))
        results[name] = trained(name, state, range(HALF, STEPS))[1]
    Path(report).write_text(json.dumps(results))


if __name__ == "__main__":
    absl.logging.set_verbosity("error")
    main(*sys.argv[1:])
