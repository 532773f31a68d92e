"""Runs the tasks and writes `benchmarks/results/convergence.{json,md,png}`.

    python -m benchmarks.convergence [--tasks A,B] [--ways A,B] [--seeds N]
        [--resume] [--out DIR]

Every run is written when it ends. The exit code is 1 if a run ends outside of the
spread of the float32 runs.
"""

import argparse
import os
import pathlib
import sys

# Most of the time is compiling. Excess precision would hide roundings.
os.environ["XLA_FLAGS"] = (
    "--xla_backend_optimization_level=1 --xla_allow_excess_precision=false "
    "--xla_cpu_use_fusion_emitters=false " + os.environ.get("XLA_FLAGS", "")
)
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax  # noqa: E402

from benchmarks.convergence import figure, page, run  # noqa: E402
from benchmarks.convergence.results import Results  # noqa: E402
from benchmarks.convergence.task import WAYS  # noqa: E402
from benchmarks.convergence.tasks import TASKS  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description="Trains to the end and compares.")
    add = parser.add_argument
    add("--tasks", default=",".join(TASKS), help="some of the tasks")
    add("--ways", default=",".join(WAYS), help="some of the precisions")
    add("--seeds", type=int, default=3, help="of a precision; float32 may have more")
    add("--resume", action="store_true", help="keep the runs that are there")
    add("--out", type=pathlib.Path, default="benchmarks/results")
    asked = parser.parse_args()
    results = Results.open(asked.out / "convergence.json")
    for task in asked.tasks.split(","):
        for way in asked.ways.split(","):
            least = TASKS[task].seeds if way == "float32" else 0
            count = max(least, asked.seeds)
            kept = asked.resume and results.has
            seeds = [x for x in range(count) if not (kept and kept(task, way, x))]
            _run(results, task, way, seeds)
            jax.clear_caches()
    (asked.out / "convergence.md").write_text(page.page(results))
    figure.draw(results, asked.out / "convergence.png")
    outside = page.outside(results)
    print(f"{len(outside)} runs outside: {', '.join(outside)}")
    return bool(outside)


def _run(results, name, way, seeds):
    if not seeds:
        return
    for seed, figures in run.train(TASKS[name], WAYS[way], seeds):
        results.put(name, way, seed, figures)
        print(f"{name} {way} {seed}: {page.told(figures)}", flush=True)
    if WAYS[way].precision != "32-true":
        program = TASKS[name].build(WAYS[way])
        results.put_share(name, way, run.low_share(program))


if __name__ == "__main__":
    sys.exit(main())
