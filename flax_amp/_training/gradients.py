"""From the user's loss to unscaled gradients, over micro-batches and devices.

Both training steps share this part. It scales the loss, differentiates, unscales,
averages, decides whether everything is finite, and moves the scale. The steps then
apply the gradients.
"""

import contextlib
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT
from jax.typing import ArrayLike

from flax_amp import _tree
from flax_amp._training.aliases import (
    Array,
    AxisName,
    Batch,
    Metrics,
    PyTree,
    Rngs,
    UserFn,
    check_count,
    check_type,
    first_of,
)
from flax_amp._training.averaging import (
    PassResult,
    accumulate,
    average_over_devices,
    check_axis_name,
    device_index,
    mark_varying,
)
from flax_amp._training.loss import (
    KEYWORDS,
    check_function,
    check_metrics_fn,
    check_returned,
    differences,
    pure_loss,
)
from flax_amp._training.precision import Precision, amp_by_precision
from flax_amp._training.retry import Attempt, check_retries, retry_until_finite
from flax_amp._training.scaled_grad import cast_like, run_pass, split_overwrite
from flax_amp._training.scaler import Scaler, validate_scaler
from flax_amp._training.train_state import AmpTrainState
from flax_amp.optim._optimizer import pure
from flax_amp.policy import Policy, PolicyEntries

_OWN_STATE = (
    "Make the state of the optimizer anew for these parameters, with "
    "AmpTrainState.create or nnx.Optimizer."
)


class Options(NamedTuple):
    """The checked arguments of `make_train_step` or `make_nnx_train_step`."""

    loss_fn: UserFn
    has_aux: bool
    amp: dict[Precision, Callable[[UserFn], UserFn]]  # with the user's policy
    redo_on_nan: int
    accum_steps: int
    axis_name: AxisName
    caller: str  # the function that the messages name
    open_scopes: bool  # whether NNX modules open scopes, for the keys of the policy
    metrics_fn: UserFn | None  # measures gradients and updates
    check_update: bool  # whether an update that is not finite skips the step


def make_options(
    loss_fn: object,
    caller: str,
    *,
    has_aux: bool,
    redo_on_nan: object,
    accum_steps: int,
    axis_name: AxisName,
    amp_policy: PolicyEntries | None,
    metrics_fn: UserFn | None,
    check_update: bool,
    keywords: tuple[str, ...] = KEYWORDS,
    **amp_options: Any,
) -> Options:
    """Checks the arguments of `caller`. The loss may declare `keywords`."""
    seen = f"{caller}: {accum_steps=}"
    check_metrics_fn(metrics_fn, f"{caller}: metrics_fn")
    check_type(check_update, bool, f"{caller}: check_update", "True or False.")
    return Options(
        loss_fn=check_function(loss_fn, f"{caller}: loss_fn", keywords),
        has_aux=has_aux,
        amp=amp_by_precision(amp_policy=amp_policy, **amp_options),
        redo_on_nan=check_retries(redo_on_nan, caller),
        accum_steps=check_count(accum_steps, seen, "of micro-batches"),
        axis_name=check_axis_name(axis_name, caller),
        caller=caller,
        open_scopes=Policy(amp_policy).names_scopes,
        metrics_fn=metrics_fn,
        check_update=check_update,
    )


def compute_gradients(
    options: Options, state: AmpTrainState, batch: Batch, args: tuple[PyTree, ...] = ()
) -> tuple[Scaler, Array, PassResult]:
    """Differentiates the loss, and repeats that with lower scales if asked to.

    `args` are the further arguments of the loss, the same for all micro-batches.

    Returns:
      The new scaler, whether everything is finite, and the result.
    """

    def attempt(scaler: Scaler) -> Attempt:
        result = _run_passes(options, state, scaler, batch, args)
        return Attempt.judge(result, state.variables)

    scaler = validate_scaler(state.scaler)
    return retry_until_finite(attempt, scaler, options.redo_on_nan)


def make_metrics(
    options: Options,
    scaler: Scaler,
    finite: Array,
    result: PassResult,
    measured: Metrics,
    fields: Collection[str] = (),
    /,
    **more: PyTree,
) -> Metrics:
    """Returns the metrics of a step: its own ones, `measured`, and those of `aux`.

    `more` holds further metrics of the step, `measured` those of `metrics_fn`. An entry
    of `aux` with the name of another metric becomes `aux/<name>`. The names of
    `fields`, those of the state, are reserved. A user who means to change a field by
    `aux` would not notice that it stays as it was.
    """
    own = more | dict(
        loss=result.loss,
        grads_finite=finite,
        scaler=scaler["scaler"],
        grad_norm=optax.tree.norm(result.grads),
    )
    if taken := sorted(measured.keys() & own.keys()):
        raise ValueError(
            f"{options.caller}: metrics_fn returned {taken}, which the step reports "
            "itself; expected other names. Rename them."
        )
    own |= measured
    if taken := sorted(result.aux.keys() & set(fields)):
        raise ValueError(
            f"{options.caller}: the loss returned aux with {taken}, fields of its "
            "state; expected other names. Rename them. A field of a subclass changes "
            "in its apply_gradients, or by state.replace after the step."
        )
    aux = {f"aux/{key}" if key in own else key: x for key, x in result.aux.items()}
    if len(own | aux) < len(own) + len(result.aux):
        taken = sorted(key for key in result.aux if key in own)
        raise ValueError(
            f"{options.caller}: the loss returned aux with {taken}, names of other "
            "metrics, and 'aux/<name>', which it would be called instead, is taken as "
            "well; expected other names. Rename them."
        )
    return own | aux


def measure_update(
    options: Options, subject: Any, grads: PyTree, old: PyTree, new: PyTree
) -> Metrics:
    """Returns what the user's `metrics_fn` makes of one update.

    Args:
      options: those of the step.
      subject: the state, or the model, before the update.
      grads: the gradients that the optimizer was given.
      old: the parameters before the update.
      new: the parameters after it, as the optimizer gives them.
    """
    if options.metrics_fn is None:
        return {}
    updates = jax.tree.map(jnp.subtract, new, old)
    name = f"{options.caller}: metrics_fn"
    found = options.metrics_fn(subject, grads, updates)
    expected = "a dict of metrics by name."
    check_type(found, Mapping, f"{name}: its result", expected)
    if wrong := [key for key in found if not isinstance(key, str)]:
        raise TypeError(
            f"{name} returned the names {wrong}; expected strings. Write them out, "
            "e.g. {'layer_0': ...}."
        )
    check_returned(found, "metrics", name)
    return dict(found)


def complete_grads(result: PassResult, params: PyTree) -> PyTree:
    """Returns a gradient for every parameter, in its dtype: zeros for integers."""
    grads = result.grads
    if result.overwrite is not None:
        grads = {**grads, OVERWRITE_WITH_GRADIENT: result.overwrite}
    _, rest = _tree.partition(params, _tree.is_inexact_array)
    grads = _tree.combine(grads, jax.tree.map(jnp.zeros_like, rest))
    return cast_like(grads, params)


def select_update(
    options: Options, finite: Array, new: PyTree, old: PyTree
) -> tuple[Array, PyTree]:
    """Returns whether an update is applied, and the state after it or the one before.

    An optimizer can make an inf or a NaN of finite gradients: `adam(eps=0)` divides
    zeros, and squares of 1e20 overflow. What it would store is checked, unless the user
    has switched that off.

    Args:
      options: those of the step.
      finite: bool[], whether loss, gradients and updated variables are finite.
      new: the state after the update.
      old: the state before it.

    Raises:
      ValueError: if they differ in structure or shapes. The update does not fail if the
        state of an optimizer for other parameters broadcasts against these.
    """
    if changed := differences(old, new, jnp.shape):
        raise ValueError(
            f"{options.caller}: the update changed {'; '.join(changed)}; expected the "
            f"same leaves and shapes as before. {_OWN_STATE}"
        )
    if options.check_update:
        # A field of a subclass may become an inf on purpose, such as a best loss that
        # is reset.
        pair = [
            (x.params, x.opt_state) if isinstance(x, AmpTrainState) else x
            for x in (new, old)
        ]
        finite = finite & _tree.stays_finite(*pair)
    return finite, _tree.select(finite, new, old)


def select_scaler(applied: Array, finite: Array, new: Scaler, old: Scaler) -> Scaler:
    """Returns the scaler after a step.

    It stays as it is if only the update was not finite, which no other scale mends.
    """
    old = {key: old[key] for key in new}  # without the counts of skipped steps
    return _tree.select(applied | ~finite, new, old)


@contextlib.contextmanager
def explain_update(
    caller: str, tx: Any, opt_state: PyTree, params: PyTree
) -> Iterator[None]:
    """Says why the update of an optimizer may have failed.

    The step may not pass it all arguments, or its state may be of other parameters.
    """
    try:
        yield
    except Exception as error:
        missing = re.search(r"missing \d+ required keyword-only argument.*", str(error))
        if not missing:
            if foreign := _foreign_leaves(tx, opt_state, params):
                raise ValueError(
                    f"{caller}: the state of the optimizer does not fit: it was made "
                    f"for another model or by another optimizer: {foreign}; expected "
                    "the same leaves. "
                    f"{_OWN_STATE}"
                ) from error
            error.add_note(
                f"flax_amp: {caller}: the update of the optimizer failed. If its state "
                "is one of other parameters or of another optimizer, make it anew, "
                "with AmpTrainState.create or nnx.Optimizer. The limit of an "
                "optax.apply_if_finite must fit into int32."
            )
            raise
        names = ", ".join(re.findall(r"'(\w+)'", missing[0]))
        raise TypeError(
            f"{caller}: the optimizer's update asks for {names} too, as optax.lbfgs "
            "and reduce_on_plateau do; expected one that needs only gradients, its "
            "state and the parameters, such as optax.adamw. Use this one in a loop of "
            "your own, with jax.value_and_grad(flax_amp.amp(loss_fn))."
        ) from error


def _foreign_leaves(tx: Any, opt_state: PyTree, params: PyTree) -> str:
    """Describes what of a state differs from a new one of these parameters."""
    try:
        new = jax.eval_shape(lambda: pure(tx.init(params)))
    except Exception:  # the error of the update says more
        return ""
    names = "in its state", "for these parameters"
    changed = differences(pure(opt_state), new, jnp.shape, "opt_state", names)
    return first_of(changed, separator="; ")


def fold_in(rngs: Rngs, data: ArrayLike) -> Rngs:
    """Folds a number into every key."""
    return {name: jax.random.fold_in(key, data) for name, key in rngs.items()}


def _fold_in_if_key(leaf: Any, data: Array) -> Any:
    """Folds a number into the keys that NNX keeps among the variables."""
    if not _tree.is_key(leaf):
        return leaf
    folded = jax.vmap(jax.random.fold_in, in_axes=(0, None))(leaf.reshape(-1), data)
    return folded.reshape(leaf.shape)


def _run_passes(
    options: Options,
    state: AmpTrainState,
    scaler: Scaler,
    batch: Batch,
    args: tuple[PyTree, ...],
) -> PassResult:
    """Returns the gradients of one batch, over all micro-batches and devices."""
    axis = options.axis_name
    device = device_index(axis, options.caller)
    params, variables = mark_varying((state.params, state.variables), axis)
    rngs = fold_in(state.rngs, state.step)
    if device is not None:
        rngs = fold_in(rngs, device)
        variables = jax.tree.map(lambda x: _fold_in_if_key(x, device), variables)
    loss_fn = options.amp[state.precision](
        pure_loss(
            options.loss_fn,
            options.has_aux,
            state,
            caller=options.caller,
            open_scopes=options.open_scopes,
        )
    )
    floating, rest = _tree.partition(params, _tree.is_inexact_array)

    def one_pass(
        variables: PyTree, batch: Batch, index: Array | None = None
    ) -> PassResult:
        streams = rngs if index is None else fold_in(rngs, index)

        def loss_of(floating: PyTree) -> tuple[Array, PyTree, Metrics]:
            params = _tree.combine(floating, rest)
            return loss_fn(params, variables, batch, streams, *args)

        result = run_pass(loss_of, floating, scaler, axis)
        return result._replace(loss=result.loss.astype(jnp.float32))

    if options.accum_steps == 1:
        result = one_pass(variables, batch)
    else:
        trained, _ = _tree.partition(state.params, _tree.is_inexact_array)
        zeros = jax.tree.map(jnp.zeros_like, split_overwrite(trained)[0])
        zeros = mark_varying(zeros, axis)
        result = accumulate(one_pass, zeros, variables, batch, options.accum_steps)
    return average_over_devices(result, axis, state.variables)
