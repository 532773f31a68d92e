"""Runs what stands in a `shard_map` one equation at a time, on all devices together.

Inside of a `shard_map` each device has its own arrays. Between two equations, those of
one variable are one array, a *stack*. Its first axis has an element for each device:

    y = log x       a `shard_map` for this equation alone: each device has its element
    z = psum y      another one, in which all devices take part

Where devices take different branches of a `cond`, or leave a `while` one after the
other, one device is followed: all of them then run with its arrays.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax
from jax.extend.core import jaxprs_in_params
from jax.sharding import PartitionSpec as P

from flax_amp._compat import Array, Arrays, Atom, Eqn, Jaxpr, open_jaxpr
from flax_amp._jaxprs import bind_in_context, evaluate, named_axes, varying_axes
from flax_amp._rewriter.primitives import walk

# XLA may keep the digits and the range of float32 in fused code. Here each equation is
# to run in its own dtype.
OPTIONS = {"xla_allow_excess_precision": False}

Specs = Sequence[P]
Examples = Callable[[np.ndarray], tuple[int, ...]]  # those marked in an array of bools


class NotAlone(Exception):
    """A part of a `shard_map` cannot run by itself."""


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        # Whatever JAX refuses here, it has run the `shard_map` as a whole before.
        raise NotAlone from error


class _Batch(NamedTuple):
    """How the devices share the batch."""

    axes: tuple[str, ...]  # of the mesh, which split its first axis
    other_shapes: Collection[tuple[int, ...]]  # of operands that are not the batch
    examples: Examples  # of the whole batch


@dataclasses.dataclass(frozen=True, eq=False)
class Devices:
    """The devices of a `shard_map`."""

    call: Eqn  # the `shard_map`
    depth: int  # how many loops and branches are around it
    compiled: dict[Any, Any]
    batch: _Batch | None
    followed: int | None = None  # the number of the device whose arrays all have

    @classmethod
    def of(
        cls,
        call: Eqn,
        operands: Arrays,
        *,
        depth: int,
        compiled: dict[Any, Any],
        examples: Examples,
    ) -> "Devices":
        """Returns the devices of an equation with its operands."""
        return cls(call, depth, compiled, _batch_of(call, operands, examples))

    @functools.cached_property
    def sizes(self) -> dict[str, int]:
        """The sizes of the manual axes of the mesh, in its order."""
        manual = self.call.params["newly_manual_axes"]
        shape = self.call.params["mesh"].shape
        return {name: size for name, size in shape.items() if name in manual}

    # --- stacks ----------------------------------------------------------------------

    @_alone()
    def split(self, operands: Arrays) -> Arrays:
        """Returns the operands of the `shard_map` as stacks."""
        specs = tuple(self.call.params["in_specs"])
        return self._run(("split", specs), self._map(_stacked, specs), operands)

    @_alone()
    def repeat(self, x: Array) -> Array:
        """Returns a stack in which all devices have the same array."""
        return self._run("repeat", self._map(_stacked, [P()]), [x])[0]

    @_alone()
    def run(self, item: Eqn | Jaxpr, stacks: Arrays) -> Arrays:
        """Runs an equation, or a body with all its equations."""
        is_eqn = hasattr(item, "primitive")
        jaxpr = item if is_eqn else open_jaxpr(item)[0]
        run = functools.partial(bind_in_context if is_eqn else evaluate, item)
        given = tuple(map(self._spec, jaxpr.invars))
        made = tuple(map(self._spec, jaxpr.outvars))
        check_vma = self.call.params["check_vma"]

        def on_device(*elements: Array) -> Arrays:
            return _stacked(*run([lax.squeeze(x, [0]) for x in elements]))

        def on_devices(*stacks: Array) -> Arrays:
            # An equation asks for operands of its types. With `check_vma` these tell
            # along which axes all devices have the same, which is not always true: the
            # result of a `cond` has no axis of its index. So a stack has every device.
            typed = self._retyped(stacks, [self._every] * len(given), given)
            outs = self._map(on_device, given, made, check_vma)(*typed)
            return self._retyped(outs, made, [self._every] * len(made))

        kind = _kind(item) if is_eqn else id(item)
        return self._run((kind, given, made), on_devices, stacks)

    @property
    def _every(self) -> P:
        """The spec of a stack."""
        return P(tuple(self.sizes))

    def _spec(self, atom: Atom) -> P:
        """Returns the spec of a stack without the axes along which it is the same."""
        if not self.call.params["check_vma"]:
            return self._every
        varying = varying_axes(atom.aval)
        return P(tuple(name for name in self.sizes if name in varying))

    def _retyped(self, arrays: Arrays, before: Specs, after: Specs) -> Arrays:
        """Returns arrays with other specs. Each device keeps what it has."""
        if [*before] == [*after]:
            return arrays
        return self._map(lambda *arrays: arrays, before, after)(*arrays)

    def _map(
        self,
        run: Callable[..., Any],
        in_specs: Specs,
        out_specs: Specs | None = None,
        check_vma: bool = False,
    ) -> Callable[..., Any]:
        """Returns a function that runs on each device; by default it makes stacks."""
        return jax.shard_map(
            run,
            mesh=self.call.params["mesh"],
            in_specs=tuple(in_specs),
            out_specs=self._every if out_specs is None else tuple(out_specs),
            check_vma=check_vma,
            axis_names=set(self.sizes),
        )

    def _run(self, key: Hashable, run: Callable[..., Any], arrays: Arrays) -> Arrays:
        """Runs a function, which is compiled once for each key."""
        params = self.call.params
        key = params["mesh"], tuple(self.sizes), params["check_vma"], key
        if key not in self.compiled:
            self.compiled[key] = jax.jit(run, compiler_options=OPTIONS)
        return self.compiled[key](*arrays)

    # --- one device ------------------------------------------------------------------

    def following(self, number: int) -> "Devices":
        """Returns these devices, which all have the arrays of one of them."""
        return dataclasses.replace(self, followed=number)

    def first(self, bad: np.ndarray) -> int:
        """Returns the number of the first device with something bad in a stack."""
        return int(np.flatnonzero(self._has_bad(bad))[0])

    def note(self, bad: np.ndarray) -> str:
        """Returns which devices have something bad: `device data=1 and 2 more of 4`."""
        places = np.unravel_index(self.first(bad), [*self.sizes.values()])
        place = " ".join(f"{x}={i}" for x, i in zip(self.sizes, places, strict=True))
        count = int(self._has_bad(bad).sum())
        others = f" and {count - 1} more" if count > 1 else ""
        is_group = self.call.params["mesh"].size > len(bad)
        noun = "group of devices" if is_group else "device"
        return f"{noun} {place}{others} of {len(bad)}"

    def _has_bad(self, bad: np.ndarray) -> np.ndarray:
        """Returns which devices have something bad in a stack, of those that count."""
        found = np.asarray(bad.reshape(len(bad), -1).any(axis=1))
        if self.followed is not None:
            found &= np.arange(len(bad)) == self.followed
        return found

    def examples(self, bad: np.ndarray) -> tuple[int, ...]:
        """Returns the examples of the batch that are marked in a stack of bools."""
        _, *shape = bad.shape
        if self.batch is None or not shape or tuple(shape) in self.batch.other_shapes:
            return ()
        counts = self._has_bad(bad).reshape(-1, *(1 for _ in shape))
        # The examples are in the order of the axes that split the batch. Along the
        # other axes, devices share examples.
        names = [*self.sizes]
        order = [names.index(name) for name in self.batch.axes]
        others = [i for i in range(len(names)) if i not in order]
        grid = (bad & counts).reshape(*self.sizes.values(), *shape)
        rest = range(len(names), grid.ndim)
        grid = grid.transpose(*others, *order, *rest).any(axis=(*range(len(others)),))
        return self.batch.examples(grid.reshape(-1, *shape[1:]))


def _stacked(*arrays: Array) -> tuple[Array, ...]:
    """Returns arrays of a device as its elements of stacks."""
    return tuple(lax.expand_dims(x, [0]) for x in arrays)


def _kind(eqn: Eqn) -> Hashable:
    """Returns what is equal for equations that do the same to their operands."""
    try:
        return eqn.primitive, frozenset(eqn.params.items()), eqn.ctx
    except TypeError:  # an array among the parameters has no hash
        return id(eqn)


def _batch_of(call: Eqn, operands: Arrays, examples: Examples) -> _Batch | None:
    """Returns how the devices of a `shard_map` share the batch.

    It is `None` if its operands do not tell, or if a collective mixes the examples.
    """
    body, _ = open_jaxpr(call.params["jaxpr"])
    splits, sizes, others = set(), set(), set()
    for spec, x, v in zip(call.params["in_specs"], operands, body.invars, strict=True):
        is_batch = bool(examples(np.broadcast_to(True, x.shape)))
        if is_batch:
            names = next(iter(spec), None) or ()
            splits.add(names if isinstance(names, tuple) else (names,))
            sizes.add(v.aval.shape[0])
        else:
            others.add(v.aval.shape)
    if len(splits) != 1:
        return None
    (axes,) = splits
    is_mixed = any(_mixes(visit.eqn, axes, sizes) for visit in walk(body))
    return None if is_mixed else _Batch(axes, others, examples)


def _mixes(eqn: Eqn, axes: Sequence[str], sizes: Collection[int]) -> bool:
    """Whether a collective over these axes makes an array of so many rows."""
    # An equation with bodies has the effects of what is in them.
    has_bodies = any(jaxprs_in_params(eqn.params))
    if has_bodies or named_axes(eqn).isdisjoint(axes):
        return False
    shapes = [getattr(v.aval, "shape", ()) for v in eqn.outvars]
    return any(shape and shape[0] in sizes for shape in shapes)
