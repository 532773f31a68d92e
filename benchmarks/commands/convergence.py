"""`convergence`: whole runs in each precision, whose ends are compared with float32's.

Every run is stored when it ends, in a folder `convergence-runs` beside the results.
"""

import shutil
import sys

import jax

from benchmarks import request
from benchmarks.convergence.page import figures, outside, page
from benchmarks.convergence.task import WAYS
from benchmarks.convergence.tasks import TASKS
from benchmarks.request import Request
from benchmarks.results import Results
from benchmarks.show import write_page


def run(asked: Request, tasks: str, ways: str, seeds: int, steps: int) -> None:
    """Writes the figures, convergence.md; exits with 1 if a precision is outside.

    Without names of `tasks` and `ways`, separated by commas, it runs all of them;
    without `seeds` it makes the page of what is there; without `steps` each task has
    its own number of them.
    """
    # Most of the time is compiling. Excess precision would hide roundings.
    request.on_cpu(
        "--xla_backend_optimization_level=1",
        "--xla_allow_excess_precision=false",
        "--xla_cpu_use_fusion_emitters=false",
    )
    results = Results.open(asked.folder, "convergence", "cpu")
    names = ways.split(",") if ways else [name for name in WAYS if name != "float32"]
    for task in (tasks.split(",") if tasks else TASKS) if seeds else ():
        directory = asked.folder / "convergence-runs" / task
        if not asked.resume:
            shutil.rmtree(directory, ignore_errors=True)
        found = TASKS[task].compare(names, seeds, steps or None, directory)
        print(found, flush=True)
        for way, told in figures(found).items():
            results.put(task, way, told)
        jax.clear_caches()
    write_page(asked.folder / "convergence.md", page(results))
    out = outside(results)
    print(f"{len(out)} outside: {', '.join(out)}")
    sys.exit(bool(out))
