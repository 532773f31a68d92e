"""Runs a loss in float32 and in half precision, and compares what passes in both."""

import dataclasses
import functools
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from flax_amp import _compat
from flax_amp._compat import Array, Jaxpr
from flax_amp._jaxpr.evaluate import evaluate
from flax_amp._rewriter.transform import amp
from flax_amp._tree import widen
from flax_amp.debug._compare_edges import Marked, mark
from flax_amp.debug._compare_model import Errors, ModuleErrors
from flax_amp.debug._compare_stats import (
    difference,
    flushed,
    histogram,
    iterations,
    largest,
    magnitudes,
    relative,
)
from flax_amp.debug._compare_taps import Passed, gradient
from flax_amp.policy import default_amp_policy, keep_precision

# By module: figures of what it computes, of the cotangents that it passes back, and of
# the gradients of its parameters.
_ByModule = dict[str, tuple[list[Any], ...]]


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
        return mark(self.closed, self.trained)

    @functools.cached_property
    def reference(self) -> Passed:
        """What passes in float32."""
        return self.run_jaxpr(self.marked.jaxpr)

    def run(
        self, options: Mapping[str, Any], scale: float = 1.0, *, forced: bool = False
    ) -> Passed:
        """Runs the program in half precision.

        Args:
          options: those of `amp`.
          scale: the factor of the loss.
          forced: whether along the edges passes what passes in float32.
        """
        policy = options.get("amp_policy")
        policy = default_amp_policy if policy is None else policy
        # A policy of one's own need not know the primitive that marks.
        policy = {_compat.primitives()["name"]: keep_precision, **policy}
        low = self.lowered(self.marked.jaxpr, {**options, "amp_policy": policy})
        pairs = self.reference.values, self.reference.cotangents
        instead = {name: tuple(side[name] for side in pairs) for name in pairs[0]}
        return self.run_jaxpr(low, scale, instead if forced else {})

    def lowered(self, jaxpr: Jaxpr, options: Mapping[str, Any]) -> Jaxpr:
        """Returns what `amp` makes of a program, each layer by itself."""

        def run(*arrays: Array) -> Any:
            return evaluate(jaxpr, arrays)

        # Layers do not equal each other: their edges have names of their own.
        low = amp(run, **{**options, "merge_layers": False})
        return jax.make_jaxpr(low)(*self.arrays)

    def run_jaxpr(
        self, jaxpr: Jaxpr, scale: float = 1.0, instead: Mapping[str, Any] | None = None
    ) -> Passed:
        """Returns what passes in a program, without the scale."""
        function = functools.partial(gradient, jaxpr, self.trained)
        run = jax.jit(function, compiler_options=_compiler_options())
        passed = run(self.arrays, jnp.float32(scale), instead or {})
        gradients, cotangents = _divided((passed.gradients, passed.cotangents), scale)
        return passed._replace(gradients=gradients, cotangents=cotangents)

    # --- comparing -------------------------------------------------------------------

    def errors(self, found: Passed) -> tuple[float, float]:
        """Returns the errors of the loss and of all gradients together."""
        pairs = zip(found.gradients, self.reference.gradients, strict=True)
        gradients = [difference(x, y, times=1) for x, y in pairs]
        loss = [difference(found.loss, self.reference.loss, times=1)]
        loss, gradients = jax.device_get((loss, gradients))
        return relative(loss) or 0.0, relative(gradients) or 0.0

    def differences(self, found: Passed) -> _ByModule:
        """Compares what passed with what passes in float32, by module."""
        edges = self.marked.edges

        def compare(field: str, key: Any) -> Any:
            x, y = (getattr(passed, field)[key] for passed in (found, self.reference))
            return difference(x, y, times=edges[key].times if key in edges else 1)

        return self._by_module(compare)

    def modules(
        self, own: _ByModule, total: _ByModule, scale: float
    ) -> list[ModuleErrors]:
        """Returns the modules, the most harmful first."""
        sizes = self._by_module(lambda f, k: magnitudes(getattr(self.reference, f)[k]))
        found = [
            _module(path, own[path], total[path], sizes[path], scale) for path in sizes
        ]
        return sorted(found, key=lambda module: -module.harm)

    def _by_module(self, measure: Callable[[str, Any], Any]) -> _ByModule:
        found: _ByModule = defaultdict(lambda: ([], [], []))
        for name, edge in self.marked.edges.items():
            if edge.maker is not None:
                found[edge.maker][0].append(measure("values", name))
            if edge.reader is not None:
                side = 1 if edge.maker is not None else 2
                found[edge.reader][side].append(measure("cotangents", name))
        inputs = [i for i, is_trained in enumerate(self.trained) if is_trained]
        for i, index in enumerate(inputs):
            path, *others = self.marked.readers.get(index, [""])
            if not others:  # what each of several readers adds passes along an edge
                found[path][2].append(measure("gradients", i))
        return jax.device_get(dict(found))


def _module(path: str, own: Any, total: Any, sizes: Any, scale: float) -> ModuleErrors:
    values, gradients = sizes[0], [*sizes[1], *sizes[2]]
    added = Errors(*map(relative, own))
    counts = histogram(gradients)
    return ModuleErrors(
        path=path,
        harm=added.largest,
        own=added,
        total=Errors(*map(relative, total)),
        iterations=iterations([*own[0], *own[1]]),
        flushed=flushed(counts),
        largest_value=largest(values),
        largest_gradient=largest(gradients) * scale,
        values=histogram(values),
        gradients=counts,
    )


def _compiler_options() -> dict[str, Any]:
    """Returns the options of XLA for programs that run only once.

    A CPU computes halves in float32, where XLA would leave out the roundings in between
    that other devices do.
    """
    if jax.default_backend() != "cpu":
        return {}
    return {"xla_allow_excess_precision": False, "xla_backend_optimization_level": 0}


@jax.jit
def _divided(tree: Any, scale: Array) -> Any:
    return jax.tree.map(lambda x: widen(x) / scale, tree)
