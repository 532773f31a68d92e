"""The arrays of a plan while it is emitted, in the precisions that readers ask for."""

from collections import Counter
from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp
from jax.extend.core import Literal

from flax_amp._compat import Array, Arrays, Atom, DType, Eqn, Var
from flax_amp._jaxpr.walk import variables
from flax_amp._rewriter.plan import Paint, Value, has_paint, value_of
from flax_amp._rewriter.recompute.regions import Region
from flax_amp._rewriter.recompute.residuals import LowCopy, Node


def to_float32(x: Array, value: Value | None) -> Array:
    """Returns an operand in float32."""
    if value is None or x.dtype == jnp.float32:
        return x
    return jax.lax.convert_element_type(x, jnp.float32)


class Environment:
    """The live arrays of a plan and their values.

    An array is dropped after its last use.

    Args:
      arrays: the arrays of the inputs, by variable.
      values: their values.
      reads: every read of a variable, results included.
      region: the region that is emitted, if it is one.
    """

    def __init__(
        self,
        arrays: dict[Var, Array],
        values: dict[Var, Value | None],
        reads: Sequence[Atom],
        region: Region | None = None,
    ):
        self._region = region
        self._arrays = arrays
        self._values = values
        # Further forms of an array, made when the first reader asks: of a half in
        # float32, as it was before it was rounded, and of a float32 one in half.
        self._full: dict[Var, Array] = {}
        self._unrounded: dict[Var, Array] = {}
        self._low: dict[Var, Array] = {}
        # How often each variable is still read. An equation counts twice if it reads it
        # twice, such as `mul x x`.
        self._uses = Counter(variables(reads))

    def of_region(
        self, region: Region, eqns: Sequence[Eqn], operands: Arrays
    ) -> "Environment":
        """Returns the environment of a region that is traced by itself.

        Args:
          region: the region.
          eqns: its equations.
          operands: the arrays of its inputs inside of the trace.
        """
        reads = [v for eqn in eqns for v in eqn.invars] + list(region.outs)
        # In the order of the inputs: that of the set `stored` differs from process to
        # process, and XLA's compilation cache would not recognize the program.
        arrays = {
            v: region.mark(v, x, region.indices[0])
            for v, x in zip(region.ins, operands, strict=True)
        }
        values = {v: self.value(v) for v in region.ins}
        return Environment(arrays, values, reads, region)

    def array(self, atom: Atom, *, unrounded: bool = False) -> Array:
        """Returns the array, as it was before it was rounded if that is at hand."""
        if isinstance(atom, Literal):
            return atom.val
        held = self._arrays[atom]
        return self._unrounded.get(atom, held) if unrounded else held

    def full(self, atom: Atom, *, unrounded: bool = False) -> Array:
        """Returns the array in float32; all readers share one cast.

        The cotangents of the three places where a norm reads its input then add up in
        float32 and are rounded once.
        """
        if isinstance(atom, Literal):
            return atom.val
        if unrounded and atom in self._unrounded:
            return self._unrounded[atom]
        if atom not in self._full:
            self._full[atom] = to_float32(self._arrays[atom], self._values[atom])
        return self._full[atom]

    def low(self, atom: Atom, dtype: DType, index: int) -> Array:
        """Returns the array that the equation at `index` reads in low precision.

        All readers share the cast of a full value. Leaves stay as they are, because
        each use of a weight has a cast of its own.
        """
        is_full = has_paint(self.value(atom), Paint.FULL)
        if isinstance(atom, Literal) or not is_full:
            return self.array(atom)
        if atom not in self._low:
            # The region may store the copy and not the value: it has half the bytes.
            x = jax.lax.convert_element_type(self._arrays[atom], dtype)
            self._low[atom] = self.mark(LowCopy(atom), x, index)
        return self._low[atom]

    def mark(self, key: Node, x: Array, index: int) -> Array:
        """Returns an array, marked if the region stores it (see `Region.mark`)."""
        return x if self._region is None else self._region.mark(key, x, index)

    def has(self, variable: Var) -> bool:
        return variable in self._arrays

    def value(self, atom: Atom) -> Value | None:
        return value_of(atom, self._values)

    def write(
        self,
        variables: Sequence[Var],
        arrays: Arrays,
        values: Sequence[Value | None],
    ) -> None:
        for v, array, value in zip(variables, arrays, values, strict=True):
            if v in self._uses:  # JAX's jaxprs have results that nothing reads
                self._arrays[v], self._values[v] = array, value

    def unrounded(self, variables: Iterable[Var]) -> dict[Var, Array]:
        """Returns those of some arrays that are at hand as before a rounding."""
        return {v: self._unrounded[v] for v in variables if v in self._unrounded}

    def write_unrounded(self, arrays: Iterable[tuple[Var, Array]]) -> None:
        """Adds what some results were before they were rounded."""
        self._unrounded |= {v: x for v, x in arrays if v in self._uses}

    def release(self, atoms: Sequence[Atom]) -> None:
        """Drops the operands of an equation that nothing reads after it."""
        for v in variables(atoms):
            self._uses[v] -= 1
            if not self._uses[v]:
                for held in (
                    self._arrays,
                    self._values,
                    self._full,
                    self._unrounded,
                    self._low,
                ):
                    held.pop(v, None)
