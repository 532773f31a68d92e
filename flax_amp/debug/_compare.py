"""`compare_precision`: where a program in half precision departs from float32."""

import dataclasses
import functools
import glob
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from flax_amp._rewriter.captures import with_captured_outputs
from flax_amp._rewriter.nnx_bridge import FunctionalCall
from flax_amp._rewriter.policy_warnings import PolicyWarning
from flax_amp._rewriter.recompute.regions import Recompute
from flax_amp._rewriter.transform import amp
from flax_amp._training.precision import compute_dtype_of
from flax_amp._training.train_state import AmpTrainState
from flax_amp.debug._call import FlatLoss, Target, read_target, with_scopes
from flax_amp.debug._compare_model import Comparison, Setting
from flax_amp.debug._compare_programs import Programs
from flax_amp.debug._compare_stats import EXPONENTS
from flax_amp.debug._compare_taps import Passed, size_of
from flax_amp.debug._explain import explain
from flax_amp.policy import (
    Policy,
    PolicyEntries,
    check_compute_dtype,
    default_amp_policy,
)

_OPTIONS = ("compute_dtype", "amp_policy", "recompute", "reduce_dtype")
# A module whose own error is this many times the spacing of numbers at 1 stands out.
_STANDS_OUT = 8


def compare_precision(
    fun: Any,
    *step: Any,
    compute_dtype: DTypeLike | None = None,
    amp_policy: PolicyEntries | None = None,
    recompute: Recompute = "auto",
    reduce_dtype: DTypeLike | None = None,
    scale: float | None = None,
    settings: Mapping[str, Mapping[str, Any]] | None = None,
    remedies: int = 3,
) -> Any:
    """Compares a loss and its gradients in half precision with those in float32.

    It runs both programs on the same arguments, and compares what passes between
    modules, forward and backward. It then runs the one in half precision again with
    the values of the other one at the borders of each module, which tells the error
    that a module adds from the error that arrives at it. For the worst modules it
    tries the entry of the policy that runs them in float32.

    There are two ways to call it: `compare_precision(fun)(*args)`, where `fun` is the
    loss before `amp`, and `compare_precision(state, loss_fn, batch)` for the state and
    the loss of `make_train_step`. Gradients are those of the first argument, or of the
    parameters of the state.

    Args:
      fun: a float32 function that returns a loss, or `(loss, aux)`; or a state.
      *step: the loss function and a batch, if `fun` is a state.
      compute_dtype: see `flax_amp.amp`; by default that of the state's precision, or
        float16.
      amp_policy: see `flax_amp.amp`.
      recompute: see `flax_amp.amp`.
      reduce_dtype: see `flax_amp.amp`.
      scale: the factor of the loss in half precision, by which gradients are divided
        before they are compared. By default that of the state's scaler, or 1.
      settings: other options of `amp` to compare, by a name for each, such as
        `{"sums in float32": dict(reduce_dtype=jnp.float32)}`. What one leaves out is as
        above.
      remedies: for how many modules a remedy is tried.

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
      >>> found = flax_amp.compare_precision(loss)(w, x, jnp.array(300.0))
      >>> found.modules[0].path, found.remedies[0].policy
      ('rounded', '"rounded": jnp.float32')
    """
    state = fun if isinstance(fun, AmpTrainState) else None
    if scale is None:
        scale = 1.0 if state is None else _scale_of(state)
    options = {
        "compute_dtype": check_compute_dtype(
            compute_dtype_of(state.precision if state else "16-mixed", compute_dtype)
        ),
        "amp_policy": amp_policy,
        "recompute": recompute,
        "reduce_dtype": reduce_dtype,
    }
    amp(**options)  # checks them
    target = read_target("compare_precision", fun, step)
    asked = _Asked(
        target,
        lambda others: explain(fun, *step, **others),
        options,
        _check_scale(scale),
        _check_settings(settings),
        _check_count(remedies),
    )

    def compared(*args: Any, **kwargs: Any) -> Comparison:
        return asked.compare(args, kwargs)

    return compared if target.args is None else compared(*target.args)


def _scale_of(state: AmpTrainState) -> float:
    scale = state.scaler["scaler"]
    if isinstance(scale, jax.core.Tracer | jax.ShapeDtypeStruct):
        raise _abstract("compare_precision", scale)
    return float(jax.device_get(scale))


def _check_scale(scale: Any) -> float:
    is_number = isinstance(scale, int | float | np.number | jax.Array)
    if not is_number or not (math.isfinite(scale) and scale > 0):
        raise ValueError(
            f"compare_precision: got scale={scale!r}; expected a positive number, such "
            "as 2.0**15, or None for that of the state's scaler."
        )
    return float(scale)


def _check_count(count: Any) -> int:
    if type(count) is not int or count < 0:
        raise ValueError(
            f"compare_precision: got remedies={count!r}; expected how many modules to "
            "try a remedy for, or 0 for none."
        )
    return count


def _check_settings(settings: Any) -> dict[str, dict[str, Any]]:
    if settings is None:
        return {}
    if not isinstance(settings, Mapping) or not all(
        isinstance(options, Mapping) for options in settings.values()
    ):
        raise TypeError(
            f"compare_precision: got settings={settings!r}; expected a dict of dicts, "
            "{name: options of amp}."
        )
    for name, options in settings.items():
        if unknown := sorted(set(options) - set(_OPTIONS)):
            raise TypeError(
                f"compare_precision: the setting {name!r} has the options {unknown}; "
                f"expected some of {', '.join(_OPTIONS)}."
            )
        amp(**options)  # checks their values
    return {str(name): dict(options) for name, options in settings.items()}


def _abstract(name: str, found: Any) -> TypeError:
    return TypeError(
        f"{name}: got {found} among the arguments; expected arrays: the program is "
        "run. Call it outside of jax.jit and jax.eval_shape, or ask flax_amp.explain, "
        "which runs nothing."
    )


@dataclasses.dataclass(frozen=True)
class _Asked:
    """The arguments of `compare_precision`, checked."""

    target: Target
    explained: Callable[[dict[str, Any]], Any]
    options: dict[str, Any]
    scale: float
    settings: dict[str, dict[str, Any]]
    remedies: int

    def compare(self, args: Any, kwargs: Any) -> Comparison:
        programs, is_named = self._trace(args, kwargs)
        passed = programs.run(self.options, self.scale)
        total = programs.differences(passed, self.scale)
        compared = size_of(programs.reference) + size_of(passed)
        passed = passed._replace(values={}, cotangents={})  # frees them
        forced = programs.run(self.options, self.scale, forced=True)
        own = programs.differences(forced, self.scale)
        del forced
        modules = programs.modules(own, total, self.scale)
        row = functools.partial(self._row, programs, args, kwargs)
        settings = [row("as it is", {}, found=passed)]
        settings += [row(name, options) for name, options in self.settings.items()]
        threshold = _STANDS_OUT * float(jnp.finfo(self.options["compute_dtype"]).eps)
        worst = _outermost(m.path for m in modules if m.path and m.harm > threshold)
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore", PolicyWarning
            )  # the policy is not the user's
            remedies = [
                row(name, {"amp_policy": policy}, line)
                for name, line, policy in self._policies(worst[: self.remedies])
            ]
        return Comparison(
            name=self.target.name,
            compute_dtype=self.options["compute_dtype"].name,
            scale=self.scale,
            loss=(float(programs.reference.loss), float(passed.loss)),
            modules=tuple(modules),
            threshold=threshold,
            settings=tuple(settings),
            remedies=tuple(remedies),
            compared=compared,
            notes=tuple(_notes(programs, is_named)),
            exponents=(EXPONENTS[0], EXPONENTS[-1]),
        )

    def _trace(self, args: Any, kwargs: Any) -> tuple[Programs, bool]:
        """Returns the user's loss, and whether its modules have names."""
        name = f"compare_precision: {self.target.name}"

        def trace(call: FunctionalCall) -> Programs:
            for x in call.inputs:
                if isinstance(x, jax.core.Tracer | jax.ShapeDtypeStruct):
                    raise _abstract(name, x)
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

        caller = "compare_precision"
        needs_scopes = Policy(self.options["amp_policy"]).names_scopes
        return with_scopes(
            trace, self.target, args, kwargs, caller, needs_scopes=needs_scopes
        )

    def _row(
        self,
        programs: Programs,
        args: Any,
        kwargs: Any,
        name: str,
        options: Mapping[str, Any],
        policy: str = "",
        found: Passed | None = None,
    ) -> Setting:
        """Runs the program with other options, unless that was done, and judges it."""
        options = {**self.options, **options}
        found = found or programs.gradients(options, self.scale)
        explained = self.explained(options)
        if callable(explained):
            explained = explained(*args, **kwargs)
        is_known = explained.stored_without_recompute is not None
        stored = explained.totals.stored.total() if is_known else None
        errors = programs.errors(found, self.scale)
        return Setting(name, policy, *errors, stored, explained.totals.low_share)

    def _policies(self, paths: list[str]) -> Iterator[tuple[str, str, Any]]:
        """Yields the name, the new entries and the policy of each remedy."""
        policy = self.options["amp_policy"]
        policy = default_amp_policy if policy is None else policy
        for group in [*([path] for path in paths), *([paths] if paths[1:] else [])]:
            entries = {glob.escape(path): jnp.float32 for path in group}
            line = ", ".join(f'"{key}": jnp.float32' for key in entries)
            name = group[0] if len(group) == 1 else f"all {len(group)}"
            yield name, line, {**policy, **entries}


def _outermost(paths: Iterable[str]) -> list[str]:
    """Returns paths without those inside of earlier ones."""
    found: list[str] = []
    for path in paths:
        # An entry for a module is one for the modules inside.
        if not any(path.startswith(f"{outer}/") for outer in found):
            found.append(path)
    return found


def _notes(programs: Programs, is_named: bool) -> Iterator[str]:
    if not is_named:
        yield "modules have no names: the code needs equal modules"
    values = programs.reference.values
    half = {
        edge.maker or "(outside of modules)"
        for name, edge in programs.marked.edges.items()
        if name in values and values[name].dtype.itemsize < 4
    }
    if half:
        yield (
            "the author of this code set a half dtype, so that it runs in half "
            f"precision in the reference, too: {', '.join(sorted(half))}"
        )
    if not jnp.isfinite(programs.reference.loss):
        yield "the loss is not finite in float32 either"
