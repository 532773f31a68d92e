"""How a single equation runs: as it is, or on each device of a `shard_map`.

Inside of a `shard_map` an equation stands for one part of an array on each device. By
itself it runs in a `shard_map` of its own. Between equations an array has one more axis
in front, with the parts of all devices, or one part if they are known to be equal.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from flax_amp import _compat
from flax_amp._compat import Array, Aval, Eqn

# XLA may keep the digits and the range of float32 in fused code. Here each equation is
# to run in its own dtype.
_OPTIONS = {"xla_allow_excess_precision": False}

ArrayFunction = Callable[..., Sequence[Array]]


class Context:
    """Runs functions of arrays as they are.

    Attributes:
      lead: the number of axes that stand before those of the program.
    """

    lead = 0

    def compile(
        self, function: ArrayFunction, ins: Sequence[Aval], outs: Sequence[Aval]
    ) -> ArrayFunction:
        """Returns a function in which each operation runs in its own dtype.

        Args:
          function: a function of arrays as the program has them.
          ins: the types of its arguments.
          outs: the types of its results.
        """
        return jax.jit(function, compiler_options=_OPTIONS)

    def lift(self, x: Any) -> Any:
        """Returns a constant of the program as a value."""
        return x

    def common(self, x: Array) -> Array | None:
        """Returns the value that is the same on all devices, if there is one."""
        return x

    def names(self, devices: Sequence[int], x: Array) -> str:
        """Returns the names of the devices that hold these parts of a value."""
        return ""


PLAIN = Context()


@dataclasses.dataclass(frozen=True)
class Devices(Context):
    """Runs functions on each device of a mesh."""

    mesh: Any
    axes: tuple[str, ...]
    specs: tuple[Any, ...]  # of the operands of the whole
    typed: bool  # whether types tell over which axes a value varies

    lead = 1

    @classmethod
    def of(cls, eqn: Eqn) -> "Devices":
        """Returns the devices of a `shard_map`."""
        params = eqn.params
        manual = params["newly_manual_axes"]
        axes = tuple(name for name in params["mesh"].axis_names if name in manual)
        specs = tuple(params["in_specs"])
        return cls(params["mesh"], axes, specs, params["check_vma"])

    def enter(self, eqn: Eqn, arrays: Sequence[Array]) -> list[Array]:
        """Returns the parts of the operands of a `shard_map` on all devices."""
        body, _ = _compat.open_jaxpr(eqn.params["jaxpr"])
        outs = [v.aval for v in body.invars]
        return self._map(lambda *arrays: arrays, self.specs, outs)(*arrays)

    def compile(
        self, function: ArrayFunction, ins: Sequence[Aval], outs: Sequence[Aval]
    ) -> ArrayFunction:
        def of_parts(*arrays: Array) -> Sequence[Array]:
            return function(*(jnp.squeeze(x, 0) for x in arrays))

        return self._map(of_parts, tuple(map(self._spec, ins)), outs)

    def lift(self, x: Any) -> Any:
        size = 1 if self.typed else self._size(self.axes)
        return jnp.broadcast_to(x, (size, *np.shape(x)))

    def common(self, x: Array) -> Array | None:
        parts = np.asarray(x)
        return parts[0] if (parts == parts[0]).all() else None

    def names(self, devices: Sequence[int], x: Array) -> str:
        spec = x.sharding.spec[0] or ()
        axes = (spec,) if isinstance(spec, str) else spec
        if not axes:
            return "all devices"
        sizes = [self.mesh.shape[name] for name in axes]
        places = [np.unravel_index(i, sizes) for i in devices[:4]]
        texts = [
            ",".join(f"{n}={int(i)}" for n, i in zip(axes, place, strict=True))
            for place in places
        ]
        more = ", ..." if len(devices) > len(texts) else ""
        return f"device {' and '.join(texts)}{more}"

    def _map(self, function: Any, specs: Any, outs: Sequence[Aval]) -> Any:
        def one_device(*arrays: Array) -> list[Array]:
            return [jnp.expand_dims(x, 0) for x in function(*arrays)]

        mapped = jax.shard_map(
            one_device,
            mesh=self.mesh,
            in_specs=specs,
            out_specs=list(map(self._spec, outs)),
            axis_names=set(self.axes),
            check_vma=self.typed,
        )
        return jax.jit(mapped, compiler_options=_OPTIONS)

    def _varying(self, aval: Aval) -> tuple[str, ...]:
        if not self.typed:
            return self.axes
        varying = aval.mat.varying
        return tuple(name for name in self.axes if name in varying)

    def _spec(self, aval: Aval) -> PartitionSpec:
        return PartitionSpec(self._varying(aval) or None)

    def _size(self, axes: Sequence[str]) -> int:
        return int(np.prod([self.mesh.shape[name] for name in axes]))
