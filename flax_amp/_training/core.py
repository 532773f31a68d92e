"""One training step: from a loss, gradients and a scaler to the selected new state.

The order of a step is fixed here, because any change of the order is wrong somewhere:
the passes, the decision for all devices together, the optimizer, which may clip, and
the select.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from flax_amp import _tree
from flax_amp._checks import check_type, describe
from flax_amp._training import Array, Metrics, PyTree
from flax_amp._training.arguments import (
    Options,
    check_leaves,
    check_params,
    differences,
)
from flax_amp._training.loss import LossOutput, fold_in, merge_metrics
from flax_amp._training.loss_checks import observed_loss
from flax_amp._training.optimizer import (
    collect_hyperparams,
    naming_missing_arguments,
    next_counters,
)
from flax_amp._training.passes import (
    PassResult,
    cast_like,
    complete_grads,
    run_passes,
)
from flax_amp._training.scaler import Scaler, check_scaler, update_scaler
from flax_amp._training.train_state import StateT
from flax_amp._training.untrained import params_of_loss, unchanged_flags
from flax_amp.optim._skip_spikes import keep_counts, spiked, spikes_total
from flax_amp.optim._small_state import rounds_parameters


class Judged(NamedTuple):
    """A pass, whether its numbers are finite, and the square norm of its gradients."""

    result: PassResult
    forward_finite: Array  # bool[]: the loss and its written arrays are finite
    backward_finite: Array  # bool[]: the gradients are finite
    square_norm: Array | float = 0.0


def run_step(
    options: Options, state: StateT, batch: PyTree, *args: PyTree
) -> tuple[StateT, Metrics]:
    """Returns the state after one step, and its metrics."""
    unchanged = unchanged_flags(state)
    may_be_half = rounds_parameters(state.opt_state)
    check_params(state.params, "train_step", unchanged, may_be_half=may_be_half)
    if not jnp.issubdtype(jnp.result_type(state.step), jnp.integer):
        raise TypeError(
            f"train_step: state.step is {describe(state.step)}; expected an integer, "
            "the number of steps."
        )
    # `amp` is inside of `value_and_grad`, so the loss is differentiated with respect to
    # float32 parameters. For parameters that are stored in bfloat16, XLA drops the cast
    # to float32 where a cast back follows. Parameters in half precision that no step
    # changes are not cast, and the loss is not differentiated with respect to them.
    loss_fn = observed_loss(options, state)
    params = params_of_loss(state.params, unchanged)
    inputs = params, state.variables, fold_in(state.rngs, state.step)

    def run(scaler: Scaler) -> Judged:
        result = run_passes(options, loss_fn, inputs, batch, args, scaler)
        return judge_pass(result, params, state.variables)

    scaler = check_scaler(state.scaler, "train_step: the scaler")
    scaler, judged = run_with_retries(run, scaler, options.redo_on_nan)
    output = judged.result.output
    norm = jnp.sqrt(judged.square_norm)
    grads = complete_grads(judged.result, params)
    new = _update(options, state, output, grads, norm, unchanged)
    measured: Metrics = {}
    if options.metrics_fn is not None:
        after = params_of_loss(new.params, unchanged)
        updates = jax.tree.map(jnp.subtract, after, params)
        measured = options.metrics_fn(state, grads, updates)
        seen = f"{options.caller}: the result of metrics_fn"
        check_type(measured, Mapping, seen, "a dict of metrics by name.")
        check_leaves(measured, options.caller, "metrics_fn")
    is_finite = judged.forward_finite & judged.backward_finite
    _check_update(options, state, new)
    is_kept, fallback = _decide(is_finite, new, state)
    selected = _select(is_kept, new, fallback)
    new, own = _advance(selected, state, is_kept, scaler)
    own |= dict(
        loss=output.loss,
        grads_finite=is_kept,  # False for every skipped step, also for a spike
        scaler=scaler["scaler"],
        grad_norm=norm,
    )
    if output.weight is not None:
        own["weight"] = output.weight
    return new, merge_metrics(own, measured, output.aux)


def _update(
    options: Options,
    state: StateT,
    output: LossOutput,
    grads: PyTree,
    norm: Array,
    unchanged: PyTree,
) -> StateT:
    """Returns the state after an update, with the variables that the loss wrote.

    Parameters that no update changes are the same arrays in the new state. Otherwise
    XLA would have to add zeros to them, because `-0.0 + 0.0` is `0.0`.
    """
    new_params = cast_like(output.new_params, state.params)
    left = state.replace(params=_tree.combine(new_params, state.params))
    # A subclass may have its own `apply_gradients`, as for an average of parameters.
    with naming_missing_arguments(options.caller):
        new = left.apply_gradients(
            grads=grads,
            variables=_tree.combine(output.new_variables, state.variables),
            finite=True,
            extra_args=dict(value=output.loss, loss=output.loss, grad_norm=norm),
        )

    def updated(is_unchanged: bool, old: Any, new: Any) -> Any:
        return old if is_unchanged else new

    params = jax.tree.map(updated, unchanged, left.params, new.params)
    return new.replace(params=params)


def judge_pass(result: PassResult, params: PyTree, variables: PyTree) -> Judged:
    """Decides whether a pass is finite.

    `params` and `variables` are the parameters and variables before the pass.
    """
    # The square norm costs nothing, because the metric `grad_norm` needs the square
    # norm anyway. The square norm overflows where the squares of an optimizer would.
    square_norm = jnp.asarray(optax.tree.norm(result.grads, squared=True), jnp.float32)
    # The fp8 statistics of cotangents depend on the scale, as gradients do.
    backward_finite = _tree.all_finite((square_norm, result.overwrite))
    output = result.output
    forward_finite = _tree.all_finite(output.loss)
    for new, old in (output.new_variables, variables), (output.new_params, params):
        forward_finite &= _tree.stays_finite(new, old)
    return Judged(result, forward_finite, backward_finite, square_norm)


def run_with_retries(
    run: Callable[[Scaler], Judged], scaler: Scaler, retries: int
) -> tuple[Scaler, Judged]:
    """Runs a pass, at most `retries` times again, as long as a lower scale may help."""
    static: PyTree = None

    def attempt(scaler: Scaler) -> tuple[Scaler, Array, PyTree]:
        nonlocal static
        found = run(scaler)
        forward_finite = found.forward_finite
        backward_finite = found.backward_finite
        new = update_scaler(scaler, backward_finite, loss_finite=forward_finite)
        # At its lower limit the scale stays, and a retry would change nothing.
        is_lower = new["scaler"] < scaler["scaler"]
        falls = forward_finite & ~backward_finite & is_lower
        # A loop can carry arrays only. The remaining leaves are equal in every pass.
        arrays, static = _tree.partition(found, _tree.is_array)
        return new, falls, arrays

    if retries:
        attempt = jax.jit(attempt)  # traced once for the first pass and the loop
    # The first pass runs before the loop: its results give the carry its types, and
    # under `shard_map` its varying axes.
    last = attempt(scaler)
    if retries:
        _, last = jax.lax.while_loop(
            lambda carry: (carry[0] < retries) & carry[1][1],
            lambda carry: (carry[0] + 1, attempt(carry[1][0])),
            (jnp.int32(0), last),
        )
    scaler, _, arrays = last
    return scaler, _tree.combine(arrays, static)


def _select(is_kept: Array, new: PyTree, old: PyTree) -> PyTree:
    """Returns the new state, or all of the old state, bit for bit.

    A select, not a `lax.cond` around the update, for two reasons. The same rule holds
    for every leaf, keys and -0.0 included. And XLA cannot fuse across a branch or
    update in place: an MLP on a v5e needs 178 MB of temporary memory with the select,
    and 975 MB with the branch.
    """

    def select(new: Any, old: Any) -> Any:
        if new is old:
            return old
        # With another type than before, the next step would be traced again.
        is_weak = getattr(jax.typeof(old), "weak_type", False)
        return _tree.with_weak_type(jnp.where(is_kept, new, old), is_weak)

    return jax.tree.map(select, new, old)


def _check_update(options: Options, old: PyTree, new: PyTree) -> None:
    """Raises a ValueError if an update changed the leaves or shapes of the state."""
    if changed := differences(old, new, jnp.shape):
        raise ValueError(
            f"{options.caller}: the update changed {'; '.join(changed)}; expected the "
            "same leaves and shapes: a state of an optimizer for these parameters."
        )


def _decide(is_finite: Array, new: StateT, old: StateT) -> tuple[Array, StateT]:
    """Returns whether to keep the new state, and the state to keep otherwise.

    The state to keep otherwise is the old state. If the step is finite, that state has
    the record that `skip_spikes` makes of this step.
    """
    is_spike = spiked(old.opt_state, new.opt_state)
    if is_spike is None:
        return is_finite, old
    recorded = keep_counts(old.opt_state, new.opt_state)
    opt_state = _tree.select(is_finite, recorded, old.opt_state)
    return is_finite & ~is_spike, old.replace(opt_state=opt_state)


def _advance(
    new: StateT, old: StateT, is_kept: Array, scaler: Scaler
) -> tuple[StateT, Metrics]:
    """Advances the counters of a kept or skipped step, and collects their metrics.

    Returns the state and the metrics that come from the state of the optimizer.
    """
    opt_state = new.opt_state
    reported: Metrics = {}
    if isinstance(opt_state, optax.ApplyIfFiniteState):
        opt_state = opt_state._replace(**next_counters(old.opt_state, is_kept))
        reported["skipped_total"] = opt_state.total_notfinite
    new = new.replace(step=old.step + 1, scaler=scaler, opt_state=opt_state)
    if (total := spikes_total(opt_state)) is not None:
        reported["spikes_total"] = total
    values = collect_hyperparams(opt_state).items()
    return new, reported | {
        f"hyperparams/{name}": x for name, x in values if not x.shape
    }
