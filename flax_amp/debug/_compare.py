"""`compare_precision`: how far gradients in half precision are from those in float32.

The program runs in both precisions on the same arguments. If the gradients differ by
more than roundings make, it runs again with remedies. Which modules have to be in
float32 is found by halving: of those that together are enough, the half that still is,
and so on. The deepest ones come first, so that a part of a module is found before it.
"""

import dataclasses
import glob
import math
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from rich.text import Text

from flax_amp import _tree
from flax_amp._compat import Array, evaluate
from flax_amp._rewriter.transform import rewrite
from flax_amp._training.arguments import check_count
from flax_amp.debug._call import Asked, Call, Loss, tool
from flax_amp.debug._place import LineScopes
from flax_amp.debug._record import Recorder, Totals
from flax_amp.debug._report import (
    Part,
    Report,
    percent,
    plural,
    policy_text,
    table,
)
from flax_amp.policy import Policy, PolicyEntries, without_fp8

# Gradients are as wrong as half precision makes them if their error is at most this
# many times the spacing of numbers at 1.
_USUAL = 8
_HELPS = 0.9  # what a remedy that helps leaves of the error of the gradients, at most
_SHOWN = 12  # groups of parameters
_MAX_RUNS = 16  # of the search for modules
# The largest gradient is to be this: four times as much is in the range of float16, for
# those inside of the program.
_TARGET = 2.0**14


class GradientErrors(NamedTuple):
    """How the gradients of a group of parameters differ from those in float32."""

    path: str  # what the group has in common, such as `params/Dense_0`
    error: float  # relative, L2; infinite if one is not finite that is in float32
    largest: float  # the largest magnitude in float32, times the scale of the loss


class Setting(NamedTuple):
    """A run of the program."""

    name: str  # what it is called
    scale: float  # of the loss
    keys: tuple[str, ...]  # the modules that are in float32, as keys of a policy
    lines: tuple[str, ...]  # lines outside of modules in float32, as by `amp_stop`
    loss_error: float  # relative
    gradient_error: float  # relative, L2, of all gradients together
    low_share: float | None  # of matmuls in half precision; `None` without matmuls


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Comparison(Report):
    """How a program differs from itself in float32. Made by `compare_precision`.

    Attributes:
      name: the name of the function.
      compute_dtype: the dtype of low-precision values.
      loss: the loss in float32 and in this precision.
      gradients: the groups of parameters, that with the largest error first.
      threshold: the error of the gradients from which on remedies are tried.
      as_it_is: the program as it is.
      remedies: what was tried: the program without fp8, if it has matmuls in fp8; with
        another scale, in float16; and, unless one of them is enough, with the modules
        in float32 that are at fault, one by one and together.
      own_policy: whether the policy is the user's own.
      notes: what limits these figures.
    """

    name: str
    compute_dtype: str
    loss: tuple[float, float]
    gradients: tuple[GradientErrors, ...]
    threshold: float
    as_it_is: Setting
    remedies: tuple[Setting, ...] = ()
    own_policy: bool = False
    notes: tuple[str, ...] = ()

    @property
    def best(self) -> Setting | None:
        """The remedy that leaves the least error, if one helps."""
        best = min(self.remedies, key=lambda run: run.gradient_error, default=None)
        limit = _HELPS * self.as_it_is.gradient_error
        return best if best and best.gradient_error < limit else None

    @property
    def policy(self) -> str:
        """The policy of the best remedy, as code; empty if it has none."""
        keys = self.best.keys if self.best else ()
        return policy_text(keys, self.own_policy) if keys else ""

    def _parts(self) -> Iterator[Part]:
        run, threshold = self.as_it_is, _error(self.threshold)
        scale = f", loss scale {run.scale:g}" if run.scale != 1 else ""
        before, after = self.loss
        yield f"{self.name} in {self.compute_dtype} against float32{scale}"
        yield f"loss {before:.6g} in float32, {after:.6g} here\n"
        rows = ([g.path, _error(g.error), f"{g.largest:.2g}"] for g in self.gradients)
        yield table(["gradients of", "error", "largest"], [*rows][:_SHOWN])
        if self.gradients[_SHOWN:]:
            yield f"... and {len(self.gradients) - _SHOWN} more"
        yield ""
        headers = ["\nthe program", "error of\nloss", "\ngradients", "in\nhalf"]
        yield table(headers, map(_cells, (run, *self.remedies)))
        best = self.best
        if run.gradient_error <= self.threshold:
            yield f"\nThe gradients are as exact as usual: below {threshold}."
        elif best is None:
            yield f"\nThe error is above {threshold}, and nothing that was tried helps."
        else:
            yield f"\nThis was tried and helps: {best.name}."
            if best.scale != run.scale:
                yield f"  flax_amp.init_scaler(scaler={best.scale:.8g})"
            if self.policy:
                yield f"  amp_policy={self.policy}"
            if best.lines:
                yield f"  flax_amp.amp_stop around {', '.join(best.lines)}"
        yield from (Text(f"Note: {note}.") for note in self.notes)


def _cells(run: Setting) -> list[str]:
    share = "" if run.low_share is None else percent(run.low_share, 1)
    return [run.name, _error(run.loss_error), _error(run.gradient_error), share]


def _error(value: float) -> str:
    """Returns a relative error in a few characters."""
    if not math.isfinite(value):
        return "inf"
    return f"{value:.1e}".replace("e-0", "e-").replace("e+0", "e+") if value else "0"


@tool
def compare_precision(
    asked: Asked, *, scale: float | None = None, remedies: int = 3
) -> Callable[[Call], Comparison]:
    """Compares a loss and its gradients in half precision with those in float32.

    It tells the error of the loss and of the gradients of each group of parameters. If
    that is more than roundings make, it runs remedies: without fp8, with a loss scale
    at which gradients fit into float16, and with the fewest modules, or lines outside
    of modules, in float32 that are enough. It is called as `flax_amp.explain`, with
    arrays that have values; a loss may return `(loss, aux)`.

    Args:
      fun: see `flax_amp.explain`, as for the other arguments.
      *step: see there.
      **options: see there.
      scale: the factor of the loss in half precision, by which gradients are divided
        before they are compared. By default that of the scaler, or 1.
      remedies: how many modules may be in float32 together; 0 to try no remedy at all.

    Returns:
      A `Comparison`, or a function that returns one. Print it.

    Raises:
      TypeError: if an argument is of a wrong kind.
      ValueError: if a number is out of range.

    Example:
      >>> import jax, jax.numpy as jnp, flax_amp
      >>> def loss(w, x, size):
      ...     with jax.named_scope("first"):
      ...         y = jnp.tanh(x @ w)
      ...     with jax.named_scope("cancels"):  # a difference of rounded products
      ...         y = (y * size) @ w - (y * size - y) @ w
      ...     return jnp.mean(y)
      >>> x, w = jnp.linspace(0, 1, 32).reshape(4, 8), jnp.eye(8)
      >>> found = flax_amp.compare_precision(loss)(w, x, jnp.full((1, 8), 300.0))
      >>> found.remedies[0].keys
      ('cancels',)
    """
    seen = f"compare_precision: {remedies=}"
    check_count(remedies, seen, "of modules to try in float32", least=0)
    factor = asked.scale(scale)
    return lambda call: _Search(asked, call, factor).comparison(remedies)


class _Difference(NamedTuple):
    """How an array differs from its counterpart in float32."""

    distance: Any  # L2 norm; infinite if an element is lost that is finite in float32
    reference: Any  # the norm of the counterpart
    largest: Any  # its largest magnitude


def _difference(x: Array, reference: Array) -> _Difference:
    # As float64: no square overflows or becomes zero.
    x, y = (np.asarray(a).astype(np.complex128) for a in (x, reference))
    known = np.isfinite(y)
    lost = (known & ~np.isfinite(x)).any()
    x, y = np.where(known, x, 0), np.where(known, y, 0)
    distance = math.inf if lost else np.linalg.norm((x - y).ravel())
    return _Difference(distance, np.linalg.norm(y.ravel()), np.abs(y).max(initial=0))


def _relative(found: Sequence[_Difference]) -> float:
    """Returns the relative L2 error of several arrays."""
    distance = math.hypot(*(one.distance for one in found))
    reference = math.hypot(*(one.reference for one in found))
    if not distance:
        return 0.0
    return distance / reference if reference else math.inf


class _Run(NamedTuple):
    """What a run of the program has shown."""

    setting: Setting
    loss: float
    gradients: tuple[GradientErrors, ...]
    low_paths: set[str]  # of the modules that compute in half precision


class _Search:
    """Compares a program, and looks for what makes its gradients more exact."""

    def __init__(self, asked: Asked, call: Call, scale: float):
        self._asked, self._call, self._scale = asked, call, scale
        self._lines = LineScopes()
        closed = jax.make_jaxpr(lambda *xs: call.loss(xs)[0])(*call.arrays)
        closed = self._lines(closed)
        self._loss: Loss = lambda arrays: evaluate(closed, arrays)
        self._reference = self._gradients(self._loss, 1.0)
        self._threshold = _USUAL * float(jnp.finfo(asked.dtype).eps)
        self._runs: dict[frozenset[str], Setting] = {}
        self._notes: list[str] = []

    def _run(
        self, name: str, entries: PolicyEntries, scale: float, paths: Sequence[str] = ()
    ) -> _Run:
        """Runs the program in half precision, with modules in float32."""
        keys = map(glob.escape, paths)
        policy = Policy({**entries, **dict.fromkeys(keys, jnp.float32)})
        asked, recorder = self._asked, Recorder()
        low = rewrite(self._loss, policy, asked.dtype, asked.recompute, recorder)
        with warnings.catch_warnings():
            if paths:  # the policy is not the user's
                warnings.simplefilter("ignore")
            loss, gradients = self._gradients(low, scale)
        exact, references = self._reference
        errors = list(map(_difference, gradients, references))
        loss_error = _relative([_difference(loss, exact)])
        # No step is taken if the loss is lost, whatever the gradients are.
        error = max(_relative(errors), loss_error if loss_error == math.inf else 0.0)
        lines = tuple(filter(None, map(self._line, paths)))
        modules = tuple(glob.escape(path) for path in paths if not self._line(path))
        rows = [visit.row for visit in recorder.visits()]
        share = Totals.of(rows).low_share
        setting = Setting(name, scale, modules, lines, loss_error, error, share)
        low_paths = {row.path for row in rows if row.is_low}
        return _Run(setting, float(loss), self._by_group(errors, scale), low_paths)

    def _gradients(self, loss: Loss, scale: float) -> Any:
        """Returns a loss and its gradients, without the scale."""
        options: Any = {}
        if jax.default_backend() == "cpu":
            # A CPU computes halves in float32, where XLA would leave out the roundings
            # in between that other devices do.
            options = {"xla_allow_excess_precision": False}
            options["xla_backend_optimization_level"] = 0  # each program runs once
        run = jax.jit(self._call.gradients(loss), compiler_options=options)
        (value,), gradients = run(jnp.float32(scale), self._call.arrays)
        return value, gradients

    def _by_group(
        self, errors: Sequence[_Difference], scale: float
    ) -> tuple[GradientErrors, ...]:
        groups: dict[str, list[_Difference]] = defaultdict(list)
        paths = _tree.pick(self._call.paths, self._call.trained())
        for path, error in zip(paths, errors, strict=True):
            parts = path.split("/")  # the leaves of one module are a group
            groups["/".join(parts[:-1] if len(parts) > 2 else parts)].append(error)
        found = [
            GradientErrors(path, _relative(g), float(max(x.largest for x in g)) * scale)
            for path, g in groups.items()
        ]
        return tuple(sorted(found, key=lambda group: -group.error))

    # --- remedies --------------------------------------------------------------------

    def comparison(self, most: int) -> Comparison:
        """Returns what is found, with remedies of up to so many modules."""
        asked, threshold = self._asked, self._threshold
        first = self._run("as it is", asked.entries, self._scale)
        self._error = first.setting.gradient_error
        is_bad = most > 0 and self._error > threshold
        return Comparison(
            name=asked.name,
            compute_dtype=asked.dtype.name,
            loss=(float(self._reference[0]), first.loss),
            gradients=first.gradients,
            threshold=threshold,
            as_it_is=first.setting,
            remedies=tuple(self._remedies(first, most) if is_bad else ()),
            own_policy=asked.has_own_policy,
            notes=tuple(self._notes),
        )

    def _remedies(self, first: _Run, most: int) -> Iterator[Setting]:
        """Runs what may help, until something is enough."""
        entries, tried = self._asked.entries, []
        if Policy(entries).fp8_recipes:
            tried.append(("without fp8", without_fp8(entries), self._scale))
        scale = self._fitting_scale(first)
        if scale != self._scale:
            tried.append((f"loss scale {scale:.8g}", entries, scale))
        for name, policy, scale in tried:
            run = self._run(name, policy, scale).setting
            yield run
            if run.gradient_error <= self._threshold:
                return
            if scale != self._scale and run.gradient_error < self._error:
                self._scale, self._error = scale, run.gradient_error
        modules = self._modules(first.low_paths)
        if not modules:
            self._notes.append("neither modules nor lines in float32 are enough")
        elif len(modules) > most:
            many = f"more than {plural(most, 'module')} would have to be in float32"
            self._notes.append(f"{many}: the error is spread over the program")
        else:
            groups = [[path] for path in modules] + [modules] * (len(modules) > 1)
            yield from map(self._in_float32, groups)

    def _fitting_scale(self, first: _Run) -> float:
        """Returns the largest power of two at which all gradients fit into float16."""
        largest = max(group.largest for group in first.gradients) / self._scale
        # The forward pass does not see the scale.
        is_known = math.isfinite(first.loss) and 0 < largest < math.inf
        if self._asked.dtype != jnp.float16 or not is_known:
            return self._scale
        return min(2.0 ** math.floor(math.log2(_TARGET / largest)), 2.0**24)

    def _modules(self, paths: set[str]) -> list[str]:
        """Returns the fewest modules that have to be in float32, if that helps.

        Args:
          paths: the modules that compute in half precision; all else is as in float32.
        """
        modules = {f"{path}/" for path in paths if path}

        # With a key for all that is there, nothing would be left in half.
        parts = [x for x in modules if not all(y.startswith(x) for y in modules)]
        found = [path.rstrip("/") for path in parts]
        found = sorted(found, key=lambda path: (-path.count("/"), path))
        best = self._in_float32(found).gradient_error if found else math.inf
        # There may be another fault, outside of modules.
        self._threshold = max(self._threshold, 2 * best)
        if self._threshold >= self._error / 2:
            return []
        return self._fewest([], found)

    def _fewest(self, fixed: list[str], paths: list[str]) -> list[str]:
        """Returns the fewest of some modules that are enough together with others."""
        if len(paths) == 1:
            return paths
        left, right = paths[: len(paths) // 2], paths[len(paths) // 2 :]
        for half in (left, right):
            if self._is_enough([*fixed, *half]):
                return self._fewest(fixed, half)
        # It takes some of both.
        found = self._fewest([*fixed, *left], right)
        return [*self._fewest([*fixed, *found], left), *found]

    def _is_enough(self, paths: list[str]) -> bool:
        """Whether modules in float32 are enough; after many runs none is any more."""
        if len(self._runs) >= _MAX_RUNS and frozenset(paths) not in self._runs:
            return False
        return self._in_float32(paths).gradient_error <= self._threshold

    def _in_float32(self, paths: Sequence[str]) -> Setting:
        """Runs the program with modules in float32, once for the same ones."""
        key = frozenset(paths)
        if key not in self._runs:
            first = self._line(paths[0]) or paths[0]
            name = f"{first if len(paths) == 1 else f'all {len(paths)}'} in float32"
            run = self._run(name, self._asked.entries, self._scale, paths)
            self._runs[key] = run.setting
        return self._runs[key]

    def _line(self, path: str) -> str:
        """Returns the line that a path stands for; empty for that of a module."""
        return self._lines.sources.get(path.rpartition("/")[2], "")
