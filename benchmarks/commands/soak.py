"""`soak`: a long run in float16, with faults, kills and restarts."""

import pathlib
import tempfile

from benchmarks.request import Request
from benchmarks.soak.processes import Run


def run(asked: Request, steps: int, seed: int, work: str) -> None:
    where = pathlib.Path(work or tempfile.gettempdir() + f"/flax_amp_soak_{seed}")
    run_ = Run(where, seed, steps, 50)
    half = 0
    for record, note in run_.processes(120):
        lines = record.read_text().count('"n": ') if record.exists() else 0
        if note["precision"] == "16-mixed":
            half += lines
        print(record.name, note, lines, half, flush=True)
        if half >= steps:
            break
