"""Compiles a step for an accelerator that this machine does not have.

XLA compiles ahead of time for a described device: TPU through libtpu, GPU through the
plugin `jax-cuda12-plugin[with-cuda]`. Import this module before JAX is first used: the
environment variables that keep both from looking for a device are set here, where the
user has not set them.
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

from benchmarks.stages import Build, build  # noqa: E402

jax.config.update("jax_platforms", os.environ["JAX_PLATFORMS"])  # imported before

PyTree = Any

H200 = pathlib.Path(__file__).with_name("h200.txtpb")


@functools.cache
def tpu_devices(topology: str = "v5e:2x2") -> tuple[jax.Device, ...]:
    """Describes the devices of a TPU slice; needs libtpu, but no TPU.

    Args:
      topology: generation and shape, such as "v5e:2x2" or "v5e:16x16".

    Returns:
      The described devices.
    """
    described = topologies.get_topology_desc(platform="tpu", topology_name=topology)
    return tuple(described.devices)


@functools.cache
def gpu_devices(
    config_path: str | os.PathLike[str] = H200, topology: str = "1x1x1"
) -> tuple[jax.Device, ...]:
    """Describes GPUs; needs the CUDA plugin of JAX, but no GPU.

    Args:
      config_path: a target configuration of XLA, a text proto.
      topology: slices x hosts x devices of a host.

    Returns:
      The described devices.
    """
    described = topologies.get_topology_desc(
        "gpu",
        "cuda",
        target_config=pathlib.Path(config_path).read_text(),
        topology=topology,
    )
    return tuple(described.devices)


def compile_for(
    devices: Sequence[jax.Device],
    step: Callable[..., Any],
    args: Sequence[PyTree],
    donate_argnums: int | Sequence[int] = (0,),
    shardings: PyTree | None = None,
    **jit_options: Any,
) -> Build:
    """Compiles a step for described devices.

    Args:
      devices: what `tpu_devices` or `gpu_devices` gave.
      step: the function to compile.
      args: its arguments; only shapes and dtypes are read, so that
        `jax.ShapeDtypeStruct` will do.
      donate_argnums: as in `jax.jit`.
      shardings: one sharding for all, or a prefix of the tree `args` with shardings
        as leaves. By default everything lies on the first device.
      **jit_options: further keywords of `jax.jit`, such as `out_shardings`.

    Returns:
      The executable and the seconds of its stages.
    """
    if shardings is None:
        shardings = SingleDeviceSharding(devices[0])
    structs = _with_shardings(tuple(args), shardings)
    jitted = jax.jit(step, donate_argnums=donate_argnums, **jit_options)
    return build(jitted, *structs)


def _with_shardings(args: tuple[PyTree, ...], shardings: PyTree) -> tuple[PyTree, ...]:
    """Returns the shapes of `args`, placed by a prefix tree of shardings."""

    def place(sharding: Sharding, subtree: PyTree) -> PyTree:
        return jax.tree.map(lambda leaf: _struct(leaf, sharding), subtree)

    return jax.tree.map(
        place, shardings, args, is_leaf=lambda node: isinstance(node, Sharding)
    )


def _struct(leaf: Any, sharding: Sharding) -> jax.ShapeDtypeStruct:
    aval = leaf if isinstance(leaf, jax.ShapeDtypeStruct) else jax.typeof(leaf)
    return jax.ShapeDtypeStruct(
        aval.shape, aval.dtype, sharding=sharding, weak_type=aval.weak_type
    )
