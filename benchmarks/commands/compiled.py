"""`tpu` and `gpu-aot`: the step as XLA compiles it for a device that is not here."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax

from benchmarks import hlo, request, show, targets
from benchmarks.method import Training
from benchmarks.request import Request
from benchmarks.results import Results
from benchmarks.sections import section
from benchmarks.stages import Build

PART = "compiled"


def run_tpu(asked: Request) -> None:
    """Compiles every cell for a TPU v5e."""
    _run(asked, "tpu", "v5e", targets.tpu_devices(), request.BFLOAT16)


def run_gpu(asked: Request) -> None:
    """Compiles every cell for an H200."""
    chosen = (*request.BFLOAT16, *request.FLOAT16)
    _run(asked, "gpu-aot", "h200", targets.gpu_devices(), chosen)


def _run(
    asked: Request,
    command: str,
    target: str,
    devices: Sequence[jax.Device],
    variants: Sequence[str],
) -> None:
    def build(training: Training) -> Build:
        return targets.compile_for(devices, training.step, training.shapes())

    run_cells(asked, command, target, asked.cells(request.MODELS, variants), build)


def run_cells(
    asked: Request,
    command: str,
    target: str,
    cells: Sequence[tuple[str, list[str]]],
    build: Callable[[Training], Build],
) -> None:
    """Compiles the cells, keeps their figures and prints them.

    Args:
      asked: the request.
      command: the name of the command.
      target: what is compiled for.
      cells: models with their variants.
      build: compiles a training step.
    """
    results = Results.open(asked.folder, command, target, asked.size)
    shown = section(command, PART)
    progress = show.Progress(sum(len(names) for _, names in cells))
    for model, names in cells:
        for variant in names:
            label = asked.label(variant)
            if asked.resume and results.has(model, label, PART):
                progress.cell(model, label, "there already")
                continue
            figures = _figures(asked, model, variant, build)
            results.put(model, label, PART, figures)
            progress.cell(model, label, shown.line(figures))
            request.free_memory()
    show.results(results)


def _figures(
    asked: Request, model: str, variant: str, build: Callable[[Training], Build]
) -> dict[str, Any]:
    """Returns the figures of one cell, or why there are none."""
    try:
        built = build(asked.training(variant, model))
        return dataclasses.asdict(hlo.measure(built))
    except Exception as error:  # whatever a package or XLA may raise
        return {"error": request.reason(error)}
