"""`error`: how far the gradients are from those of the float32 model, on the CPU.

XLA may skip a rounding to half precision between two operations that it fuses. Here it
is told not to, so that what is compared is the rounding that a program asks for. And
every matmul of half-precision arrays adds in float32 and is rounded once, whatever the
CPU would do (`exact_matmuls`).
"""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import request, variants
from benchmarks.matmuls import exact_matmuls
from benchmarks.request import Request
from benchmarks.results import Figures

SEEDS = 8  # of weights and batches
_EXACT = "--xla_allow_excess_precision=false"

PyTree = Any


def run(asked: Request) -> None:
    """Compares the gradients of every cell with the float32 model's."""
    request.on_cpu(_EXACT)

    def measure(model: str, names: list[str]) -> Iterator[tuple[str, Figures]]:
        samples = _reference(model)
        for name in names:
            yield name, request.guarded(_figures, model, name, samples)

    request.run_cells(asked, "cpu", measure)


def relative_error(grads: PyTree, reference: PyTree) -> float:
    """Returns the relative L2 error over all leaves; the error if all are zero."""
    found, right = (
        np.concatenate([np.ravel(x).astype(complex) for x in jax.tree.leaves(tree)])
        for tree in (grads, reference)
    )
    return float(np.linalg.norm(found - right) / (np.linalg.norm(right) or 1.0))


def _reference(model: str) -> list[tuple[Any, ...]]:
    """Returns parameters, other variables, batch and float32 gradients of each seed."""
    training = variants.training("float32", model, "tiny")
    init, batch = jax.jit(training.problem.init), jax.jit(training.problem.batch)
    gradients = jax.jit(training.gradients)
    samples = []
    for seed in range(SEEDS):
        keys = jax.random.split(jax.random.key(seed))
        (params, others), data = init(keys[0]), batch(keys[1])
        with jax.default_matmul_precision("float32"):
            grads = gradients(params, others, data)
        samples.append(jax.device_get((params, others, data, grads)))
    return samples


def _figures(model: str, variant: str, samples: list[Any]) -> Figures:
    gradients = jax.jit(
        exact_matmuls(variants.training(variant, model, "tiny").gradients)
    )
    errors = []
    for params, others, data, reference in samples:
        grads = gradients(params, others, data)
        if any(leaf.dtype != jnp.float32 for leaf in jax.tree.leaves(grads)):
            raise TypeError("a gradient is not float32")
        if not all(jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(grads)):
            raise ValueError("a gradient is not finite")
        errors.append(100 * relative_error(grads, reference))
    return {"errors": errors}
