"""`make_train_step` and `make_eval_step`: the steps of an `AmpTrainState`.

The step itself is `core.run_step`. This module tells it what a train state is.

Sharp edges:
  `state.step` counts skipped steps, but the counts inside `opt_state` do not. After
  skips, `schedule(state.step)` is ahead of the learning rate that the optimizer uses.
"""

import functools
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import jax
import optax
from flax import nnx

from flax_amp import _tree
from flax_amp._rewriter.rewritten import rewritten
from flax_amp._training.arguments import (
    Array,
    AxisName,
    Metrics,
    Options,
    PyTree,
    UserFn,
    check_function,
    check_options,
    check_params,
    check_type,
)
from flax_amp._training.core import Task, run_step
from flax_amp._training.loss import (
    call_user_fn,
    fold_in,
    inputs_unchanged,
    named_after,
    pure_loss,
)
from flax_amp._training.optimizer import counted, hyperparam_metrics
from flax_amp._training.precision import (
    Precision,
    check_amp_options,
    lowered,
    warn_if_unscaled,
)
from flax_amp._training.scaler import Scaler, check_scaler
from flax_amp._training.step_call import Known, call_step
from flax_amp._training.train_state import (
    AmpTrainState,
    StateT,
    check_state,
    model_state,
    split_model,
)
from flax_amp.optim._small_state import rounds_parameters
from flax_amp.policy import Policy, PolicyEntries

ResultT = TypeVar("ResultT")


class TrainStep(Protocol):
    """A training step: it returns a state of the class that it was given."""

    def __call__(
        self, state: StateT, batch: PyTree, *args: PyTree
    ) -> tuple[StateT, Metrics]: ...


def make_train_step(
    loss_fn: UserFn,
    *,
    has_aux: bool = False,
    precision: Precision | None = None,
    amp_policy: PolicyEntries | None = None,
    redo_on_nan: int = 0,
    accum_steps: int = 1,
    axis_name: AxisName = None,
    metrics_fn: UserFn | None = None,
    state_shardings: PyTree = None,
    donate: bool = True,
    jit: bool = True,
) -> TrainStep:
    """Makes a training step from an ordinary float32 loss.

    Args:
      loss_fn: `loss_fn(params, batch, *args)`, or `loss_fn(model, batch, *args)` if
        the state was made from an NNX model, where `args` are the further arguments of
        the step. It returns a scalar float loss. It may also declare the keywords
        `state`, the state with the parameters and variables of this pass, and `rngs`,
        `state.rngs` folded with `state.step`. A loss that is already
        `flax_amp.amp(...)` is taken as it is, for options that the step does not have.
      has_aux: `loss_fn` returns `(loss, aux)`, where `aux` is any pytree. The entries
        of a dict become metrics; only its reserved key `"variables"` holds updated
        collections of a Linen model, as `apply` with `mutable=` returns them. The state
        of an NNX model is collected from the model itself.
      precision: what to compute in, instead of the `precision` of the state.
      amp_policy: see `flax_amp.amp`.
      redo_on_nan: while the loss is finite, the gradients are not, and the scale can
        still fall, compute the same batch again with the lower scale, at most this
        many times.
      accum_steps: the number of micro-batches. The leading axis of every leaf of the
        batch is split (every `accum_steps`-th example goes into the same micro-batch),
        and the gradients are averaged in float32. Scalar float leaves of `aux` are
        averaged too, nodes with a `reduce` method (clu metrics) are reduced, and all
        other leaves come back stacked.
      axis_name: mapped axis (of `shard_map`, `pmap` or `vmap`), or a tuple of them,
        over which to average gradients (in float32), loss, variables and scalar float
        leaves of `aux`. Each device draws its own `rngs`. Use it with `jit=False`
        inside the mapped function.
      metrics_fn: `metrics_fn(state, grads, updates)`, which returns a dict of further
        metrics. It is traced into the step and runs in float32. `state` is the one
        before the update, `grads` are unscaled and averaged, before `tx`, and `updates`
        is what is added to the float32 parameters. In a skipped step, both may hold
        infs and NaNs.
      state_shardings: the shardings of the new state, as a state of shardings or as one
        sharding for all leaves. On a mesh, pass those that the state was created with:
        otherwise XLA chooses them, and may move a leaf that was replicated.
      donate: let the new state reuse the memory of the old one, which is then deleted.
        Copy a state that you want to keep: `jax.tree.map(jnp.copy, state)`.
      jit: compile the step.

    Returns:
      `train_step(state, batch, *args) -> (state, metrics)`. Further arguments go to the
      loss as they are: traced, and neither split into micro-batches nor averaged. The
      metrics are arrays on the device:

      - `loss`: float32.
      - `grads_finite`: False for every skipped step, also if its loss or its updated
        variables were the cause.
      - `scaler`: the scale of the next step.
      - `grad_norm`: the norm of the unscaled gradients, before any clipping.
      - `skipped_total`: the number of skipped steps.
      - `hyperparams/learning_rate` and so on, if `tx` is of `flax_amp.optim` or of
        `optax.inject_hyperparams`: the values that the last update used.
      - the entries of `metrics_fn`, and those of `aux`, if that is a dict whose keys
        are strings (one with the name of another metric as `aux/<name>`), or `aux`.

    Raises:
      TypeError: if an argument is of a wrong kind; when called, if the state is not an
        `AmpTrainState`, or if what the loss or `metrics_fn` returns is not what is
        expected.
      ValueError: if an argument is out of its range, or if a loss that is already
        `flax_amp.amp(...)` comes with an option of `amp`; when called, if the batch
        does not split, if a parameter is not float32, if updated variables or the
        update of the optimizer do not fit the state, or if two leaves of the state are
        the same array.
      RuntimeError: when called, if an earlier step has deleted the state.

    Example:
      >>> import jax.numpy as jnp
      >>> state = AmpTrainState.create(params={"w": jnp.ones(3)}, tx=optax.sgd(0.1))
      >>> def loss_fn(params, batch):
      ...     return ((batch["x"] @ params["w"] - batch["y"]) ** 2).mean()
      >>> train_step = make_train_step(loss_fn)
      >>> batch = {"x": jnp.ones((4, 3)), "y": jnp.zeros(4)}
      >>> state, metrics = train_step(state, batch)
      >>> int(state.step), bool(metrics["grads_finite"])
      (1, True)
    """
    caller = "make_train_step"
    options = check_options(
        caller,
        loss_fn,
        has_aux=has_aux,
        precision=check_amp_options(loss_fn, caller, precision, amp_policy),
        amp_policy=amp_policy,
        redo_on_nan=redo_on_nan,
        accum_steps=accum_steps,
        axis_name=axis_name,
        metrics_fn=metrics_fn,
    )

    @rewritten
    def train_step(
        state: StateT, batch: PyTree, *args: PyTree
    ) -> tuple[StateT, Metrics]:
        _check(state)
        return run_step(options, _task(options, state), batch, args)

    if not jit and state_shardings is not None:
        raise ValueError(
            f"{caller}: got state_shardings with jit=False; expected only one of them. "
            "Pass out_shardings=(state_shardings, None) to jax.jit yourself."
        )
    if not jit:
        return train_step
    # A traced function does not see where its arguments lie, so it cannot constrain a
    # new leaf to the sharding of the old one.
    settings: dict[str, Any] = dict(donate_argnums=(0,) if donate else ())
    if state_shardings is not None:
        settings["out_shardings"] = (state_shardings, None)
    return _jitted(jax.jit(train_step, **settings), options.precision, donate)


def _jitted(jitted: Any, word: Precision | None, donates: bool) -> Any:
    """Returns a jitted step whose errors name the leaf that is wrong."""
    known, first = Known(), [True]

    @functools.wraps(jitted)
    def train_step(state: Any, batch: PyTree, *args: PyTree) -> Any:
        def call() -> Any:
            if first and isinstance(state, AmpTrainState):
                if not isinstance(state.step, jax.core.Tracer):
                    first.clear()
                warn_if_unscaled(word or state.precision, state.scaler, stacklevel=5)
            return jitted(state, batch, *args)

        out = call_step(
            call,
            "train_step",
            lambda: ({"state": state}, {"batch": batch, "args": args}),
            look_first=donates and state not in known,
        )
        known.set(out[0])
        return out

    # As a function of `jax.jit` has them.
    for name in ("lower", "trace", "eval_shape", "clear_cache", "_cache_size"):
        setattr(train_step, name, getattr(jitted, name))
    return train_step


def _task(options: Options, state: AmpTrainState) -> Task:
    """Returns what a step trains, of a train state."""

    def update(grads: PyTree, variables: PyTree) -> tuple[AmpTrainState, PyTree]:
        # By `apply_gradients`, because a subclass may have its own one, such as for an
        # average of the parameters.
        new = state.apply_gradients(grads=grads, variables=variables, finite=True)
        return new, new.params

    def finish(
        selected: AmpTrainState, finite: Array, scaler: Scaler
    ) -> tuple[AmpTrainState, Metrics]:
        counters = counted(state.opt_state, finite)
        new = selected.replace(
            step=state.step + 1,
            scaler=scaler,
            opt_state=selected.opt_state._replace(**counters),
        )
        more = hyperparam_metrics(new.opt_state)
        return new, more | {"skipped_total": counters["total_notfinite"]}

    return Task(
        precision=options.precision or state.precision,
        loss=pure_loss(options, state),
        params=state.params,
        variables=state.variables,
        rngs=fold_in(state.rngs, state.step),
        scaler=check_scaler(state.scaler, "train_step: state.scaler"),
        old=state,
        update=update,
        finish=finish,
        subject=lambda: state,
    )


def _check(state: Any) -> None:
    """Raises an error unless a state is one that can be trained."""
    check_state(state, "train_step")
    check_type(
        state.opt_state,
        optax.ApplyIfFiniteState,
        "train_step: state.opt_state",
        "an optax.ApplyIfFiniteState. Make the state with AmpTrainState.create, which "
        "wraps tx.",
    )
    may_be_half = rounds_parameters(state.opt_state)
    check_params(state.params, "train_step", may_be_half=may_be_half)


def make_eval_step(
    fn: Callable[..., ResultT],
    *,
    precision: Precision | None = None,
    amp_policy: PolicyEntries | None = None,
    jit: bool = True,
) -> Callable[..., ResultT]:
    """Makes an evaluation step in the precision of training, without a scaler.

    Args:
      fn: `fn(params, batch, *args)`, or `fn(model, batch, *args)` for NNX, where `args`
        are the further arguments of the step. The model is then in evaluation mode
        (`model.eval()`), and its updates are dropped. `fn` may declare the keywords
        `state` and `rngs`, and it may be `flax_amp.amp(...)` already, as in
        `make_train_step`.
      precision: what to compute in, instead of the `precision` of the state. An NNX
        model tells none: for it, the default is "bf16-mixed".
      amp_policy: see `flax_amp.amp`.
      jit: compile the step.

    Returns:
      `eval_step(state, batch, *args)`, or `eval_step(model, batch, *args)`, which
      returns what `fn` returns.

    Raises:
      TypeError: when called, if the state is neither an `AmpTrainState` nor a module.
      ValueError: when called, if `fn` changes modules among its inputs.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
      >>> eval_step = make_eval_step(lambda model, batch: model(batch))
      >>> eval_step(model, jnp.ones((4, 3))).shape
      (4, 1)
    """
    check_function(fn, "make_eval_step: fn")
    given = check_amp_options(fn, "make_eval_step", precision, amp_policy)
    open_scopes = Policy(amp_policy).names_scopes
    name = f"eval_step: {getattr(fn, '__name__', 'fn')}"

    def evaluate(state: AmpTrainState, batch: PyTree, *args: PyTree) -> Any:
        def pure(
            params: PyTree,
            variables: PyTree,
            batch: PyTree,
            rngs: PyTree,
            *args: PyTree,
        ) -> Any:
            now = state.replace(params=params, variables=variables)
            with inputs_unchanged(batch, args, name, wanted=jit):
                _, out = call_user_fn(
                    fn, now, batch, rngs, args, open_scopes=open_scopes, evaluate=True
                )
            return out

        # As in a training step: other numbers in each step, the same ones in a rerun.
        rngs = fold_in(state.rngs, state.step)
        word = given or state.precision
        named = lowered(named_after(pure, fn), fn, word, amp_policy, recompute=False)
        params = jax.tree.map(_tree.float32_if_bfloat16, state.params)
        return named(params, state.variables, batch, rngs, *args)

    run = jax.jit(evaluate) if jit else evaluate

    @rewritten
    def eval_step(state: Any, batch: PyTree, *args: PyTree) -> Any:
        if isinstance(state, nnx.Module):
            state = model_state(*split_model(state, nnx.Param))
        check_state(state, "eval_step")
        return call_step(
            lambda: run(state, batch, *args),
            "eval_step",
            lambda: ({"state": state}, {"batch": batch, "args": args}),
            look_first=False,
        )

    return eval_step
