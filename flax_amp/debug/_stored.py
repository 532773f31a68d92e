"""What the backward pass stores, equation by equation.

JAX itself decides that: the gradient of the emitted program is traced, and what its
forward pass hands to its backward pass is counted. Nothing is compiled or run. Each
array is followed back to the equation that made it, through loops and calls:

    a, s = scan[body={... s = tanh y; return y, s}] x        s: stored
    tanh stands in the body, under the scope `Block` and at the user's line

What the function was given (its parameters and its batch) is in memory anyway, and is
not counted, nor is what only moves its data, such as a transposed weight.
"""

import dataclasses
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Literal, jaxprs_in_params

from flax_amp import _compat
from flax_amp._compat import Array, Atom, Eqn, Jaxpr, Var
from flax_amp._jaxpr.traits import Trait, has
from flax_amp._rewriter.recompute.stored import stored_p
from flax_amp._tree import fill, pick
from flax_amp.debug._model import Dtypes, Equation
from flax_amp.debug._scopes import Place
from flax_amp.debug._walk import Matching, Visit, source_line


@dataclasses.dataclass(frozen=True)
class Stored:
    """An array that the backward pass stores, with the equation that made it."""

    eqn: Eqn
    path: str
    dtype: str
    bytes: int


@dataclasses.dataclass(eq=False)
class _Frame:
    """A jaxpr, with the operands that its inputs stand for, and its place."""

    jaxpr: Jaxpr
    place: Place = Place()
    outer: "_Frame | None" = None
    operands: Sequence[Atom] = ()
    carry: tuple[int, int] = (0, 0)  # the inputs that are the carry of a loop

    def __post_init__(self) -> None:
        self.inner: dict[int, _Frame] = {}
        self.moves: dict[int, bool] = {}  # what `_moves_inputs` found
        self.made = {v: e for e in self.jaxpr.eqns for v in e.outvars}
        self.inputs = {v: i for i, v in enumerate(self.jaxpr.invars)}

    def body(self, eqn: Eqn) -> "_Frame | None":
        """Returns the frame of what an equation calls, if it is known to be a call."""
        if id(eqn) not in self.inner:
            bodies = list(jaxprs_in_params(eqn.params))
            name = eqn.primitive.name
            if not bodies or name in ("while", "pallas_call"):
                return None
            jaxpr = _compat.open_jaxpr(bodies[0])[0]
            if len(jaxpr.outvars) != len(eqn.outvars):
                return None
            carry = (0, 0)
            if name == "scan":
                start, count = _compat.scan_counts(eqn)
                carry = start, start + count
            first = len(eqn.invars) - len(jaxpr.invars)  # behind a predicate
            self.inner[id(eqn)] = _Frame(
                jaxpr,
                self.place.within(eqn),
                self,
                eqn.invars[first:],
                carry,
            )
        return self.inner[id(eqn)]


def _origin(
    atom: Atom, frame: _Frame
) -> tuple[Eqn, Var, _Frame, frozenset[Var]] | None:
    """Returns the equation that makes a value; `None` for inputs and constants.

    Returned with it are its result, its frame, and the carries of loops on the way:
    what an iteration before has made is another array than what this one makes.
    """
    carried: set[Var] = set()
    while not isinstance(atom, Literal):
        eqn = frame.made.get(atom)
        if eqn is None:
            index = frame.inputs.get(atom)
            if index is None or frame.outer is None:
                return None
            start, stop = frame.carry
            if start <= index < stop and atom not in carried:  # of the iteration before
                carried.add(atom)
                atom = frame.jaxpr.outvars[index - start]
            else:
                atom, frame = frame.operands[index], frame.outer
        elif eqn.primitive is stored_p:
            atom = eqn.invars[0]
        else:
            body = frame.body(eqn)
            if body is None:
                if _moves_inputs(eqn, frame):
                    return None
                return eqn, atom, frame, frozenset(carried)
            atom, frame = body.jaxpr.outvars[list(eqn.outvars).index(atom)], body
    return None


def _moves_inputs(eqn: Eqn, frame: _Frame) -> bool:
    """Whether a result is the data of inputs and constants, in another order."""
    # Asked once for each equation: of what is rolled 30 times, each one reads the one
    # before twice.
    if id(eqn) not in frame.moves:
        frame.moves[id(eqn)] = (
            has(eqn, Trait.LAYOUT) or eqn.primitive.name == "pvary"
        ) and all(_origin(v, frame) is None for v in eqn.invars)
    return frame.moves[id(eqn)]


def stored_arrays(
    function: Callable[..., Sequence[Array]], arrays: Sequence[Any], moving: Any
) -> list[Stored]:
    """Returns what the backward pass of a function stores.

    Args:
      function: a function of arrays, whose first result is the loss if it is a scalar.
      arrays: its arguments, or their shapes.
      moving: for each, whether it is differentiated.
    """

    def residuals(*arrays: Array) -> list[Array]:
        def loss(*chosen: Array) -> Any:
            outs = function(*fill(chosen, moving, arrays))
            outs = [x for x in outs if jnp.issubdtype(x.dtype, jnp.inexact)]
            return outs[:1] if outs and outs[0].ndim == 0 else outs

        outs, pullback = jax.vjp(jax.jit(loss), *pick(arrays, moving))
        # Only its use tells whether there is one: a `while` has none.
        pullback(jax.tree.map(jnp.ones_like, outs))
        leaves = jax.tree.leaves(pullback)
        return [x for x in leaves if isinstance(x, jax.Array)]

    closed = jax.make_jaxpr(residuals)(*arrays)
    frame = _Frame(_compat.open_jaxpr(closed)[0])
    found: dict[Any, Stored] = {}
    for atom in frame.jaxpr.outvars:
        origin = _origin(atom, frame)
        if origin is not None:
            eqn, variable, at, carried = origin
            size = math.prod(atom.aval.shape) * atom.aval.dtype.itemsize
            stored = Stored(eqn, at.place.path(eqn), str(atom.aval.dtype), size)
            found[variable, id(at), carried, atom.aval.shape] = stored
    return list(found.values())


def bytes_by_dtype(stored: Sequence[Stored]) -> Counter[str]:
    """Returns the sum of bytes for each dtype."""
    sizes: Counter[str] = Counter()
    for item in stored:
        sizes[item.dtype] += item.bytes
    return sizes


def attach(stored: Sequence[Stored], visits: Sequence[Visit]) -> list[Equation]:
    """Adds what is stored to the equations that made it.

    The rule of a custom derivative has tracebacks of its own, and equations like those
    of the function that it belongs to.

    Returns:
      Equations for what none of them made: only the rule has these.
    """
    matching = Matching(visits)
    alike: dict[Any, list[Equation]] = defaultdict(list)
    for visit in visits:
        alike[_kind(visit.row.path, visit.eqn)].append(visit.row)
    others: list[Equation] = []
    for item in stored:
        name = item.eqn.primitive.name
        found = matching.rows(item.path, item.eqn)
        same = [row for row in found if row.primitive == name]
        unused = [row for row in alike[_kind(item.path, item.eqn)] if not row.stored]
        candidates = same or found or unused
        if not candidates:
            candidates = [_rule(item)]
            others += candidates
        candidates[0].stored[item.dtype] += item.bytes
    return others


def _kind(path: str, eqn: Eqn) -> tuple[str, str, Any]:
    shapes = [getattr(v.aval, "shape", ()) for v in eqn.outvars]  # none of a print
    return path, eqn.primitive.name, shapes[0] if shapes else ()


def _rule(item: Stored) -> Equation:
    dtypes = Dtypes((), (item.dtype,))
    return Equation(
        item.path,
        item.eqn.primitive.name,
        before=dtypes,
        after=dtypes,
        reason="stored by the rule of a derivative",
        source=source_line(item.eqn),
    )
