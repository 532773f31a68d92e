"""How a single equation of a `shard_map` runs: in a `shard_map` of its own.

Between equations an array has one more axis in front, with the parts of all devices, or
one part if they are known to be equal.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from flax_amp import _compat
from flax_amp._compat import Array, Atom, Eqn, Jaxpr

# XLA may keep the digits and the range of float32 in fused code. Here each equation is
# to run in its own dtype.
_OPTIONS = {"xla_allow_excess_precision": False}

ArrayFunction = Callable[..., Sequence[Array]]


@dataclasses.dataclass(frozen=True)
class Devices:
    """The devices of a `shard_map`."""

    mesh: Any
    axes: tuple[str, ...]
    typed: bool  # whether types tell over which axes a value varies

    @classmethod
    def of(cls, eqn: Eqn) -> "Devices":
        """Returns the devices of a `shard_map`."""
        mesh, manual = eqn.params["mesh"], eqn.params["newly_manual_axes"]
        axes = tuple(name for name in mesh.axis_names if name in manual)
        return cls(mesh, axes, eqn.params["check_vma"])

    def enter(self, eqn: Eqn, arrays: Sequence[Array]) -> Sequence[Array]:
        """Returns the parts of the operands of a `shard_map`."""
        body, _ = _compat.open_jaxpr(eqn.params["jaxpr"])
        specs = tuple(eqn.params["in_specs"])
        return jax.jit(self._map(lambda *xs: xs, specs, body.invars))(*arrays)

    def on_parts(self, function: ArrayFunction, types: Eqn | Jaxpr) -> ArrayFunction:
        """Returns a function of the parts of arrays, which runs on each device.

        Args:
          function: a function of the arrays of one device.
          types: what has its operands and its results.
        """
        return self._map(
            lambda *arrays: function(*(jnp.squeeze(x, 0) for x in arrays)),
            tuple(map(self._spec, types.invars)),
            types.outvars,
        )

    def _map(
        self, function: ArrayFunction, specs: Any, outs: Sequence[Atom]
    ) -> ArrayFunction:
        return jax.shard_map(
            lambda *arrays: [jnp.expand_dims(x, 0) for x in function(*arrays)],
            mesh=self.mesh,
            in_specs=specs,
            out_specs=list(map(self._spec, outs)),
            axis_names=set(self.axes),
            check_vma=self.typed,
        )

    def _spec(self, atom: Atom) -> PartitionSpec:
        varying = atom.aval.mat.varying if self.typed else self.axes
        return PartitionSpec(tuple(n for n in self.axes if n in varying) or None)

    def lift(self, x: Any) -> Array:
        """Returns a constant of the program as parts."""
        sizes = [self.mesh.shape[name] for name in self.axes]
        size = 1 if self.typed else int(np.prod(sizes))
        return jnp.broadcast_to(x, (size, *np.shape(x)))

    def common(self, x: Array) -> Array | None:
        """Returns the part that is the same on all devices, if it is."""
        parts = np.asarray(x)
        return parts[0] if (parts == parts[0]).all() else None

    def names(self, numbers: Sequence[int], x: Array) -> str:
        """Returns the devices of some parts of an array: `device data=2,model=0`."""
        axes = x.sharding.spec[0] or ()
        axes = (axes,) if isinstance(axes, str) else axes
        if not axes:
            return "all devices"
        sizes = [self.mesh.shape[name] for name in axes]
        places = [np.unravel_index(i, sizes) for i in numbers[:4]]
        texts = [
            ",".join(f"{n}={int(i)}" for n, i in zip(axes, place, strict=True))
            for place in places
        ]
        more = ", ..." if len(numbers) > len(texts) else ""
        return f"device {' and '.join(texts)}{more}"


def compiled(
    function: ArrayFunction, types: Eqn | Jaxpr, devices: Devices | None
) -> ArrayFunction:
    """Returns a function in which each operation runs in its own dtype."""
    mapped = function if devices is None else devices.on_parts(function, types)
    return jax.jit(mapped, compiler_options=_OPTIONS)
