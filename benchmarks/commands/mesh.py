"""`mesh`: the scanned GPT under FSDP on 256 chips of a described TPU v5e.

Each parameter is sharded over its largest axis that the chips divide, and stays whole
where there is none; the optimizer's state lies as the parameters do. The batch is
sharded over its examples, and the model asks for the same of its residual stream.
"""

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks import targets
from benchmarks.commands.compiled import run_cells
from benchmarks.method import Training
from benchmarks.request import Request
from benchmarks.stages import Build

TOPOLOGY = "v5e:16x16"
MODEL = "gpt_fsdp"
VARIANTS = ("float32", "hand_bf16", "amp_bf16", "jmp_bf16", "mpx_bf16", "jaxamp_bf16")

PyTree = Any


def run(asked: Request) -> None:
    """Compiles every variant for the mesh and tells its collectives."""
    mesh = Mesh(np.array(targets.tpu_devices(TOPOLOGY)), ("data",))

    def build(training: Training) -> Build:
        carry, batch = training.shapes()
        placed = fsdp(carry, mesh)
        whole = NamedSharding(mesh, PartitionSpec())
        examples = NamedSharding(mesh, PartitionSpec("data"))
        with jax.set_mesh(mesh):  # the model asks for it
            return targets.compile_for(
                mesh.devices.flatten().tolist(),
                training.step,
                (carry, batch),
                shardings=(placed, examples),
                out_shardings=(placed, whole),
            )

    run_cells(asked, "mesh", TOPOLOGY, asked.cells((MODEL,), VARIANTS), build)


def fsdp(tree: PyTree, mesh: Mesh) -> PyTree:
    """Returns a sharding for each leaf: its largest axis that divides, over "data"."""

    def place(leaf: Any) -> NamedSharding:
        fits = [i for i, size in enumerate(leaf.shape) if size % mesh.size == 0]
        if not fits:
            return NamedSharding(mesh, PartitionSpec())
        axis = max(fits, key=lambda i: leaf.shape[i])
        return NamedSharding(mesh, PartitionSpec(*[None] * axis, "data"))

    return jax.tree.map(place, tree)
