"""`gpu`: steps timed on the GPU that is here, with what they take of its memory.

Each model has a process of its own, so that one which fails or fills the memory does
not harm the next.
"""

import concurrent.futures
import multiprocessing
import sys
from collections.abc import Callable
from typing import Any

import jax

from benchmarks import request, show
from benchmarks.request import Request
from benchmarks.results import Results
from benchmarks.sections import section
from benchmarks.timing import Cells, Plan, measure

PART = "measured"
VARIANTS = (*request.BFLOAT16, *request.FLOAT16)


def run(
    asked: Request, platform: str = "cuda", rounds: int = 30, burst_ms: float = 100.0
) -> None:
    """Measures every cell on a device that is here.

    Args:
      asked: the request.
      platform: JAX's name of it; "cpu" with the size "tiny" tries the command out.
      rounds: turns of each variant.
      burst_ms: the length of a turn.
    """
    jax.config.update("jax_platforms", "cpu")  # the device is for the other processes
    try:
        device = _in_own_process(_device_kind, platform)
    except Exception as error:  # JAX raises one kind or another
        sys.exit(f"error: no device of the platform {platform}: {error!r}")
    results = Results.open(asked.folder, "gpu", device, asked.size)
    plan = Plan(platform, rounds, burst_ms / 1e3)
    cells = asked.cells(request.MODELS, VARIANTS)
    progress = show.Progress(sum(len(names) for _, names in cells))
    shown = section("gpu", PART)
    for model, names in cells:
        labels = {name: asked.label(name) for name in names}
        if asked.resume and all(results.has(model, v, PART) for v in labels.values()):
            for label in labels.values():
                progress.cell(model, label, "there already")
            continue
        for name, figures in _measured(asked, plan, model, names).items():
            results.put(model, labels[name], PART, figures)
            progress.cell(model, labels[name], shown.line(figures))
    show.results(results)


def _measured(asked: Request, plan: Plan, model: str, names: list[str]) -> Cells:
    try:
        return _in_own_process(measure, asked, plan, model, names)
    except Exception as error:  # also the end of the process
        return {name: {"error": request.reason(error)} for name in names}


def _in_own_process(function: Callable[..., Any], *arguments: Any) -> Any:
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, context) as pool:
        return pool.submit(function, *arguments).result()


def _device_kind(platform: str) -> str:
    jax.config.update("jax_platforms", platform)
    return jax.devices()[0].device_kind
