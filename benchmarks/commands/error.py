"""`error`: how far the gradients are from those of the float32 model, on the CPU.

XLA may skip a rounding to half precision between two operations that it fuses. Here it
is told not to, so that what is compared is the rounding that a program asks for.
"""

import dataclasses
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import request, show
from benchmarks.request import Request
from benchmarks.results import Results
from benchmarks.sections import section

PART = "gradients"
SEEDS = 8
VARIANTS = (
    "hand_bf16",
    "smcast_bf16",
    "amp_bf16",
    "jmp_bf16",
    "mpx_bf16",
    "jaxamp_bf16",
    "hand_fp16",
    "amp_fp16",
    "jmp_fp16",
)
_EXACT = "--xla_allow_excess_precision=false"

PyTree = Any


def run(asked: Request, seeds: int = SEEDS) -> None:
    """Compares the gradients of every cell with the float32 model's.

    Args:
      asked: the request.
      seeds: how many weights and batches to draw.
    """
    if _EXACT not in os.environ.get("XLA_FLAGS", ""):  # read when JAX is first used
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_EXACT}".strip()
    jax.config.update("jax_platforms", "cpu")
    asked = dataclasses.replace(asked, size="tiny")
    results = Results.open(asked.folder, "error", "cpu")
    cells = asked.cells(request.MODELS, VARIANTS)
    progress = show.Progress(sum(len(names) for _, names in cells))
    for model, names in cells:
        _run_model(asked, model, names, range(seeds), results, progress)
    show.results(results)


def relative_error(grads: PyTree, reference: PyTree) -> float:
    """Returns the relative L2 error over all leaves."""
    pairs = zip(jax.tree.leaves(grads), jax.tree.leaves(reference), strict=True)
    wrong = right = 0.0
    for a, b in pairs:
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        wrong += float(((a - b) ** 2).sum())
        right += float((b**2).sum())
    return (wrong / right) ** 0.5


def _run_model(
    asked: Request,
    model: str,
    names: list[str],
    seeds: range,
    results: Results,
    progress: show.Progress,
) -> None:
    shown = section("error", PART)
    samples: list[tuple[Any, Any, Any, Any]] = []
    for variant in names:
        label = asked.label(variant)
        if asked.resume and results.has(model, label, PART):
            progress.cell(model, label, "there already")
            continue
        try:
            samples = samples or _reference(asked, model, seeds)
            figures = _figures(asked, model, variant, seeds, samples)
        except Exception as error:  # whatever a package or XLA may raise
            figures = {"error": request.reason(error)}
        results.put(model, label, PART, figures)
        progress.cell(model, label, shown.line(figures))
        request.free_memory()


def _reference(asked: Request, model: str, seeds: range) -> list[tuple[Any, ...]]:
    """Returns parameters, other variables, batch and float32 gradients of each seed."""
    training = asked.training("float32", model)
    init, batch = jax.jit(training.init), jax.jit(training.batch)
    gradients = jax.jit(training.gradients)
    samples = []
    for seed in seeds:
        keys = jax.random.split(jax.random.key(seed))
        others = dict(init(keys[0]))
        params, data = others.pop("params"), batch(keys[1])
        with jax.default_matmul_precision("float32"):
            _, grads = gradients(params, others, data)
        samples.append(jax.device_get((params, others, data, grads)))
    return samples


def _figures(
    asked: Request, model: str, variant: str, seeds: range, samples: list[Any]
) -> dict[str, Any]:
    gradients = jax.jit(asked.training(variant, model).gradients)
    errors = []
    for params, others, data, reference in samples:
        _, grads = gradients(params, others, data)
        if any(leaf.dtype != jnp.float32 for leaf in jax.tree.leaves(grads)):
            raise TypeError("a gradient is not float32")
        errors.append(relative_error(grads, reference))
    return {"seeds": list(seeds), "errors": errors}
