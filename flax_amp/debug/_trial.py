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
    low_share: float | None  # of matmuls in half precision; `None` without matmuls


class Trials:
    """Runs the loss of a call, which it traces once."""

    def __init__(self, call: Call):
        self._call, self._traced = call, call.trace_loss()

    @functools.cached_property
    def exact(self) -> Trial:
        """The run in float32."""
        loss = functools.partial(evaluate, self._traced.closed)
        return self._trial(loss, 1.0, Recorder())

    def run(
        self, entries: PolicyEntries, scale: float, parts: Collection[Part] = ()
    ) -> Trial:
        """Runs the program in half precision, with parts of it in float32."""
        recorder = Recorder()
        return self._trial(self._in_half(entries, parts, recorder), scale, recorder)

    def parts(self, entries: PolicyEntries) -> list[Part]:
        """Returns what may be in float32, with modules on top first.

        A key for all that is there would leave nothing in half.
        """
        recorder = Recorder()
        jax.eval_shape(self._in_half(entries, (), recorder), self._call.arrays)
        rows = [visit.row for visit in recorder.visits if visit.row.is_low]
        low = {Part(row.path, "" if row.path else row.source) for row in rows}
        paths = [f"{part.path}/" for part in low]
        whole = {x for x in low if all(path.startswith(f"{x.path}/") for path in paths)}
        parts = [part for part in low if part.line or part not in whole]
        return sorted(parts, key=lambda part: (part.path.count("/"), part))

    def search(self, entries: PolicyEntries, parts: list[Part]) -> list[Part]:
        """Returns the fewest parts with which a run is finite; none if all are not."""

        def is_finite(parts: Sequence[Part]) -> bool:
            trial = self.run(entries, 1.0, parts)  # the scaler lowers its scale
            arrays = trial.loss, *trial.gradients
            return all(bool(jnp.isfinite(x).all()) for x in arrays)

        return fewest(parts, is_finite) if parts and is_finite(parts) else []

    def _in_half(
        self, entries: PolicyEntries, parts: Collection[Part], recorder: Recorder
    ) -> Loss:
        asked = self._call.asked
        choose = with_float32(entries, asked.dtype, parts)
        traced = self._traced._replace(choose=choose)
        return lambda arrays: traced.emit(arrays, asked.recompute, recorder)

    def _trial(self, loss: Loss, scale: float, recorder: Recorder) -> Trial:
        options: Any = {}
        if jax.default_backend() == "cpu":
            # A CPU computes halves in float32, where XLA would leave out the roundings
            # in between that other devices do.
            options = {"xla_allow_excess_precision": False}
            options["xla_backend_optimization_level"] = 0  # each program runs once
        run = jax.jit(self._call.gradients(loss), compiler_options=options)
        (value, *_), gradients = run(jnp.float32(scale), self._call.arrays)
        return Trial(value, gradients, low_share([x.row for x in recorder.visits]))


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
