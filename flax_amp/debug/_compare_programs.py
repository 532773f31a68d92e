"""Runs a loss in float32 and in half precision, and compares what passes in both."""

import dataclasses
import functools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flax_amp import _compat
from flax_amp._compat import Array, Arrays, Eqn, Jaxpr
from flax_amp._rewriter.transform import amp
from flax_amp.debug._compare_model import Errors, ModuleErrors
from flax_amp.debug._compare_stats import (
    Difference,
    Range,
    compiler_options,
    difference,
    iterations,
    magnitudes,
    relative,
    share,
)
from flax_amp.debug._compare_taps import Marked, Passed, mark, tapped_gradient
from flax_amp.policy import default_amp_policy, keep_precision

# By module: of what it computes, of the cotangents that it passes back, and of the
# gradients of its parameters.
_Sides = dict[str, tuple[list[Any], list[Any], list[Any]]]


@dataclasses.dataclass(frozen=True)
class Programs:
    """The user's loss in several precisions.

    Attributes:
      closed: its jaxpr.
      arrays: its arguments.
      trained: which of them a gradient is asked for.
    """

    closed: Jaxpr
    arrays: list[Array]
    trained: list[bool]

    @functools.cached_property
    def marked(self) -> Marked:
        """The program with marked edges."""
        return mark(self.closed)

    @functools.cached_property
    def reference(self) -> Passed:
        """What passes in float32."""
        return self._run(self.marked.jaxpr, 1.0, {})

    def run(
        self, options: Mapping[str, Any], scale: float, *, forced: bool = False
    ) -> Passed:
        """Runs the program in half precision.

        Args:
          options: those of `amp`.
          scale: the factor of the loss.
          forced: whether along the edges passes what passes in float32.
        """
        policy = options["amp_policy"]
        policy = default_amp_policy if policy is None else policy
        # A policy of one's own need not know the primitive that marks.
        policy = {_compat.primitives()["name"]: keep_precision, **policy}
        low = self._low(self.marked.jaxpr, {**options, "amp_policy": policy})
        pairs = self.reference.values, self.reference.cotangents
        instead = {k: tuple(side[k] for side in pairs) for k in pairs[0]}
        return self._run(low, scale, instead if forced else {})

    def gradients(self, options: Mapping[str, Any], scale: float) -> Passed:
        """Runs the program in half precision without marked edges."""
        return self._run(self._low(self.closed, options), scale, {})

    def _low(self, jaxpr: Jaxpr, options: Mapping[str, Any]) -> Jaxpr:
        def bind(eqn: Eqn, xs: Arrays) -> Arrays:
            with _compat.equation_context(eqn):
                return _compat.bind(eqn, xs, eqn.params)

        # Each layer stays by itself: its edges have names of their own.
        low = amp(
            lambda *arrays: _compat.evaluate(jaxpr, arrays, bind),
            **options,
            merge_layers=False,
        )
        return jax.make_jaxpr(low)(*self.arrays)

    def _run(self, jaxpr: Jaxpr, scale: float, instead: Mapping[str, Any]) -> Passed:
        @functools.partial(jax.jit, compiler_options=compiler_options())
        def run(arrays: Arrays, scale: Array, instead: Mapping[str, Any]) -> Passed:
            return tapped_gradient(jaxpr, arrays, self.trained, scale, instead)

        return run(self.arrays, jnp.float32(scale), instead)

    # --- comparing -------------------------------------------------------------------

    def errors(self, found: Passed, scale: float) -> tuple[float, float, float]:
        """Returns the errors of loss and gradients, and the share of lost gradients."""
        pairs = zip(found.gradients, self.reference.gradients, strict=True)
        compared = [difference(x, y, scale, 1) for x, y in pairs]
        loss = difference(found.loss, self.reference.loss, 1.0, 1)
        compared, loss = jax.device_get((compared, loss))
        lost = share((d.lost for d in compared), (d.count for d in compared))
        return relative([loss]) or 0.0, relative(compared) or 0.0, lost

    def differences(self, found: Passed, scale: float) -> _Sides:
        """Compares what passed, by module."""

        def compare(side: str, key: Any, scale: float, times: int) -> Difference:
            x, y = (getattr(passed, side)[key] for passed in (found, self.reference))
            return difference(x, y, scale, times)

        return self._by_module(compare, scale)

    def ranges(self, scale: float) -> _Sides:
        """Measures what passes in float32, by module."""

        def measure(side: str, key: Any, _: float, times: int) -> Range:
            return magnitudes(getattr(self.reference, side)[key], scale)

        return self._by_module(measure, scale)

    def _by_module(self, measure: Any, scale: float) -> _Sides:
        sides: _Sides = defaultdict(lambda: ([], [], []))
        reference = self.reference
        for name, (maker, reader, times) in self.marked.edges.items():
            if name in reference.values:
                sides[maker][0].append(measure("values", name, 1.0, times))
                if reader is not None:
                    cotangents = measure("cotangents", name, scale, times)
                    sides[reader][1].append(cotangents)
        inputs = [i for i, is_trained in enumerate(self.trained) if is_trained]
        for i, index in enumerate(inputs):
            path = self.marked.owners.get(index, "")
            sides[path][2].append(measure("gradients", i, scale, 1))
        return jax.device_get(dict(sides))

    def modules(self, own: _Sides, total: _Sides, scale: float) -> list[ModuleErrors]:
        """Returns the modules, the most harmful first."""
        ranges = self.ranges(scale)
        found = [
            _module(path, own[path], total[path], ranges[path], scale)
            for path in ranges
        ]
        return sorted(found, key=lambda module: -module.harm)


def _module(path: str, own: Any, total: Any, ranges: Any, scale: float) -> ModuleErrors:
    values, gradients = ranges[0], [*ranges[1], *ranges[2]]
    differences = [d for side in total for d in side]
    nonzero = [r.nonzero for r in gradients]
    return ModuleErrors(
        path=path,
        own=Errors(*map(relative, own)),
        total=Errors(*map(relative, total)),
        iterations=iterations([*own[0], *own[1]]),
        nonfinite=share((d.lost for d in differences), (d.count for d in differences)),
        flushed=share((r.flushed for r in gradients), nonzero),
        flushed_scaled=share((r.flushed_scaled for r in gradients), nonzero),
        largest_value=_largest(values),
        largest_gradient=_largest(gradients) * scale,
        values=_histogram(values),
        gradients=_histogram(gradients),
    )


def _largest(found: Sequence[Range]) -> float:
    return max((float(r.largest) for r in found), default=0.0)


def _histogram(found: Sequence[Range]) -> tuple[int, ...]:
    return (
        tuple(map(int, np.sum([r.histogram for r in found], axis=0))) if found else ()
    )
