"""Command line of the example: flags, one call, a summary.

python -m examples.digits.main --precision=16-mixed --workdir=runs/digits
"""

import json
import pathlib
import signal
import threading
from typing import get_args

from absl import app, flags, logging
from ml_collections import config_flags

from examples.digits import train
from flax_amp import Precision

ROOT = pathlib.Path(__file__).resolve().parents[2]
WORKDIR = flags.DEFINE_string(
    "workdir", "runs/digits", "For checkpoints and logs; resumes from it"
)
PRECISION = flags.DEFINE_enum(
    "precision", None, get_args(Precision), "Overrides config.precision"
)
DEBUG_OVERFLOW = flags.DEFINE_bool(
    "debug_overflow", False, "Explain the steps that are skipped"
)
CONFIG = config_flags.DEFINE_config_file(
    "config", str(ROOT / "configs" / "digits.py"), "Settings", lock_config=True
)


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"too many arguments: {argv[1:]}")
    logging.set_verbosity(logging.ERROR)  # Orbax logs 59 lines for one save
    config = CONFIG.value
    if PRECISION.value is not None:
        config.precision = PRECISION.value
    config.debug_overflow |= DEBUG_OVERFLOW.value
    workdir = pathlib.Path(WORKDIR.value).resolve()
    workdir.mkdir(parents=True, exist_ok=True)

    # On SIGTERM (a preempted machine), finish the step, save, evaluate and end.
    told_to_stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: told_to_stop.set())

    _, summary = train.train_and_evaluate(
        config, workdir, should_stop=lambda step: told_to_stop.is_set()
    )
    summary = {"precision": config.precision, **summary}
    (workdir / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    print(f"{config.precision}: test accuracy {summary['test_accuracy']:.2%}")


if __name__ == "__main__":
    app.run(main)
