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

from flax_amp._compat import Array, DType, Eqn, evaluate
from flax_amp._rewriter.primitives import Kind, kind_of
from flax_amp._rewriter.roles import Choice, Chooser, Context
from flax_amp.debug._call import Call, Loss
from flax_amp.debug._place import module_path, scopes_of, source_line
from flax_amp.debug._record import Recorder, low_share
from flax_amp.policy import Policy, PolicyEntries

_MAX_RUNS = 16  # of a search


class Part(NamedTuple):
    """A part of a program that may run in float32."""

    path: str  # of a module; empty if it is a line outside of modules
    line: str = ""


class Trial(NamedTuple):
    """A run of a program."""

    loss: Array
    gradients: list[Array]  # without the scale
    low: set[Part]  # what computes in half precision
    low_share: float | None  # of matmuls in half precision; `None` without matmuls


class Trials:
    """Runs the loss of a call, which it traces once."""

    def __init__(self, call: Call):
        self._call, self._traced = call, call.trace_loss()
        exact = functools.partial(evaluate, self._traced.closed)
        self.exact_loss, self.exact_gradients = self._gradients(exact, 1.0)

    def run(
        self, entries: PolicyEntries, scale: float, parts: Collection[Part] = ()
    ) -> Trial:
        """Runs the program in half precision, with parts of it in float32."""
        asked, recorder = self._call.asked, Recorder()
        choose = with_float32(entries, asked.dtype, parts)
        traced = self._traced._replace(choose=choose)
        loss, gradients = self._gradients(
            lambda arrays: traced.emit(arrays, asked.recompute, recorder), scale
        )
        rows = [visit.row for visit in recorder.visits]
        low = {Part(x.path, "" if x.path else x.source) for x in rows if x.is_low}
        return Trial(loss, gradients, low, low_share(rows))

    def _gradients(self, loss: Loss, scale: float) -> Any:
        """Returns a loss and its gradients, without the scale."""
        options: Any = {}
        if jax.default_backend() == "cpu":
            # A CPU computes halves in float32, where XLA would leave out the roundings
            # in between that other devices do.
            options = {"xla_allow_excess_precision": False}
            options["xla_backend_optimization_level"] = 0  # each program runs once
        run = jax.jit(self._call.gradients(loss), compiler_options=options)
        (value, *_), gradients = run(jnp.float32(scale), self._call.arrays)
        return value, gradients


@dataclasses.dataclass(frozen=True)
class _LineChooser(Chooser):
    """Follows a policy, and leaves lines outside of modules in float32."""

    lines: frozenset[str] = frozenset()

    def __call__(self, eqn: Eqn, context: Context) -> Choice:
        is_own = source_line(eqn) in self.lines and kind_of(eqn) is not Kind.STRUCTURED
        if is_own and not module_path(context.scopes + scopes_of(eqn)):
            stop = self.policy.decide(eqn.primitive, ("amp_stop",))
            context = context._replace(forced=stop)
        return super().__call__(eqn, context)


def with_float32(
    entries: PolicyEntries, half: DType, parts: Collection[Part]
) -> Chooser:
    """Returns what chooses as a policy does, with parts of a program in float32."""
    policy = Policy({**entries, **dict.fromkeys(keys_of(parts), jnp.float32)})
    return _LineChooser(policy, half, frozenset(lines_of(parts)))


def keys_of(parts: Collection[Part]) -> tuple[str, ...]:
    """Returns the modules among some parts, as keys of a policy."""
    return tuple(glob.escape(part.path) for part in parts if part.path)


def lines_of(parts: Collection[Part]) -> tuple[str, ...]:
    """Returns the lines among some parts."""
    return tuple(part.line for part in parts if part.line)


def candidates(low: set[Part]) -> list[Part]:
    """Returns what may be in float32, with modules on top first.

    A key for all that is there would leave nothing in half.
    """
    paths = [f"{part.path}/" for part in low]
    whole = {x for x in low if all(path.startswith(f"{x.path}/") for path in paths)}
    parts = [part for part in low if part.line or part not in whole]
    return sorted(parts, key=lambda part: (part.path.count("/"), part))


def fewest(
    parts: list[Part], is_enough: Callable[[Sequence[Part]], bool]
) -> list[Part]:
    """Returns the fewest of some parts that are enough; all of them are."""
    size, runs = len(parts), 0
    while size > 1:
        size = (size + 1) // 2
        for some in [parts[i : i + size] for i in range(0, len(parts), size)]:
            rest = [part for part in parts if part not in some]
            if rest and runs < _MAX_RUNS:
                runs += 1
                parts = rest if is_enough(rest) else parts
    return parts
