"""`explain`: what mixed precision does to each equation of a function, and why."""

import functools
import warnings
from collections.abc import Callable
from typing import Any, overload

import jax
from flax import nnx
from jax.typing import DTypeLike

from flax_amp._rewriter.transform import TracedCall, trace_call
from flax_amp._training.train_state import AmpTrainState
from flax_amp.debug._call import Tool, UsersCall, on_arrays
from flax_amp.debug._explanation import Explanation
from flax_amp.debug._model import Module
from flax_amp.debug._problems import find_problems
from flax_amp.debug._rows import Recorder, count_casts
from flax_amp.debug._stored import attach, bytes_by_dtype, stored_arrays
from flax_amp.policy import MatmulDType, Policy, PolicyEntries, Precision


@overload
def explain(
    fun: AmpTrainState | tuple[nnx.Module, nnx.Optimizer],
    loss_fn: Callable[..., Any],
    batch: Any,
    /,
    *args: Any,
    precision: Precision | None = ...,
    compute_dtype: DTypeLike | None = ...,
    matmul_dtype: MatmulDType = ...,
    amp_policy: PolicyEntries | None = ...,
    recompute: bool = ...,
    backward: bool = ...,
) -> Explanation: ...
@overload
def explain(
    fun: Callable[..., Any],
    *,
    precision: Precision | None = ...,
    compute_dtype: DTypeLike | None = ...,
    matmul_dtype: MatmulDType = ...,
    amp_policy: PolicyEntries | None = ...,
    recompute: bool = ...,
    backward: bool = ...,
) -> Callable[..., Explanation]: ...
def explain(
    fun: Any,
    *step: Any,
    precision: Precision | None = None,
    compute_dtype: DTypeLike | None = None,
    matmul_dtype: MatmulDType = None,
    amp_policy: PolicyEntries | None = None,
    recompute: bool = True,
    backward: bool = True,
) -> Any:
    """Tells what `amp` does to a function: which equation runs in which dtype, and why.

    Nothing is compiled or run, so abstract arguments do (`jax.ShapeDtypeStruct`, or
    what `jax.eval_shape` and `nnx.eval_shape` return). Modules of Linen and of NNX are
    found by themselves. Figures are those of the forward pass; each product has two
    more of its size in the backward pass.

    It is called as `explain(fun)(*args)`, where `fun` is the function before `amp`; as
    `explain(state, loss_fn, batch, *args)` for the state and the loss of
    `make_train_step`; or as `explain((model, optimizer), loss_fn, batch, *args)` for
    those of `make_nnx_train_step`.

    Args:
      fun: a float32 function, or an `AmpTrainState`, or a pair `(model, optimizer)`.
      *step: the loss function and what the step takes after its batch, unless `fun` is
        a function.
      precision, compute_dtype, matmul_dtype: see `flax_amp.amp`; by default those of
        the state or the optimizer, or bfloat16.
      amp_policy, recompute: see `flax_amp.amp`.
      backward: whether to count what the backward pass stores, for the gradient with
        respect to the first argument. It takes a trace of the gradient.

    Returns:
      An `Explanation`, or a function that returns one. Print it, or see its methods
      `report`, `to_dict` and `to_html`.

    Raises:
      TypeError: if an argument is of a wrong kind.

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
    tool = Tool.read(
        "explain", fun, step, precision, compute_dtype, matmul_dtype, amp_policy,
        recompute,
    )  # fmt: skip

    def explained(*args: Any, **kwargs: Any) -> Explanation:
        found: list[Explanation] = []
        use = functools.partial(_explain, tool, backward)

        def trace(*args: Any, **kwargs: Any) -> None:
            found.append(tool.run(use, args, kwargs))

        # Inside of a trace, arguments may be shapes, and nothing runs.
        jax.eval_shape(*on_arrays(trace, args, kwargs, tool.where))
        return found[0]

    return tool.on_target(explained)


def _explain(tool: Tool, backward: bool, call: UsersCall) -> Explanation:
    policy, recorder = Policy(tool.entries), Recorder()
    traced, messages = _trace(tool, policy, call)

    def emitted(*arrays: Any) -> Any:
        return traced.emit(arrays, tool.recompute, recorder)

    def emitted_again(*arrays: Any) -> Any:
        return traced.emit(arrays, tool.recompute)

    closed = jax.make_jaxpr(emitted)(*call.arrays)
    visits = recorder.visits(traced.closed)
    results = count_casts(closed, visits, tool.dtype.name)
    stored, notes = None, []
    if backward:
        try:
            found = stored_arrays(emitted_again, call.arrays, call.trained())
            stored = bytes_by_dtype(found)
            results += attach(found, visits)
        except Exception as error:
            text = f"{type(error).__name__}: {error}".partition("\n")[0].rstrip(":. ")
            notes = [f"what the backward pass stores is not known: {text}"]
    problems, choices = find_problems(visits, messages, policy, tool.dtype)
    root = Module(tool.name, "")
    for row in (*(visit.row for visit in visits), *results):
        root.add(row)
    return Explanation(
        name=tool.name,
        compute_dtype=tool.dtype.name,
        root=root,
        problems=tuple(problems),
        stored=stored,
        notes=(*notes, *choices),
    )


def _trace(tool: Tool, policy: Policy, call: UsersCall) -> tuple[TracedCall, list[str]]:
    """Returns the trace of a call, and what `amp` warns of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        traced = trace_call(call, policy, tool.dtype)
    messages = []
    for warning in caught:
        text, category = str(warning.message), warning.category
        if text.startswith(("amp: ", "amp_policy: ")):
            messages.append(text)
        else:  # of the user's code
            where = warning.filename, warning.lineno
            warnings.warn_explicit(warning.message, category, *where)
    return traced, messages
