"""Marks what passes between modules, so that it is found again after `amp`.

An *edge* is a value that one module computes and another one reads. `mark` names the
edges of a user's jaxpr by `checkpoint_name`, an identity:

    h = tanh z   in Block_0             h = tanh z         in Block_0
    y = dot h w  in Block_1     =>      h' = name[edge 3] h
                                        y = dot h' w       in Block_1

A parameter that several modules read passes along an edge to each of them, so that what
each adds to its gradient is known. The names stay in the program that `amp` makes of
it, so that the edges of both programs can be compared, whatever `amp` does between
them.
"""

import dataclasses
from collections.abc import Sequence, Set
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Literal

from flax_amp import _compat
from flax_amp._compat import Atom, Eqn, Jaxpr, Var
from flax_amp._jaxpr import traits
from flax_amp._rewriter.plan import EditedJaxpr
from flax_amp._tree import split_list
from flax_amp.debug._place import Place

_PREFIX = "flax_amp edge "
# What can carry more operands and results. All else is left alone, and its module has
# what leaves the equation.
_ENTERED = ("jit", "remat2", "scan", "cond")


class Edge(NamedTuple):
    """Where a value passes from one module to another.

    Attributes:
      maker: the path of the module that computes it; `None` for a parameter.
      reader: the path of the module that reads it; `None` for the loss.
      times: how often it passes: the lengths of the loops around it, multiplied.
    """

    maker: str | None
    reader: str | None
    times: int


@dataclasses.dataclass
class Marked:
    """A user's program with marked edges.

    Attributes:
      jaxpr: the program.
      edges: the edges, by name.
      readers: the modules that read an input, the first one first, by its index.
    """

    jaxpr: Any = None
    edges: dict[str, Edge] = dataclasses.field(default_factory=dict)
    readers: dict[int, list[str]] = dataclasses.field(default_factory=dict)


def edge_name(eqn: Eqn) -> str:
    """Returns the name of an edge, if an equation marks one."""
    name = eqn.params["name"] if eqn.primitive.name == "name" else ""
    return name if name.startswith(_PREFIX) else ""


def _only_moves(eqn: Eqn) -> bool:
    """Whether a result is an operand, moved or in another dtype."""
    return (
        traits.has(eqn, traits.Trait.LAYOUT)
        or eqn.primitive.name == "convert_element_type"
    )


def bodies(eqn: Eqn) -> tuple[Jaxpr, ...]:
    """Returns the jaxprs of an equation in which edges are marked."""
    return traits.bodies(eqn) if eqn.primitive.name in _ENTERED else ()


def mark(closed: Jaxpr, trained: Sequence[bool]) -> Marked:
    """Marks the edges of a program whose first result is the loss.

    Args:
      closed: the program.
      trained: which of its inputs are parameters.
    """
    readers = _marked(closed, frozenset()).readers
    shared = {i for i, paths in readers.items() if trained[i] and paths[1:]}
    return _marked(closed, shared)


def _marked(closed: Jaxpr, shared: Set[int]) -> Marked:
    marked = Marked()
    jaxpr, consts = _compat.open_jaxpr(closed)
    inputs: dict[Var, tuple[int, ...]] = {v: (i,) for i, v in enumerate(jaxpr.invars)}
    body = _Body(marked, shared, jaxpr, inputs, Place())
    body.mark()
    loss = body.read(jaxpr.outvars[0], None)
    outvars = [loss, *jaxpr.outvars[1:]]
    marked.jaxpr = EditedJaxpr(
        jaxpr.invars, outvars, body.eqns, jaxpr.constvars, consts
    )
    return marked


@dataclasses.dataclass
class _Body:
    """A jaxpr that is being marked.

    Attributes:
      shared: the indices of the parameters that several modules read.
      leaves: its variables that are inputs of the program, or only move their data,
        with the indices of these inputs. They are not computed, and pass unmarked.
      place: where it stands.
    """

    marked: Marked
    shared: Set[int]
    jaxpr: Jaxpr
    leaves: dict[Var, tuple[int, ...]]
    place: Place

    def __post_init__(self) -> None:
        # The module around makes the inputs of a body, and reads its results.
        self.path = self.place.path
        self.leaves |= dict.fromkeys(self.jaxpr.constvars, ())
        self.paths = dict.fromkeys(self.jaxpr.invars, self.path)
        self.eqns: list[Eqn] = []
        self._names: dict[tuple[Var, str | None], Var] = {}

    def mark(self) -> None:
        """Marks each equation."""
        for eqn in self.jaxpr.eqns:
            path = self.place.of(eqn).path
            sources = [self._leaf(v) for v in eqn.invars]
            known = [source for source in sources if source is not None]
            indices = sum(known, ())
            invars = [self.read(v, path) for v in eqn.invars]
            moves = _only_moves(eqn)
            if moves and known and len(known) == len(sources):
                self.leaves |= dict.fromkeys(eqn.outvars, indices)
            elif eqn.primitive.name in _ENTERED:
                eqn = self._with_bodies(eqn, sources)
            else:
                for index in indices:
                    paths = self.marked.readers.setdefault(index, [])
                    paths += [path] * (path not in paths)
                invars = [self._read_leaf(v, path) for v in invars]
            self.eqns.append(eqn.replace(invars=invars))
            self.paths |= dict.fromkeys(eqn.outvars, path)

    def read(self, atom: Atom, reader: str | None) -> Atom:
        """Returns what a module reads in place of a variable."""
        if self._leaf(atom) is not None or self.paths[atom] == reader:
            return atom
        return self._edge(atom, self.paths[atom], reader)

    def _read_leaf(self, atom: Atom, reader: str) -> Atom:
        """Returns what a module reads in place of a parameter."""
        indices = self._leaf(atom) or ()
        return (
            atom if self.shared.isdisjoint(indices) else self._edge(atom, None, reader)
        )

    def _edge(self, atom: Atom, maker: str | None, reader: str | None) -> Atom:
        if not jnp.issubdtype(atom.aval.dtype, jnp.floating) or not atom.aval.size:
            return atom
        if (atom, reader) not in self._names:
            name = f"{_PREFIX}{len(self.marked.edges)}"
            self.marked.edges[name] = Edge(maker, reader, self.place.times)
            struct = _compat.struct_of(atom.aval, atom.aval.dtype)
            traced = jax.make_jaxpr(lambda x: checkpoint_name(x, name))(struct)
            (eqn,) = _compat.open_jaxpr(traced)[0].eqns
            # It has no scopes, so that no key of a policy for a module decides on it.
            self.eqns.append(eqn.replace(invars=[atom]))
            self._names[atom, reader] = eqn.outvars[0]
        return self._names[atom, reader]

    def _leaf(self, atom: Atom) -> tuple[int, ...] | None:
        return () if isinstance(atom, Literal) else self.leaves.get(atom)

    def _with_bodies(self, eqn: Eqn, sources: Sequence[tuple[int, ...] | None]) -> Eqn:
        """Returns a structured equation with marked bodies."""
        name = eqn.primitive.name
        if name == "scan":
            consts, carry, xs = split_list(sources, *_compat.scan_counts(eqn))
            sources = (*consts, *[None] * len(carry), *xs)
        sources = sources[1:] if name == "cond" else sources

        def with_marks(closed: Jaxpr) -> Jaxpr:
            jaxpr, _ = _compat.open_jaxpr(closed)
            pairs = zip(jaxpr.invars, sources, strict=True)
            leaves = {v: source for v, source in pairs if source is not None}
            body = _Body(
                self.marked, self.shared, jaxpr, leaves, self.place.within(eqn)
            )
            body.mark()
            outvars = [body.read(v, body.path) for v in jaxpr.outvars]
            jaxpr = jaxpr.replace(eqns=body.eqns, outvars=outvars)
            # Before JAX 0.12, a closed jaxpr holds an open one.
            return closed.replace(jaxpr=jaxpr) if hasattr(closed, "jaxpr") else jaxpr

        new = tuple(map(with_marks, bodies(eqn)))
        changed = {traits.traits_of(eqn).body: new if name == "cond" else new[0]}
        return eqn.replace(params={**eqn.params, **changed})
