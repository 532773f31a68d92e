"""`tpu`, `gpu-aot` and `mesh`: the step as XLA compiles it for devices not here.

`mesh` is the scanned GPT under FSDP: each parameter is sharded over its largest axis
that the chips divide, and stays whole where there is none. The optimizer's state lies
as the parameters do. The batch is sharded over its examples, and the model asks for the
same of its residual stream.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks import hlo, request, targets
from benchmarks.request import Figures, Request
from benchmarks.results import Results
from benchmarks.variants import Training

_CHIPS = "v5e:16x16"
_MESH_VARIANTS = "float32 hand_bf16 amp_bf16 jmp_bf16 mpx_bf16 jaxamp_bf16".split()

PyTree = Any
Compile = Callable[[Training], jax.stages.Compiled]


def run_tpu(asked: Request) -> None:
    """Compiles every cell for a TPU v5e."""
    cells = asked.cells(request.MODELS, request.BFLOAT16)
    _run(asked, "tpu", "v5e", cells, _for_one(targets.tpu_devices()))


def run_gpu(asked: Request) -> None:
    """Compiles every cell for an H200."""
    cells = asked.cells(request.MODELS, request.BFLOAT16 + request.FLOAT16)
    _run(asked, "gpu-aot", "h200", cells, _for_one(targets.gpu_devices()))


def run_mesh(asked: Request) -> None:
    """Compiles every variant for 256 chips of a TPU v5e, and tells its collectives."""
    mesh = Mesh(np.array(targets.tpu_devices(_CHIPS)), ("data",))

    def build(training: Training) -> Any:
        carry, batch = training.shapes()
        placed = fsdp(carry, mesh)
        whole = NamedSharding(mesh, PartitionSpec())
        with jax.set_mesh(mesh):  # the model asks for it
            return targets.compile_for(
                mesh.devices.flatten().tolist(),
                training.step,
                (carry, batch),
                shardings=(placed, NamedSharding(mesh, PartitionSpec("data"))),
                out_shardings=(placed, whole),
            )

    cells = asked.cells(("gpt_fsdp",), _MESH_VARIANTS)
    _run(asked, "mesh", _CHIPS, cells, build)


def fsdp(tree: PyTree, mesh: Mesh) -> PyTree:
    """Returns a sharding for each leaf: its largest axis that divides, over "data"."""

    def place(leaf: Any) -> NamedSharding:
        fits = [i for i, size in enumerate(leaf.shape) if size % mesh.size == 0]
        if not fits:
            return NamedSharding(mesh, PartitionSpec())
        axis = max(fits, key=lambda i: leaf.shape[i])
        return NamedSharding(mesh, PartitionSpec(*[None] * axis, "data"))

    return jax.tree.map(place, tree)


def _for_one(devices: Sequence[jax.Device]) -> Compile:
    return lambda training: targets.compile_for(
        devices, training.step, training.shapes()
    )


def _run(asked: Request, command: str, target: str, cells: Any, build: Compile) -> None:
    def figures(variant: str, model: str) -> Figures:
        return hlo.measure(build(asked.training(variant, model)))

    def measure(model: str, names: list[str]) -> Iterator[tuple[str, Figures]]:
        for name in names:
            yield name, request.guarded(figures, name, model)

    results = Results.open(asked.folder, command, target, asked.size)
    request.run_cells(asked, results, cells, measure)
