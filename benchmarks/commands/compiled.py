"""`tpu`, `gpu-aot` and `mesh`: the step as XLA compiles it for devices not here.

XLA compiles ahead of time for a described device: for a TPU through libtpu, for a GPU
through the plugin `jax-cuda12-plugin[with-cuda]`.

`mesh` is the scanned GPT under FSDP: each parameter is sharded over its largest axis
that the chips divide, and stays whole where there is none. The optimizer's state lies
as the parameters do. The batch is sharded over its examples, and the model asks for the
same of its residual stream.
"""

import os
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from benchmarks import hlo, request
from benchmarks.request import Figures, Request
from benchmarks.results import Results
from benchmarks.variants import Training

_CHIPS = "v5e:16x16"
_MESH_VARIANTS = "float32 hand_bf16 amp_bf16 jmp_bf16 mpx_bf16 jaxamp_bf16".split()
_H200 = pathlib.Path(__file__).parents[1] / "h200.txtpb"
# They keep libtpu from looking for a TPU.
_NO_TPU = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "true",
}

PyTree = Any
Compile = Callable[[Training], jax.stages.Compiled]


def run_tpu(asked: Request) -> None:
    """Compiles every cell for a TPU v5e."""
    cells = asked.cells(request.MODELS, request.BFLOAT16)
    _run(asked, "tpu", "v5e", cells, _for_one(_tpu_devices("v5e:2x2")))


def run_gpu(asked: Request) -> None:
    """Compiles every cell for an H200."""
    h200 = dict(target_config=_H200.read_text(), topology="1x1x1")
    cells = asked.cells(request.MODELS, request.BFLOAT16 + request.FLOAT16)
    _run(asked, "gpu-aot", "h200", cells, _for_one(_devices("gpu", "cuda", **h200)))


def run_mesh(asked: Request) -> None:
    """Compiles every variant for 256 chips of a TPU v5e, and tells its collectives."""
    mesh = Mesh(np.array(_tpu_devices(_CHIPS)), ("data",))

    def build(training: Training) -> jax.stages.Compiled:
        carry, batch = training.shapes()
        placed = fsdp(carry, mesh)
        over_examples = NamedSharding(mesh, PartitionSpec("data"))
        whole = NamedSharding(mesh, PartitionSpec())
        with jax.set_mesh(mesh):  # the model asks for it
            return compile_for(
                training.step,
                (carry, batch),
                (placed, over_examples),
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


def compile_for(
    step: Callable[..., Any], shapes: PyTree, shardings: PyTree, **jit_options: Any
) -> jax.stages.Compiled:
    """Compiles a step for described devices; the executable cannot be called."""

    def place(sharding: Sharding, subtree: PyTree) -> PyTree:
        return jax.tree.map(lambda x: x.update(sharding=sharding), subtree)

    placed = jax.tree.map(
        place, shardings, shapes, is_leaf=lambda node: isinstance(node, Sharding)
    )
    return jax.jit(step, donate_argnums=0, **jit_options).lower(*placed).compile()


def _for_one(devices: Sequence[jax.Device]) -> Compile:
    one = jax.sharding.SingleDeviceSharding(devices[0])
    return lambda training: compile_for(training.step, training.shapes(), one)


def _tpu_devices(topology: str) -> list[jax.Device]:
    for name, value in _NO_TPU.items():
        os.environ.setdefault(name, value)
    return _devices(topology, "tpu")


def _devices(name: str, platform: str, **options: Any) -> list[jax.Device]:
    """Describes devices; JAX itself computes on the CPU."""
    jax.config.update("jax_platforms", "cpu")
    return list(topologies.get_topology_desc(name, platform, **options).devices)


def _run(asked: Request, command: str, target: str, cells: Any, build: Compile) -> None:
    def figures(variant: str, model: str) -> Figures:
        return hlo.measure(build(asked.training(variant, model)))

    def measure(model: str, names: list[str]) -> Iterator[tuple[str, Figures]]:
        for name in names:
            yield name, request.guarded(figures, name, model)

    results = Results.open(asked.folder, command, target, asked.size)
    request.run_cells(asked, results, cells, measure)
