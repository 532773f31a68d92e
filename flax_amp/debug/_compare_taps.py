"""Marks what passes between modules, and reads or replaces it while a program runs.

An *edge* is a value that one module computes and another one reads. `mark` names the
edges of a user's jaxpr by `checkpoint_name`, an identity:

    h = tanh z   in Block_0             h = tanh z         in Block_0
    y = dot h w  in Block_1     =>      h' = name[edge 3] h
                                        y = dot h' w       in Block_1

The names stay in the program that `amp` makes of it, so that the edges of both programs
can be compared, whatever `amp` does between them. `run_tapped` evaluates a program, and
at each edge returns the value, and the cotangent as the gradient of an array of zeros.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Literal

from flax_amp import _compat
from flax_amp._compat import Array, Arrays, Atom, Eqn, Jaxpr, Var
from flax_amp._rewriter.plan import EditedJaxpr
from flax_amp._tree import split_list
from flax_amp.debug._walk import module_path
from flax_amp.policy import MOVE_OPS

_PREFIX = "flax_amp edge "
# What can carry more operands and results. All else is left alone, and its module has
# what leaves the equation.
_BODIES = {"jit": "jaxpr", "remat2": "jaxpr", "scan": "jaxpr", "cond": "branches"}
_MOVES = MOVE_OPS | {"convert_element_type", "copy"}


class Edge(NamedTuple):
    """Where a value passes from one module to another.

    Attributes:
      maker: the path of the module that computes it.
      reader: the path of the module that reads it; `None` for the loss.
      times: how often it passes: the lengths of the loops around it, multiplied.
    """

    maker: str
    reader: str | None
    times: int


@dataclasses.dataclass
class Marked:
    """A user's program with marked edges.

    Attributes:
      jaxpr: the program.
      edges: the edges, by name.
      owners: the module that reads an input first, by the input's index.
    """

    jaxpr: Any = None
    edges: dict[str, Edge] = dataclasses.field(default_factory=dict)
    owners: dict[int, str] = dataclasses.field(default_factory=dict)


def mark(closed: Jaxpr) -> Marked:
    """Marks the edges of a program whose first result is the loss."""
    marked = Marked()
    jaxpr, consts = _compat.open_jaxpr(closed)
    inputs: dict[Var, tuple[int, ...]] = {v: (i,) for i, v in enumerate(jaxpr.invars)}
    body = _Body(marked, jaxpr, inputs, (), 1)
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
      leaves: its variables that are inputs of the program, or only move their data,
        with the indices of these inputs. They are not computed, and pass unmarked.
      scopes: the scopes around it.
      times: how often it runs.
    """

    marked: Marked
    jaxpr: Jaxpr
    leaves: dict[Var, tuple[int, ...]]
    scopes: tuple[str, ...]
    times: int

    def __post_init__(self) -> None:
        # The module around makes the inputs of a body, and reads its results.
        self.path = module_path(self.scopes)
        self.leaves |= dict.fromkeys(self.jaxpr.constvars, ())
        self.paths = dict.fromkeys(self.jaxpr.invars, self.path)
        self.eqns: list[Eqn] = []
        self._names: dict[tuple[Var, str | None], Var] = {}

    def mark(self) -> None:
        """Marks each equation."""
        for eqn in self.jaxpr.eqns:
            scopes = self.scopes + _compat.scope_names(eqn)
            path = module_path(scopes)
            sources = [self._leaf(v) for v in eqn.invars]
            known = [source for source in sources if source is not None]
            moves = eqn.primitive.name in _MOVES
            if moves and known and len(known) == len(sources):
                self.leaves |= dict.fromkeys(eqn.outvars, sum(known, ()))
            key = _BODIES.get(eqn.primitive.name)
            if key is not None:
                eqn = self._with_bodies(eqn, key, sources, scopes)
            elif not moves:
                for index in sum(known, ()):
                    self.marked.owners.setdefault(index, path)
            eqn = eqn.replace(invars=[self.read(v, path) for v in eqn.invars])
            self.eqns.append(eqn)
            self.paths |= dict.fromkeys(eqn.outvars, path)

    def read(self, atom: Atom, reader: str | None) -> Atom:
        """Returns what a module reads in place of a variable."""
        if self._leaf(atom) is not None or self.paths[atom] == reader:
            return atom
        if not jnp.issubdtype(atom.aval.dtype, jnp.floating) or not atom.aval.size:
            return atom
        if (atom, reader) not in self._names:
            name = f"{_PREFIX}{len(self.marked.edges)}"
            self.marked.edges[name] = Edge(self.paths[atom], reader, self.times)
            struct = _compat.struct_of(atom.aval, atom.aval.dtype)
            traced = jax.make_jaxpr(lambda x: checkpoint_name(x, name))(struct)
            (eqn,) = _compat.open_jaxpr(traced)[0].eqns
            # It has no scopes, so that no key of a policy for a module decides on it.
            self.eqns.append(eqn.replace(invars=[atom]))
            self._names[atom, reader] = eqn.outvars[0]
        return self._names[atom, reader]

    def _leaf(self, atom: Atom) -> tuple[int, ...] | None:
        return () if isinstance(atom, Literal) else self.leaves.get(atom)

    def _with_bodies(
        self,
        eqn: Eqn,
        key: str,
        sources: Sequence[tuple[int, ...] | None],
        scopes: tuple[str, ...],
    ) -> Eqn:
        """Returns a structured equation with marked bodies."""
        name, times = eqn.primitive.name, self.times
        if name == "scan":
            consts, carry, xs = split_list(sources, *_compat.scan_counts(eqn))
            sources = (*consts, *[None] * len(carry), *xs)
            times *= eqn.params["length"]
        sources = sources[1:] if name == "cond" else sources

        def with_marks(closed: Jaxpr) -> Jaxpr:
            jaxpr, _ = _compat.open_jaxpr(closed)
            pairs = zip(jaxpr.invars, sources, strict=True)
            leaves = {v: source for v, source in pairs if source is not None}
            body = _Body(self.marked, jaxpr, leaves, scopes, times)
            body.mark()
            outvars = [body.read(v, body.path) for v in jaxpr.outvars]
            jaxpr = jaxpr.replace(eqns=body.eqns, outvars=outvars)
            # Before JAX 0.12, a closed jaxpr holds an open one.
            return closed.replace(jaxpr=jaxpr) if hasattr(closed, "jaxpr") else jaxpr

        bodies = eqn.params[key]
        many = isinstance(bodies, tuple)
        new = tuple(map(with_marks, bodies)) if many else with_marks(bodies)
        return eqn.replace(params={**eqn.params, key: new})


# --- evaluation ----------------------------------------------------------------------


class Feed(NamedTuple):
    """What an edge gets.

    Attributes:
      tap: zeros; the gradient with respect to them is the cotangent of the edge.
      value: what takes the place of the value, if anything does.
      cotangent: what takes the place of the cotangent in the same case.
    """

    tap: Array
    value: Array | None = None
    cotangent: Array | None = None


@jax.custom_vjp
def _tap(x: Array, tap: Array) -> Array:
    return x


_tap.defvjp(lambda x, tap: (x, None), lambda _, cotangent: (cotangent, cotangent))


@jax.custom_vjp
def _replace(x: Array, feed: Feed) -> Array | None:
    return feed.value


_replace.defvjp(
    lambda x, feed: (feed.value, feed.cotangent),
    lambda instead, cotangent: (instead, Feed(cotangent, None, None)),
)


def taps_of(closed: Jaxpr) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the marked edges of a program, with a leading axis for each loop."""
    found = {}
    for eqn in _compat.open_jaxpr(closed)[0].eqns:
        name = _edge_name(eqn)
        if name:
            aval = eqn.invars[0].aval
            found[name] = jax.ShapeDtypeStruct(aval.shape, aval.dtype)
        length = (eqn.params["length"],) if eqn.primitive.name == "scan" else ()
        for body in _bodies(eqn):
            for name, inner in taps_of(body).items():
                shape = (*length, *inner.shape)
                found[name] = jax.ShapeDtypeStruct(shape, inner.dtype)
    return found


def _edge_name(eqn: Eqn) -> str:
    name = eqn.params["name"] if eqn.primitive.name == "name" else ""
    return name if name.startswith(_PREFIX) else ""


def _bodies(eqn: Eqn) -> Sequence[Jaxpr]:
    bodies = eqn.params.get(_BODIES.get(eqn.primitive.name, ""), ())
    return bodies if isinstance(bodies, tuple) else (bodies,)


def run_tapped(
    closed: Jaxpr, operands: Arrays, feeds: Mapping[str, Feed]
) -> tuple[Arrays, dict[str, Array]]:
    """Evaluates a program with what its edges get.

    Returns:
      The results, and the values of the edges before anything took their place.
    """
    seen: dict[str, Array] = {}

    def bind(eqn: Eqn, xs: Arrays) -> Arrays:
        name = _edge_name(eqn)
        if name in feeds:
            seen[name] = xs[0]
            feed = feeds[name]
            if feed.value is None:
                return [_tap(xs[0], feed.tap)]
            return [_replace(xs[0], feed)]
        inner = {k: feeds[k] for body in _bodies(eqn) for k in taps_of(body)}
        with _compat.equation_context(eqn):
            if not inner:
                return _compat.bind(eqn, xs, eqn.params)
            outs, found = _STRUCTURED[eqn.primitive.name](eqn, xs, inner)
        seen.update(found)
        return outs

    return _compat.evaluate(closed, operands, bind), seen


def _run_jit(eqn: Eqn, xs: Arrays, feeds: dict[str, Feed]) -> Any:
    return run_tapped(eqn.params["jaxpr"], xs, feeds)


def _run_checkpoint(eqn: Eqn, xs: Arrays, feeds: dict[str, Feed]) -> Any:
    def body(xs: Arrays, feeds: dict[str, Feed]) -> Any:
        return run_tapped(eqn.params["jaxpr"], xs, feeds)

    options = {k: eqn.params[k] for k in ("prevent_cse", "policy")}
    return jax.checkpoint(body, **options)(xs, feeds)


def _run_scan(eqn: Eqn, xs: Arrays, feeds: dict[str, Feed]) -> Any:
    consts, init, slices = split_list(xs, *_compat.scan_counts(eqn))

    def body(carry: Any, x: Any) -> Any:
        operands = (*consts, *carry, *x[0])
        outs, seen = run_tapped(eqn.params["jaxpr"], operands, x[1])
        return tuple(outs[: len(carry)]), (tuple(outs[len(carry) :]), seen)

    options = _compat.scan_options(eqn)
    carry, (ys, seen) = jax.lax.scan(body, init, (slices, feeds), **options)
    return [*carry, *ys], seen


def _run_cond(eqn: Eqn, xs: Arrays, feeds: dict[str, Feed]) -> Any:
    def branch(body: Jaxpr) -> Any:
        def run(xs: Arrays, feeds: dict[str, Feed]) -> Any:
            outs, seen = run_tapped(body, xs, feeds)
            # The edges of a branch that is not taken are zero.
            zeros = {k: jnp.zeros_like(feed.tap) for k, feed in feeds.items()}
            return outs, zeros | seen

        return run

    branches = [branch(body) for body in eqn.params["branches"]]
    return jax.lax.switch(xs[0], branches, list(xs[1:]), feeds)


_STRUCTURED = {
    "jit": _run_jit,
    "remat2": _run_checkpoint,
    "scan": _run_scan,
    "cond": _run_cond,
}


def tapped_gradient(
    closed: Jaxpr,
    arrays: Arrays,
    trained: Sequence[bool],
    scale: Array,
    instead: Mapping[str, tuple[Array, Array]],
) -> "Passed":
    """Returns what passes along the edges of a program, and its gradients.

    Args:
      closed: the program; its first result is the loss.
      arrays: its arguments.
      trained: which of them a gradient is asked for.
      scale: the factor of the loss; all gradients have it, too.
      instead: values that take the place of those of edges, and cotangents without the
        scale, by name.
    """
    chosen = [i for i, is_trained in enumerate(trained) if is_trained]
    structs = taps_of(closed)

    def loss_of(wrt: Arrays, taps: dict[str, Array]) -> Any:
        operands = list(arrays)
        for index, x in zip(chosen, wrt, strict=True):
            operands[index] = x
        feeds = {name: Feed(tap) for name, tap in taps.items()}
        for name in feeds.keys() & instead.keys():
            value, cotangent = instead[name]
            tap = feeds[name].tap
            others = _fit(value, tap.dtype), _fit(cotangent * scale, tap.dtype)
            feeds[name] = Feed(tap, *others)
        (loss, *_), seen = run_tapped(closed, operands, feeds)
        return loss.astype(jnp.promote_types(loss.dtype, jnp.float32)) * scale, (
            loss,
            seen,
        )

    zeros = {name: jnp.zeros(s.shape, s.dtype) for name, s in structs.items()}
    wrt = [arrays[i] for i in chosen]
    gradient = jax.value_and_grad(loss_of, argnums=(0, 1), has_aux=True)
    (_, (loss, seen)), (gradients, cotangents) = gradient(wrt, zeros)
    return Passed(loss, gradients, seen, cotangents)


class Passed(NamedTuple):
    """What passed through a program.

    Attributes:
      loss: the loss.
      gradients: those of the trained arrays, times the scale.
      values: those of the edges.
      cotangents: those of the edges, times the scale.
    """

    loss: Array
    gradients: Any
    values: dict[str, Array]
    cotangents: dict[str, Array]


def _fit(x: Array, dtype: Any) -> Array:
    """Returns a finite array in a dtype whose range may be too small for it."""
    limit = float(jnp.finfo(dtype).max)
    return jnp.where(jnp.isfinite(x), jnp.clip(x, -limit, limit), x).astype(dtype)


def size_of(passed: Passed) -> int:
    """Returns the bytes of what passed along edges."""
    leaves = jax.tree.leaves((passed.values, passed.cotangents))
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in leaves)
