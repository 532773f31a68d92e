"""Runs a `shard_map` equation by equation, on all devices together.

Inside of a `shard_map` each device has its own arrays. Between two equations, the
arrays of a variable on all devices form a single array, a *stack*. The first axis of a
stack has an element for each device:

    y = log x       a `shard_map` for this equation alone: each device has its element
    z = psum y      another `shard_map`, in which all devices take part

Devices may take different branches of a `cond`, or leave a `while` after different
numbers of iterations. Then a single device is followed: all devices run with the
arrays of this device.
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
# Returns the numbers of the examples that are marked in an array of bools.
Examples = Callable[[np.ndarray], tuple[int, ...]]


class NotAlone(Exception):
    """A part of a `shard_map` cannot run by itself."""


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        # JAX has run the `shard_map` as a whole before. If JAX refuses a part, the
        # report is about the whole `shard_map`, so any error is caught.
        raise NotAlone from error


class _Batch(NamedTuple):
    """How the devices share the batch."""

    axes: tuple[str, ...]  # the axes of the mesh that split the first axis of the batch
    other_shapes: Collection[tuple[int, ...]]  # of operands that are not the batch
    examples: Examples  # of the whole batch


@dataclasses.dataclass(frozen=True, eq=False)
class Devices:
    """The devices of a `shard_map`."""

    call: Eqn  # the `shard_map`
    depth: int  # the number of loops and branches around the `shard_map`
    compiled: dict[Any, Any]
    batch: _Batch | None
    followed: int | None = None  # the device whose arrays all devices have, if any

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
        if hasattr(item, "primitive"):
            jaxpr = item
            item_key = _cache_key(item)
            run = functools.partial(bind_in_context, item)
        else:
            jaxpr, _ = open_jaxpr(item)
            item_key = id(item)
            run = functools.partial(evaluate, item)
        given = tuple(map(self._spec, jaxpr.invars))
        made = tuple(map(self._spec, jaxpr.outvars))
        check_vma = self.call.params["check_vma"]

        def on_device(*elements: Array) -> Arrays:
            return _stacked(*run([lax.squeeze(x, [0]) for x in elements]))

        def on_devices(*stacks: Array) -> Arrays:
            # An equation asks for operands of its types. With `check_vma`, the types
            # tell along which axes all devices have the same array. The types are not
            # always right: the result of a `cond` may lack an axis along which its
            # index varies. So a stack keeps the array of every device.
            typed = self._retyped(stacks, [self._stack_spec] * len(given), given)
            outs = self._map(on_device, given, made, check_vma)(*typed)
            return self._retyped(outs, made, [self._stack_spec] * len(made))

        return self._run((item_key, given, made), on_devices, stacks)

    @property
    def _stack_spec(self) -> P:
        """The spec of a stack."""
        return P(tuple(self.sizes))

    def _spec(self, atom: Atom) -> P:
        """Returns the spec of a variable: the axes along which arrays may differ."""
        if not self.call.params["check_vma"]:
            return self._stack_spec
        varying = varying_axes(atom.aval)
        return P(tuple(name for name in self.sizes if name in varying))

    def _retyped(self, arrays: Arrays, before: Specs, after: Specs) -> Arrays:
        """Returns arrays with the specs `after`. Each device keeps its array."""
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
        """Returns a function that runs on each device; by default, it makes stacks."""
        return jax.shard_map(
            run,
            mesh=self.call.params["mesh"],
            in_specs=tuple(in_specs),
            out_specs=self._stack_spec if out_specs is None else tuple(out_specs),
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

    # --- a device --------------------------------------------------------------------

    def following(self, number: int) -> "Devices":
        """Returns these devices, which all have the arrays of a single device."""
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
        """Returns which devices have something bad in a stack.

        If a device is followed, no further device counts.
        """
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
        # The examples are in the order of the axes that split the batch. Along all
        # remaining axes, devices share examples.
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


def _cache_key(eqn: Eqn) -> Hashable:
    """Returns a key that is equal for equations with the same computation."""
    try:
        return eqn.primitive, frozenset(eqn.params.items()), eqn.ctx
    except TypeError:  # an array among the parameters has no hash
        return id(eqn)


def _batch_of(call: Eqn, operands: Arrays, examples: Examples) -> _Batch | None:
    """Returns how the devices of a `shard_map` share the batch.

    Returns `None` if the operands do not tell, or if a collective mixes the examples.
    """
    body, _ = open_jaxpr(call.params["jaxpr"])
    splits = set()
    sizes = set()
    others = set()
    for spec, x, v in zip(call.params["in_specs"], operands, body.invars, strict=True):
        is_batch = bool(examples(np.broadcast_to(True, x.shape)))
        if is_batch:
            names = next(iter(spec), None) or ()
            if not isinstance(names, tuple):
                names = (names,)
            splits.add(names)
            sizes.add(v.aval.shape[0])
        else:
            others.add(v.aval.shape)
    if len(splits) != 1:
        return None
    (axes,) = splits
    if any(_mixes(visit.eqn, axes, sizes) for visit in walk(body)):
        return None
    return _Batch(axes, others, examples)


def _mixes(eqn: Eqn, axes: Sequence[str], sizes: Collection[int]) -> bool:
    """Whether a collective over these axes makes an array of so many rows."""
    # An equation with bodies has the axes of the collectives in its bodies, which the
    # walk visits by themselves.
    has_bodies = any(jaxprs_in_params(eqn.params))
    if has_bodies or named_axes(eqn).isdisjoint(axes):
        return False
    shapes = [getattr(v.aval, "shape", ()) for v in eqn.outvars]
    return any(shape and shape[0] in sizes for shape in shapes)
