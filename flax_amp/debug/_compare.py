"""`compare_precision`: how far gradients in half precision are from those in float32.

The program runs in both precisions on the same arguments. If the gradients differ by
more than roundings make, it runs again with remedies: without fp8, with a loss scale at
which gradients fit into float16, and with modules in float32. Which modules is found by
halving: of those that together are enough, the half that still is, and so on.
"""

import glob
import math
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Unpack, overload

import jax
import jax.numpy as jnp
import numpy as np

from flax_amp import _tree
from flax_amp._compat import Array, evaluate
from flax_amp._rewriter.transform import rewrite
from flax_amp._training.arguments import check_count
from flax_amp.debug._call import Asked, Call, Loss, Options, Trained
from flax_amp.debug._comparison import Comparison, GradientErrors, Setting
from flax_amp.debug._lines import LineScopes
from flax_amp.debug._record import Recorder, Totals
from flax_amp.policy import Policy, PolicyEntries, without_fp8

# Gradients are as wrong as half precision makes them if their error is at most this
# many times the spacing of numbers at 1.
_USUAL = 8
_MAX_RUNS = 16  # of the search for modules
# The largest gradient is to be this: four times as much is in the range of float16, for
# those inside of the program.
_TARGET = 2.0**14


@overload
def compare_precision(
    fun: Trained, /, *step: Any, **options: Unpack[Options]
) -> Comparison: ...
@overload
def compare_precision(
    fun: Loss, /, **options: Unpack[Options]
) -> Callable[..., Comparison]: ...
def compare_precision(
    fun: Any,
    /,
    *step: Any,
    scale: float | None = None,
    remedies: int = 3,
    **options: Any,
) -> Any:
    """Compares a loss and its gradients in half precision with those in float32.

    It runs both programs on the same arguments, and tells the error of the loss and of
    the gradients of each group of parameters. If that is more than roundings make, it
    runs remedies: without fp8, with a loss scale at which gradients fit into float16,
    and with the fewest modules, or lines outside of modules, in float32 that are
    enough. It is called as `flax_amp.explain`; a loss may return `(loss, aux)`.
    Gradients are those of the first argument, or of the parameters.

    Args:
      fun: see `flax_amp.explain`.
      *step: see `flax_amp.explain`.
      scale: the factor of the loss in half precision, by which gradients are divided
        before they are compared. By default that of the scaler, or 1.
      remedies: how many modules may be in float32 together; 0 to try no remedy at all.
      **options: see `flax_amp.explain`.

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
    asked = Asked.read("compare_precision", fun, step, **options)
    seen = f"compare_precision: {remedies=}"
    check_count(remedies, seen, "of modules to try in float32", least=0)
    factor = asked.scale(scale)
    return asked.answer(lambda call: _Search(asked, call, factor).comparison(remedies))


# --- runs ----------------------------------------------------------------------------


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
    gradients: list[GradientErrors]
    low_paths: dict[str, None]  # of the modules that compute in half precision


class _EnoughError(Exception):
    """The search has run the program often enough."""


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
        pairs = zip(gradients, references, strict=True)
        errors = [_difference(x, y) for x, y in pairs]
        loss_error = _relative([_difference(loss, exact)])
        # No step is taken if the loss is lost, whatever the gradients are.
        error = max(_relative(errors), loss_error if loss_error == math.inf else 0.0)
        lines = tuple(filter(None, map(self._line, paths)))
        modules = tuple(glob.escape(path) for path in paths if not self._line(path))
        rows = [visit.row for visit in recorder.visits()]
        share = Totals.of(rows).low_share
        setting = Setting(name, scale, modules, lines, loss_error, error, share)
        low_paths = dict.fromkeys(row.path for row in rows if row.is_low)
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
    ) -> list[GradientErrors]:
        groups: dict[str, list[_Difference]] = defaultdict(list)
        paths = _tree.pick(self._call.paths, self._call.trained())
        for path, error in zip(paths, errors, strict=True):
            parts = path.split("/")  # the leaves of one module are a group
            groups["/".join(parts[:-1] if len(parts) > 2 else parts)].append(error)
        found = [
            GradientErrors(path, _relative(g), float(max(x.largest for x in g)) * scale)
            for path, g in groups.items()
        ]
        return sorted(found, key=lambda group: -group.error)

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
            gradients=tuple(first.gradients),
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
            many = f"{len(modules)} modules or more would have to be in float32"
            self._notes.append(f"{many}: the error is spread over the program")
        else:
            groups = [[path] for path in modules] + [modules] * (len(modules) > 1)
            # A key for all that is there is no remedy: nothing is left in half.
            runs = map(self._in_float32, groups)
            yield from (run for run in runs if run.low_share != 0)

    def _fitting_scale(self, first: _Run) -> float:
        """Returns the largest power of two at which all gradients fit into float16."""
        largest = max(group.largest for group in first.gradients) / self._scale
        # The forward pass does not see the scale.
        is_known = math.isfinite(first.loss) and 0 < largest < math.inf
        if self._asked.dtype != jnp.float16 or not is_known:
            return self._scale
        return min(2.0 ** math.floor(math.log2(_TARGET / largest)), 2.0**24)

    def _modules(self, paths: dict[str, None]) -> list[str]:
        """Returns the fewest modules that have to be in float32, if that helps.

        Args:
          paths: the modules that compute in half precision; all else is as in float32.
        """

        def inside(path: str) -> list[str]:
            start = f"{path}/".lstrip("/")
            ends = [p[len(start) :] for p in paths if p and p.startswith(start)]
            return list(dict.fromkeys(start + end.partition("/")[0] for end in ends))

        root = ""
        while len(inside(root)) == 1 and root not in paths:
            (root,) = inside(root)
        found = inside(root)
        best = self._in_float32(found).gradient_error if found else math.inf
        # There may be another fault, outside of modules.
        self._threshold = max(self._threshold, 2 * best)
        if self._threshold >= self._error / 2:
            return []
        try:
            found = queue = self._fewest([], found)
            while queue:  # of a module, a part may be enough
                module, *queue = queue
                others = [path for path in found if path != module]
                parts = inside(module)
                if parts and self._is_enough([*others, *parts]):
                    parts = self._fewest(others, parts)
                    found, queue = [*others, *parts], [*queue, *parts]
        except _EnoughError:
            pass
        return found

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
        if len(self._runs) >= _MAX_RUNS and frozenset(paths) not in self._runs:
            raise _EnoughError
        return self._in_float32(paths).gradient_error <= self._threshold

    def _in_float32(self, paths: Sequence[str]) -> Setting:
        """Runs the program with modules in float32, once for the same ones."""
        key = frozenset(paths)
        if key not in self._runs:
            first = self._line(paths[0]) or paths[0]
            name = first if len(paths) == 1 else f"all {len(paths)}"
            run = self._run(
                f"{name} in float32", self._asked.entries, self._scale, paths
            )
            self._runs[key] = run.setting
        return self._runs[key]

    def _line(self, path: str) -> str:
        """Returns the line that a path stands for; empty for that of a module."""
        return self._lines.sources.get(path.rpartition("/")[2], "")
