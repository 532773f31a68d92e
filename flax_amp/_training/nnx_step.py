"""`make_nnx_train_step`: the training step of a model and its optimizer.

The step itself is `core.run_step`. This module tells it what of a model, its optimizer
and the modules in the batch are arrays, and writes what it selects back into them: last
of all, so that an error leaves them as they were.
"""

import dataclasses
import functools
from typing import Any, Protocol

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
    check_options,
    check_params,
    check_selection,
    check_type,
)
from flax_amp._training.core import Task, run_step
from flax_amp._training.loss import named_after, pure_loss
from flax_amp._training.optimizer import AmpOptimizer, counted, hyperparam_metrics
from flax_amp._training.precision import (
    Precision,
    check_amp_options,
    needs_scale,
    warn_if_unscaled,
)
from flax_amp._training.scaler import Scaler, check_scaler, no_scaler
from flax_amp._training.step_call import Known, call_step
from flax_amp._training.train_state import model_state, split_model
from flax_amp.optim._optimizer import pure
from flax_amp.optim._small_state import rounds_parameters
from flax_amp.policy import PolicyEntries


class NnxTrainStep(Protocol):
    """A training step that updates a model and its optimizer in place."""

    def __call__(
        self, model: nnx.Module, optimizer: nnx.Optimizer, batch: PyTree, *args: PyTree
    ) -> Metrics: ...


def make_nnx_train_step(
    loss_fn: UserFn,
    *,
    has_aux: bool = False,
    precision: Precision | None = None,
    amp_policy: PolicyEntries | None = None,
    redo_on_nan: int = 0,
    accum_steps: int = 1,
    axis_name: AxisName = None,
    metrics_fn: UserFn | None = None,
    donate: bool = True,
    jit: bool = True,
) -> NnxTrainStep:
    """Makes a training step that updates a model and its optimizer in place.

    It does what the step of `make_train_step` does. A step that is not finite changes
    neither model nor optimizer, not even the optimizer's own `step`: only the scaler
    and the counters of skipped steps of a `flax_amp.AmpOptimizer`.

    Args:
      loss_fn: `loss_fn(model, batch, *args)`, which returns a scalar float loss.
        Modules in the batch or in `args`, such as an `nnx.Rngs` or an
        `nnx.metrics.Metric`, are updated like the model, but do not train.
      precision: what to compute in, instead of the `precision` of the optimizer. A
        plain `nnx.Optimizer` tells none: for it, the default is "bf16-mixed".
      has_aux, amp_policy, redo_on_nan, accum_steps, axis_name: see `make_train_step`.
      metrics_fn: `metrics_fn(model, grads, updates)`, as in `make_train_step`. `model`
        is a copy of the model before the update; `grads` and `updates` are an
        `nnx.State` of what trains, as `nnx.grad` returns it.
      donate: let the new arrays reuse the memory of the old ones, which are then
        deleted, also in an `nnx.clone` of the model: copy the arrays of a teacher.
      jit: compile the step, with `nnx.jit`.

    Returns:
      `train_step(model, optimizer, batch, *args) -> metrics`. The `wrt` of the
      optimizer selects what trains. The metrics are those of `make_train_step`; without
      a `flax_amp.AmpOptimizer` or an `optax.apply_if_finite`, nothing counts skipped
      steps, and there is no `skipped_total`.

    Raises:
      TypeError, ValueError, RuntimeError: as `make_train_step`. A TypeError is also
        raised where a plain `nnx.Optimizer` comes with float16, which needs a scaler.

    Example:
      >>> import jax.numpy as jnp
      >>> import optax
      >>> model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
      >>> optimizer = AmpOptimizer(model, optax.sgd(0.1))
      >>> train_step = make_nnx_train_step(lambda model, x: (model(x) ** 2).mean())
      >>> metrics = train_step(model, optimizer, jnp.ones((4, 3)))
      >>> int(optimizer.step[...]), bool(metrics["grads_finite"])
      (1, True)
    """
    caller = "make_nnx_train_step"
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
    step: Any = functools.partial(_step, options)
    if jit:
        step = nnx.jit(step, donate_argnums=(0, 1) if donate else ())
    known = Known()

    @rewritten
    def train_step(
        model: nnx.Module, optimizer: nnx.Optimizer, batch: PyTree, *args: PyTree
    ) -> Metrics:
        is_new = optimizer not in known
        if is_new:
            _check(options, model, optimizer)
            if jit and donate:
                _copy_repeated_arrays(model, optimizer)

        def arguments() -> tuple[dict[str, PyTree], dict[str, PyTree]]:
            modules, arrays = _take_out(_WHOLE_NODES, {"batch": batch, "args": args})
            # Modules may share variables with the model, but no arrays.
            objects = dict(model=model, modules=nnx.List(modules), optimizer=optimizer)
            states = nnx.to_pure_dict(nnx.state(nnx.Dict(objects)))
            return states, arrays | {"modules": states.pop("modules", {})}

        metrics: Metrics = call_step(
            lambda: step(model, optimizer, batch, *args),
            "train_step",
            arguments,
            look_first=is_new and jit and donate,
        )
        known.set(optimizer)
        return metrics

    return train_step


def _check(options: Options, model: Any, optimizer: Any) -> None:
    """Raises a TypeError unless these are a model and an optimizer that fit a step."""
    expected = "an nnx.Module. For Linen use make_train_step."
    check_type(model, nnx.Module, "train_step: model", expected)
    expected = "a flax_amp.AmpOptimizer, made with AmpOptimizer(model, tx)."
    check_type(optimizer, nnx.Optimizer, "train_step: optimizer", expected)
    word = _word_of(options, optimizer)
    if isinstance(optimizer, AmpOptimizer):
        warn_if_unscaled(word, pure(optimizer.scaler), stacklevel=4)
    elif needs_scale(word):
        raise TypeError(
            "train_step: the optimizer has no loss scaler, without which gradients "
            "below 6e-8 become zero in float16; expected a flax_amp.AmpOptimizer. Make "
            "it with AmpOptimizer(model, tx, wrt=wrt, precision='16-mixed')."
        )


def _word_of(options: Options, optimizer: Any) -> Precision:
    """Returns the precision of a step: its own, or that of the optimizer."""
    own = optimizer.precision if isinstance(optimizer, AmpOptimizer) else "bf16-mixed"
    return options.precision or own


def _step(
    options: Options,
    model: nnx.Module,
    optimizer: nnx.Optimizer,
    batch: PyTree,
    *args: PyTree,
) -> Metrics:
    # Micro-batches split an nnx.Variable by itself, since it may hold examples.
    in_batch = _WHOLE_NODES if options.accum_steps == 1 else (nnx.Pytree,)
    modules, batch = _take_out(in_batch, batch)
    more_modules, args = _take_out(_WHOLE_NODES, args)
    # One Dict holds the model and the modules of the inputs. `model` sorts before
    # `others`, so state that both share gets its path in the model.
    whole = nnx.Dict(model=model, others=nnx.List(modules + more_modules))
    task = _task(options, whole, optimizer)
    selected, metrics = run_step(options, task, batch, args)
    nnx.update((whole, optimizer), selected)
    return metrics


def _task(options: Options, whole: nnx.Dict, optimizer: Any) -> Task:
    """Returns what a step trains, of a model with other modules, and its optimizer."""
    wrt = optimizer.wrt
    # By path: `wrt` must not select parameters of the other modules in `whole`.
    flat = nnx.to_flat_state(nnx.state(whole.model, wrt))
    trained = {("model", *path) for path, _ in flat}
    graphdef, params, variables = split_model(whole, lambda path, _: path in trained)
    may_be_half = rounds_parameters(pure(optimizer.opt_state))
    check_selection(params, wrt, "train_step")
    check_params(params["model"], "train_step", may_be_half=may_be_half)
    # The update changes a copy in place.
    copy_def, old = nnx.split((whole, optimizer))
    new_whole, new_optimizer = nnx.merge(copy_def, old, copy=True)
    is_amp = isinstance(optimizer, AmpOptimizer)
    scaler = pure(optimizer.scaler) if is_amp else no_scaler()

    def view(tree: PyTree) -> nnx.State:
        """Returns a tree like the parameters as `nnx.grad` would."""
        state = nnx.state(nnx.clone(whole.model), wrt)
        nnx.replace_by_pure_dict(state, tree["model"])
        return state

    def update(grads: PyTree, variables: PyTree) -> tuple[nnx.State, PyTree]:
        finite = {"finite": True} if is_amp else {}
        new_optimizer.update(new_whole.model, view(grads), **finite)
        nnx.update(new_whole, variables)
        new = nnx.state((new_whole, new_optimizer))
        _, params, _ = split_model(new_whole, lambda path, _: path in trained)
        return new, params

    def finish(
        selected: nnx.State, finite: Array, scaler: Scaler
    ) -> tuple[nnx.State, Metrics]:
        nnx.update((new_whole, new_optimizer), selected)
        if is_amp:
            nnx.update(new_optimizer, {"scaler": scaler})
        more: Metrics = {}
        before = pure(optimizer.opt_state)
        if isinstance(before, optax.ApplyIfFiniteState):
            counters = counted(before, finite)
            nnx.update(new_optimizer, {"opt_state": counters})
            more["skipped_total"] = counters["total_notfinite"]
        more |= hyperparam_metrics(new_optimizer.opt_state)
        return nnx.state((new_whole, new_optimizer)), more

    def loss_fn(whole: nnx.Dict, *inputs: PyTree) -> PyTree:
        inputs = _tree.replace_nodes(inputs, _Placeholder, whole.others)
        return options.loss_fn(whole.model, *inputs)

    of_whole = options._replace(loss_fn=named_after(loss_fn, options.loss_fn))
    return Task(
        precision=_word_of(options, optimizer),
        loss=pure_loss(of_whole, model_state(graphdef, params, variables)),
        params=params,
        variables=variables,
        rngs={},
        scaler=check_scaler(scaler, "train_step: optimizer.scaler"),
        old=old,
        update=update,
        finish=finish,
        subject=lambda: nnx.clone(whole.model),
        view=view,
    )


# What is no batch of examples: it is taken out of the inputs of a loss as it is.
_WHOLE_NODES = (nnx.Pytree, nnx.Variable)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Placeholder:
    """Stands for a module in the inputs of a loss.

    It is static, so no transformation changes it.
    """


def _take_out(kinds: tuple[type, ...], tree: PyTree) -> tuple[list[Any], PyTree]:
    """Returns the modules in a tree, and the tree with placeholders for them."""
    modules = _tree.nodes(tree, kinds)
    return modules, _tree.replace_nodes(tree, kinds, [_Placeholder()] * len(modules))


def _copy_repeated_arrays(model: nnx.Module, optimizer: nnx.Optimizer) -> None:
    """Copies arrays of the optimizer that are in the model too, or in itself twice.

    The first state of some optimizers, such as `optax.contrib.mechanize`, holds the
    parameters themselves, and a buffer must not be donated twice. An error would ask
    each user to know that.
    """
    seen = set(map(id, jax.tree.leaves(nnx.state(model))))

    def own(leaf: Any) -> Any:
        leaf = _tree.own(leaf) if id(leaf) in seen else leaf
        seen.add(id(leaf))
        return leaf

    nnx.update(optimizer, jax.tree.map(own, nnx.state(optimizer)))
