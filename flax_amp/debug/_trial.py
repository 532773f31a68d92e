"""Runs a loss and its gradients with parts of the program in float32."""

import dataclasses
import functools
import glob
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from flax_amp._compat import Array, DType, Eqn, Jaxpr
from flax_amp._jaxprs import evaluate
from flax_amp._rewriter.primitives import Kind, kind_of
from flax_amp._rewriter.roles import Choice, Chooser, Context
from flax_amp._rewriter.transform import TracedCall
from flax_amp.debug._call import Call, Loss
from flax_amp.debug._record import Recorder, low_share, source_text
from flax_amp.debug._run import is_finite
from flax_amp.policy import Decision, KeyKind, Policy

# Of a search: each run compiles a program. With 16 runs, `fewest` finds one part of
# 128, or three parts of 8. With 8 runs, `fewest` finds one part of 128 in at most 35 %
# of 200 draws. With 32 runs, `fewest` finds three parts of 32.
_MAX_RUNS = 16
# On a CPU, XLA computes halves in float32, and without the first option would leave out
# roundings that a GPU or a TPU does. The second option saves time for the compiler,
# because each program runs once.
_ON_CPU = {"xla_allow_excess_precision": False, "xla_backend_optimization_level": 0}


class Part(NamedTuple):
    """A part of a program that may run in float32: a module, or a line of code."""

    path: str = ""  # the path of a module, empty for a line
    line: str = ""


class Trial(NamedTuple):
    """A run of a program."""

    loss: Array
    updates: list[Array]  # the updated variables
    gradients: list[Array]  # divided by the scale of the loss
    low_share: float | None  # the share of matmuls in half; `None` without matmuls

    @property
    def is_finite(self) -> bool:
        """Whether a training step would be taken, not skipped."""
        return all(map(is_finite, (self.loss, *self.updates, *self.gradients)))


class Trials:
    """Runs the loss of a call, which is traced once."""

    def __init__(self, call: Call):
        self._call = call
        self.traced = call.trace_loss()

    @property
    def half(self) -> DType:
        """The dtype of half precision."""
        return self._call.request.dtype

    @functools.cached_property
    def exact(self) -> Trial:
        """The run in float32."""
        return self._step(functools.partial(evaluate, self.traced.closed), Recorder())

    def with_float32(
        self, parts: Collection[Part], entries: Any = None, value: Any = jnp.float32
    ) -> TracedCall:
        """Returns the program in half precision, with parts of it in float32.

        Args:
          parts: the modules and lines that get `value`.
          entries: the policy for the rest; by default the policy of the call.
          value: the value of the parts in the policy, such as `use_float32_result`.
        """
        if entries is None:
            entries = self._call.request.entries
        policy = Policy({**entries, **dict.fromkeys(keys_of(parts), value)})
        forced = None
        if value is not jnp.float32:
            forced = Decision(value, KeyKind.SCOPE, "of a line")
        choose = _LineChooser(policy, self.half, lines_of(parts), forced)
        return self.traced._replace(choose=choose)

    def run(
        self,
        parts: Collection[Part] = (),
        scale: float = 1.0,
        entries: Any = None,
        value: Any = jnp.float32,
    ) -> Trial:
        """Runs the program of `with_float32`, with a scale of the loss."""
        emit = self.with_float32(parts, entries, value).emit
        recorder = Recorder()
        request = self._call.request
        options = request.recompute, recorder, request.reduce_in_float32
        return self._step(lambda x: emit(x, *options), recorder, scale)

    def parts(self) -> list[Part]:
        """Returns the parts that may be in float32, outer modules first.

        With a root module in float32, which holds all modules, nothing would be left in
        half precision. So the lines of a root module are parts, and so are the lines
        outside of modules.
        """
        recorder = Recorder()
        emit = functools.partial(self.traced.emit, record=recorder)
        jax.eval_shape(emit, self._call.arrays)
        rows = [row for row in recorder.rows if row.is_low or row.is_in_fp8]
        paths = {row.path for row in rows}
        root = {""} | {x for x in paths if all(_is_inside(path, x) for path in paths)}
        parts = {Part("", x.source) if x.path in root else Part(x.path) for x in rows}
        # An equation of library code that no user code calls has no module and no line.
        parts -= {Part()}
        # By length first, the lines of a file are in the order of their numbers.
        return sorted(parts, key=lambda x: (x.path.count("/"), len(x.line), x))

    def gradient_program(self, scale: float) -> tuple[Jaxpr, list[Array]]:
        """Returns the jaxpr of the loss and its gradients in half precision.

        The operands of the jaxpr are returned as well. The program has no recomputation
        in the backward pass: without recomputation, the roundings are the same, and the
        program compiles in three quarters of the time.
        """
        request = self._call.request
        options = False, None, request.reduce_in_float32
        step = self._gradients(lambda x: self.traced.emit(x, *options))

        def run(scale: Array, *arrays: Array) -> list[Array]:
            (value, *_), gradients = step(scale, arrays)
            return [value, *gradients]

        operands = [jnp.float32(scale), *self._call.arrays]
        return jax.make_jaxpr(run)(*operands), operands

    def _step(self, program: Loss, recorder: Recorder, scale: float = 1.0) -> Trial:
        step = jax.jit(self._gradients(program), compiler_options=compiler_options())
        (value, updates, _), gradients = step(jnp.float32(scale), self._call.arrays)
        return Trial(value, updates, gradients, low_share(recorder.rows))

    def _gradients(self, program: Loss) -> Loss:
        def loss(arrays: Sequence[Array]) -> Any:
            return self.traced.rebuild(program(arrays))[0]

        return self._call.gradients(loss)


def compiler_options() -> dict[str, Any]:
    """Returns the compiler options for a program that runs only a few times."""
    return _ON_CPU if jax.default_backend() == "cpu" else {}


@dataclasses.dataclass(frozen=True)
class _LineChooser(Chooser):
    """Follows a policy, but runs some lines of code in float32, as `amp_stop` does."""

    lines: tuple[str, ...]
    decision: Decision | None = None  # for these lines, instead of float32

    def __call__(self, eqn: Eqn, context: Context) -> Choice:
        if source_text(eqn) in self.lines and kind_of(eqn) is not Kind.STRUCTURED:
            stop = self.policy.decide(eqn.primitive, ("amp_stop",))
            context = context._replace(forced=self.decision or stop)
        return super().__call__(eqn, context)


def keys_of(parts: Collection[Part]) -> tuple[str, ...]:
    """Returns the modules among some parts, as keys of a policy.

    The key of an outer module wins, so the modules inside of that module get no key.
    """
    paths = [part.path for part in parts if not part.line]
    outer = [x for x in paths if not any(_is_inside(x, y) and x != y for y in paths)]
    return tuple(map(glob.escape, outer))


def lines_of(parts: Collection[Part]) -> tuple[str, ...]:
    """Returns the lines among some parts."""
    return tuple(part.line for part in parts if part.line)


def _is_inside(path: str, outer: str) -> bool:
    """Whether a module is the module `outer`, or is inside of that module."""
    return f"{path}/".startswith(f"{outer}/")


def fewest(
    parts: list[Part], is_enough: Callable[[Sequence[Part]], bool]
) -> list[Part]:
    """Returns as few parts as a search finds that are enough.

    All parts together must be enough. The search leaves out first halves of the list,
    then quarters, and so on, as long as the remaining parts are enough. Outer modules
    come first in the list and are left out first, so that a module inside is found
    rather than the module around.
    """
    size = len(parts)
    runs = 0
    while size > 1:
        size = (size + 1) // 2
        for some in [parts[i : i + size] for i in range(0, len(parts), size)]:
            rest = [part for part in parts if part not in some]
            if rest and runs < _MAX_RUNS:
                runs += 1
                if is_enough(rest):
                    parts = rest
    return parts
