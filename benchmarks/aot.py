"""Compiles a step, if need be for an accelerator that this machine does not have.

XLA compiles ahead of time for a described device: for a TPU through libtpu, for a GPU
through the plugin `jax-cuda12-plugin[with-cuda]`. Import this module before JAX is
first used, because the environment variables that keep both plugins from looking for a
device are set here, where the user has not set them.
"""

import functools
import os
import pathlib
import time
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
    args: tuple[PyTree, ...],
    shardings: PyTree | None = None,
    **jit_options: Any,
) -> tuple[jax.stages.Compiled, dict[str, float]]:
    """Compiles a step, whose first argument is donated, for described devices.

    Args:
      devices: what `tpu_devices` or `gpu_devices` gave.
      step: the function to compile.
      args: its arguments, as `jax.ShapeDtypeStruct`.
      shardings: a prefix of the tree `args` with shardings as leaves. By default
        everything lies on the first device.
      **jit_options: further keywords of `jax.jit`, such as `out_shardings`.

    Returns:
      The executable, which cannot be called, and the seconds of each stage.
    """

    def place(sharding: Sharding, subtree: PyTree) -> PyTree:
        return jax.tree.map(lambda leaf: leaf.update(sharding=sharding), subtree)

    if shardings is None:
        shardings = SingleDeviceSharding(devices[0])
    placed = jax.tree.map(
        place, shardings, args, is_leaf=lambda node: isinstance(node, Sharding)
    )
    return build(jax.jit(step, donate_argnums=0, **jit_options), *placed)


def lower(jitted: Any, *args: Any) -> tuple[jax.stages.Lowered, dict[str, float]]:
    """Traces and lowers a jitted function; returns the seconds of both stages too.

    `cpu_s` is processor time, which other work on the machine disturbs least.
    """
    start, cpu = time.perf_counter(), time.thread_time()
    traced = jitted.trace(*args)
    traced_at = time.perf_counter()
    lowered = traced.lower()
    end, cpu_end = time.perf_counter(), time.thread_time()
    seconds = {"trace_s": traced_at - start, "lower_s": end - traced_at}
    return lowered, {**seconds, "cpu_s": cpu_end - cpu}


def build(jitted: Any, *args: Any) -> tuple[jax.stages.Compiled, dict[str, float]]:
    """Compiles a jitted function; returns the seconds of each stage too."""
    lowered, seconds = lower(jitted, *args)
    start = time.perf_counter()
    compiled = lowered.compile()
    return compiled, seconds | {"compile_s": time.perf_counter() - start}
