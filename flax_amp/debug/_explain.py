"""`explain`: what mixed precision does to each equation of a function, and why."""

import functools
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import jax

from flax_amp import _compat
from flax_amp._rewriter.primitives import Kind, kind_of
from flax_amp._rewriter.transform import TracedCall, trace_call
from flax_amp.debug._call import Asked, Call, tool
from flax_amp.debug._explanation import Explanation
from flax_amp.debug._problems import find_problems
from flax_amp.debug._record import Equation, Recorder, Visit, casts, stored
from flax_amp.policy import Policy

_OF_LOSS = ("float32: no matmul reads it", "float32: a scalar")  # results on its way


@functools.partial(tool, runs=False)
def explain(asked: Asked, *, backward: bool = True) -> Callable[[Call], Explanation]:
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
      backward: whether to count what the backward pass stores, for the gradient with
        respect to the first argument. It takes a trace of the gradient.
      **options: `precision`, `compute_dtype`, `matmul_dtype`, `amp_policy` and
        `recompute` of `flax_amp.amp`; by default those of the state or the optimizer.

    Returns:
      An `Explanation`, or a function that returns one. Print it, or see its methods
      `report`, `to_dict` and `to_html`.

    Raises:
      TypeError: if an argument is of a wrong kind.
      RuntimeError: if an array among the arguments was deleted by a step.

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
      >>> product.reason, found.totals.casts_down, found.totals.low_share
      ('primitive dot_general', 2, 1.0)
    """
    return lambda call: _explain(asked, backward, call)


def _explain(asked: Asked, backward: bool, call: Call) -> Explanation:
    policy, recorder = Policy(asked.entries), Recorder()
    traced, messages = _trace(asked, policy, call)

    def emitted(*arrays: Any) -> Any:
        return traced.emit(arrays, asked.recompute, recorder)

    closed = jax.make_jaxpr(emitted)(*call.arrays)
    visits = recorder.visits()
    added, notes, has_stored = casts(closed, visits), [], False
    if backward:
        try:
            added += stored(closed, call.arrays, call.trained())
            has_stored = True
        except Exception as error:
            text = f"{type(error).__name__}: {error}".partition("\n")[0].rstrip(":. ")
            notes = [f"what the backward pass stores is not known: {text}"]
    problems, choices = find_problems(visits, messages, asked.dtype)
    return Explanation(
        name=asked.name,
        compute_dtype=asked.dtype.name,
        equations=tuple(visit.row for visit in visits),
        added=tuple(added),
        problems=tuple(problems),
        notes=(*notes, *choices),
        loss_reads=_loss_reads(visits, traced),
        has_stored=has_stored,
    )


def _trace(asked: Asked, policy: Policy, call: Call) -> tuple[TracedCall, list[str]]:
    """Returns the trace of a call, and what `amp` warns of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        traced = trace_call(call, policy, asked.dtype)
    messages = []
    for warning in caught:
        text, category = str(warning.message), warning.category
        if text.startswith(("amp: ", "amp_policy: ")):
            messages.append(text)
        else:  # of the user's code
            where = warning.filename, warning.lineno
            warnings.warn_explicit(warning.message, category, *where)
    return traced, messages


def _loss_reads(visits: Iterable[Visit], traced: TracedCall) -> tuple[str, ...]:
    """Returns which half-precision results the arithmetic of a scalar loss reads."""
    outs = _compat.open_jaxpr(traced.closed)[0].outvars
    if not outs or getattr(outs[0].aval, "shape", None) != ():
        return ()
    rows: dict[Any, Equation] = {}
    levels: dict[Any, int] = {}  # how many matmuls stand before a result
    found: dict[str, None] = {}
    for row, eqn, *_ in visits:
        operands = _compat.variables(eqn.invars)
        level = max((levels.get(v, 0) for v in operands), default=0)
        if row.result.startswith(_OF_LOSS):
            for v in operands:
                made = rows.get(v)
                if made and (
                    made.result == "half precision"
                    or (made.result.startswith("rounded") and levels[v] < level)
                ):
                    of = f" of {made.path}" if made.path else ""
                    found[f"{made.primitive}{of}, {made.source}"] = None
        rows |= dict.fromkeys(eqn.outvars, row)
        is_product = kind_of(eqn) is Kind.PRODUCT
        levels |= dict.fromkeys(eqn.outvars, level + is_product)
    return tuple(found)
