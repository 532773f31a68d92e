"""`compare_precision`: how far gradients in half are from gradients in float32."""

import dataclasses
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from flax_amp import _tree
from flax_amp._checks import check_count, first_of
from flax_amp._compat import Array
from flax_amp._training.scaler import HIGHEST
from flax_amp.debug._call import Call, tool
from flax_amp.debug._report import Block, Report, percent, plural, policy_text, table
from flax_amp.debug._sensitivity import KINDS, RESULT, Roundings
from flax_amp.debug._trial import Part, Trials, fewest, keys_of, lines_of
from flax_amp.policy import (
    Policy,
    PolicyEntries,
    use_float32_result,
    without_fp8,
)

# Gradients are as wrong as half precision makes them if their error is at most this
# many times the spacing of numbers at 1. In bfloat16, 13 of the 17 models of
# `benchmarks/results/error-cpu-jax0.12.0.1.json` have a smaller error, 10 with 4 times
# the spacing, and 15 with 16 times.
_USUAL = 8
# A remedy helps if the error of the gradients falls below this share of the error. The
# exact share does not matter, from 0.1 to 1: the best remedies of the planted faults in
# `tests/debug/test_compare_precision.py` leave at most 0.01 of the error.
_HELPS = 0.9
_RESULT = "flax_amp.use_float32_result"
# Groups of parameters in the report. The exact number does not matter: the tables
# behind the groups should stay on the same screen.
_SHOWN = 12
# Headers of a table of errors: a part alone is rounded, then each kind of rounding.
_HEADERS = ("this\nalone", "\noperands", "\nresults", "border\nvalues", "\ncotangents")
_NOT_FINITE = (
    "the loss or its gradients are not finite in float32 either: "
    "flax_amp.find_nonfinite says where"
)
# A trial of a loss scale brings the largest gradient of a parameter to at most this
# magnitude. float16 holds almost four times as much, which leaves room for larger
# gradients inside of the program.
_LARGEST_GRADIENT = 2.0**14


@dataclasses.dataclass(frozen=True)
class GradientErrors:
    """How the gradients of a group of parameters differ from float32."""

    path: str  #: the common path of the group, such as `params/Dense_0`
    error: float  #: relative, L2; infinite if an element is not finite
    largest: float  #: the largest magnitude in float32, times the scale of the loss


@dataclasses.dataclass(frozen=True)
class Setting:
    """A run of the program."""

    name: str  #: the name of the run in the report, such as `as it is`
    scale: float  #: of the loss
    keys: tuple[str, ...]  #: the modules with a value of their own, as keys of a policy
    lines: tuple[str, ...]  #: lines outside of modules in float32, as by `amp_stop`
    loss_error: float  #: relative
    gradient_error: float  #: relative, L2, of all gradients together
    low_share: float | None  #: of matmuls in half precision; `None` without matmuls
    value: str = "jnp.float32"  #: of the keys, or `flax_amp.use_float32_result`


@dataclasses.dataclass(frozen=True)
class Sensitivity:
    """The error of the gradients that the roundings of one part make.

    Errors are relative, L2, of all gradients together.
    """

    name: str  #: the module, or the line outside of modules
    alone: float  #: the error if this part alone is rounded
    without: float  #: the error if all but this part are rounded
    #: `alone` for each kind of roundings: of an `operand` of a matmul, its `result`, a
    #: `border value`, which is any further value of the forward pass, or a `cotangent`,
    #: which is any value of the backward pass but an operand of a matmul
    by_kind: dict[str, float]


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Comparison(Report):
    """How a program differs from itself in float32. Made by `compare_precision`."""

    compute_dtype: str  #: the dtype of low-precision values, `bfloat16 and fp8`
    loss: tuple[float, float]  #: in float32 and in this precision
    gradients: tuple[GradientErrors, ...]  #: by group, the largest error first
    threshold: float  #: remedies are tried if the error of the gradients is larger
    as_it_is: Setting  #: the run of the program without a remedy
    #: without fp8, another scale, modules in float32 or with float32 results
    remedies: tuple[Setting, ...]
    own_policy: bool  #: whether the policy is the user's own
    #: the parts whose roundings make the error, the worst part first
    sensitivities: tuple[Sensitivity, ...] = ()

    @property
    def best(self) -> Setting | None:
        """The cheapest remedy that is enough, or the remedy of the least error.

        The cheapest remedy leaves most matmuls in half precision. `None` if no remedy
        helps.
        """
        enough = [x for x in self.remedies if x.gradient_error <= self.threshold]
        best = min(enough, key=_cost, default=None)
        if best is None:
            best = min(self.remedies, key=lambda run: run.gradient_error, default=None)
        limit = _HELPS * self.as_it_is.gradient_error
        if best and best.gradient_error < limit:
            return best
        return None

    def _parts(self, only: str | None = None) -> Iterator[Block]:
        run = self.as_it_is
        scale = f", loss scale {run.scale:g}" if run.scale != 1 else ""
        before, after = self.loss
        yield f"{self.name} in {self.compute_dtype} against float32{scale}"
        yield f"loss {before:.6g} in float32, {after:.6g} here\n"
        rows = ([g.path, f"{g.error:.2g}", f"{g.largest:.2g}"] for g in self.gradients)
        yield table(["gradients of", "error", "largest"], [*rows][:_SHOWN])
        if self.gradients[_SHOWN:]:
            yield f"... and {len(self.gradients) - _SHOWN} more"
        yield ""
        headers = ["\nthe program", "error of\nloss", "\ngradients", "in\nhalf"]
        yield table(headers, map(_cells, (run, *self.remedies)))
        if self.sensitivities:
            yield ""
            headers = ["\nrounded", "all but\nthis", *_HEADERS]
            yield table(headers, map(_row, self.sensitivities))
        yield from self._conclusion()

    def _conclusion(self) -> Iterator[str]:
        run = self.as_it_is
        best = self.best
        threshold = self.threshold
        if run.gradient_error <= threshold:
            above = [group.path for group in self.gradients if group.error > threshold]
            gradients = "The gradients, all together," if above else "The gradients"
            yield f"\n{gradients} are as exact as usual: below {threshold:.2g}."
            if above:
                # An optimizer such as Adam takes a step of the same size for a group
                # with small gradients.
                yield f"Some groups alone are above: {first_of(above)}."
        elif best is None:
            tried = ", and nothing that was tried helps" if self.remedies else ""
            yield f"\nThe error is above {threshold:.2g}{tried}."
        else:
            yield f"\nThis was tried and helps: {best.name}."
            change = f"{run.gradient_error:.2g} to {best.gradient_error:.2g}"
            if best.gradient_error <= threshold and (best.keys or best.lines):
                change += "; nothing else matters"
            yield f"The error of the gradients falls from {change}."
            if best.scale != run.scale:
                yield f"  flax_amp.init_scaler(scaler={best.scale:.8g})"
            own = self.own_policy
            yield from policy_text(best.keys, best.lines, own, best.value)


def _cost(run: Setting) -> tuple[float, int, float]:
    """Returns the cost of a remedy: matmuls that leave half precision, then keys."""
    return -(run.low_share or 0.0), len(run.keys) + len(run.lines), run.gradient_error


def _row(part: Sensitivity) -> list[str]:
    errors = part.without, part.alone, *part.by_kind.values()
    return [part.name, *(f"{error:.2g}" for error in errors)]


def _cells(run: Setting) -> list[str]:
    errors = f"{run.loss_error:.2g}", f"{run.gradient_error:.2g}"
    return [run.name, *errors, percent(run.low_share)]


@tool
def compare_precision(
    call: Call,
    *,
    scale: float | None = None,
    # The exact number does not matter: many modules in float32 are no remedy.
    remedies: int = 3,
) -> Comparison:
    """Compares a loss and its gradients in half precision with float32.

    The report tells the error of the loss and of the gradients of each group of
    parameters. If the error of the gradients is larger than roundings usually make it,
    remedies are run: without fp8, with a loss scale at which gradients fit into
    float16, and with a few modules, or lines outside of modules, in float32 that are
    enough. These modules also run with `flax_amp.use_float32_result`, which leaves
    their matmuls in half precision. The report names the cheapest remedy that is
    enough. The call and the options are as for `flax_amp.explain`, with arrays that
    have values. A loss may return `(loss, aux)`.

    Args:
      scale: the factor of the loss in half precision, by which gradients are divided
        before they are compared. By default the scale of the scaler, or 1.
      remedies: how many modules may be in float32 together; 0 to try no remedy at all.

    Returns:
      A `Comparison`, or a function that returns a `Comparison`. Print the comparison.

    Raises:
      TypeError: if an argument is of a wrong kind.
      ValueError: if a number is out of range.

    Example:
      >>> import jax, jax.numpy as jnp, flax_amp
      >>> def loss(w, x, size):
      ...     with jax.named_scope("first"):
      ...         y = jnp.tanh(x @ w)
      ...     with jax.named_scope("cancels"):  # a difference of rounded numbers
      ...         y = (y * size) @ w - (y * size - y) @ w
      ...     return jnp.mean(y)
      >>> x, w = jnp.linspace(0, 1, 32).reshape(4, 8), jnp.eye(8)
      >>> found = flax_amp.compare_precision(loss)(w, x, jnp.full((1, 8), 300.0))
      >>> found.remedies[0].keys
      ('cancels',)
    """
    seen = f"compare_precision: {remedies=}"
    check_count(remedies, seen, "of modules to try in float32", least=0)
    return _Comparing(call, call.request.scale(scale)).comparison(remedies)


def _differences(found: Sequence[Array], exact: Sequence[Array]) -> Array:
    """Returns float64[n, 3]: norm of the error, norm and largest magnitude in float32.

    Norms are L2. The norm of the error is infinite if an element of a gradient is not
    finite in a precision or in float32.
    """
    rows = []
    for pair in zip(found, exact, strict=True):
        # In float64, no square overflows or becomes zero.
        x, y = (np.asarray(a).astype(np.complex128).ravel() for a in pair)
        known = np.isfinite(x) & np.isfinite(y)
        error = np.linalg.norm(x - y) if known.all() else math.inf
        y = y[np.isfinite(y)]
        rows.append((error, np.linalg.norm(y), np.abs(y).max(initial=0)))
    return np.array(rows)


def _relative(differences: Array) -> float:
    """Returns the relative L2 error of several arrays."""
    error, exact, _ = map(float, np.linalg.norm(differences, axis=0))
    if not error:
        return 0.0
    if not exact:
        return math.inf
    return error / exact


class _Comparing:
    """Compares a program with float32, and looks for more exact gradients."""

    def __init__(self, call: Call, scale: float):
        self._request = call.request
        self._call = call
        self._scale = scale
        self._first_scale = scale
        self._trials = Trials(call)
        self._is_fp8 = bool(Policy(call.request.entries).fp8_recipes)
        self._enough = _USUAL * float(jnp.finfo(call.request.dtype).eps)  # an error
        # The error to reach with a few parts in float32.
        self._target_error = self._enough
        self._notes: list[str] = []
        self._sensitivities: list[Sensitivity] = []
        self._roundings: Roundings | None = None

    def comparison(self, most: int) -> Comparison:
        """Returns the comparison, with remedies of at most `most` modules."""
        request = self._request
        exact = self._trials.exact
        first, loss, errors = self._try("as it is")
        groups = self._by_group(errors)
        remedies: list[Setting] = []
        if not exact.is_finite:
            self._notes.append(_NOT_FINITE)
        elif most > 0 and first.gradient_error > self._enough:
            # The scale does not change the forward pass: if the loss is not finite, an
            # infinite `largest` skips the trial of another scale.
            largest = errors[:, 2].max()
            if not math.isfinite(loss):
                largest = math.inf
            remedies += self._global_remedies(first.gradient_error, largest)
            least = min(run.gradient_error for run in (first, *remedies))
            if least > self._enough:
                remedies += self._part_remedies(most, least)
        return Comparison(
            name=request.name,
            compute_dtype=request.dtype.name + " and fp8" * self._is_fp8,
            loss=(float(exact.loss), loss),
            gradients=groups,
            threshold=self._enough,
            as_it_is=first,
            remedies=tuple(remedies),
            own_policy=request.has_own_policy,
            sensitivities=tuple(self._sensitivities),
            notes=tuple(self._notes),
        )

    def _try(
        self,
        name: str,
        *parts: Part,
        entries: PolicyEntries | None = None,
        value: Any = jnp.float32,
    ) -> tuple[Setting, float, Array]:
        """Runs the program in half precision, with parts of the program in float32.

        Returns the setting, the loss and the differences of the gradients.
        """
        if parts and self._scale != self._first_scale:
            name += f", loss scale {self._scale:.8g}"
        trial = self._trials.run(parts, self._scale, entries, value)
        exact = self._trials.exact
        loss_error = _relative(_differences([trial.loss], [exact.loss]))
        errors = _differences(trial.gradients, exact.gradients)
        # No step is taken if the loss is not finite, even with finite gradients.
        error = _relative(errors) if loss_error < math.inf else math.inf
        setting = Setting(
            name=name,
            scale=self._scale,
            keys=keys_of(parts),
            lines=lines_of(parts),
            loss_error=loss_error,
            gradient_error=error,
            low_share=trial.low_share,
            value="jnp.float32" if value is jnp.float32 else _RESULT,
        )
        return setting, float(trial.loss), errors

    def _by_group(self, errors: Array) -> tuple[GradientErrors, ...]:
        groups = defaultdict(list)
        paths = _tree.pick(self._call.paths, self._call.trained())
        for path, row in zip(paths, errors, strict=True):
            names = path.split("/")
            if len(names) > 2:  # the parameters of a module are a group
                names = names[:-1]
            groups["/".join(names)].append(row)
        found = []
        for path, rows in groups.items():
            largest = float(max(row[2] for row in rows)) * self._scale
            found.append(GradientErrors(path, _relative(np.array(rows)), largest))
        return tuple(sorted(found, key=lambda group: -group.error))

    # --- remedies --------------------------------------------------------------------

    def _global_remedies(self, error: float, largest: float) -> Iterator[Setting]:
        """Runs remedies for the whole program: without fp8, and another loss scale.

        A scale that helps stays for all later runs. `largest` is the largest magnitude
        of the gradients, infinite if the loss is not finite.
        """
        request = self._request
        scale = self._scale
        if self._is_fp8:
            yield self._try("without fp8", entries=without_fp8(request.entries))[0]
        if request.dtype == jnp.float16 and 0 < largest < math.inf:
            exponent = math.floor(math.log2(_LARGEST_GRADIENT / largest))
            self._scale = min(2.0**exponent, HIGHEST)
            if self._scale != scale:
                run, *_ = self._try(f"loss scale {self._scale:.8g}")
                yield run
                is_better = run.gradient_error < error
                if not is_better:
                    self._scale = scale

    def _part_remedies(self, most: int, error: float) -> Iterator[Setting]:
        """Runs a few parts in float32 that are enough, if there are at most `most`."""
        parts = self._trials.parts()
        found = self._sensitive(parts, most, error)
        if len(found) > most:
            self._note_of_many(found, most)
            return
        run = self._in_float32(found) if found else None
        if run is None or run.gradient_error > self._target_error:
            # Some roundings have no switch, for example the roundings in a kernel.
            found = self._searched(parts, most, error)
            if not found:
                return
            run = self._in_float32(found)
        yield run
        # If only results of matmuls are too rough, the matmuls may stay in half.
        if self._remains(found) > self._target_error:
            return
        name = f"{_named(found)} with float32 results"
        run, *_ = self._try(name, *found, value=use_float32_result)
        if run.gradient_error <= self._target_error:
            yield run

    def _sensitive(
        self, parts: Sequence[Part], most: int, error: float
    ) -> Sequence[Part]:
        """Returns the parts whose roundings make the error.

        Returns `most + 1` parts if `most` parts are not enough, and no part if the
        roundings of all parts together do not make the error.
        """
        try:
            self._roundings = roundings = Roundings(self._trials, parts, self._scale)
            if not self._set_target_error(roundings.error_without(parts), error):
                return ()
            worst = roundings.worst(self._target_error, most)
            self._sensitivities = [_sensitivity(roundings, part) for part in worst]
        except Exception as cause:  # an equation without a rule may raise any error
            first_line = str(cause).partition("\n")[0]
            self._notes.append(
                "the error that each module makes is not known: "
                f"{type(cause).__name__}: {first_line}"
            )
            return ()
        return worst

    def _remains(self, parts: Sequence[Part]) -> float:
        """Returns the error if parts have float32 results, 0 if that is not known."""
        if not self._sensitivities:
            return 0.0
        assert self._roundings is not None
        return self._roundings.error_without(parts, [RESULT])

    def _searched(self, parts: list[Part], most: int, error: float) -> Sequence[Part]:
        """Returns parts that are enough in float32, found by runs of programs."""
        with_all_parts = math.inf
        if parts:
            with_all_parts = self._in_float32(parts).gradient_error
        if not self._set_target_error(with_all_parts, error):
            self._notes.append(
                "nothing less than the whole program in float32 is enough"
            )
            return ()
        found = fewest(
            parts, lambda x: self._in_float32(x).gradient_error <= self._target_error
        )
        if len(found) > most:
            self._note_of_many(found, most)
            return ()
        return found

    def _set_target_error(self, with_all_parts: float, error: float) -> bool:
        """Sets the error to reach, and returns whether a few parts may reach it.

        The error with all parts in float32 is `with_all_parts`: no choice of parts does
        better. If even that is too much, another fault is beside them. A search for the
        few parts that reach twice that error is then worth its runs only if it halves
        the error.
        """
        if with_all_parts <= self._enough:
            self._target_error = self._enough
            return True
        self._target_error = 2 * with_all_parts
        return self._target_error < error / 2

    def _in_float32(self, parts: Sequence[Part]) -> Setting:
        return self._try(f"{_named(parts)} in float32", *parts)[0]

    def _note_of_many(self, parts: Sequence[Part], most: int) -> None:
        many = f"more than {plural(most, 'module')} would have to be in float32"
        names = first_of([part.line or part.path for part in parts])
        self._notes.append(f"{many}: {names}")


def _named(parts: Sequence[Part]) -> str:
    if len(parts) > 1:
        return f"all {len(parts)}"
    return parts[0].line or parts[0].path


def _sensitivity(roundings: Roundings, part: Part) -> Sensitivity:
    return Sensitivity(
        name=part.line or part.path,
        alone=roundings.error([part]),
        without=roundings.error_without([part]),
        by_kind={name: roundings.error([part], [i]) for i, name in enumerate(KINDS)},
    )
