"""Runs a loss and its gradients with parts of the program in float32.

Which parts have to be in float32 is found by leaving out: from all of them, first
halves, then quarters, and so on, as long as the rest is enough. Those on top go first,
so that a part of a module is found before it.
"""

import dataclasses
import functools
import glob
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from flax_amp._compat import Array, Eqn, evaluate
from flax_amp._rewriter.primitives import Kind, kind_of
from flax_amp._rewriter.roles import Choice, Chooser, Context
from flax_amp.debug._call import Call, Loss
from flax_amp.debug._record import (
    Recorder,
    low_share,
    module_path,
    scopes_of,
    source_line,
)
from flax_amp.debug._run import is_finite
from flax_amp.policy import Policy, PolicyEntries

_MAX_RUNS = 16  # of a search


class Part(NamedTuple):
    """A part of a program that may run in float32: a module, or a line of one."""

    path: str  # of the module; empty outside of modules
    line: str = ""  # empty for the whole module


class Trial(NamedTuple):
    """A run of a program."""

    loss: Array
    updates: list[Array]  # of the variables
    gradients: list[Array]  # without the scale
    low_share: float | None  # of matmuls in half precision; `None` without matmuls

    @property
    def is_finite(self) -> bool:
        """Whether a step would be taken."""
        return all(map(is_finite, (self.loss, *self.updates, *self.gradients)))


class Trials:
    """Runs the loss of a call, which it traces once."""

    def __init__(self, call: Call):
        self._call, self.traced = call, call.trace_loss()

    @functools.cached_property
    def exact(self) -> Trial:
        """The run in float32."""
        run = functools.partial(evaluate, self.traced.closed)
        return self._trial(run, 1.0, Recorder())

    def run(
        self, entries: PolicyEntries, scale: float, parts: Collection[Part] = ()
    ) -> Trial:
        """Runs the program in half precision, with parts of it in float32."""
        recorder = Recorder()
        return self._trial(self._in_half(entries, parts, recorder), scale, recorder)

    def parts(self, entries: PolicyEntries) -> list[Part]:
        """Returns what may be in float32, with modules on top first.

        With a module that holds all others, nothing would be left in half: its lines
        are parts, as those outside of modules.
        """
        recorder = Recorder()
        jax.eval_shape(self._in_half(entries, (), recorder), self._call.arrays)
        rows = [row for row in recorder.rows if row.is_low]
        paths = {row.path for row in rows}
        whole = {
            x for x in paths if not x or all(_is_inside(path, x) for path in paths)
        }
        parts = {Part(x.path, x.source if x.path in whole else "") for x in rows}
        # Code of a library, called by itself, has neither.
        parts -= {Part(path) for path in whole}
        return sorted(parts, key=lambda part: (part.path.count("/"), part))

    def chooser(self, entries: PolicyEntries, parts: Collection[Part]) -> Chooser:
        """Returns what follows a policy, and leaves parts of the program in float32."""
        policy = Policy({**entries, **dict.fromkeys(keys_of(parts), jnp.float32)})
        return _LineChooser(policy, self._call.asked.dtype, frozenset(parts))

    def _in_half(
        self, entries: PolicyEntries, parts: Collection[Part], recorder: Recorder
    ) -> Loss:
        traced = self.traced._replace(choose=self.chooser(entries, parts))
        recompute = self._call.asked.recompute
        return lambda arrays: traced.emit(arrays, recompute, recorder)

    def _trial(self, run: Loss, scale: float, recorder: Recorder) -> Trial:
        def loss(arrays: Sequence[Array]) -> Any:
            return self.traced.rebuild(run(arrays))[0]

        options: Any = {}
        if jax.default_backend() == "cpu":
            # A CPU computes halves in float32, where XLA would leave out the roundings
            # in between that other devices do.
            options = {"xla_allow_excess_precision": False}
            options["xla_backend_optimization_level"] = 0  # each program runs once
        step = jax.jit(self._call.gradients(loss), compiler_options=options)
        (value, updates, _), gradients = step(jnp.float32(scale), self._call.arrays)
        return Trial(value, updates, gradients, low_share(recorder.rows))


@dataclasses.dataclass(frozen=True)
class _LineChooser(Chooser):
    """Follows a policy, and leaves lines of modules in float32."""

    parts: frozenset[Part] = frozenset()

    def __call__(self, eqn: Eqn, context: Context) -> Choice:
        part = Part(module_path(context.scopes + scopes_of(eqn)), source_line(eqn))
        if part in self.parts and kind_of(eqn) is not Kind.STRUCTURED:
            stop = self.policy.decide(eqn.primitive, ("amp_stop",))
            context = context._replace(forced=stop)
        return super().__call__(eqn, context)


def keys_of(parts: Collection[Part]) -> tuple[str, ...]:
    """Returns the modules among some parts, as keys of a policy.

    The key of an outer module wins: those inside of it have none.
    """
    paths = [part.path for part in parts if not part.line]
    outer = [x for x in paths if not any(_is_inside(x, y) and x != y for y in paths)]
    return tuple(map(glob.escape, outer))


def lines_of(parts: Collection[Part]) -> tuple[str, ...]:
    """Returns the lines among some parts, from the top of a file."""
    lines = {part.line for part in parts if part.line}
    return tuple(sorted(lines, key=lambda line: (len(line), line)))


def _is_inside(path: str, outer: str) -> bool:
    """Whether a module is another one, or a part of it."""
    return f"{path}/".startswith(f"{outer}/")


def fewest(
    parts: list[Part], is_enough: Callable[[Sequence[Part]], bool]
) -> list[Part]:
    """Returns as few of some parts as a search finds that are enough; all are."""
    size, runs = len(parts), 0
    while size > 1:
        size = (size + 1) // 2
        for some in [parts[i : i + size] for i in range(0, len(parts), size)]:
            rest = [part for part in parts if part not in some]
            if rest and runs < _MAX_RUNS:
                runs += 1
                parts = rest if is_enough(rest) else parts
    return parts
