"""`compare_precision`: how far gradients in half precision are from those in float32.

The program runs in both precisions on the same arguments. If the gradients differ by
more than roundings make, it runs again with remedies. Which modules have to be in
float32 is found by leaving out: from all of them, first halves, then quarters, and so
on, as long as the rest is enough. Those on top go first, so that a part of a module is
found before it.
"""

import dataclasses
import functools
import glob
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from rich.text import Text

from flax_amp import _tree
from flax_amp._compat import Array, evaluate
from flax_amp._rewriter.transform import rewrite
from flax_amp._training.arguments import check_count
from flax_amp.debug._call import Call, Loss, tool, with_float32
from flax_amp.debug._place import with_line_scopes
from flax_amp.debug._record import Recorder, Totals
from flax_amp.debug._report import Part, Report, percent, plural, policy_text, table
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
    call: Call, *, scale: float | None = None, remedies: int = 3
) -> Comparison:
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
    return _Search(call, call.asked.scale(scale)).comparison(remedies)


def _differences(found: Sequence[Array], exact: Sequence[Array]) -> Array:
    """Returns float64[n, 3]: norm of the error, norm and largest magnitude in float32.

    Norms are L2. That of an array that has lost a finite element is infinite.
    """
    rows = []
    for pair in zip(found, exact, strict=True):
        # As float64: no square overflows or becomes zero.
        x, y = (np.asarray(a).astype(np.complex128).ravel() for a in pair)
        known = np.isfinite(y)
        lost = (known & ~np.isfinite(x)).any()
        x, y = x[known], y[known]
        error = math.inf if lost else np.linalg.norm(x - y)
        rows.append((error, np.linalg.norm(y), np.abs(y).max(initial=0)))
    return np.array(rows)


def _relative(differences: Array) -> float:
    """Returns the relative L2 error of several arrays."""
    error, exact, _ = map(float, np.linalg.norm(differences, axis=0))
    if not error:
        return 0.0
    return error / exact if exact else math.inf


class _Search:
    """Compares a program, and looks for what makes its gradients more exact."""

    def __init__(self, call: Call, scale: float):
        self._asked, self._call, self._scale = call.asked, call, scale
        closed = jax.make_jaxpr(lambda *xs: call.loss(xs)[0])(*call.arrays)
        self._lines: dict[str, str] = {}  # those that scopes stand for
        self._loss = functools.partial(evaluate, with_line_scopes(closed, self._lines))
        self._exact = self._gradients(self._loss, 1.0)
        self._enough = _USUAL * float(jnp.finfo(call.asked.dtype).eps)  # an error
        self._runs: dict[frozenset[str], Setting] = {}
        self._notes: list[str] = []

    def comparison(self, most: int) -> Comparison:
        """Returns what is found, with remedies of up to so many modules."""
        asked, threshold = self._asked, self._enough
        first, loss, errors, paths = self._run("as it is", asked.entries, self._scale)
        groups = self._by_group(errors)
        self._error = first.gradient_error
        is_bad = most > 0 and self._error > threshold
        # The forward pass does not see the scale.
        largest = errors[:, 2].max() if math.isfinite(loss) else math.inf
        remedies = self._remedies(most, largest, paths) if is_bad else ()
        return Comparison(
            name=asked.name,
            compute_dtype=asked.dtype.name,
            loss=(float(self._exact[0]), loss),
            gradients=groups,
            threshold=threshold,
            as_it_is=first,
            remedies=tuple(remedies),
            own_policy=asked.has_own_policy,
            notes=tuple(self._notes),
        )

    def _run(
        self, name: str, entries: PolicyEntries, scale: float, paths: Sequence[str] = ()
    ) -> tuple[Setting, float, Array, set[str]]:
        """Runs the program in half precision, with modules in float32.

        It returns the loss, the differences of the gradients, and the modules that
        compute in half precision as well.
        """
        asked, recorder = self._asked, Recorder()
        with with_float32(entries, paths) as tried:
            policy = Policy(tried)
            low = rewrite(self._loss, policy, asked.dtype, asked.recompute, recorder)
            loss, gradients = self._gradients(low, scale)
        exact, references = self._exact
        errors = _differences(gradients, references)
        loss_error = _relative(_differences([loss], [exact]))
        # No step is taken if the loss is lost, whatever the gradients are.
        is_lost = loss_error == math.inf
        rows = [visit.row for visit in recorder.visits]
        setting = Setting(
            name=name,
            scale=scale,
            keys=tuple(glob.escape(x) for x in paths if not self._line(x)),
            lines=tuple(filter(None, map(self._line, paths))),
            loss_error=loss_error,
            gradient_error=math.inf if is_lost else _relative(errors),
            low_share=Totals.of(rows).low_share,
        )
        return setting, float(loss), errors, {row.path for row in rows if row.is_low}

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

    def _by_group(self, errors: Array) -> tuple[GradientErrors, ...]:
        groups = defaultdict(list)
        paths = _tree.pick(self._call.paths, self._call.trained())
        for path, row in zip(paths, errors, strict=True):
            parts = path.split("/")  # the leaves of one module are a group
            groups["/".join(parts[:-1] if len(parts) > 2 else parts)].append(row)
        found = []
        for path, rows in groups.items():
            largest = float(max(row[2] for row in rows)) * self._scale
            found.append(GradientErrors(path, _relative(np.array(rows)), largest))
        return tuple(sorted(found, key=lambda group: -group.error))

    def _line(self, path: str) -> str:
        """Returns the line that a path stands for; empty for that of a module."""
        return self._lines.get(path.rpartition("/")[2], "")

    # --- remedies --------------------------------------------------------------------

    def _remedies(
        self, most: int, largest: float, low_paths: set[str]
    ) -> Iterator[Setting]:
        """Runs what may help, until something is enough.

        At most so many modules are in float32. The largest gradient is infinite if the
        loss is not finite.
        """
        entries, tried = self._asked.entries, []
        if Policy(entries).fp8_recipes:
            tried.append(("without fp8", without_fp8(entries), self._scale))
        if self._asked.dtype == jnp.float16 and 0 < largest < math.inf:
            fitting = min(2.0 ** math.floor(math.log2(_TARGET / largest)), 2.0**24)
            if fitting != self._scale:
                tried.append((f"loss scale {fitting:.8g}", entries, fitting))
        for name, policy, scale in tried:
            run, *_ = self._run(name, policy, scale)
            yield run
            if run.gradient_error <= self._enough:
                return
            if scale != self._scale and run.gradient_error < self._error:
                self._scale, self._error = scale, run.gradient_error
        modules = self._fewest(low_paths)
        if not modules:
            self._notes.append("neither modules nor lines in float32 are enough")
        elif len(modules) > most:
            many = f"more than {plural(most, 'module')} would have to be in float32"
            self._notes.append(f"{many}: the error is spread over the program")
        else:
            groups = [[path] for path in modules] + [modules] * (len(modules) > 1)
            yield from map(self._in_float32, groups)

    def _fewest(self, low_paths: set[str]) -> list[str]:
        """Returns the fewest modules that have to be in float32, if that helps."""
        modules = {f"{path}/" for path in low_paths if path}
        # With a key for all that is there, nothing would be left in half.
        parts = [x for x in modules if not all(y.startswith(x) for y in modules)]
        found = [path.rstrip("/") for path in parts]
        found = sorted(found, key=lambda path: (path.count("/"), path))
        best = self._in_float32(found).gradient_error if found else math.inf
        # There may be another fault, outside of modules.
        self._enough = max(self._enough, 2 * best)
        if self._enough >= self._error / 2:
            return []
        size = len(found)
        while size > 1:
            size = (size + 1) // 2
            for part in [found[i : i + size] for i in range(0, len(found), size)]:
                rest = [path for path in found if path not in part]
                if not rest or len(self._runs) >= _MAX_RUNS:
                    continue
                if self._in_float32(rest).gradient_error <= self._enough:
                    found = rest
        return found

    def _in_float32(self, paths: Sequence[str]) -> Setting:
        """Runs the program with modules in float32, once for the same ones."""
        key = frozenset(paths)
        if key not in self._runs:
            first = self._line(paths[0]) or paths[0]
            name = f"{first if len(paths) == 1 else f'all {len(paths)}'} in float32"
            run, *_ = self._run(name, self._asked.entries, self._scale, paths)
            self._runs[key] = run
        return self._runs[key]
