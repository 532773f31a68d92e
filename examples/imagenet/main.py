"""Command line of the example: flags, one call, a summary.

python -m examples.imagenet.main --config=configs/imagenet/tpu.py
"""

import json
import pathlib
import signal
import threading

from absl import app, flags, logging
from ml_collections import config_flags

from examples.imagenet import train

CONFIGS = pathlib.Path(__file__).resolve().parents[2] / "configs" / "imagenet"
WORKDIR = flags.DEFINE_string(
    "workdir", "runs/imagenet", "For checkpoints and logs; resumes from it"
)
CONFIG = config_flags.DEFINE_config_file(
    "config", str(CONFIGS / "default.py"), "Settings", lock_config=True
)


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"too many arguments: {argv[1:]}")
    logging.set_verbosity(logging.ERROR)  # Orbax logs 59 lines for one save
    workdir = pathlib.Path(WORKDIR.value).resolve()
    workdir.mkdir(parents=True, exist_ok=True)

    # On SIGTERM (a preempted machine), finish the step, save and end: no evaluation.
    told_to_stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: told_to_stop.set())

    config = CONFIG.value
    _, found = train.train_and_evaluate(
        config, workdir, should_stop=lambda step: told_to_stop.is_set()
    )
    found = {"precision": config.precision, **found}
    (workdir / "summary.json").write_text(json.dumps(found, indent=2) + "\n")
    if "test_accuracy" not in found:
        print(f"stopped at step {found['step']}; the same command goes on from there")
        return
    print(f"{config.precision}: test accuracy {found['test_accuracy']:.2%}")


if __name__ == "__main__":
    app.run(main)
