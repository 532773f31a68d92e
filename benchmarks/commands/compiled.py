"""`tpu`, `gpu-aot`, `mesh`, `fp8`: the step, compiled for devices not here.

XLA compiles ahead of time for a described device: for a TPU through libtpu, for a GPU
through the plugin `jax-cuda12-plugin[with-cuda]`, which carries descriptions of GPUs.

`mesh` is the scanned GPT under FSDP: each parameter, with its moments, is sharded over
its largest axis that the chips divide, the batch over its examples, and the model asks
for the same of its residual stream.
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
from benchmarks.request import Request
from benchmarks.results import Figures
from benchmarks.variants import Training

CHIPS = "v5e:16x16"
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

Compile = Callable[[Training], jax.stages.Compiled]


def run(asked: Request, target: str = CHIPS) -> None:
    """Compiles every cell for a target, by default 256 chips of a TPU v5e."""
    devices = _gpu(target) if target in GPUS else tpu_devices(target)
    build = _for_chips(devices) if target == CHIPS else _for_one(devices)

    def figures(model: str, variant: str) -> Figures:
        compiled = build(variants.training(variant, model, asked.size))
        found = hlo.measure(compiled)
        time = found.pop("estimated_mcycles")
        on_v5e = target.startswith("v5e")
        found["estimated_time"] = time / _V5E_GHZ if on_v5e else time
        if asked.command == "fp8" and target in GPUS:
            found["roofline_ms"] = hlo.roofline_ms(compiled.as_text() or "")
        return found

    def measure(model: str, names: list[str]) -> Iterator[tuple[str, Figures]]:
        for name in names:
            yield name, request.guarded(figures, model, name)

    request.run_cells(asked, target, measure)


def _for_chips(devices: Sequence[jax.Device]) -> Compile:
    mesh = Mesh(np.array(devices), ("data",))

    def build(training: Training) -> jax.stages.Compiled:
        shapes = carry, _ = training.shapes()
        state = jax.tree.map(lambda leaf: _fsdp(leaf, mesh), carry)
        batch, loss = (NamedSharding(mesh, PartitionSpec(*x)) for x in (["data"], []))
        with jax.set_mesh(mesh):  # the model asks for it
            out = state, loss
            return compile_for(training.step, shapes, (state, batch), out_shardings=out)

    return build


def _fsdp(leaf: Any, mesh: Mesh) -> NamedSharding:
    """Returns the sharding of a leaf: its largest axis that divides, over "data"."""
    fits = [i for i, size in enumerate(leaf.shape) if size % mesh.size == 0]
    before = max(fits, key=lambda i: leaf.shape[i]) if fits else None
    parts = [] if before is None else [None] * before + ["data"]
    return NamedSharding(mesh, PartitionSpec(*parts))


def _for_one(devices: Sequence[jax.Device]) -> Compile:
    one = jax.sharding.SingleDeviceSharding(devices[0])
    return lambda training: compile_for(training.step, training.shapes(), one)


def compile_for(
    step: Callable[..., Any], shapes: Any, shardings: Any, **jit_options: Any
) -> jax.stages.Compiled:
    """Compiles a step for described devices; the executable cannot be called.

    It is traced as on a host of these devices (`flax_amp/_rewriter/row_matmuls.py`).
    """
    options: Any = dict(donate_argnums=0, in_shardings=shardings, **jit_options)
    sharding = jax.tree.leaves(shardings)[0]
    with jax.default_device(min(sharding.device_set, key=lambda x: x.id)):
        return jax.jit(step, **options).lower(*shapes).compile()


def tpu_devices(target: str) -> list[jax.Device]:
    """Returns described chips of a TPU: of `TPUS`, or of a topology."""
    for name, value in _NO_TPU.items():
        os.environ.setdefault(name, value)
    return _devices(TPUS.get(target, target), "tpu")


def _gpu(target: str) -> list[jax.Device]:
    """Returns a GPU, which a text in XLA's plugin describes."""
    spec = importlib.util.find_spec("jax_plugins.xla_cuda12")
    if spec is None or spec.origin is None:
        sys.exit("error: no plugin; pip install 'jax-cuda12-plugin[with-cuda]'")
    plugin = pathlib.Path(spec.origin).with_name("xla_cuda_plugin.so").read_bytes()
    end = f'device_description_str: "{GPUS[target]}"\n'.encode()
    head, found, _ = plugin.partition(end)
    if not found:
        sys.exit(f"error: the plugin that is installed does not describe {target}")
    text = (head[head.rindex(b"gpu_device_info {") :] + end).decode()
    return _devices("gpu", "cuda", target_config=text, topology="1x1x1")


def _devices(name: str, platform: str, **options: Any) -> list[jax.Device]:
    """Describes devices; JAX itself computes on the CPU."""
    jax.config.update("jax_platforms", "cpu")
    return list(topologies.get_topology_desc(name, platform, **options).devices)
