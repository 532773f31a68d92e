"""`convergence`: whole runs in each precision, whose ends are compared with float32's.

Every run is written when it ends.
"""

import sys

import jax

from benchmarks import request
from benchmarks.convergence import page
from benchmarks.convergence.run import final, train
from benchmarks.convergence.task import WAYS
from benchmarks.convergence.tasks import TASKS
from benchmarks.request import Request
from benchmarks.results import Results
from benchmarks.show import write_page


def run(asked: Request, tasks: str, ways: str, seeds: int) -> None:
    """Writes the runs, convergence.md and a figure; exits with 1 if one is out.

    Without names of `tasks` and `ways`, separated by commas, it runs all of them;
    without `seeds` it makes the page of what is there.
    """
    # Most of the time is compiling. Excess precision would hide roundings.
    request.on_cpu(
        "--xla_backend_optimization_level=1",
        "--xla_allow_excess_precision=false",
        "--xla_cpu_use_fusion_emitters=false",
    )
    results = Results.open(asked.folder, "convergence", "cpu")
    for task in tasks.split(",") if tasks else TASKS:
        for way in ways.split(",") if ways else WAYS:
            least = TASKS[task].seeds if way == "float32" and seeds else 0
            numbers = range(max(least, seeds))
            done = [
                seed
                for seed in numbers
                if asked.resume and results.has(task, f"{way} {seed}")
            ]
            _run(results, task, way, [x for x in numbers if x not in done])
    write_page(asked.folder / "convergence.md", page.page(results))
    page.draw(results, asked.folder / "convergence.png")
    outside = page.outside(results)
    print(f"{len(outside)} runs out: {', '.join(outside)}")
    sys.exit(bool(outside))


def _run(results: Results, name: str, way: str, seeds: list[int]) -> None:
    for seed, run in train(TASKS[name], WAYS[way], seeds):
        results.put(name, f"{way} {seed}", run)
        told = f"{final(run['curve']):.4g}, skipped {run['skipped']}"
        print(f"{name} {way} {seed}: {told}, {run['seconds']} s", flush=True)
    jax.clear_caches()
