"""`make_train_step` and `make_eval_step`: the steps of an `AmpTrainState`.

The step itself is `core.run_step`. This module adapts a train state to it: it applies
the gradients with `tx`, and lets `step`, the scaler and the skip counters advance.

Sharp edges:
  `state.step` counts skipped steps, but the counts inside `opt_state` do not. After
  skips, `schedule(state.step)` is ahead of the learning rate that the optimizer uses.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Concatenate, Protocol, TypeVar

import jax
from jax.typing import DTypeLike

from flax_amp import _tree
from flax_amp._rewriter.rewritten import rewritten
from flax_amp._training.arguments import (
    AxisName,
    Batch,
    Metrics,
    PyTree,
    Rngs,
    UserFn,
    check_function,
    check_options,
    check_params,
    check_shardings,
    check_state,
)
from flax_amp._training.core import Decision, Update, run_step
from flax_amp._training.loss import (
    call_user_fn,
    check_returned,
    fold_in,
    inputs_unchanged,
    named_after,
)
from flax_amp._training.optimizer import (
    apply_if_finite_counters,
    explain_update,
    hyperparam_metrics,
    without_finite_check,
)
from flax_amp._training.precision import (
    UnscaledWarning,
    amp_by_precision,
    check_precision,
)
from flax_amp._training.scaler import Scaler, check_keys
from flax_amp._training.step_call import JittedStep, Step
from flax_amp._training.train_state import AmpTrainState, StateT
from flax_amp.optim._small_state import rounds_parameters
from flax_amp.policy import MatmulDType, Policy, PolicyEntries

ResultT = TypeVar("ResultT")


class TrainStep(Protocol):
    """A training step: it returns a state of the class that it was given."""

    def __call__(
        self, state: StateT, batch: Batch, *args: PyTree
    ) -> tuple[StateT, Metrics]: ...


def make_train_step(
    loss_fn: UserFn,
    *,
    has_aux: bool = False,
    compute_dtype: DTypeLike | None = None,
    matmul_dtype: MatmulDType = None,
    amp_policy: PolicyEntries | None = None,
    redo_on_nan: int = 0,
    accum_steps: int = 1,
    axis_name: AxisName = None,
    metrics_fn: UserFn | None = None,
    check_update: bool = True,
    state_shardings: PyTree = None,
    donate: bool = True,
    jit: bool = True,
) -> TrainStep:
    """Makes a training step from an ordinary float32 loss.

    Args:
      loss_fn: `loss_fn(params, batch, *args)`, or `loss_fn(model, batch, *args)` if
        the state was made from an NNX model, where `args` are the further arguments of
        the step, if there are any. It returns a scalar float loss. It may also declare
        the keywords `state` and `rngs`. `state` is then the state, with the parameters
        and variables of this pass, and `rngs` is `state.rngs`, folded with
        `state.step`. A loss that is already `flax_amp.amp(...)` is taken as it is, for
        options of `amp` that the step does not have.
      has_aux: `loss_fn` returns `(loss, aux)`, where `aux` is any pytree. The entries
        of a dict become metrics, under names that no field of the state has; only its
        reserved key `"variables"` holds updated collections of a Linen model, as
        `apply` with `mutable=` returns them. The state of an NNX model is collected
        from the model itself.
      compute_dtype: what to compute in, instead of the `precision` of the state.
      matmul_dtype: what matrix products run in, instead of the `precision` of the
        state; see `flax_amp.amp`.
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
        metrics, such as norms by layer. It is traced into the step and runs in float32.
        `state` is the one before the update; `grads` are its gradients, unscaled and
        averaged, before `tx`; `updates` is the difference that the update makes to the
        float32 parameters, where one below their spacing is 0. In a skipped step, both
        may hold infs and NaNs.
      check_update: skip the step if the update would store an inf or a NaN in the
        state, such as one of `adam(eps=0)` for zeros. The decision then waits for the
        whole update, which is computed twice: 1.02 of the estimated time of a small ViT
        on a TPU v5e, 1.22 of that of an MLP of 50 million parameters and a small batch.
        `False` looks at loss, gradients and variables only.
      state_shardings: the shardings of the new state, as a state of shardings or as one
        sharding for all leaves. On a mesh, pass the shardings that the state was
        created with. Otherwise XLA chooses them, and may move a leaf that was
        replicated.
      donate: let the new state reuse the memory of the old one, which is then deleted.
      jit: compile the step.

    Returns:
      `train_step(state, batch, *args) -> (state, metrics)`. Further arguments go to the
      loss as they are: traced, and neither split into micro-batches nor averaged. The
      metrics are arrays on the device:

      - `loss`: float32.
      - `grads_finite`: False for every skipped step, also if its loss, its updated
        variables or its update were the cause.
      - `scaler`: the scale of the next step.
      - `grad_norm`: the norm of the unscaled gradients, before any clipping.
      - `skipped_total`: the number of skipped steps.
      - `hyperparams/learning_rate` and so on, if `tx` is of `flax_amp.optim` or of
        `optax.inject_hyperparams`: the values that the last update used, schedules
        included.
      - the entries of `metrics_fn`.
      - the entries of `aux`, if that is a dict whose keys are strings. One with the
        name of another metric comes as `aux/<name>`.
      - `aux`: any other `aux`, such as a tuple or a dataclass.

    Raises:
      TypeError: if an argument is of a wrong kind; when called, if the state is not an
        `AmpTrainState`, if the loss does not take the arguments of the step, or if what
        it or `metrics_fn` returns is not what is expected.
      ValueError: if `redo_on_nan` or `accum_steps` is out of range, if a loss that is
        already `flax_amp.amp(...)` comes with an option of `amp`, or if
        `state_shardings` comes with `jit=False`; when called, if the
        batch does not split, if a parameter is not float32, if updated variables, the
        update of the optimizer or `state_shardings` do not fit the state, if `aux` has
        the name of a field of the state, or if two leaves of the state are the same
        array.
      RuntimeError: when called, if an earlier step has deleted the state.

    Example:
      >>> import jax.numpy as jnp
      >>> import optax
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
    options = check_options(
        loss_fn,
        "make_train_step",
        has_aux=has_aux,
        amp=amp_by_precision(
            loss_fn,
            "make_train_step",
            compute_dtype=compute_dtype,
            matmul_dtype=matmul_dtype,
            amp_policy=amp_policy,
        ),
        open_scopes=Policy(amp_policy).names_scopes,
        redo_on_nan=redo_on_nan,
        accum_steps=accum_steps,
        axis_name=axis_name,
        metrics_fn=metrics_fn,
        check_update=check_update,
    )

    warn_if_unscaled = UnscaledWarning(compute_dtype)

    # The first call of a jitted step gives it values, a trace only types.
    def check(state: StateT) -> None:
        _check_state(state, "train_step")
        warn_if_unscaled(state.precision, state.scaler, stacklevel=4)

    @rewritten
    def train_step(
        state: StateT, batch: Batch, *args: PyTree
    ) -> tuple[StateT, Metrics]:
        # In a trace as well, because a state of other types is traced again.
        check(state)
        may_be_half = rounds_parameters(state.opt_state)
        check_params(state.params, "train_step", may_be_half=may_be_half)
        adapter = _StateAdapter(state, state_shardings)
        return run_step(options, state, batch, args, adapter)

    if not jit:
        if state_shardings is not None:
            raise ValueError(
                "make_train_step: got state_shardings with jit=False; expected only "
                "one of them. Pass out_shardings=(state_shardings, None) to jax.jit "
                "yourself."
            )
        return Step(train_step)
    # A traced function does not see where its arguments lie, so it cannot constrain a
    # new leaf to the sharding of the old one. The `shard_alike` of JAX, which did that,
    # is gone in JAX 0.11.
    settings: dict[str, Any] = dict(donate_argnums=(0,) if donate else ())
    if state_shardings is not None:
        settings["out_shardings"] = (state_shardings, None)
    try:
        jitted = jax.jit(train_step, **settings)
    except TypeError as error:
        raise TypeError(
            f"make_train_step: state_shardings holds something that is not a sharding "
            f"({error}); expected one for all leaves, such as jax.NamedSharding(mesh, "
            "jax.P()), or a state of them. Pass jax.tree.map(lambda x: x.sharding, "
            "state)."
        ) from error
    return JittedStep(jitted, donates=donate, check=check)


def make_eval_step(
    fn: Callable[..., ResultT],
    *,
    compute_dtype: DTypeLike | None = None,
    matmul_dtype: MatmulDType = None,
    amp_policy: PolicyEntries | None = None,
    jit: bool = True,
) -> Callable[Concatenate[AmpTrainState, Batch, ...], ResultT]:
    """Makes an evaluation step in the precision of training, without a scaler.

    Args:
      fn: `fn(params, batch, *args)`, or `fn(model, batch, *args)` for NNX, where `args`
        are the further arguments of the step. The model is then in evaluation mode
        (`model.eval()`), and its updates are dropped. `fn` may declare the keywords
        `state` and `rngs`, and it may be `flax_amp.amp(...)` already, as in
        `make_train_step`.
      compute_dtype: what to compute in, instead of the `precision` of the state.
      matmul_dtype: what matrix products run in, instead of the `precision` of the
        state; see `flax_amp.amp`.
      amp_policy: see `flax_amp.amp`.
      jit: compile the step.

    Returns:
      `eval_step(state, batch, *args)`, which returns what `fn` returns.

    Raises:
      TypeError: if an argument is of a wrong kind; when called, if the state is not an
        `AmpTrainState`, if `fn` does not take the arguments, or if a compiled step
        cannot return what it returns.
      ValueError: when called, if `fn` changes modules among its inputs.

    Example:
      >>> import jax.numpy as jnp
      >>> import optax
      >>> from flax import nnx
      >>> model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
      >>> state = AmpTrainState.create(model=model, tx=optax.sgd(0.1))
      >>> eval_step = make_eval_step(lambda model, batch: model(batch))
      >>> eval_step(state, jnp.ones((4, 3))).shape
      (4, 1)
    """
    # It evaluates states only. A module tells no precision, and `nnx.jit(amp(fn))` is
    # the line that the loop of its user has already.
    check_function(fn, "make_eval_step: fn")
    # Nothing is differentiated, so nothing is computed again for a backward pass.
    rewrites = amp_by_precision(
        fn,
        "make_eval_step",
        compute_dtype=compute_dtype,
        matmul_dtype=matmul_dtype,
        amp_policy=amp_policy,
        recompute=False,
    )
    open_scopes = Policy(amp_policy).names_scopes
    name = getattr(fn, "__name__", "fn")

    @rewritten
    def eval_step(state: AmpTrainState, batch: Batch, *args: PyTree) -> ResultT:
        _check_state(state, "eval_step")

        def pure(
            params: PyTree, variables: PyTree, batch: Batch, rngs: Rngs, *args: PyTree
        ) -> Any:
            now = state.replace(params=params, variables=variables)
            with inputs_unchanged(batch, args, f"eval_step: {name}", wanted=jit):
                _, out = call_user_fn(
                    fn, now, batch, rngs, args, open_scopes=open_scopes, evaluate=True
                )
            if jit:
                check_returned(out, "", f"eval_step: {name}")
            return out

        # As in a training step: other numbers in each step, the same ones in a rerun.
        rngs = fold_in(state.rngs, state.step)
        named = rewrites[state.precision](named_after(pure, fn))
        params = jax.tree.map(_tree.float32_if_bfloat16, state.params)
        return named(params, state.variables, batch, rngs, *args)

    if not jit:
        return Step(eval_step)
    return JittedStep(jax.jit(eval_step), donates=False)


@dataclasses.dataclass(frozen=True)
class _StateAdapter:
    """A train state as what `run_step` trains."""

    state: AmpTrainState
    shardings: PyTree

    @property
    def reserved_names(self) -> list[str]:
        return [field.name for field in dataclasses.fields(self.state)]

    def update(self, grads: PyTree, variables: PyTree, scaler: Scaler) -> Update:
        old = self.state
        with explain_update("make_train_step", old.tx, old.opt_state, old.params):
            # By `apply_gradients`, because a subclass may have its own one, such as for
            # an average of the parameters.
            new = old.replace(tx=without_finite_check(old.tx)).apply_gradients(
                grads=grads, scaler=scaler, variables=variables
            )
        params = old.params, new.params
        # `tx` is static: a state with another one would be traced again.
        return Update(old, new.replace(tx=old.tx), old, grads, params)

    def finish(
        self, update: Update, decision: Decision
    ) -> tuple[AmpTrainState, Scaler, dict[str, PyTree]]:
        """Lets the step, the scaler and the skip counters advance in any case."""
        old, selected = self.state, decision.selected
        # From the old ones: an update by an `optax.apply_if_finite` has counted, too,
        # and the select may have put that back.
        counters = apply_if_finite_counters(old.opt_state, decision.applied)
        new = selected.replace(
            step=update.after.step,
            scaler=decision.select_scaler(old.scaler),
            opt_state=selected.opt_state._replace(**counters),
        )
        more = hyperparam_metrics(new.opt_state)
        more["skipped_total"] = new.opt_state.total_notfinite
        if self.shardings is not None:
            check_shardings(self.shardings, new)
        return new, new.scaler, more


def _check_state(state: Any, caller: str) -> None:
    check_state(state, AmpTrainState, caller)
    check_keys(state.scaler, f"{caller}: state.scaler")
    check_precision(state.precision, f"{caller}: state.precision")
