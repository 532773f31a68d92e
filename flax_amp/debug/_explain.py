"""`explain`: what mixed precision does to each equation of a function, and why."""

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from flax_amp import _tree
from flax_amp._rewriter.nnx_bridge import FunctionalCall
from flax_amp._rewriter.nnx_scopes import SCOPES_NOTE
from flax_amp._rewriter.recompute.regions import Recompute, check_recompute
from flax_amp._rewriter.transform import PlannedCall, is_wide, plan_call
from flax_amp._training.gradients import fold_in
from flax_amp._training.loss import call_user_fn, check_function
from flax_amp._training.precision import compute_dtype_of
from flax_amp._training.train_state import AmpTrainState, variables_of
from flax_amp.debug._model import Explanation, Module
from flax_amp.debug._problems import find_choices, find_problems
from flax_amp.debug._stored import Stored, attach, bytes_by_dtype, stored_arrays
from flax_amp.debug._walk import Place, Walk
from flax_amp.policy import Policy, PolicyEntries, check_compute_dtype


class _Unknown(Exception):
    """What the backward pass stores is not known, and why."""


@dataclasses.dataclass(frozen=True)
class _Options:
    """The arguments of `amp`, checked, and `backward`."""

    compute_dtype: Any
    policy: Policy
    recompute: Recompute
    wide_gradients: bool
    merge_layers: bool
    backward: bool


def explain(
    fun: Any,
    *step: Any,
    compute_dtype: DTypeLike | None = None,
    amp_policy: PolicyEntries | None = None,
    recompute: Recompute = "auto",
    reduce_dtype: DTypeLike | None = None,
    merge_layers: bool = True,
    backward: bool = True,
) -> Any:
    """Tells what `amp` does to a function: which equation runs in which dtype, and why.

    Nothing is compiled or run, so abstract arguments do (`jax.ShapeDtypeStruct`, or
    what `jax.eval_shape` and `nnx.eval_shape` return). Modules of Linen and of NNX are
    found by themselves. Figures are those of the forward pass; each product has two
    more of its size in the backward pass.

    There are two ways to call it: `explain(fun)(*args)`, where `fun` is the function
    before `amp`, and `explain(state, loss_fn, batch)` for the state and the loss of
    `make_train_step`.

    Args:
      fun: a float32 function, or an `AmpTrainState`.
      *step: the loss function and a batch, if `fun` is a state.
      compute_dtype: see `flax_amp.amp`; by default that of the state's precision, or
        float16.
      amp_policy: see `flax_amp.amp`.
      recompute: see `flax_amp.amp`.
      reduce_dtype: see `flax_amp.amp`.
      merge_layers: see `flax_amp.amp`.
      backward: whether to count what the backward pass stores, for the gradient with
        respect to the first argument. It takes a trace of the gradient.

    Returns:
      An `Explanation`, or a function that returns one. Print it, or see its methods
      `report`, `to_dict` and `to_html`.

    Raises:
      TypeError: if an argument is of a wrong kind.
      ValueError: if `recompute` or `reduce_dtype` is out of range.

    Example:
      >>> import jax, jax.numpy as jnp, flax_amp
      >>> def loss(w, x):
      ...     with jax.named_scope("head"):
      ...         return jnp.mean((x @ w) ** 2)
      >>> struct = jax.ShapeDtypeStruct
      >>> found = flax_amp.explain(loss)(
      ...     struct((64, 8), jnp.float32), struct((4, 64), jnp.float32))
      >>> product = found.equations[0]
      >>> print(product.path, product.primitive, product.before, "=>", product.after)
      head dot_general f32 -> f32 => f16 -> f16
      >>> product.reason, product.casts_down, found.totals.low_share
      ('primitive dot_general', 2, 1.0)
    """
    word = fun.precision if isinstance(fun, AmpTrainState) else "16-mixed"
    compute_dtype = check_compute_dtype(compute_dtype_of(word, compute_dtype))
    options = _Options(
        compute_dtype,
        Policy(amp_policy),
        check_recompute(recompute),
        is_wide(reduce_dtype, compute_dtype),
        merge_layers,
        backward,
    )
    if isinstance(fun, AmpTrainState):
        if len(step) != 2:
            raise TypeError(
                f"explain: got a state and {len(step)} more arguments; expected "
                "explain(state, loss_fn, batch)."
            )
        return _explain_step(options, fun, *step)
    if step or not callable(fun):
        raise TypeError(
            f"explain: got {', '.join(type(x).__name__ for x in (fun, *step))}; "
            "expected explain(fun)(*args), or explain(state, loss_fn, batch) with an "
            "AmpTrainState."
        )

    def explained(*args: Any, **kwargs: Any) -> Explanation:
        name = getattr(fun, "__name__", type(fun).__name__)
        return _explain(options, fun, args, kwargs, name)

    return explained


def _explain_step(
    options: _Options, state: AmpTrainState, loss_fn: Any, batch: Any
) -> Explanation:
    check_function(loss_fn, "explain: loss_fn")

    def pure(params: Any, state: AmpTrainState, batch: Any) -> Any:
        rngs = fold_in(state.rngs, state.step)
        variables = state.variables
        target, out = call_user_fn(
            loss_fn, state, params, variables, batch, rngs, open_scopes=True
        )
        # An updated module is a part of the result of a step.
        updates = {} if state.graphdef is None else variables_of(target, params)
        return out, updates

    name = getattr(loss_fn, "__name__", "loss_fn")
    return _explain(options, pure, (state.params, state, batch), {}, name)


def _explain(
    options: _Options, fun: Callable[..., Any], args: Any, kwargs: Any, name: str
) -> Explanation:
    found: list[Explanation] = []
    notes: list[str] = []
    caller = f"explain: {name}"

    def record(*args: Any, **kwargs: Any) -> None:
        try:
            call = FunctionalCall(fun, args, kwargs, open_scopes=True, caller=caller)
            found.append(_explain_call(options, call, name, notes))
        except Exception as error:
            has_note = SCOPES_NOTE in getattr(error, "__notes__", ())
            if options.policy.names_scopes or not has_note:
                raise  # as `amp` does
            # The names of modules are in the way here, and `amp` does not need them.
            call = FunctionalCall(fun, args, kwargs, caller=caller)
            notes.append("modules have no names: the code needs equal modules")
            found.append(_explain_call(options, call, name, notes))

    # Inside of a trace, abstract arguments are arrays like all others.
    outer = FunctionalCall(record, args, kwargs, caller=caller)
    is_traced = [
        _tree.is_array(x) or isinstance(x, jax.ShapeDtypeStruct) for x in outer.inputs
    ]

    def trace(arrays: list[Any]) -> None:
        outer.function(_tree.fill(arrays, is_traced, outer.inputs))

    jax.eval_shape(trace, _tree.pick(outer.inputs, is_traced))
    return found[0]


def _explain_call(
    options: _Options, call: FunctionalCall, name: str, notes: list[str]
) -> Explanation:
    planned, messages = _plan(options, call)
    is_half = options.compute_dtype != jnp.float32
    recompute: Recompute = options.recompute if is_half else "never"
    merges = options.merge_layers and not planned.plan.exports
    walk = Walk(planned.painter, merges)
    walk.plan(planned.plan, Place(recompute=recompute))
    walk.results(planned.plan.outs, planned.outs)
    rows = walk.rows
    never = None
    if options.backward:
        try:
            stored = unchanged = _stored(options, planned, call, recompute)
            if recompute != "never":
                unchanged = _stored(options, planned, call, "never")
            rows += attach(stored, walk.visits)
            never = bytes_by_dtype(unchanged)
        except Exception as error:
            cause = f"{type(error).__name__}: {error}".partition("\n")[0].rstrip(".")
            if isinstance(error, _Unknown):
                cause = str(error)
            notes.append(f"what the backward pass stores is not known: {cause}")
    notes += find_choices(walk.visits, options.compute_dtype)
    root = Module(name, "")
    for row in rows:
        root.add(row)
    return Explanation(
        name=name,
        compute_dtype=options.compute_dtype.name,
        root=root,
        problems=tuple(find_problems(walk.visits, messages, options.compute_dtype)),
        stored_without_recompute=never,
        notes=tuple(notes),
    )


def _plan(options: _Options, call: FunctionalCall) -> tuple[PlannedCall, list[str]]:
    """Returns the plan of a call, and what `amp` warns of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        planned = plan_call(call, options.policy, options.compute_dtype)
    messages = []
    for warning in caught:
        text, category = str(warning.message), warning.category
        if text.startswith(("amp: ", "amp_policy: ")):
            messages.append(text)
        else:  # of the user's code
            where = warning.filename, warning.lineno
            warnings.warn_explicit(warning.message, category, *where)
    return planned, messages


def _stored(
    options: _Options, planned: PlannedCall, call: FunctionalCall, recompute: Recompute
) -> list[Stored]:
    arrays = [x for x in call.inputs if _tree.is_array(x)]
    trained = _trained(call)
    if not any(trained):
        raise _Unknown("the first argument has no float arrays")

    def emitted(*arrays: Any) -> Any:
        wide, merge = options.wide_gradients, options.merge_layers
        return planned.emit(arrays, recompute, wide, merge)

    return stored_arrays(emitted, arrays, trained)


def _trained(call: FunctionalCall) -> list[bool]:
    """Returns which arrays among the inputs are trained.

    They are the floats of the first argument; of a module, those in an `nnx.Param`.
    """
    indices = list(range(len(call.inputs)))
    args, _ = call.rebuild_arguments(
        indices, lambda state: nnx.to_pure_dict(nnx.filter_state(state, nnx.Param))
    )
    first = set(jax.tree.leaves(args[:1]))
    return [
        i in first and _tree.is_inexact_array(x)
        for i, x in enumerate(call.inputs)
        if _tree.is_array(x)
    ]
