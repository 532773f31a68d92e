"""Compiles a step for an accelerator that this machine does not have.

XLA compiles ahead of time for a described device: for a TPU through libtpu, for a GPU
through the plugin `jax-cuda12-plugin[with-cuda]`. Import this module before JAX is
first used, because the environment variables that keep both plugins from looking for a
device are set here, where the user has not set them.
"""

import functools
import os
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

for _name, _value in {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "true",
}.items():
    os.environ.setdefault(_name, _value)

import jax  # noqa: E402
from jax.experimental import topologies  # noqa: E402
from jax.sharding import Sharding, SingleDeviceSharding  # noqa: E402

jax.config.update("jax_platforms", os.environ["JAX_PLATFORMS"])  # imported before

PyTree = Any

_H200 = pathlib.Path(__file__).with_name("h200.txtpb")


@functools.cache
def tpu_devices(topology: str = "v5e:2x2") -> tuple[jax.Device, ...]:
    """Describes the devices of a TPU slice; needs libtpu, but no TPU."""
    described = topologies.get_topology_desc(platform="tpu", topology_name=topology)
    return tuple(described.devices)


@functools.cache
def gpu_devices() -> tuple[jax.Device, ...]:
    """Describes one H200; needs the CUDA plugin of JAX, but no GPU."""
    described = topologies.get_topology_desc(
        "gpu", "cuda", target_config=_H200.read_text(), topology="1x1x1"
    )
    return tuple(described.devices)


def compile_for(
    devices: Sequence[jax.Device],
    step: Callable[..., Any],
    shapes: tuple[PyTree, ...],
    shardings: PyTree | None = None,
    **jit_options: Any,
) -> jax.stages.Compiled:
    """Compiles a step for described devices; the executable cannot be called."""

    def place(sharding: Sharding, subtree: PyTree) -> PyTree:
        return jax.tree.map(lambda x: x.update(sharding=sharding), subtree)

    if shardings is None:
        shardings = SingleDeviceSharding(devices[0])
    placed = jax.tree.map(
        place, shardings, shapes, is_leaf=lambda node: isinstance(node, Sharding)
    )
    return jax.jit(step, donate_argnums=0, **jit_options).lower(*placed).compile()
