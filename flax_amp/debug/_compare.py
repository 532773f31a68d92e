"""`compare_precision`: how far gradients in half precision are from those in float32.

The program runs in both precisions on the same arguments. If the gradients differ by
more than roundings make, it runs again with remedies: without fp8, with a loss scale at
which gradients fit into float16, and with modules in float32. Which modules is found by
halving: of those that together are enough, the half that still is, and so on.
"""

import dataclasses
import functools
import glob
import math
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from rich.text import Text

from flax_amp import _tree
from flax_amp._compat import Array, evaluate
from flax_amp._rewriter.transform import rewrite
from flax_amp._training.arguments import check_count
from flax_amp.debug._call import (
    Asked,
    FlatLoss,
    Tool,
    UsersCall,
    check_concrete,
    read_scale,
)
from flax_amp.debug._lines import LineScopes
from flax_amp.debug._model import Module, total
from flax_amp.debug._report import Part, Report, as_text, percent, policy_text, table
from flax_amp.debug._rows import Recorder, Visit
from flax_amp.policy import (
    MatmulDType,
    Policy,
    PolicyEntries,
    Precision,
    without_fp8,
)

# Gradients are as wrong as half precision makes them if their error is at most this
# many times the spacing of numbers at 1.
_USUAL = 8
_HELPS = 0.9  # what a remedy that helps leaves of the error of the gradients, at most
_MAX_RUNS = 16  # of the search for modules
# The largest gradient is to be this: four times as much is in the range of float16, for
# those inside of the program.
_TARGET = 2.0**14


@dataclasses.dataclass(frozen=True)
class GradientErrors:
    """How the gradients of a group of parameters differ from those in float32.

    Attributes:
      path: what the group has in common, such as `params/Dense_0`.
      error: their relative L2 error. Infinite: one is not finite, though it is in
        float32.
      largest: the largest magnitude in float32, times the scale of the loss.
    """

    path: str
    error: float
    largest: float


@dataclasses.dataclass(frozen=True)
class Setting:
    """A run of the program.

    Attributes:
      name: what it is called.
      scale: the scale of the loss.
      keys: the modules that are in float32, as keys of a policy.
      lines: the lines outside of modules that are in float32, as by `amp_stop`.
      loss_error: the relative error of the loss.
      gradient_error: the relative L2 error of all gradients together.
      low_share: the share of products in half precision; `None` without products.
    """

    name: str
    scale: float
    keys: tuple[str, ...]
    lines: tuple[str, ...]
    loss_error: float
    gradient_error: float
    low_share: float | None


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Comparison(Report):
    """How a program differs from itself in float32. Made by `compare_precision`.

    It prints as a report.

    Attributes:
      name: the name of the function.
      compute_dtype: the dtype of low-precision values.
      loss: the loss in float32 and in this precision.
      gradients: the groups of parameters, that with the largest error first.
      threshold: the error of the gradients from which on remedies are tried.
      as_it_is: the program as it is.
      remedies: what was tried: the program without fp8, if it has products in fp8; with
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
    def helpful(self) -> list[Setting]:
        """The remedies that help; if some are enough, only those."""
        limit = _HELPS * self.as_it_is.gradient_error
        enough = [x for x in self.remedies if x.gradient_error <= self.threshold]
        return enough or [x for x in self.remedies if x.gradient_error < limit]

    @property
    def policies(self) -> list[str]:
        """The policies of the remedies that help, as code, without lines."""
        runs = [run for run in self.helpful if run.keys]
        return [policy_text(run.keys, own=self.own_policy) for run in runs]

    def report(self, *, top: int = 12) -> str:
        """Returns the report as text.

        Args:
          top: how many groups of parameters to show.

        Raises:
          ValueError: if `top` is not a positive number.
        """
        check_count(top, f"report: {top=}", "of groups of parameters")
        return as_text(self._parts(top))

    def _parts(self, top: int = 12) -> Iterator[Part]:
        run, threshold = self.as_it_is, _error(self.threshold)
        scale = f", loss scale {run.scale:g}" if run.scale != 1 else ""
        before, after = self.loss
        yield f"{self.name} in {self.compute_dtype} against float32{scale}"
        yield f"loss {before:.6g} in float32, {after:.6g} here\n"
        rows = ([g.path, _error(g.error), f"{g.largest:.2g}"] for g in self.gradients)
        yield table(["gradients of", "error", "largest"], [*rows][:top])
        if self.gradients[top:]:
            yield f"... and {len(self.gradients) - top} more"
        yield ""
        headers = ["\nthe program", "error of\nloss", "\ngradients", "in\nhalf"]
        yield table(headers, map(_cells, (run, *self.remedies)))
        if run.gradient_error <= self.threshold:
            yield f"\nThe gradients are as exact as usual: below {threshold}."
        elif not self.helpful:
            yield f"\nThe error is above {threshold}, and nothing that was tried helps."
        for factor in {run.scale for run in self.helpful} - {run.scale}:
            yield f"\nScale the loss: flax_amp.init_scaler(scaler={factor:.8g})."
        if self.policies:
            yield "\nThis was tried and helps:"
        yield from (f"  amp_policy={text}" for text in self.policies)
        for lines in dict.fromkeys(run.lines for run in self.helpful if run.lines):
            yield f"\nPut flax_amp.amp_stop around {', '.join(lines)}: it was tried."
        yield from (Text(f"Note: {note}.") for note in self.notes)

    def to_dict(self) -> dict[str, Any]:
        return super().to_dict() | {"policies": self.policies}

    def _summary(self) -> str:
        return f"gradients differ by {_error(self.as_it_is.gradient_error)}"


def _cells(run: Setting) -> list[str]:
    share = "" if run.low_share is None else percent(run.low_share, 1)
    return [run.name, _error(run.loss_error), _error(run.gradient_error), share]


def _error(value: float) -> str:
    """Returns a relative error in a few characters."""
    if not math.isfinite(value):
        return "inf"
    return f"{value:.1e}".replace("e-0", "e-").replace("e+0", "e+") if value else "0"


# --- the function --------------------------------------------------------------------


def compare_precision(
    fun: Asked,
    *step: Any,
    precision: Precision | None = None,
    compute_dtype: DTypeLike | None = None,
    matmul_dtype: MatmulDType = None,
    amp_policy: PolicyEntries | None = None,
    recompute: bool = True,
    scale: float | None = None,
    remedies: int = 3,
) -> Any:
    """Compares a loss and its gradients in half precision with those in float32.

    It runs both programs on the same arguments, and tells the error of the loss and of
    the gradients of each group of parameters. If that is more than roundings make, it
    runs remedies: without fp8, with a loss scale at which gradients fit into float16,
    and with the fewest modules in float32 that are enough.

    It is called as `compare_precision(loss)(params, batch)`, with the loss before
    `amp`, which may return `(loss, aux)`, or as `compare_precision(state, loss_fn,
    batch, *args)`. Gradients are those of the first argument, or of the parameters.

    Args:
      fun, precision, compute_dtype, matmul_dtype, amp_policy, recompute: see
        `flax_amp.explain`.
      *step: see `flax_amp.explain`.
      scale: the factor of the loss in half precision, by which gradients are divided
        before they are compared. By default that of the state's scaler, or 1.
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
    tool = Tool.read(
        "compare_precision", fun, step, precision, compute_dtype, matmul_dtype,
        amp_policy, recompute,
    )  # fmt: skip
    seen = f"compare_precision: {remedies=}"
    check_count(remedies, seen, "of modules to try in float32", least=0)
    factor = read_scale("compare_precision", fun, scale)

    def use(call: UsersCall) -> Comparison:
        check_concrete(tool.where, call.inputs)
        loss = FlatLoss.of(call, tool.where)
        with tool.working():
            return _Search(tool, loss, factor).comparison(remedies)

    return tool.on_target(lambda *args, **kwargs: tool.run(use, args, kwargs))


# --- runs ----------------------------------------------------------------------------


class _Run(NamedTuple):
    """What a run of the program has shown."""

    setting: Setting
    loss: float
    gradients: list[GradientErrors]
    visits: list[Visit]


class _Programs:
    """The user's loss in several precisions."""

    def __init__(self, tool: Tool, loss: FlatLoss):
        self._tool, self._flat, self._lines = tool, loss, LineScopes()
        closed = jax.make_jaxpr(lambda *arrays: loss(arrays)[0])(*loss.arrays)
        self._closed = self._lines(closed)

    def line(self, path: str) -> str:
        """Returns the line that a path stands for; empty for that of a module."""
        return self._lines.sources.get(path.rpartition("/")[2], "")

    def _loss(self, arrays: Sequence[Array]) -> Array:
        return evaluate(self._closed, arrays)[0]

    @functools.cached_property
    def reference(self) -> tuple[Array, list[Array]]:
        """The loss and its gradients in float32."""
        return self._gradients(self._loss, 1.0)

    def run(
        self,
        name: str,
        entries: PolicyEntries,
        scale: float,
        paths: Sequence[str] = (),
    ) -> _Run:
        """Runs the program in half precision, with modules in float32."""
        keys = map(glob.escape, paths)
        policy = Policy({**entries, **dict.fromkeys(keys, jnp.float32)})
        recorder = Recorder()
        low = rewrite(
            self._loss, policy, self._tool.dtype, self._tool.recompute, recorder
        )
        with warnings.catch_warnings():
            if paths:  # the policy is not the user's
                warnings.simplefilter("ignore")
            loss, gradients = self._gradients(low, scale)
        pairs = zip(gradients, self.reference[1], strict=True)
        errors = jax.device_get([_difference(x, y, scale) for x, y in pairs])
        loss_error = _relative([_difference(loss, self.reference[0], 1.0)])
        visits = recorder.visits()
        share = total(visit.row for visit in visits).low_share
        # No step is taken if the loss is lost, whatever the gradients are.
        error = max(_relative(errors), loss_error if loss_error == math.inf else 0.0)
        lines = tuple(filter(None, map(self.line, paths)))
        modules = tuple(glob.escape(path) for path in paths if not self.line(path))
        setting = Setting(name, scale, modules, lines, loss_error, error, share)
        return _Run(setting, float(loss), self._by_group(errors), visits)

    def _gradients(self, loss: Callable[..., Any], scale: float) -> Any:
        """Returns a loss and its gradients, without the scale."""
        arrays, trained = self._flat.arrays, self._flat.trained

        def gradients(arrays: list[Array], scale: Array) -> Any:
            def scaled(chosen: list[Array]) -> Any:
                value = _tree.widen(loss(_tree.fill(chosen, trained, arrays)))
                return value * scale, value

            found, value = jax.grad(scaled, has_aux=True)(_tree.pick(arrays, trained))
            return value, [_tree.widen(g) / scale for g in found]

        options: Any = {}
        if jax.default_backend() == "cpu":
            # A CPU computes halves in float32, where XLA would leave out the roundings
            # in between that other devices do.
            options = {"xla_allow_excess_precision": False}
            options["xla_backend_optimization_level"] = 0  # each program runs once
        return jax.jit(gradients, compiler_options=options)(arrays, jnp.float32(scale))

    def _by_group(self, errors: Sequence["_Difference"]) -> list[GradientErrors]:
        groups: dict[str, list[_Difference]] = defaultdict(list)
        paths = _tree.pick(self._flat.paths, self._flat.trained)
        for path, error in zip(paths, errors, strict=True):
            parts = path.split("/")  # the leaves of one module are a group
            groups["/".join(parts[:-1] if len(parts) > 2 else parts)].append(error)
        found = [
            GradientErrors(path, _relative(g), max(float(x.largest) for x in g))
            for path, g in groups.items()
        ]
        return sorted(found, key=lambda group: -group.error)


class _Difference(NamedTuple):
    """How an array differs from its counterpart in float32."""

    distance: Any  # L2 norm; infinite if an element is lost that is finite in float32
    reference: Any  # the norm of the counterpart
    largest: Any  # its largest magnitude, with the scale


@jax.jit
def _difference(x: Array, reference: Array, scale: float) -> _Difference:
    known = jnp.isfinite(reference)
    lost = (known & ~jnp.isfinite(x)).any()
    reference = jnp.where(known, reference, 0)
    distance = _norm(jnp.where(known, x - reference, 0))
    largest = jnp.abs(reference).max(initial=0) * scale
    return _Difference(jnp.where(lost, math.inf, distance), _norm(reference), largest)


def _norm(x: Array) -> Array:
    """Returns a norm; no square overflows or becomes zero."""
    largest = jnp.abs(x).max(initial=0)
    unit = jnp.where(largest > 0, largest, 1)
    return unit * jnp.sqrt(jnp.square(jnp.abs(x) / unit).sum())


def _relative(found: Sequence[_Difference]) -> float:
    """Returns the relative L2 error of several arrays."""
    distance, reference = (
        float(np.linalg.norm([one[i] for one in found])) for i in (0, 1)
    )
    if not distance:
        return 0.0
    return distance / reference if reference else math.inf


# --- remedies ------------------------------------------------------------------------


class _EnoughError(Exception):
    """The search has run the program often enough."""


class _Search:
    """Compares a program, and looks for what makes its gradients more exact."""

    def __init__(self, tool: Tool, loss: FlatLoss, scale: float):
        self._tool, self._scale = tool, scale
        self._programs = _Programs(tool, loss)
        self._threshold = _USUAL * float(jnp.finfo(tool.dtype).eps)
        self._runs: dict[frozenset[str], Setting] = {}
        self._notes: list[str] = []

    def comparison(self, most: int) -> Comparison:
        """Returns what is found, with remedies of up to so many modules."""
        tool, threshold = self._tool, self._threshold
        first = self._programs.run("as it is", tool.entries, self._scale)
        self._error = first.setting.gradient_error
        is_bad = most > 0 and self._error > threshold
        return Comparison(
            name=tool.name,
            compute_dtype=tool.dtype.name,
            loss=(float(self._programs.reference[0]), first.loss),
            gradients=tuple(first.gradients),
            threshold=threshold,
            as_it_is=first.setting,
            remedies=tuple(self._remedies(first, most) if is_bad else ()),
            own_policy=tool.has_own_policy,
            notes=tuple(self._notes),
        )

    def _remedies(self, first: _Run, most: int) -> Iterator[Setting]:
        """Runs what may help, until something is enough."""
        entries, tried = self._tool.entries, []
        if Policy(entries).fp8_recipes:
            tried.append(("without fp8", without_fp8(entries), self._scale))
        scale = self._fitting_scale(first)
        if scale != self._scale:
            tried.append((f"loss scale {scale:.8g}", entries, scale))
        for name, policy, scale in tried:
            run = self._programs.run(name, policy, scale).setting
            yield run
            if run.gradient_error <= self._threshold:
                return
            if scale != self._scale and run.gradient_error < self._error:
                self._scale, self._error = scale, run.gradient_error
        modules = self._modules(first.visits)
        if not modules:
            self._notes.append("neither modules nor lines in float32 are enough")
        elif len(modules) > most:
            many = f"{len(modules)} modules or more would have to be in float32"
            self._notes.append(f"{many}: the error is spread over the program")
        else:
            groups = [[path] for path in modules] + [modules] * (len(modules) > 1)
            # A key for all that is there is no remedy: nothing is left in half.
            yield from (run for run in map(self._run, groups) if run.low_share != 0)

    def _fitting_scale(self, first: _Run) -> float:
        """Returns the largest power of two at which all gradients fit into float16."""
        largest = max(group.largest for group in first.gradients) / self._scale
        # The forward pass does not see the scale.
        is_known = math.isfinite(first.loss) and 0 < largest < math.inf
        if self._tool.dtype != jnp.float16 or not is_known:
            return self._scale
        return min(2.0 ** math.floor(math.log2(_TARGET / largest)), 2.0**24)

    def _modules(self, visits: Sequence[Visit]) -> list[str]:
        """Returns the fewest modules that have to be in float32, if that helps."""
        root = Module("", "")
        for visit in visits:
            if visit.row.is_low:  # all else is as in float32
                root.add(visit.row)
        while len(root.children) == 1 and not root.equations:
            (root,) = root.children.values()
        inside = {child.path: child for child in root.children.values()}
        best = self._run([*inside]).gradient_error if inside else math.inf
        # There may be another fault, outside of modules.
        self._threshold = max(self._threshold, 2 * best)
        if self._threshold >= self._error / 2:
            return []
        found = [*inside]
        try:
            found = self._fewest([], found)
            queue = [inside[path] for path in found]
            while queue:  # of a module, a part may be enough
                module = queue.pop(0)
                inside = {child.path: child for child in module.children.values()}
                others = [path for path in found if path != module.path]
                if inside and self._is_enough([*others, *inside]):
                    parts = self._fewest(others, [*inside])
                    found = [*others, *parts]
                    queue += (inside[path] for path in parts)
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
        return self._run(paths).gradient_error <= self._threshold

    def _run(self, paths: Sequence[str]) -> Setting:
        """Runs the program with modules in float32, once for the same ones."""
        key = frozenset(paths)
        if key not in self._runs:
            first = self._programs.line(paths[0]) or paths[0]
            name = first if len(paths) == 1 else f"all {len(paths)}"
            name = f"{name} in float32"
            run = self._programs.run(name, self._tool.entries, self._scale, paths)
            self._runs[key] = run.setting
        return self._runs[key]
