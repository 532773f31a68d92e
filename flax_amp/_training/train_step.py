"""`make_train_step` and `make_eval_step`: the steps of an `AmpTrainState`."""

import functools
import weakref
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import jax
from flax import nnx

from flax_amp._checks import check_type
from flax_amp._rewriter.transform import rewritten
from flax_amp._training import AxisName, Metrics, PyTree, UserFn
from flax_amp._training.arguments import Options, check_flags, check_options
from flax_amp._training.core import run_step
from flax_amp._training.loss import call_user_fn, fold_in, in_precision
from flax_amp._training.scaler import check_scaled
from flax_amp._training.step_call import copy_aliases, naming_arrays
from flax_amp._training.train_state import (
    AmpTrainState,
    StateT,
    bare_state,
    split_model,
)
from flax_amp._training.untrained import params_of_loss, unchanged_flags
from flax_amp.policy import PolicyEntries, Precision

ResultT = TypeVar("ResultT")

_A_STATE = (
    "an AmpTrainState. Make a state with flax_amp.AmpTrainState.create(...), or train "
    "an nnx.Module with make_nnx_train_step."
)


_FOR_EVALUATION = (
    "an AmpTrainState or an nnx.Module. Bare parameters take no step: "
    "jax.jit(flax_amp.amp(fn))(params, batch)."
)


class TrainStep(Protocol):
    """A training step, which returns a state of the same class as its argument."""

    def __call__(
        self, state: StateT, batch: PyTree, *args: PyTree
    ) -> tuple[StateT, Metrics]: ...


def make_train_step(
    loss_fn: UserFn,
    *,
    has_aux: bool = False,
    precision: Precision | None = None,
    amp_policy: PolicyEntries | None = None,
    reduce_in_float32: bool = False,
    redo_on_nan: int = 0,
    accum_steps: int = 1,
    axis_name: AxisName = None,
    metrics_fn: UserFn | None = None,
    state_shardings: PyTree = None,
    donate: bool = True,
    jit: bool = True,
) -> TrainStep:
    """Makes a training step from an ordinary float32 loss.

    The step offers its optimizer the extra arguments `value` and `loss` (both the
    loss), `grad` (the gradients) and `grad_norm`. The optimizer gets the arguments that
    its `update` takes: `optax.contrib.reduce_on_plateau` takes `value`.

    Args:
      loss_fn: `loss_fn(params, batch, *args)`, or `loss_fn(model, batch, *args)` if
        the state was made from an NNX model. `loss_fn` returns a scalar float loss, and
        may also declare two keywords: `state`, with the parameters and variables of
        this pass, and `rngs`, which is `state.rngs` folded with `state.step`. A loss
        that is `flax_amp.amp(...)` already is not changed: use such a loss for options
        that the step does not have.
      has_aux: `loss_fn` returns `(loss, aux)`, where `aux` is any pytree. The entries
        of a dict become metrics, but for two reserved keys. `"variables"` holds updated
        collections of a Linen model, as `apply` with `mutable=` returns them; the state
        of an NNX model is collected from the model itself. `"weight"`, a scalar number,
        is the weight of this loss in the average over micro-batches and devices. For a
        mean over tokens, the weight is the number of tokens. The weight must not have a
        derivative with respect to the parameters.
      precision: the precision to compute in, which wins over the `precision` of the
        state.
      amp_policy, reduce_in_float32: see `flax_amp.amp`.
      redo_on_nan: how often at most to compute the same batch again with a lower
        scale, while the loss is finite, the gradients are not, and the scale can fall.
      accum_steps: the number of micro-batches. The leading axis of every leaf of the
        batch is split (every `accum_steps`-th example goes into the same micro-batch).
        The loss is `sum(w_i * L_i) / sum(w_i)` of the losses `L_i` and the weights
        `w_i` of the micro-batches, in float32, and the gradients are the gradients of
        this quotient. Without `aux["weight"]`, each micro-batch counts the same; the
        step then warns of a loss that is divided by a total of the examples. A
        micro-batch of weight 0 contributes nothing. If the sum of the weights is not
        positive and finite, the step is skipped, also with a single micro-batch. Scalar
        float leaves of `aux` are averaged by the same weights, nodes with a `reduce`
        method (clu metrics) are reduced, and the remaining leaves come back stacked. A
        micro-batch starts with the variables and parameters that the micro-batch before
        has written.
      axis_name: a mapped axis (of `shard_map`, `pmap` or `vmap`), or a tuple of mapped
        axes, over which to average loss, gradients, written variables and parameters,
        and scalar float leaves of `aux`: in float32, and by `aux["weight"]`, as over
        micro-batches. Each device draws its own `rngs`. Use the step with `jit=False`
        inside the mapped function.
      metrics_fn: `metrics_fn(state, grads, updates)`, traced into the step, returns a
        dict of further metrics. `state` is the state before the update; `grads` are the
        unscaled and averaged gradients before `tx`; `updates` are the new parameters
        minus the old parameters. `grads` and `updates` are float32, but zeros in half
        precision for parameters in half precision that no step changes. In a skipped
        step, `grads` and `updates` may hold infs and NaNs.
      state_shardings: the shardings of the new state, as a state of shardings or as a
        single sharding for all leaves. On a mesh, pass the shardings with which the
        state was created: otherwise XLA chooses the shardings, and may move a leaf that
        was replicated.
      donate: let the new state reuse the memory of the old state, which is then
        deleted. Copy a state that you want to keep: `jax.tree.map(jnp.copy, state)`.
      jit: compile the step.

    Returns:
      `train_step(state, batch, *args) -> (state, metrics)`. Further arguments go to the
      loss as they are: traced, and neither split into micro-batches nor averaged. The
      metrics are arrays on the device:

      - `loss`: float32.
      - `grads_finite`: False for every skipped step, whatever the cause.
      - `scaler`: the scale of the next step.
      - `grad_norm`: the norm of the unscaled gradients, before any clipping.
      - `skipped_total`: the number of skipped steps.
      - `spikes_total`: the number of steps that `optim.skip_spikes` skipped, if
        `optim.skip_spikes` is part of the optimizer.
      - `weight`: float32, the sum of the weights, if the loss returns a weight.
      - `hyperparams/learning_rate` and so on, if `tx` is of `flax_amp.optim` or of
        `optax.inject_hyperparams`: the values that the last update used.
      - the entries of `metrics_fn`.
      - the entries of `aux`, if `aux` is a dict whose keys are strings; otherwise `aux`
        itself, as `aux`. An entry with the name of a metric that stands above becomes
        `metrics_fn/<name>` or `aux/<name>`.

    Raises:
      TypeError, ValueError: if an argument is of no kind listed above; when called, if
        the state, the batch or the result of a function is of a wrong kind.
      RuntimeError: when called, if an earlier step has deleted the state.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> state = AmpTrainState.create(params={"w": jnp.ones(3)}, tx=optax.sgd(0.1))
      >>> def loss_fn(params, batch):
      ...     return ((batch["x"] @ params["w"] - batch["y"]) ** 2).mean()
      >>> train_step = make_train_step(loss_fn)
      >>> batch = {"x": jnp.ones((4, 3)), "y": jnp.zeros(4)}
      >>> state, metrics = train_step(state, batch)
      >>> int(state.step), bool(metrics["grads_finite"])
      (1, True)
    """
    of_passes: Any = (
        reduce_in_float32,
        has_aux,
        redo_on_nan,
        accum_steps,
        axis_name,
        metrics_fn,
    )
    options = Options("make_train_step", loss_fn, precision, amp_policy, *of_passes)
    options = check_options(options)
    check_flags(options.caller, donate=donate, jit=jit)
    if not jit and state_shardings is not None:
        raise ValueError(
            "make_train_step: got state_shardings with jit=False; expected "
            "state_shardings with jit=True only. Pass out_shardings=(state_shardings, "
            "None) to jax.jit yourself."
        )
    step: Any = functools.partial(run_step, options)
    step.__name__ = "train_step"  # which profiles show
    if jit:
        donated = (0,) if donate else ()
        # Inside of `jit` the sharding of the old state is not known.
        shardings = (state_shardings, None)
        step = jax.jit(step, donate_argnums=donated, out_shardings=shardings)
    last: Any = None  # a reference to the state that the last call returned

    @rewritten
    def train_step(
        state: StateT, batch: PyTree, *args: PyTree
    ) -> tuple[StateT, Metrics]:
        nonlocal last
        if last is None or last() is not state:
            check_type(state, AmpTrainState, "train_step: state", _A_STATE)
            # Nothing is compiled before the first call that is not traced.
            if jit and not step._cache_size():
                check_scaled(options.precision, state.precision, state.scaler)
            if jit and donate:
                state = copy_aliases(state, (batch, args))
        with naming_arrays("train_step", state=state, batch=batch, args=args):
            new, metrics = step(state, batch, *args)
        last = weakref.ref(new)
        return new, metrics

    # A function of `jax.jit` has these methods, too.
    for name in ("lower", "trace", "eval_shape", "clear_cache", "_cache_size"):
        if jit:
            setattr(train_step, name, getattr(step, name))
    return train_step


def make_eval_step(
    fn: Callable[..., ResultT],
    *,
    precision: Precision | None = None,
    amp_policy: PolicyEntries | None = None,
    jit: bool = True,
) -> Callable[..., ResultT]:
    """Makes an evaluation step in the precision of training, without a scaler.

    Args:
      fn: `fn(params, batch, *args)`, or `fn(model, batch, *args)` for NNX. The model is
        in evaluation mode (`model.eval()`), and its updates are dropped.
      precision: as in `make_train_step`; "bf16-mixed" for an NNX model by itself.
      amp_policy, jit: as in `make_train_step`.

    Returns:
      `eval_step(state, batch, *args)`, or `eval_step(model, batch, *args)`, which
      returns the result of `fn`. The step raises a TypeError if the state is neither an
      `AmpTrainState` nor a module, and a ValueError if `fn` changes modules among its
      inputs.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
      >>> eval_step = make_eval_step(lambda model, batch: model(batch))
      >>> eval_step(model, jnp.ones((4, 3))).shape
      (4, 1)
    """
    options = check_options(Options("make_eval_step", fn, precision, amp_policy))
    check_flags(options.caller, jit=jit)

    def evaluate(state: AmpTrainState, batch: PyTree, *args: PyTree) -> Any:
        def pure(params: Any, variables: Any, batch: Any, rngs: Any, *args: Any) -> Any:
            inputs = params, variables, batch, rngs, *args
            return call_user_fn(options, state, *inputs, evaluate=True)[1]

        # As in a training step, the random numbers differ from step to step, and the
        # rerun of a step draws the same numbers.
        rngs = fold_in(state.rngs, state.step)
        function = in_precision(pure, options, state, recompute=False)
        params = params_of_loss(state.params, unchanged_flags(state))
        return function(params, state.variables, batch, rngs, *args)

    run = jax.jit(evaluate) if jit else evaluate

    @rewritten
    def eval_step(state: Any, batch: PyTree, *args: PyTree) -> Any:
        if isinstance(state, nnx.Module):
            state = bare_state(AmpTrainState, **split_model(state, nnx.Param))
        check_type(state, AmpTrainState, "eval_step: state", _FOR_EVALUATION)
        with naming_arrays("eval_step", state=state, batch=batch, args=args):
            return run(state, batch, *args)

    return eval_step
