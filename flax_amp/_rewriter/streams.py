"""Which carries of a scan are the stream through a stack of layers.

A stream is carried in half precision, as between unrolled layers. A carry that is no
stream is the state of a recurrence. In a state small terms add up, so a state stays
float32:

    scan(lambda x, w: (x + tanh(x @ w), None), x, stacked)        x is a stream
    scan(lambda h, x: (tanh(h @ u + x), None), h, xs)             h is a state
    scan(lambda w, x: (w - .1 * (w @ x - 1) @ x.T, None), w, xs)  w is a state

An integrator with a step of 1e-3 did not move in half precision. A carry that begins at
data is always a state (`origins.py`). In the bodies of the remaining carries, the
weights of layers and the data of a recurrence look alike, because both are slices of
`xs` that are arguments. But a gradient multiplies by its data twice: the data `x` gives
the prediction `w @ x`, and multiplies the error of the prediction.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from jax.extend.core import Literal

from flax_amp import _compat
from flax_amp._compat import Atom, Eqn, Jaxpr
from flax_amp._rewriter.flow import Flags, FlowAnalysis
from flax_amp._rewriter.primitives import Kind, bodies, is_cast_up, is_layout
from flax_amp._rewriter.roles import Context


def streams(
    flows: FlowAnalysis,
    closed: Jaxpr,
    context: Context,
    sizes: Sequence[int],
    is_weight: Sequence[bool],
) -> Flags:
    """Returns which carries of a scan are streams.

    The next value of a stream is computed from a matmul of the stream by an argument.
    The argument is a slice of `xs`, moved at most, so each step has its own, and
    multiplies the stream only once. A stream is no scalar, and no second factor of a
    matmul.

    Args:
      flows: sweeps over jaxprs.
      closed, context: the body of the scan, and the context of the body.
      sizes: the numbers of constants and of carries of the scan.
      is_weight: which of the scanned arrays `xs` are arguments.
    """
    first, count = sizes
    inputs = [
        *[_NOTHING] * first,
        *(_Path(carry=i, carries=frozenset([i])) for i in range(count)),
        *(_Path(weight=j if is_one else None) for j, is_one in enumerate(is_weight)),
    ]
    states: set[int] = set()
    paths = _Search(flows, states, {}).results(closed, context, inputs)[:count]
    carries = _compat.open_jaxpr(closed)[0].invars[first:]
    return tuple(
        i in x.streams and i not in states and bool(v.aval.shape)
        for i, (x, v) in enumerate(zip(paths, carries, strict=False))
    )


class _Path(NamedTuple):
    """The way from carries and arguments to a variable in the body of a scan."""

    # The index of the argument in `xs` if the variable is its slice, moved at most.
    weight: int | None = None
    carry: int | None = None  # the index of the carry if the variable is a moved carry
    carries: frozenset[int] = frozenset()  # from which the variable was computed
    # Pairs `(carry, argument)`: on the way to the variable, the argument multiplied a
    # value that was computed from the carry.
    matmuls: frozenset[tuple[int, int]] = frozenset()
    streams: frozenset[int] = frozenset()  # the carries that an argument multiplied


_NOTHING = _Path()


def _joined(paths: Sequence[_Path]) -> _Path:
    return _Path(
        carries=frozenset().union(*(x.carries for x in paths)),
        matmuls=frozenset().union(*(x.matmuls for x in paths)),
        streams=frozenset().union(*(x.streams for x in paths)),
    )


class _Search(NamedTuple):
    """A walk through the body of a scan, and through the bodies inside of this body."""

    flows: FlowAnalysis
    states: set[int]  # the carries that proved to be no streams
    found: dict[Any, list[_Path]]  # by body and inputs: calls may be nested deeply

    def results(
        self, closed: Jaxpr, context: Context, inputs: Sequence[_Path]
    ) -> list[_Path]:
        """Returns the paths to the results of a body, given the paths to its inputs."""
        key = closed, context, tuple(inputs)
        if key not in self.found:
            self.found[key] = self._results(closed, context, inputs)
        return self.found[key]

    def _results(
        self, closed: Jaxpr, context: Context, inputs: Sequence[_Path]
    ) -> list[_Path]:
        program = self.flows.program(closed, context)
        known = dict(zip(program.invars, inputs, strict=True))

        def read(v: Atom) -> _Path:
            return _NOTHING if isinstance(v, Literal) else known.get(v, _NOTHING)

        for eqn in program.eqns:
            paths = self._equation(eqn, context, list(map(read, eqn.invars)))
            known |= zip(eqn.outvars, paths, strict=True)
        return list(map(read, program.outvars))

    def _equation(self, eqn: Eqn, context: Context, paths: list[_Path]) -> list[_Path]:
        if (is_layout(eqn) or is_cast_up(eqn)) and len(paths) == 1:
            return paths * len(eqn.outvars)  # a split, say, has several results
        choice = self.flows.choose(eqn, context)
        results = [_joined(paths)] * len(eqn.outvars)
        if choice.role is Kind.MATMUL:
            x, y, *_ = paths
            return [self._matmul(eqn, x, y)]
        if not self.flows.has_matmul(eqn, choice):
            return results
        for body in bodies(eqn):
            # In a `cond`, the index of the branch comes before the body's operands.
            start = len(paths) - len(_compat.open_jaxpr(body)[0].invars)
            if start < 0:
                continue
            of_body = self.results(body, choice.body_context, paths[start:])
            if len(of_body) == len(results):
                results = [_joined(pair) for pair in zip(results, of_body, strict=True)]
        return results

    def _mark_state(self, path: _Path) -> None:
        if path.carry is not None:
            self.states.add(path.carry)

    def _matmul(self, eqn: Eqn, x: _Path, y: _Path) -> _Path:
        result = _joined([x, y])
        for factor, argument in ((x, y.weight), (y, x.weight)):
            if argument is not None:
                pairs = {(carry, argument) for carry in factor.carries}
                self.states.update(carry for carry, _ in pairs & factor.matmuls)
                result = result._replace(matmuls=result.matmuls | pairs)
        if not _is_kernel(eqn):
            return result
        self._mark_state(y)
        if y.weight is None:
            return result
        return result._replace(streams=result.streams | x.carries)


def _is_kernel(eqn: Eqn) -> bool:
    """Whether the second factor of a matmul is the same array for all examples."""
    if eqn.primitive.name != "dot_general":
        return True
    _, (_, batch) = eqn.params["dimension_numbers"]
    return eqn.invars[1].aval.ndim >= 2 and not batch
