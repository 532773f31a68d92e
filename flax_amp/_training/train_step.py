"""One training step in mixed precision, and one evaluation step.

The order is fixed here, because every other order is wrong somewhere: scale the loss
in float32, differentiate, unscale by the scale that was used, average over micro-
batches and devices, decide once whether all of it is finite, and only then clip and
update (`tx`). A step that is not finite changes nothing but `step`, the scaler and the
counters of skipped steps: one select of the old state against the new one, so every
other leaf keeps its bits. The scale is lowered only when the loss is finite and the
gradients are not: a bad batch, or an overflow of the activations, is the same at any
scale.

Sharp edges:
  `state.step` counts skipped steps, the counts inside `opt_state` do not: a learning
  rate logged as `schedule(state.step)` is early after skips.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

from flax_amp import _tree
from flax_amp._rewriter.nnx_bridge import changes_in
from flax_amp._rewriter.recompute.regions import Recompute
from flax_amp._rewriter.transform import amp
from flax_amp._training.accumulate import AxisName, Result
from flax_amp._training.compiled import Compiled
from flax_amp._training.finite import counted, unguarded
from flax_amp._training.gradients import (
    Options,
    all_gradients,
    check_function,
    explaining_update,
    fold_in,
    gradients,
    make_options,
    metrics_of,
)
from flax_amp._training.hyperparams import hyperparam_metrics
from flax_amp._training.loss import call, check_unchanged
from flax_amp._training.scaler import Scaler, check_complete
from flax_amp._training.train_state import AmpTrainState
from flax_amp.policy import Policy, PolicyEntries

PyTree = Any


def make_train_step(
    loss_fn: Callable[..., Any],
    *,
    has_aux: bool = False,
    compute_dtype: DTypeLike = jnp.float16,
    amp_policy: PolicyEntries | None = None,
    recompute: Recompute = "auto",
    reduce_dtype: DTypeLike | None = None,
    merge_layers: bool = True,
    redo_on_nan: int = 0,
    accum_steps: int = 1,
    axis_name: AxisName = None,
    state_shardings: PyTree = None,
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
      merge_layers: see `flax_amp.amp`.
      redo_on_nan: while the loss is finite, the gradients are not, and the scale can
        still fall, compute the same batch again with the lower scale, at most this
        many times.
      accum_steps: split the leading axis of every leaf of the batch into so many
        micro-batches (every `accum_steps`-th example makes one) and average their
        gradients in float32. Scalar float entries of `aux` are averaged too, entries
        with a `reduce` method (clu metrics) are reduced, all others come back stacked.
      axis_name: mapped axis (of `shard_map`, `pmap` or `vmap`), or a tuple of them,
        over which to average gradients, loss, variables and scalar float entries of
        `aux`. Each device draws its own `rngs`; use it with `jit=False` inside the
        mapped function.
      state_shardings: where the leaves of the new state lie, as a state of shardings or
        one for all. On a mesh, give the ones that the state was created with: without
        them XLA chooses, and may move a leaf that was replicated.
      donate: let the new state reuse the memory of the old one, which is then deleted.
      jit: compile the step.

    Returns:
      `train_step(state, batch) -> (state, metrics)`. The metrics are arrays on the
      device: `loss` (float32), `grads_finite` (False for every step that was skipped,
      because of its loss or updated variables, too), `scaler` (the scale of the next
      step),
      `grad_norm` (unscaled, before any clipping), `skipped_total`, those of `aux`, and
      `hyperparams/learning_rate` and so on if `tx` is of `flax_amp.optim`: the values
      that the last update used, schedules included.

    Raises:
      TypeError: if an argument is of a wrong kind; when called, if the state is no
        `AmpTrainState`, or the loss or `aux` is not what is expected.
      ValueError: if `recompute`, `reduce_dtype`, `redo_on_nan` or `accum_steps` is out
        of range, or `state_shardings` comes with `jit=False`; when called, if the batch
        does not split, or updated variables do not fit the state.

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
    options = make_options(
        loss_fn,
        "make_train_step",
        has_aux=has_aux,
        compute_dtype=compute_dtype,
        amp_policy=amp_policy,
        recompute=recompute,
        reduce_dtype=reduce_dtype,
        merge_layers=merge_layers,
        redo_on_nan=redo_on_nan,
        accum_steps=accum_steps,
        axis_name=axis_name,
    )

    def train_step(
        state: AmpTrainState, batch: PyTree
    ) -> tuple[AmpTrainState, dict[str, Any]]:
        _check_state(state, "train_step")
        new_scaler, finite, result = gradients(options, state, batch)
        new_state = _advance(options, state, new_scaler, finite, result)
        more = hyperparam_metrics(new_state.opt_state)
        more["skipped_total"] = new_state.opt_state.total_notfinite
        return new_state, metrics_of(options, new_scaler, finite, result, **more)

    if not jit:
        if state_shardings is not None:
            raise ValueError(
                "make_train_step: got state_shardings with jit=False; expected one of "
                "them. Pass out_shardings=(state_shardings, None) to your own jax.jit."
            )
        return train_step
    settings: dict[str, Any] = dict(donate_argnums=(0,) if donate else ())
    if state_shardings is not None:
        settings["out_shardings"] = (state_shardings, None)
    return Compiled(jax.jit(train_step, **settings))


def make_eval_step(
    fn: Callable[..., Any],
    *,
    compute_dtype: DTypeLike = jnp.float16,
    amp_policy: PolicyEntries | None = None,
    merge_layers: bool = True,
    jit: bool = True,
) -> Callable[[AmpTrainState, PyTree], Any]:
    """Makes an evaluation step in the precision of training, without a scaler.

    Args:
      fn: `fn(params, batch)`, or `fn(model, batch)` for NNX, where the model is in
        evaluation mode (`model.eval()`) and its updates are dropped. It may declare
        the keywords `state` and `rngs`, as in `make_train_step`.
      compute_dtype: see `flax_amp.amp`.
      amp_policy: see `flax_amp.amp`.
      merge_layers: see `flax_amp.amp`.
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
    check_function(fn, "make_eval_step: fn")
    # Nothing is differentiated, so there is nothing to compute again.
    lower = amp(
        compute_dtype=compute_dtype,
        amp_policy=amp_policy,
        recompute="never",
        merge_layers=merge_layers,
    )
    names = Policy(amp_policy).names_scopes
    name = getattr(fn, "__name__", "fn")

    def eval_step(state: AmpTrainState, batch: PyTree) -> Any:
        _check_state(state, "eval_step")

        def pure(params: PyTree, variables: PyTree, batch: PyTree, rngs: Any) -> Any:
            asked = dict(names=names, evaluate=True)
            changed = changes_in(batch, "batch")
            _, out = call(fn, state, params, variables, batch, rngs, **asked)
            if jit:
                check_unchanged(changed(), f"eval_step: {name}")
            return out

        rngs = fold_in(state.rngs, state.step)
        return lower(pure)(state.params, state.variables, batch, rngs)

    return Compiled(jax.jit(eval_step)) if jit else eval_step


# The update


def _advance(
    options: Options,
    state: AmpTrainState,
    new_scaler: Scaler,
    finite: jax.Array,
    result: Result,
) -> AmpTrainState:
    """Applies the gradients, or skips the step and leaves the rest as it was."""
    grads = all_gradients(result, state.params)
    variables = _tree.combine(result.variables, state.variables)
    with explaining_update(options.where):
        new = state.replace(tx=unguarded(state.tx)).apply_gradients(
            grads=grads, scaler=new_scaler, variables=variables
        )
    kept = _tree.select(finite, new.replace(tx=state.tx), state)
    counters = counted(state.opt_state, finite)
    return kept.replace(
        step=new.step,
        scaler=new_scaler,
        opt_state=kept.opt_state._replace(**counters),
    )


# Errors


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
    check_complete(state.scaler, f"{name}: state.scaler")
