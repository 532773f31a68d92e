"""One process of the resume test: trains, saves or restores, and reports its state.

Usage: python _resume.py run|save|restore DIRECTORY REPORT
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


def new_state(make):
    return make(scaler=init_scaler(scaler=64, patience=1, adjust_factor=4))


def open_manager(directory):
    return ocp.CheckpointManager(
        directory,
        options=ocp.CheckpointManagerOptions(
            async_options=ocp.AsyncOptions(create_directories_asynchronously=False)
        ),
    )


def main(task, directory, report):
    results = {}
    for name, (make, loss) in MODELS.items():
        step = make_train_step(loss, has_aux=True)
        start, stop = {"run": (0, STEPS), "save": (0, HALF), "restore": (HALF, STEPS)}[
            task
        ]
        state = new_state(make)
        with open_manager(Path(directory).resolve() / name) as manager:
            if task == "restore":
                # One target of each kind.
                target = state if name == "linen" else jax.eval_shape(lambda s=state: s)
                args = ocp.args.StandardRestore(target)
                state = manager.restore(HALF, args=args)
            losses = []
            for i in range(start, stop):
                state, metrics = step(state, make_batch(i, poisoned=i in POISONED))
                losses.append(float(metrics["loss"]))
            if task == "save":
                manager.save(HALF, args=ocp.args.StandardSave(state))
        results[name] = {
            "losses": [repr(loss) for loss in losses],
            "scale": float(state.scaler["scaler"]),
            "skipped": int(state.opt_state.total_notfinite),
            "leaves": {
                path: hashlib.sha256(repr(leaf).encode()).hexdigest()
                for path, leaf in leaves_by_path(state).items()
            },
        }
    Path(report).write_text(json.dumps(results))


if __name__ == "__main__":
    absl.logging.set_verbosity("error")
    main(*sys.argv[1:])
