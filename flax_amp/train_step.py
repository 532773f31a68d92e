"""One training step in mixed precision, and one evaluation step.

The order is fixed here, because every other order is wrong somewhere: scale the loss
in float32, differentiate, unscale by the scale that was used, average over micro-
batches and devices, decide once whether all of it is finite, and only then clip and
update (`tx`). A step that is not finite changes nothing but `step`, the scaler and the
counters of skipped steps: every other leaf of the state keeps its bits.

Sharp edges:
  `state.step` counts skipped steps, the counts inside `opt_state` do not: a learning
  rate logged as `schedule(state.step)` is early after skips.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT
from jax.typing import DTypeLike

from flax_amp import _tree, scaled_grad
from flax_amp._accumulate import AxisName, Result, accumulate, synchronize, vary
from flax_amp._loss import call, pure_loss
from flax_amp.policy import default_amp_policy
from flax_amp.scaler import Scaler
from flax_amp.train_state import AmpTrainState
from flax_amp.transform import amp

PyTree = Any


class _Options(NamedTuple):
    loss_fn: Callable[..., Any]
    has_aux: bool
    lower: Callable[[Callable[..., Any]], Callable[..., Any]]
    redo_on_nan: int
    accum_steps: int
    axis_name: AxisName


def make_train_step(
    loss_fn: Callable[..., Any],
    *,
    has_aux: bool = False,
    compute_dtype: DTypeLike = jnp.float16,
    amp_policy: Mapping[Any, Any] = default_amp_policy,
    recompute: str = "auto",
    reduce_dtype: DTypeLike | None = None,
    redo_on_nan: int = 0,
    accum_steps: int = 1,
    axis_name: AxisName = None,
    donate: bool = True,
    jit: bool = True,
) -> Callable[[AmpTrainState, PyTree], tuple[AmpTrainState, dict[str, Any]]]:
    """Makes a training step from an ordinary float32 loss.

    Args:
      loss_fn: `loss_fn(params, batch)`, or `loss_fn(model, batch)` when the state was
        made from an NNX model. It returns a scalar float loss. It may also declare
        the keywords `state` and `rngs`: it then gets the state (with the parameters
        and variables of this pass) and `state.rngs`, folded with `state.step`.
      has_aux: `loss_fn` returns `(loss, aux)`, where `aux` is a dict. Its reserved key
        `"variables"` holds updated collections of a Linen model, as `apply` with
        `mutable=` returns them; the rest goes into the metrics. The state of an NNX
        model is collected from the model itself.
      compute_dtype: see `flax_amp.amp`.
      amp_policy: see `flax_amp.amp`.
      recompute: see `flax_amp.amp`.
      reduce_dtype: see `flax_amp.amp`. Over `axis_name`, gradients are averaged in
        float32 whatever it is.
      redo_on_nan: while loss or gradients are not finite, lower the scale and compute
        the same batch again, at most this many times.
      accum_steps: split the leading axis of every leaf of the batch into so many
        micro-batches (every `accum_steps`-th example makes one) and average their
        gradients in float32. Scalar float entries of `aux` are averaged too, entries
        with a `reduce` method (clu metrics) are reduced, all others come back stacked.
      axis_name: mapped axis (of `shard_map`, `pmap` or `vmap`), or a tuple of them,
        over which to average gradients, loss, variables and scalar float entries of
        `aux`. Each device draws its own `rngs`; use it with `jit=False` inside the
        mapped function.
      donate: let the new state reuse the memory of the old one, which is then deleted.
      jit: compile the step.

    Returns:
      `train_step(state, batch) -> (state, metrics)`. The metrics are arrays on the
      device: `loss` (float32), `grads_finite`, `scaler` (the scale of the next step),
      `grad_norm` (unscaled, before any clipping), `skipped_total`, and those of `aux`.

    Raises:
      TypeError: if an argument is of a wrong kind; when called, if the state is no
        `AmpTrainState`, or the loss or `aux` is not what is expected.
      ValueError: if `recompute`, `reduce_dtype`, `redo_on_nan` or `accum_steps` is out
        of range; when called, if the batch does not split, or updated variables do not
        fit the state.

    Example:
      >>> from flax import nnx
      >>> model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
      >>> state = AmpTrainState.create(model=model, tx=optax.sgd(0.1))
      >>> def loss_fn(model, batch):
      ...     return ((model(batch["x"]) - batch["y"]) ** 2).mean()
      >>> train_step = make_train_step(loss_fn)
      >>> batch = {"x": jnp.ones((4, 3)), "y": jnp.zeros((4, 1))}
      >>> state, metrics = train_step(state, batch)
      >>> int(state.step), bool(metrics["grads_finite"])
      (1, True)
    """
    if type(accum_steps) is not int or accum_steps < 1:
        raise ValueError(
            f"make_train_step: {accum_steps=}; expected an integer of at least 1, the "
            "number of micro-batches."
        )
    options = _Options(
        loss_fn=_check_function(loss_fn, "make_train_step: loss_fn"),
        has_aux=has_aux,
        lower=amp(
            compute_dtype=compute_dtype,
            amp_policy=amp_policy,
            recompute=recompute,
            reduce_dtype=reduce_dtype,
        ),
        redo_on_nan=scaled_grad.check_retries(redo_on_nan, "make_train_step"),
        accum_steps=accum_steps,
        axis_name=axis_name,
    )

    def train_step(
        state: AmpTrainState, batch: PyTree
    ) -> tuple[AmpTrainState, dict[str, Any]]:
        _check_state(state, "train_step")

        def attempt(scale: Scaler) -> tuple[jax.Array, Result]:
            result = _compute(options, state, scale, batch)
            return _tree.all_finite(result[:3]), result

        new_scaler, finite, result = scaled_grad.retry_until_finite(
            attempt, state.scaler, options.redo_on_nan
        )
        new_state = _advance(state, new_scaler, finite, result)
        metrics = dict(
            loss=result.loss,
            grads_finite=finite,
            scaler=new_state.scaler["scaler"],
            grad_norm=optax.tree.norm(result.grads),
            skipped_total=new_state.opt_state.total_notfinite,
        )
        return new_state, metrics | result.aux

    if not jit:
        return train_step
    return jax.jit(train_step, donate_argnums=(0,) if donate else ())


def make_eval_step(
    fn: Callable[..., Any],
    *,
    compute_dtype: DTypeLike = jnp.float16,
    amp_policy: Mapping[Any, Any] = default_amp_policy,
    jit: bool = True,
) -> Callable[[AmpTrainState, PyTree], Any]:
    """Makes an evaluation step in the precision of training, without a scaler.

    Args:
      fn: `fn(params, batch)`, or `fn(model, batch)` for NNX, where the model is in
        evaluation mode (`model.eval()`) and its updates are dropped. It may declare
        the keywords `state` and `rngs`, as in `make_train_step`.
      compute_dtype: see `flax_amp.amp`.
      amp_policy: see `flax_amp.amp`.
      jit: compile the step.

    Returns:
      `eval_step(state, batch)`, which returns what `fn` returns.

    Raises:
      TypeError: if an argument is of a wrong kind.

    Example:
      >>> from flax import nnx
      >>> model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
      >>> state = AmpTrainState.create(model=model, tx=optax.sgd(0.1))
      >>> eval_step = make_eval_step(lambda model, batch: model(batch))
      >>> eval_step(state, jnp.ones((4, 3))).shape
      (4, 1)
    """
    _check_function(fn, "make_eval_step: fn")
    lower = amp(compute_dtype=compute_dtype, amp_policy=amp_policy)

    def eval_step(state: AmpTrainState, batch: PyTree) -> Any:
        _check_state(state, "eval_step")

        def pure(params: PyTree, variables: PyTree, batch: PyTree, rngs: Any) -> Any:
            _, out = call(fn, state, params, variables, batch, rngs, evaluate=True)
            return out

        rngs = _fold_in(state.rngs, state.step)
        return lower(pure)(state.params, state.variables, batch, rngs)

    return jax.jit(eval_step) if jit else eval_step


# From the user's loss to unscaled gradients


def _compute(
    options: _Options, state: AmpTrainState, scale: Scaler, batch: PyTree
) -> Result:
    """Returns the gradients of one batch, over all micro-batches and devices."""
    axis = options.axis_name
    # Gradients of device-varying parameters are not summed over devices by JAX itself,
    # whether or not `shard_map` checks varying axes; the mean below is then right.
    params, variables = vary((state.params, state.variables), axis)
    rngs = _fold_in(state.rngs, state.step)
    if axis is not None:
        rngs = _fold_in(rngs, jax.lax.axis_index(axis))
    lowered = options.lower(pure_loss(options.loss_fn, options.has_aux, state))

    def one_pass(variables: PyTree, batch: PyTree, index: Any = None) -> Result:
        streams = rngs if index is None else _fold_in(rngs, index)
        return _differentiate(lowered, scale, params, variables, batch, streams)

    if options.accum_steps == 1:
        result = one_pass(variables, batch)
    else:
        floating, _ = _tree.partition(state.params, _tree.is_inexact_array)
        zeros = jax.tree.map(jnp.zeros_like, _split_overwrite(floating)[0])
        zeros = vary(zeros, axis)
        result = accumulate(one_pass, zeros, variables, batch, options.accum_steps)
    return result if axis is None else synchronize(result, axis)


def _differentiate(
    loss_fn: Callable[..., Any],
    scale: Scaler,
    params: PyTree,
    variables: PyTree,
    batch: PyTree,
    rngs: PyTree,
) -> Result:
    floating, rest = _tree.partition(params, _tree.is_inexact_array)

    def scaled(floating: PyTree) -> Any:
        params = _tree.combine(floating, rest)
        loss, new_variables, aux = loss_fn(params, variables, batch, rngs)
        loss = jnp.asarray(loss)
        return scaled_grad.scale_loss(loss, scale), (loss, new_variables, aux)

    (_, (loss, variables, aux)), grads = jax.value_and_grad(scaled, has_aux=True)(
        floating
    )
    grads, overwrite = _split_overwrite(grads)
    grads = scaled_grad.unscale_grads(grads, scale, loss)
    return Result(grads, overwrite, loss.astype(jnp.float32), variables, aux)


def _split_overwrite(grads: PyTree) -> tuple[PyTree, PyTree]:
    """Takes out Flax's fp8 statistics: values that replace parameters, unscaled."""
    if not isinstance(grads, Mapping) or OVERWRITE_WITH_GRADIENT not in grads:
        return grads, None
    rest = {key: grads[key] for key in grads if key != OVERWRITE_WITH_GRADIENT}
    return rest, grads[OVERWRITE_WITH_GRADIENT]


def _fold_in(rngs: dict[str, jax.Array], data: Any) -> dict[str, jax.Array]:
    return {name: jax.random.fold_in(key, data) for name, key in rngs.items()}


# The update


def _advance(
    state: AmpTrainState, new_scaler: Scaler, finite: jax.Array, result: Result
) -> AmpTrainState:
    """Applies the gradients, or skips the step and leaves the rest as it was."""
    # `apply_if_finite` looks at the gradients only: tell it about everything else.
    grads = jax.tree.map(lambda g: jnp.where(finite, g, jnp.nan), result.grads)
    if result.overwrite is not None:
        grads = {**grads, OVERWRITE_WITH_GRADIENT: result.overwrite}
    _, rest = _tree.partition(state.params, _tree.is_inexact_array)
    grads = _tree.combine(grads, jax.tree.map(jnp.zeros_like, rest))
    grads = scaled_grad.cast_like(grads, state.params)
    variables = _tree.combine(result.variables, state.variables)
    new = state.apply_gradients(grads=grads, scaler=new_scaler, variables=variables)
    kept = _tree.select(finite, new, state)
    skips = {
        name: getattr(new.opt_state, name)
        for name in ("notfinite_count", "last_finite", "total_notfinite")
    }
    return kept.replace(
        step=new.step, scaler=new.scaler, opt_state=kept.opt_state._replace(**skips)
    )


# Errors


def _check_function(fn: Any, name: str) -> Callable[..., Any]:
    if not callable(fn):
        raise TypeError(
            f"{name} is a {type(fn).__name__}; expected a function of (params, batch), "
            "or of (model, batch) for NNX."
        )
    return fn


def _check_state(state: Any, name: str) -> None:
    if not isinstance(state, AmpTrainState):
        raise TypeError(
            f"{name}: state is a {type(state).__name__}; expected an AmpTrainState. "
            "Make it with flax_amp.AmpTrainState.create(...)."
        )
    if not isinstance(state.opt_state, optax.ApplyIfFiniteState):
        raise TypeError(
            f"{name}: state.opt_state is a {type(state.opt_state).__name__}; expected "
            "an optax.ApplyIfFiniteState. Make the state with AmpTrainState.create, "
            "which wraps tx."
        )
