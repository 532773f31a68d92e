"""`explain`: what mixed precision does to each equation of a function, and why."""

import dataclasses
import functools
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, overload

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from flax_amp import _tree
from flax_amp._rewriter.recompute.regions import Recompute, check_recompute
from flax_amp._rewriter.transform import PlannedCall, is_wide, plan_call
from flax_amp._training.train_state import AmpTrainState
from flax_amp.debug._call import (
    Target,
    UsersCall,
    on_arrays,
    read_compute_dtype,
    read_policy,
    read_target,
    trained_inputs,
    with_scopes,
)
from flax_amp.debug._emitted import attach_emitted
from flax_amp.debug._model import Equation, Explanation, Module
from flax_amp.debug._place import Place
from flax_amp.debug._problems import find_problems
from flax_amp.debug._stored import attach, bytes_by_dtype, stored_arrays
from flax_amp.debug._walk import Visit, Walk
from flax_amp.policy import MatmulDType, Policy, PolicyEntries


@dataclasses.dataclass(frozen=True)
class _Options:
    """The arguments of `amp`, checked, and `backward`."""

    compute_dtype: Any
    policy: Policy
    recompute: Recompute
    wide_gradients: bool
    merge_layers: bool
    backward: bool


@overload
def explain(
    fun: AmpTrainState,
    loss_fn: Callable[..., Any],
    batch: Any,
    /,
    *,
    compute_dtype: DTypeLike | None = ...,
    matmul_dtype: MatmulDType = ...,
    amp_policy: PolicyEntries | None = ...,
    recompute: Recompute = ...,
    reduce_dtype: DTypeLike | None = ...,
    merge_layers: bool = ...,
    backward: bool = ...,
) -> Explanation: ...
@overload
def explain(
    fun: Callable[..., Any],
    *,
    compute_dtype: DTypeLike | None = ...,
    matmul_dtype: MatmulDType = ...,
    amp_policy: PolicyEntries | None = ...,
    recompute: Recompute = ...,
    reduce_dtype: DTypeLike | None = ...,
    merge_layers: bool = ...,
    backward: bool = ...,
) -> Callable[..., Explanation]: ...
def explain(
    fun: Any,
    *step: Any,
    compute_dtype: DTypeLike | None = None,
    matmul_dtype: MatmulDType = None,
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
    before `amp`, and `explain(state, loss_fn, batch, *args)` for the state and the loss
    of `make_train_step`.

    Args:
      fun: a float32 function, or an `AmpTrainState`.
      *step: the loss function and what the step takes after the state, if `fun` is one.
      compute_dtype: see `flax_amp.amp`; by default that of the state's precision, or
        bfloat16.
      matmul_dtype: see `flax_amp.amp`; by default that of the state's precision.
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
      head dot_general f32 -> f32 => bf16 -> bf16
      >>> product.reason, product.casts_down, found.totals.low_share
      ('primitive dot_general', 2, 1.0)
    """
    dtype = read_compute_dtype(fun, compute_dtype)
    recompute = check_recompute(recompute)
    options = _Options(
        dtype,
        Policy(read_policy(fun, amp_policy, matmul_dtype)),
        "never" if dtype == jnp.float32 else recompute,
        is_wide(reduce_dtype, dtype),
        merge_layers,
        backward,
    )
    target = read_target("explain", fun, step)

    def explained(*args: Any, **kwargs: Any) -> Explanation:
        return _explain(options, target, args, kwargs)

    return explained if target.args is None else explained(*target.args)


def _explain(options: _Options, target: Target, args: Any, kwargs: Any) -> Explanation:
    found: list[Explanation] = []

    explain_call = functools.partial(_explain_call, options, name=target.name)

    def record(*args: Any, **kwargs: Any) -> None:
        needs_scopes = options.policy.names_scopes
        explanation, notes = with_scopes(
            explain_call, target, args, kwargs, "explain", needs_scopes=needs_scopes
        )
        notes = (*notes, *explanation.notes)
        found.append(dataclasses.replace(explanation, notes=notes))

    where = f"explain: {target.name}"
    jax.eval_shape(*on_arrays(record, args, kwargs, where))
    return found[0]


def _explain_call(options: _Options, call: UsersCall, name: str) -> Explanation:
    planned, messages = _plan(options, call)
    walk = Walk(planned.painter, options.merge_layers and not planned.plan.exports)
    walk.plan(planned.plan, Place())
    visits, compute_dtype = walk.visits, options.compute_dtype
    emitted = _emitted(options, planned, options.recompute)
    closed = jax.make_jaxpr(emitted)(*call.arrays)
    results = attach_emitted(closed, visits, compute_dtype.name)
    never, plain, others, notes = _backward(options, planned, call, visits)
    problems, choices = find_problems(visits, messages, options.policy, compute_dtype)
    root = Module(name, "")
    for row in (*(visit.row for visit in visits), *results, *others):
        root.add(row)
    return Explanation(
        name=name,
        compute_dtype=compute_dtype.name,
        root=root,
        problems=tuple(problems),
        stored_without_recompute=never,
        stored_without_amp=plain,
        notes=(*notes, *choices),
    )


def _plan(options: _Options, call: UsersCall) -> tuple[PlannedCall, list[str]]:
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


def _emitted(
    options: _Options, planned: PlannedCall, recompute: Recompute
) -> Callable[..., Any]:
    """Returns the function of arrays that `amp` makes of a call."""

    def emitted(*arrays: Any) -> Any:
        wide, merge = options.wide_gradients, options.merge_layers
        return planned.emit(arrays, recompute, wide, merge)

    return emitted


def _backward(
    options: _Options,
    planned: PlannedCall,
    call: UsersCall,
    visits: Sequence[Visit],
) -> tuple[Counter[str] | None, Counter[str] | None, list[Equation], list[str]]:
    """Adds what the backward pass stores to the equations.

    Returns:
      The bytes without recomputation, and those of the function as it is, if they are
      known; equations of rules, and notes.
    """
    if not options.backward:
        return None, None, [], []
    trained, arrays = trained_inputs(call), call.arrays
    cause = "the first argument has no float arrays"

    def plain(*arrays: Any) -> list[Any]:
        return list(filter(_tree.is_array, jax.tree.leaves(call.on(arrays))))

    if any(trained):
        try:
            found = {
                how: stored_arrays(_emitted(options, planned, how), arrays, trained)
                for how in {"never", options.recompute}
            }
            in_float32 = bytes_by_dtype(stored_arrays(plain, arrays, trained))
            others = attach(found[options.recompute], visits)
            return bytes_by_dtype(found["never"]), in_float32, others, []
        except Exception as error:
            first = f"{type(error).__name__}: {error}".partition("\n")[0]
            cause = first.rstrip(":. ")  # an assertion says nothing
    return None, None, [], [f"what the backward pass stores is not known: {cause}"]
