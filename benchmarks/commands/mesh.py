"""`mesh`: the scanned GPT under FSDP on 256 chips of a described TPU v5e.

Each parameter is sharded over its largest axis that the chips divide, and stays whole
where there is none; the optimizer's state lies as the parameters do. The batch is
sharded over its examples, and the model asks for the same of its residual stream.
"""

import dataclasses
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks import hlo, request, show, targets
from benchmarks.commands.compiled import PART
from benchmarks.request import Request
from benchmarks.results import Results
from benchmarks.sections import section

TOPOLOGY = "v5e:16x16"
MODEL = "gpt_fsdp"
VARIANTS = ("float32", "hand_bf16", "amp_bf16", "jmp_bf16", "mpx_bf16", "jaxamp_bf16")

PyTree = Any


def run(asked: Request) -> None:
    """Compiles every variant for the mesh and tells its collectives."""
    results = Results.open(asked.folder, "mesh", TOPOLOGY, asked.size)
    shown = section("mesh", PART)
    cells = asked.cells((MODEL,), VARIANTS)
    mesh = Mesh(np.array(targets.tpu_devices(TOPOLOGY)), ("data",))
    progress = show.Progress(sum(len(names) for _, names in cells))
    for model, variant in [(model, name) for model, names in cells for name in names]:
        label = asked.label(variant)
        if asked.resume and results.has(model, label, PART):
            progress.cell(model, label, "there already")
            continue
        figures = _figures(asked, mesh, model, variant)
        results.put(model, label, PART, figures)
        progress.cell(model, label, shown.line(figures))
        request.free_memory()
    show.results(results)


def fsdp(tree: PyTree, mesh: Mesh) -> PyTree:
    """Returns a sharding for each leaf: its largest axis that divides, over "data"."""

    def place(leaf: Any) -> NamedSharding:
        fits = [i for i, size in enumerate(leaf.shape) if size % mesh.size == 0]
        if not fits:
            return NamedSharding(mesh, PartitionSpec())
        axis = max(fits, key=lambda i: leaf.shape[i])
        return NamedSharding(mesh, PartitionSpec(*[None] * axis, "data"))

    return jax.tree.map(place, tree)


def _figures(asked: Request, mesh: Mesh, model: str, variant: str) -> dict[str, Any]:
    try:
        training = asked.training(variant, model)
        carry, batch = training.shapes()
        placed = fsdp(carry, mesh)
        whole = NamedSharding(mesh, PartitionSpec())
        examples = NamedSharding(mesh, PartitionSpec("data"))
        with jax.set_mesh(mesh):  # the model asks for it
            built = targets.compile_for(
                mesh.devices.flatten().tolist(),
                training.step,
                (carry, batch),
                shardings=(placed, examples),
                out_shardings=(placed, whole),
            )
        return dataclasses.asdict(hlo.measure(built))
    except Exception as error:  # whatever a package or XLA may raise
        return {"error": request.reason(error)}
