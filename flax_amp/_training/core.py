"""One training step: from a loss, gradients and a scaler to the selected new state.

It reads from top to bottom. The order of a step is fixed here, because every other
order is wrong somewhere. `passes.py` scales the loss in float32, differentiates,
unscales by the scale that was used, and averages over micro-batches and devices. Then
`judge` decides, once for all devices, whether everything is finite. Only then does the
step clip and update, which is what the optimizer does. A step that is not finite
changes nothing but `step`, the scaler and the counters of skipped steps. One select
between the old and the new state does that, so every other leaf keeps its bits.

Who trains is a `Task`: a train state in `train_step.py`, a model and its optimizer in
`nnx_step.py`.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from flax_amp import _tree
from flax_amp._compat import with_weak_type
from flax_amp._training.arguments import (
    Array,
    Metrics,
    Options,
    PyTree,
    UserFn,
    check_type,
    differences,
)
from flax_amp._training.loss import merge_metrics
from flax_amp._training.passes import PassResult, complete_grads, run_passes
from flax_amp._training.precision import Precision, lowered
from flax_amp._training.scaler import Scaler, update_scaler


class Task(NamedTuple):
    """What a step trains, as arrays and functions of arrays."""

    precision: Precision
    loss: UserFn  # (params, variables, batch, rngs, *args) -> (loss, updates, aux)
    params: PyTree
    variables: PyTree
    rngs: PyTree
    scaler: Scaler
    old: PyTree  # everything that the step changes
    # (grads, variables) -> (new, its parameters), finite or not
    update: Callable[[PyTree, PyTree], tuple[PyTree, PyTree]]
    # (selected, finite, scaler) -> (result, more metrics), in which the scaler and the
    # counters of steps have advanced, skipped or not
    finish: Callable[[PyTree, Array, Scaler], tuple[Any, Metrics]]
    subject: Callable[[], Any]  # makes the first argument of `metrics_fn`
    # how `metrics_fn` sees gradients and updates
    view: Callable[[PyTree], PyTree] = lambda tree: tree


class Judged(NamedTuple):
    """A pass; whether it is finite; and the sum of the squares of its gradients."""

    result: PassResult
    forward: Array  # bool[], of the loss and the updated variables
    backward: Array  # bool[], of the gradients
    square_norm: Array

    @property
    def finite(self) -> Array:
        """Whether the step is applied."""
        return self.forward & self.backward


def run_step(
    options: Options, task: Task, batch: PyTree, args: tuple[PyTree, ...]
) -> tuple[Any, Metrics]:
    """Returns the result of one step, and its metrics."""
    # `amp` is inside of `value_and_grad`: gradients are those of float32 parameters.
    # XLA drops a cast of stored bfloat16 that is followed by one back.
    loss_fn = lowered(task.loss, options.loss_fn, task.precision, options.amp_policy)
    params = jax.tree.map(_tree.float32_if_bfloat16, task.params)

    def run(scaler: Scaler) -> Judged:
        state = params, task.variables, task.rngs
        return judge(run_passes(options, loss_fn, state, batch, args, scaler), state[1])

    scaler, judged = run_with_retries(run, task.scaler, options.redo_on_nan)
    grads = complete_grads(judged.result, params)
    variables = _tree.combine(judged.result.variables, task.variables)
    new, new_params = task.update(grads, variables)
    measured = _measure(options, task, grads, new_params)
    selected = _select(options, judged.finite, new, task.old)
    out, more = task.finish(selected, judged.finite, scaler)
    own = more | dict(
        loss=judged.result.loss,
        grads_finite=judged.finite,
        scaler=scaler["scaler"],
        grad_norm=jnp.sqrt(judged.square_norm),
    )
    return out, merge_metrics(options, own, measured, judged.result.aux)


def judge(result: PassResult, variables: PyTree) -> Judged:
    """Decides whether a pass is finite; `variables` are those before it.

    The gradients are judged by the sum of their squares, which the metrics need anyway:
    so the decision costs nothing. It overflows where the squares of an optimizer would.
    """
    square_norm = jnp.asarray(optax.tree.norm(result.grads, squared=True), jnp.float32)
    # The fp8 statistics of cotangents depend on the scale, as gradients do.
    backward = _tree.all_finite((square_norm, result.overwrite))
    return Judged(result, forward_finite(result, variables), backward, square_norm)


def forward_finite(result: PassResult, variables: PyTree) -> Array:
    """Whether the loss and the updated variables of a pass are finite: bool[]."""
    finite = _tree.stays_finite(result.variables, variables)
    return finite & _tree.all_finite(result.loss)


def run_with_retries(
    run: Callable[[Scaler], Judged], scaler: Scaler, retries: int
) -> tuple[Scaler, Judged]:
    """Runs a pass, at most `retries` times again, as long as a lower scale may help.

    Returns the scaler after the last pass, and that pass.
    """
    static: PyTree = None

    def attempt(scaler: Scaler) -> tuple[Scaler, Array, PyTree]:
        nonlocal static
        found = run(scaler)
        new = update_scaler(scaler, found.backward, loss_finite=found.forward)
        # The scale also stays where it is at its lower limit.
        lowered = found.forward & ~found.backward & (new["scaler"] < scaler["scaler"])
        # A loop can carry arrays only. The other leaves are the same in every pass.
        arrays, static = _tree.partition(found, _tree.is_array)
        return new, lowered, arrays

    if not retries:
        scaler, _, arrays = attempt(scaler)
        return scaler, _tree.combine(arrays, static)
    # The first pass stands before the loop, because its results give the carry its
    # types, and under `shard_map` its varying axes. `jit` traces both at once.
    attempt = jax.jit(attempt)
    scaler, _, arrays, _ = jax.lax.while_loop(
        lambda carry: carry[1] & (carry[3] < retries),
        lambda carry: (*attempt(carry[0]), carry[3] + 1),
        (*attempt(scaler), jnp.int32(0)),
    )
    return scaler, _tree.combine(arrays, static)


def _select(options: Options, finite: Array, new: PyTree, old: PyTree) -> PyTree:
    """Returns the new state, or all of the old one, bit for bit.

    A select, not a `lax.cond` around the update: one rule holds for every leaf, keys
    and -0.0 included, and XLA cannot fuse across a branch or update in place (178 MB of
    temporary memory for an MLP on a v5e, 975 MB with the branch). Whether the update is
    finite is not looked at: XLA would compute all of it twice. Rejected, too: keeping
    the old value of each element that is not finite, after which the moments of an
    optimizer do not fit each other.
    """

    def select(new: Any, old: Any) -> Any:
        if new is old:
            return old
        # With another type than before, the next step would be traced again.
        is_weak = getattr(jax.typeof(old), "weak_type", False)
        return with_weak_type(jnp.where(finite, new, old), is_weak)

    if changed := differences(old, new, jnp.shape):
        raise ValueError(
            f"{options.caller}: the update changed {'; '.join(changed)}; expected the "
            "same leaves and shapes: a state of an optimizer for these parameters."
        )
    return jax.tree.map(select, new, old)


def _measure(
    options: Options, task: Task, grads: PyTree, new_params: PyTree
) -> Metrics:
    """Returns what the user's `metrics_fn` makes of one update."""
    if options.metrics_fn is None:
        return {}
    old, new = (
        jax.tree.map(_tree.float32_if_bfloat16, params)
        for params in (task.params, new_params)
    )
    updates = jax.tree.map(jnp.subtract, new, old)
    found = options.metrics_fn(task.subject(), task.view(grads), task.view(updates))
    name = f"{options.caller}: metrics_fn"
    check_type(found, Mapping, f"{name}: its result", "a dict of metrics by name.")
    return dict(found)
