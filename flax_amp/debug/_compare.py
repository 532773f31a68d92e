"""`compare_precision`: where a program in half precision departs from float32."""

import dataclasses
import glob
import math
import numbers
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from flax_amp._rewriter.captures import with_captured_outputs
from flax_amp._rewriter.policy_warnings import PolicyWarning
from flax_amp._rewriter.recompute.regions import Recompute
from flax_amp._rewriter.transform import amp
from flax_amp._training.arguments import check_count
from flax_amp.debug._call import (
    FlatLoss,
    Target,
    UsersCall,
    check_concrete,
    read_compute_dtype,
    read_policy,
    read_scale,
    read_target,
    with_scopes,
)
from flax_amp.debug._compare_model import (
    Comparison,
    ModuleErrors,
    Setting,
    helpful_remedies,
)
from flax_amp.debug._compare_programs import Programs
from flax_amp.debug._compare_taps import Passed
from flax_amp.debug._explain import explain
from flax_amp.policy import (
    MatmulDType,
    Policy,
    PolicyEntries,
    default_amp_policy,
    without_fp8,
)

# A module whose own error is this many times the spacing of numbers at 1 stands out.
_STANDS_OUT = 8
_LARGEST = 65504.0  # in float16
_MARGIN = 4  # gradients inside of modules may be this many times as large
_LARGEST_SCALE = 2.0**24  # the default of `init_scaler`


def compare_precision(
    fun: Any,
    *step: Any,
    compute_dtype: DTypeLike | None = None,
    matmul_dtype: MatmulDType = None,
    amp_policy: PolicyEntries | None = None,
    recompute: Recompute = "auto",
    reduce_dtype: DTypeLike | None = None,
    scale: float | None = None,
    settings: Mapping[str, Mapping[str, Any]] | None = None,
    remedies: int = 3,
    budget: float | None = None,
) -> Any:
    """Compares a loss and its gradients in half precision with those in float32.

    It runs both programs on the same arguments, and compares what passes between
    modules, forward and backward. It then runs the one in half precision again with
    the values of the other one at the borders of each module, which tells the error
    that a module adds from the error that arrives at it. As a remedy it tries a scale
    at which gradients fit into float16, if they do not, and then the entries of the
    policy that run the worst modules in float32.

    There are two ways to call it: `compare_precision(fun)(*args)`, where `fun` is the
    loss before `amp`, and `compare_precision(state, loss_fn, batch, *args)` for the
    state and the loss of `make_train_step`. Gradients are those of the first argument,
    or of the parameters of the state.

    Args:
      fun: a float32 function that returns a loss, or `(loss, aux)`; or a state.
      *step: the loss function and what the step takes after the state, if `fun` is one.
      compute_dtype: see `flax_amp.amp`; by default that of the state's precision, or
        bfloat16.
      matmul_dtype: see `flax_amp.amp`; by default that of the state's precision.
      amp_policy: see `flax_amp.amp`.
      recompute: see `flax_amp.amp`.
      reduce_dtype: see `flax_amp.amp`.
      scale: the factor of the loss in half precision, by which gradients are divided
        before they are compared. By default that of the state's scaler, or 1.
      settings: other options of `amp` to compare, by a name for each, such as
        `{"sums in float32": dict(reduce_dtype=jnp.float32)}`. What one leaves out is as
        above.
      remedies: for how many modules a remedy is tried; 0 for none at all.
      budget: the largest relative error of the gradients that is acceptable, such as
        0.02. `Comparison.cheapest` is then the cheapest program within it. The remedies
        are tried until one is: if no module alone is enough, the best two, and so on.

    Returns:
      A `Comparison`, or a function that returns one. Print it, or see its methods
      `report`, `to_dict` and `plot`.

    Raises:
      TypeError: if an argument is of a wrong kind, or a setting has unknown options.
      ValueError: if a number is out of range, or the rule of a custom derivative closes
        over a traced value.

    Example:
      >>> import jax, jax.numpy as jnp, flax_amp
      >>> def loss(w, x, offset):
      ...     y = x @ w
      ...     with jax.named_scope("rounded"):
      ...         y = (y + offset) - offset
      ...     with jax.named_scope("head"):
      ...         return jnp.mean(y @ w)
      >>> x, w = jnp.linspace(0, 1, 32).reshape(4, 8), jnp.ones((8, 8))
      >>> offset = jnp.full((1, 8), 300.0)  # added as a bias is, in half precision
      >>> found = flax_amp.compare_precision(loss)(w, x, offset)
      >>> found.modules[0].path, found.remedies[0].policy
      ('rounded', '"rounded": jnp.float32')
    """
    options = {
        "compute_dtype": read_compute_dtype(fun, compute_dtype),
        "amp_policy": read_policy(fun, amp_policy, matmul_dtype),
        "recompute": recompute,
        "reduce_dtype": reduce_dtype,
    }
    amp(**options)  # checks them
    _check_budget(budget)
    seen = f"compare_precision: {remedies=}"
    check_count(remedies, seen, "of modules to try a remedy for", least=0)
    target = read_target("compare_precision", fun, step)
    scale = read_scale("compare_precision", fun, scale)
    others = _read_settings(options, settings)

    def compared(*args: Any, **kwargs: Any) -> Comparison:
        call = _Call(target, args, kwargs, options, scale, budget)
        return call.compare(others, remedies)

    return compared if target.args is None else compared(*target.args)


def _check_budget(budget: Any) -> None:
    is_number = isinstance(budget, numbers.Real) and not isinstance(budget, bool)
    if budget is not None and not (is_number and 0 < budget < math.inf):
        raise ValueError(
            f"compare_precision: {budget=}; expected the largest relative error of the "
            "gradients that is acceptable, such as 0.02, or None."
        )


def _read_settings(options: dict[str, Any], settings: Any) -> dict[str, Any]:
    """Returns all options of each setting."""
    found = {}
    for name, others in dict(settings or {}).items():
        try:
            amp(**others)  # checks them
        except (TypeError, ValueError) as error:
            error.add_note(f"compare_precision: in settings[{name!r}]")
            raise
        found[str(name)] = {**options, **others}
    return found


@dataclasses.dataclass(frozen=True)
class _Call:
    """A user's loss, its arguments, and the options of `amp`."""

    target: Target
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    options: dict[str, Any]
    scale: float
    budget: float | None

    def compare(self, settings: dict[str, Any], remedies: int) -> Comparison:
        programs, notes = self._trace()
        first, modules, loss = self._measure(programs, "as it is")
        rows = [first]
        for name, options in settings.items():
            rows.append(self._run(programs, name, options)[0])
        is_fine = self.budget is not None and first.gradient_error <= self.budget
        tried: tuple[Setting, ...] = ()
        if remedies and not is_fine:
            tried = tuple(self._remedies(programs, first, modules, remedies))
        # What mends comes first; a large error may matter little to the gradients.
        error_after = {
            run.name: max(run.gradient_error, self._threshold)
            for run in helpful_remedies(first, tried, self._threshold)
        }
        modules.sort(key=lambda module: error_after.get(module.path, math.inf))
        return Comparison(
            name=self.target.name,
            compute_dtype=self.options["compute_dtype"].name,
            scale=self.scale,
            loss=(float(programs.reference.loss), loss),
            modules=tuple(modules),
            threshold=self._threshold,
            settings=tuple(rows),
            remedies=tried,
            notes=(*notes, *_notes(programs)),
            budget=self.budget,
        )

    @property
    def _threshold(self) -> float:
        return _STANDS_OUT * float(jnp.finfo(self.options["compute_dtype"]).eps)

    def _is_enough(self, run: Setting) -> bool:
        limit = self._threshold if self.budget is None else self.budget
        return run.gradient_error <= limit

    def _measure(
        self, programs: Programs, name: str
    ) -> tuple[Setting, list[ModuleErrors], float]:
        """Returns how wrong the program is, its modules, and the loss."""
        row, passed = self._run(programs, name, self.options)
        total, loss = programs.differences(passed), float(passed.loss)
        del passed  # the device has room for two runs
        own = programs.differences(programs.run(self.options, self.scale, forced=True))
        return row, programs.modules(own, total, self.scale), loss

    def _trace(self) -> tuple[Programs, tuple[str, ...]]:
        """Returns the user's loss, and a note if its modules have no names."""
        name = f"compare_precision: {self.target.name}"

        def trace(call: UsersCall) -> Programs:
            check_concrete(name, call.inputs)
            flat = FlatLoss.of(call, name)
            closed = jax.make_jaxpr(lambda *arrays: flat(arrays))(*flat.arrays)
            if with_captured_outputs(closed)[1]:
                raise ValueError(
                    f"{name}: the rule of a custom derivative closes over a traced "
                    "value, which the program that is measured does not have; expected "
                    "rules that read only what they are given. Hand the value over as "
                    "an argument of the function, or as a residual."
                )
            return Programs(closed, flat.arrays, flat.trained)

        where = self.target, self.args, self.kwargs, "compare_precision"
        needs_scopes = Policy(self.options["amp_policy"]).names_scopes
        return with_scopes(trace, *where, needs_scopes=needs_scopes)

    def _run(
        self, programs: Programs, name: str, options: dict[str, Any], policy: str = ""
    ) -> tuple[Setting, Passed]:
        """Runs and judges the program; `policy` is the entry that a remedy adds."""
        passed = programs.run(options, self.scale)
        explained = explain(self.target.fun, **options)(*self.args, **self.kwargs)
        is_known = explained.stored_without_recompute is not None
        totals = explained.totals
        stored = totals.stored.total() if is_known else None
        figures = *programs.errors(passed), stored, totals.low_share
        return Setting(name, self.scale, policy, *figures), passed

    def _remedies(
        self, programs: Programs, row: Setting, modules: list[ModuleErrors], count: int
    ) -> Iterator[Setting]:
        """Tries another scale, unless gradients fit, and then float32 for modules."""
        policy = self.options["amp_policy"]
        if Policy(policy).fp8_recipes:
            in_half = {**self.options, "amp_policy": without_fp8(policy)}
            found, _ = self._run(programs, "without fp8", in_half)
            yield found
            if self._is_enough(found):
                return
        call, scale = self, self._fitting_scale(modules)
        if scale != self.scale:
            other = dataclasses.replace(self, scale=scale)
            found, others, _ = other._measure(programs, f"loss scale {scale:.8g}")
            yield found
            if self._is_enough(found):
                return
            if found.gradient_error < row.gradient_error:
                modules, call = others, other
        paths = [m.path for m in modules if m.path]
        # A key for the whole model is no remedy: nothing would be left in half.
        whole = {p for p in paths if len(_outermost([p, *paths])) == 1 < len(paths)}
        # Many small errors may exceed a budget.
        least = self._threshold if self.budget is None else 0
        bad = (m.path for m in modules if m.harm > least and m.path in {*paths} - whole)
        yield from call._entries(programs, _outermost(bad)[:count])

    def _fitting_scale(self, modules: list[ModuleErrors]) -> float:
        """Returns the scale, or the largest power of two at which all gradients fit.

        It is another one if a gradient is too large for float16, or if the backward
        pass of a module stands out, and some of its gradients lose digits.
        """
        largest = max(m.largest_gradient for m in modules) / self.scale
        if self.options["compute_dtype"] != jnp.float16 or not largest:
            return self.scale
        fitting = 2.0 ** math.floor(math.log2(_LARGEST / _MARGIN / largest))
        fitting = min(fitting, _LARGEST_SCALE)
        is_small = any(
            min(m.gradients, default=0) <= -14 - math.log2(self.scale)  # subnormal
            for m in modules
            if m.own._replace(forward=None).largest > self._threshold
        )
        is_large = largest * self.scale > _LARGEST
        return fitting if is_large or is_small and fitting > self.scale else self.scale

    def _entries(self, programs: Programs, worst: list[str]) -> Iterator[Setting]:
        """Tries float32 for each of the worst modules, then for several.

        If none is enough, all of them are tried together; with a budget, first fewer,
        beginning with those that help most.
        """
        found = {path: self._in_float32(programs, path, [path]) for path in worst}
        yield from found.values()
        if any(map(self._is_enough, found.values())):
            return
        # What helps alone is the likeliest part of a group that helps: all groups would
        # be too many runs.
        best = sorted(worst, key=lambda path: found[path].gradient_error)
        least = len(best) if self.budget is None else 2
        for count in range(max(least, 2), len(best) + 1):
            name = f"best {count}" if count < len(best) else f"all {count}"
            run = self._in_float32(
                programs, name, sorted(best[:count], key=worst.index)
            )
            yield run
            if self._is_enough(run):
                return

    def _in_float32(
        self, programs: Programs, name: str, paths: Sequence[str]
    ) -> Setting:
        """Runs the program with modules in float32."""
        policy = self.options["amp_policy"]
        policy = default_amp_policy if policy is None else policy
        entries = {glob.escape(path): jnp.float32 for path in paths}
        line = ", ".join(f'"{key}": jnp.float32' for key in entries)
        others = {k: v for k, v in policy.items() if k not in entries}
        options = {**self.options, "amp_policy": {**entries, **others}}
        with warnings.catch_warnings():
            # The policy is not the user's.
            warnings.simplefilter("ignore", PolicyWarning)
            return self._run(programs, name, options, line)[0]


def _outermost(paths: Iterable[str]) -> list[str]:
    """Returns paths without those inside of earlier ones."""
    found: list[str] = []
    for path in paths:
        # An entry for a module is one for the modules inside.
        if not any(f"{path}/".startswith(f"{outer}/") for outer in found):
            found.append(path)
    return found


def _notes(programs: Programs) -> Iterator[str]:
    makers = {
        edge.maker or "(outside of modules)"
        for name, edge in programs.marked.edges.items()
        # That of a parameter has no maker.
        if edge.maker is not None
        and programs.reference.values[name].dtype != jnp.float32
    }
    if makers:
        yield (
            "the author of this code set a dtype, in which the reference computes, "
            f"too: {', '.join(sorted(makers))}"
        )
