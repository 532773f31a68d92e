"""`convergence`: whole runs in each precision, whose ends are compared with float32's.

Every run is written when it ends.
"""

import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from benchmarks import request
from benchmarks.convergence.page import EVALUATIONS, Run, final, page, verdicts
from benchmarks.convergence.task import WAYS, Carry, Task, Way
from benchmarks.convergence.tasks import TASKS
from benchmarks.request import Request
from benchmarks.results import Results
from benchmarks.show import write_page


def run(asked: Request, tasks: str, ways: str, seeds: int) -> None:
    """Writes the runs, convergence.md; exits with 1 if one is out.

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
            name = f"{task} {way}"
            least = TASKS[task].seeds if way == "float32" and seeds else 0
            numbers = [*range(max(least, seeds))]
            if asked.resume:
                numbers = [n for n in numbers if not results.has(name, str(n))]
            for seed, found in train(TASKS[task], WAYS[way], numbers):
                results.put(name, str(seed), found)
                told = f"{final(found['curve']):.4g}, skipped {found['skipped']}"
                print(f"{name} {seed}: {told}, {found['seconds']} s", flush=True)
            jax.clear_caches()
    write_page(asked.folder / "convergence.md", page(results))
    outside = [name for name, holds in verdicts(results).items() if not holds]
    print(f"{len(outside)} runs out: {', '.join(outside)}")
    sys.exit(bool(outside))


def train(
    task: Task, way: Way, seeds: Sequence[int], steps: int | None = None
) -> Iterator[tuple[int, Run]]:
    """Yields the seed and the figures of each run.

    The seed determines the first parameters and the batches, whatever the way. The
    steps are not in one scan: XLA's convolutions for CPUs are slow inside of loops.
    """
    program = task.make(way, task.steps)
    every = max(1, (steps or task.steps) // EVALUATIONS)
    count = (steps or task.steps) // every

    def numbered(carry: Carry, data: Any, key: jax.Array, index: Any) -> Carry:
        return program.step(carry, data, jax.random.fold_in(key, index))

    start, step = jax.jit(program.start), jax.jit(numbered, donate_argnums=0)
    evaluate, data = jax.jit(program.evaluate), jax.device_put(program.data)
    for seed in seeds:
        began, key = time.process_time(), jax.random.key(seed)
        carry, curve = start(key), []
        for index in range(count * every):
            carry = step(carry, data, key, index)
            if (index + 1) % every == 0:
                curve.append(float(f"{float(evaluate(carry, data)):.5g}"))
        run = {
            "curve": curve,
            "every": every,
            "skipped": [int(s.opt_state.total_notfinite) for s in carry.values()],
            "scale": [float(s.scaler["scaler"]) for s in carry.values()],
            "seconds": round(time.process_time() - began, 1),
        }
        yield seed, run
