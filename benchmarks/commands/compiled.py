"""`tpu`, `gpu-aot`, `mesh`, `fp8`: the step, compiled for devices not here.

XLA compiles ahead of time for a described device: for a TPU through libtpu, for a GPU
through the plugin `jax-cuda12-plugin[with-cuda]`, which carries descriptions of GPUs.

`mesh` is the scanned GPT under FSDP: each parameter is sharded over its largest axis
that the chips divide, and stays whole where there is none. The optimizer's state lies
as the parameters do. The batch is sharded over its examples, and the model asks for the
same of its residual stream.
"""

import importlib.util
import os
import pathlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks import hlo, request, variants
from benchmarks.request import Figures, Request
from benchmarks.variants import Training

CHIPS = "v5e:16x16"
_MESH_VARIANTS = "float32 hand_bf16 amp_bf16 jmp_bf16 mpx_bf16 jaxamp_bf16".split()
# By the name of the target: its topology
TPUS = {"v5e": "v5e:2x2", "v6e": "v6e:2x2", "tpu7x": "tpu7x:2x2x1"}
# By the name of the target: how the plugin names it
GPUS = {"h200": "NVIDIA H200 141GB HBM3e", "b200": "NVIDIA B200"}
_V5E_GHZ = 1.5  # the clocks of the other TPUs are not known here
# They keep libtpu from looking for a TPU.
_NO_TPU = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "true",
}

PyTree = Any
Compile = Callable[[Training], jax.stages.Compiled]


def run_tpu(asked: Request, target: str = "v5e") -> None:
    """Compiles every cell for a TPU."""
    chosen = request.MODELS, variants.BFLOAT16
    _run(asked, "tpu", target, *chosen, _for_one(tpu_devices(target)))


def run_gpu(asked: Request, target: str = "h200") -> None:
    """Compiles every cell for a GPU."""
    chosen = request.MODELS, variants.BFLOAT16 + variants.FLOAT16
    _run(asked, "gpu-aot", target, *chosen, _for_one(_gpu(target)))


def run_mesh(asked: Request) -> None:
    """Compiles every variant for 256 chips of a TPU v5e, and tells its collectives."""
    _run(asked, "mesh", CHIPS, ("gpt_fsdp",), _MESH_VARIANTS, _for_chips())


def run_fp8(asked: Request, target: str = "tpu7x") -> None:
    """Compiles matmuls in fp8 beside those in bfloat16; the roofline is of an H200."""
    is_gpu = target in GPUS
    build = _for_one(_gpu(target) if is_gpu else tpu_devices(target))

    def more(text: str) -> Figures:
        found = hlo.fp8_figures(text)
        return found if is_gpu else {"fp8_matmuls": found["fp8_matmuls"]}

    chosen = ("llama_4k",), ("amp_bf16", "amp_fp8")
    _run(asked, "fp8", target, *chosen, build, more)


def _for_chips() -> Compile:
    mesh = Mesh(np.array(tpu_devices(CHIPS)), ("data",))

    def build(training: Training) -> jax.stages.Compiled:
        carry, batch = training.shapes()
        sharded = jax.tree.map(lambda leaf: fsdp(leaf, mesh), carry)
        over_examples = NamedSharding(mesh, PartitionSpec("data"))
        whole = NamedSharding(mesh, PartitionSpec())
        with jax.set_mesh(mesh):  # the model asks for it
            return compile_for(
                training.step,
                (carry, batch),
                (sharded, over_examples),
                out_shardings=(sharded, whole),
            )

    return build


def fsdp(leaf: Any, mesh: Mesh) -> NamedSharding:
    """Returns the sharding of a leaf: its largest axis that divides, over "data"."""
    fits = [i for i, size in enumerate(leaf.shape) if size % mesh.size == 0]
    if not fits:
        return NamedSharding(mesh, PartitionSpec())
    axis = max(fits, key=lambda i: leaf.shape[i])
    return NamedSharding(mesh, PartitionSpec(*[None] * axis, "data"))


def compile_for(
    step: Callable[..., Any], shapes: PyTree, shardings: PyTree, **jit_options: Any
) -> jax.stages.Compiled:
    """Compiles a step for described devices; the executable cannot be called."""
    options: Any = dict(donate_argnums=0, in_shardings=shardings, **jit_options)
    return jax.jit(step, **options).lower(*shapes).compile()


def _for_one(devices: Sequence[jax.Device]) -> Compile:
    one = jax.sharding.SingleDeviceSharding(devices[0])
    return lambda training: compile_for(training.step, training.shapes(), one)


def _gpu(target: str) -> list[jax.Device]:
    options = dict(target_config=_description(GPUS[target]), topology="1x1x1")
    return _devices("gpu", "cuda", **options)


def tpu_devices(target: str) -> list[jax.Device]:
    """Returns described chips of a TPU: of `TPUS`, or of a topology."""
    topology = TPUS.get(target, target)
    for name, value in _NO_TPU.items():
        os.environ.setdefault(name, value)
    return _devices(topology, "tpu")


def _description(name: str) -> str:
    """Returns the description of a GPU, a text in XLA's plugin, which reads it."""
    spec = importlib.util.find_spec("jax_plugins.xla_cuda12")
    if spec is None or spec.origin is None:
        sys.exit("error: no plugin; pip install 'jax-cuda12-plugin[with-cuda]'")
    plugin = pathlib.Path(spec.origin).with_name("xla_cuda_plugin.so").read_bytes()
    end = f'device_description_str: "{name}"\n'.encode()
    head, found, _ = plugin.partition(end)
    if not found:
        sys.exit(f"error: the plugin that is installed does not describe {name}")
    return (head[head.rindex(b"gpu_device_info {") :] + end).decode()


def _devices(name: str, platform: str, **options: Any) -> list[jax.Device]:
    """Describes devices; JAX itself computes on the CPU."""
    jax.config.update("jax_platforms", "cpu")
    return list(topologies.get_topology_desc(name, platform, **options).devices)


def _run(
    asked: Request,
    command: str,
    target: str,
    models: Sequence[str],
    names: Sequence[str],
    build: Compile,
    more: Callable[[str], Figures] = lambda text: {},
) -> None:
    def figures(variant: str, model: str) -> Figures:
        compiled = build(asked.training(variant, model))
        found = hlo.measure(compiled) | more(compiled.as_text() or "")
        time = found.pop("estimated_mcycles")
        on_v5e = target.startswith("v5e")
        return found | {"estimated_time": time / _V5E_GHZ if on_v5e else time}

    def measure(model: str, names: list[str]) -> Iterator[tuple[str, Figures]]:
        for name in names:
            yield name, request.guarded(figures, name, model)

    request.run_cells(asked, command, target, models, names, measure)
