"""How a single equation runs: as it is, or on each device of a `shard_map`.

Inside of a `shard_map` an equation stands for one part of an array on each device. By
itself it runs in a `shard_map` of its own. Between equations an array has one more axis
in front, with the parts of all devices.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from flax_amp._compat import Array, Eqn

# XLA may keep the digits and the range of float32 in fused code. Here each equation is
# to run in its own dtype.
_OPTIONS = {"xla_allow_excess_precision": False}


class Context:
    """Runs functions of arrays as they are.

    Attributes:
      lead: the number of axes that stand before those of the program.
    """

    lead = 0

    def compile(
        self, function: Callable[..., Sequence[Array]]
    ) -> Callable[..., Sequence[Array]]:
        """Returns a function in which each operation runs in its own dtype."""
        return jax.jit(function, compiler_options=_OPTIONS)

    def lift(self, x: Any) -> Any:
        """Returns a constant of the program as a value."""
        return x

    def common(self, x: Array) -> Array | None:
        """Returns the value that is the same on all devices, if there is one."""
        return x

    def names(self, devices: Sequence[int]) -> str:
        """Returns the names of devices."""
        return ""


PLAIN = Context()


@dataclasses.dataclass(frozen=True)
class Devices(Context):
    """Runs functions on each device of a mesh."""

    mesh: Any
    axes: tuple[str, ...]
    specs: tuple[Any, ...]  # of the operands of the whole

    lead = 1

    @classmethod
    def of(cls, eqn: Eqn) -> "Devices":
        """Returns the devices of a `shard_map`."""
        params = eqn.params
        manual = params["manual_axes"]
        axes = tuple(name for name in params["mesh"].axis_names if name in manual)
        return cls(params["mesh"], axes, tuple(params["in_specs"]))

    def _map(self, function: Any, in_specs: Any) -> Any:
        def one_device(*arrays: Array) -> list[Array]:
            return [jnp.expand_dims(x, 0) for x in function(*arrays)]

        mapped = jax.shard_map(
            one_device,
            mesh=self.mesh,
            in_specs=in_specs,
            out_specs=PartitionSpec(self.axes),
            axis_names=set(self.axes),
            check_vma=False,
        )
        return jax.jit(mapped, compiler_options=_OPTIONS)

    def enter(self, arrays: Sequence[Array]) -> list[Array]:
        """Returns the parts of arrays on all devices."""
        return self._map(lambda *arrays: arrays, self.specs)(*arrays)

    def compile(
        self, function: Callable[..., Sequence[Array]]
    ) -> Callable[..., Sequence[Array]]:
        def of_parts(*arrays: Array) -> Sequence[Array]:
            return function(*(jnp.squeeze(x, 0) for x in arrays))

        return self._map(of_parts, PartitionSpec(self.axes))

    def lift(self, x: Any) -> Any:
        size = int(np.prod([self.mesh.shape[name] for name in self.axes]))
        return jnp.broadcast_to(x, (size, *np.shape(x)))

    def common(self, x: Array) -> Array | None:
        parts = np.asarray(x)
        return parts[0] if (parts == parts[0]).all() else None

    def names(self, devices: Sequence[int]) -> str:
        sizes = [self.mesh.shape[name] for name in self.axes]
        places = [np.unravel_index(i, sizes) for i in devices[:4]]
        texts = [
            ",".join(f"{n}={int(i)}" for n, i in zip(self.axes, place, strict=True))
            for place in places
        ]
        more = ", ..." if len(devices) > len(texts) else ""
        return f"device {' and '.join(texts)}{more}"
