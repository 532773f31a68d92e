"""`make_nnx_train_step`: the training step of a model and its optimizer.

This step is the step of a train state. The state is read from the objects, and the new
state is written back into the objects last of all, so an error leaves the objects as
they were.
"""

import functools
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Self

from flax import nnx, struct

from flax_amp._checks import check_type
from flax_amp._rewriter.transform import rewritten
from flax_amp._training import AxisName, Metrics, PyTree, UserFn
from flax_amp._training.arguments import Options, check_flags, check_options
from flax_amp._training.core import run_step
from flax_amp._training.loss import with_name_of
from flax_amp._training.optimizer import AmpOptimizer
from flax_amp._training.passes import put_back, take_out
from flax_amp._training.scaler import Scaler, check_scaled, no_scaler
from flax_amp._training.step_call import copy_aliases, naming_arrays
from flax_amp._training.train_state import AmpTrainState, bare_state, split_model
from flax_amp.optim._extra_args import taken_by, without_refused
from flax_amp.optim._optimizer import pure
from flax_amp.policy import PolicyEntries, Precision


def make_nnx_train_step(
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
    donate: bool = True,
    jit: bool = True,
) -> Callable[..., Metrics]:
    """Makes a training step that updates a model and its optimizer in place.

    The step does the same as the step of `make_train_step`. The loss may write any
    variable of the model, as `nnx.SpectralNorm` writes a kernel that trains: the
    written value is kept, and the optimizer updates the written kernel. A step that is
    skipped changes neither model nor optimizer, but for the optimizer's `step`, which
    counts skipped steps, too, and the scaler and the counters of a
    `flax_amp.AmpOptimizer`.

    Args:
      loss_fn: `loss_fn(model, batch, *args)`, which returns a scalar float loss.
        Modules in the batch or in `args`, such as an `nnx.Rngs` or an
        `nnx.metrics.Metric`, are updated like the model, but neither train nor split.
      precision: the precision to compute in, which wins over the `precision` of the
        optimizer. A plain `nnx.Optimizer` has no precision: the default is then
        "bf16-mixed".
      has_aux, amp_policy, reduce_in_float32, redo_on_nan, accum_steps, axis_name: see
        `make_train_step`.
      metrics_fn: `metrics_fn(model, grads, updates)`, as in `make_train_step`. `model`
        is a copy of the model before the update; `grads` and `updates` are an
        `nnx.State` of the variables that train, as from `nnx.grad`.
      donate: let the new arrays reuse the memory of the old arrays, which are then
        deleted, also in an `nnx.clone` of the model: copy the arrays of a teacher.
      jit: compile the step, with `nnx.jit`.

    Returns:
      `train_step(model, optimizer, batch, *args) -> metrics`. The `wrt` of the
      optimizer selects the variables that train. The metrics are the same as with
      `make_train_step`; without a `flax_amp.AmpOptimizer` or an
      `optax.apply_if_finite`, there is no `skipped_total`. The step raises the same
      errors as with `make_train_step`; float16 needs the scaler of a
      `flax_amp.AmpOptimizer`.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
      >>> optimizer = AmpOptimizer(model, optax.sgd(0.1))
      >>> train_step = make_nnx_train_step(lambda model, x: (model(x) ** 2).mean())
      >>> metrics = train_step(model, optimizer, jnp.ones((4, 3)))
      >>> int(optimizer.step[...]), bool(metrics["grads_finite"])
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
    options = Options("make_nnx_train_step", loss_fn, precision, amp_policy, *of_passes)
    options = check_options(options)
    check_flags(options.caller, donate=donate, jit=jit)
    step: Any = functools.partial(_step, options)
    if jit:
        step = nnx.jit(step, donate_argnums=(0, 1) if donate else ())
    last: Any = None  # a reference to the optimizer of the last call

    @rewritten
    def train_step(
        model: nnx.Module, optimizer: nnx.Optimizer, batch: PyTree, *args: PyTree
    ) -> Metrics:
        nonlocal last
        if last is None or last() is not optimizer:
            _check_objects(model, optimizer)
            word, scaler = _precision_and_scaler(optimizer)
            check_scaled(options.precision, word, scaler)
            if jit and donate:
                old = nnx.state((model, optimizer))
                nnx.update((model, optimizer), copy_aliases(old, (batch, args)))
        given = dict(model=model, optimizer=optimizer, batch=batch, args=args)
        with naming_arrays("train_step", **given):
            metrics: Metrics = step(model, optimizer, batch, *args)
        last = weakref.ref(optimizer)
        return metrics

    if jit:  # a function of `nnx.jit` has the attribute, too
        train_step.lower = step.lower  # type: ignore[attr-defined]
    return train_step


_CALL = (
    "train_step(model, optimizer, batch) with optimizer = "
    "flax_amp.AmpOptimizer(model, tx, wrt=nnx.Param)"
)


def _check_objects(model: Any, optimizer: Any) -> None:
    """Raises a TypeError unless these are a model and an optimizer."""
    for name, value in ("model", model), ("optimizer", optimizer):
        # An old class that Flax will remove. A `ModelAndOptimizer` holds its model and
        # updates that model.
        if isinstance(value, getattr(nnx, "ModelAndOptimizer", ())):
            raise TypeError(
                f"train_step: {name} is an nnx.ModelAndOptimizer; expected {_CALL}."
            )
    linen = "an nnx.Module. For Linen use make_train_step."
    if isinstance(model, nnx.Optimizer):
        linen = f"an nnx.Module: {_CALL}."
    check_type(model, nnx.Module, "train_step: model", linen)
    made = "a flax_amp.AmpOptimizer, made with AmpOptimizer(model, tx)."
    check_type(optimizer, nnx.Optimizer, "train_step: optimizer", made)


def _step(
    options: Options, model: nnx.Module, optimizer: Any, batch: PyTree, *args: PyTree
) -> Metrics:
    others, (batch, args) = take_out((batch, args))
    # A Variable that several objects share gets its path from the object that sorts
    # first: the order is `model`, `others`, `optimizer`.
    modules = nnx.Dict(model=model, others=nnx.List(others))
    objects = nnx.Dict(modules=modules, optimizer=optimizer)
    state = bare_state(_ObjectsState, objects=objects, **_fields_of(objects))
    new, metrics = run_step(_adapted(options, objects), state, batch, *args)
    new.write_back()
    return metrics


def _adapted(options: Options, objects: nnx.Dict) -> Options:
    """Returns options whose functions take the modules of a state, not the model."""
    loss_fn = options.loss_fn
    metrics_fn: Any = options.metrics_fn

    def loss_of_modules(modules: nnx.Dict, *inputs: PyTree) -> PyTree:
        return loss_fn(modules.model, *put_back(modules.others, inputs))

    def metrics_of_state(state: PyTree, *trees: PyTree) -> PyTree:
        model = nnx.clone(objects.modules.model)
        return metrics_fn(model, *(_as_nnx(objects, tree) for tree in trees))

    return options._replace(
        loss_fn=with_name_of(loss_fn, loss_of_modules),
        metrics_fn=metrics_fn and metrics_of_state,
    )


class _ObjectsState(AmpTrainState):
    """A model, the modules of the call and the optimizer as a state for one step."""

    optimizer_variables: PyTree  # without `step` and `opt_state`
    objects: nnx.Dict = struct.field(pytree_node=False)

    def apply_gradients(  # type: ignore[override]
        self,
        *,
        grads: PyTree,
        variables: PyTree,
        finite: bool,
        extra_args: Mapping[str, Any],
    ) -> Self:
        """Returns the state after an update of copies of the objects."""

        def updated(**extra: Any) -> nnx.Dict:
            new = nnx.clone(self.objects)
            # The loss may have written parameters, too.
            nnx.update(new.modules, self.params, variables)
            if "grad" in extra:
                extra["grad"] = _as_nnx(new, grads)
            new.optimizer.update(new.modules.model, _as_nnx(new, grads), **extra)
            return new

        optimizer = self.objects.optimizer
        extra = taken_by(optimizer.tx.update, {"grad": grads, **extra_args})
        if isinstance(optimizer, AmpOptimizer):
            extra["finite"] = finite
        # A subclass may have an `update` that takes no extra arguments.
        extra = taken_by(optimizer.update, extra)
        return self.replace(**_fields_of(without_refused(updated, extra)))

    def write_back(self) -> None:
        """Writes the arrays into the objects."""
        optimizer = self.objects.optimizer
        nnx.update(self.objects.modules, self.params, self.variables)
        nnx.update(self.objects, self.optimizer_variables)
        nnx.update(optimizer.opt_state, nnx.state(self.opt_state))
        held: dict[str, Any] = {"step": self.step}
        if isinstance(optimizer, AmpOptimizer):
            held["scaler"] = self.scaler
        nnx.update(optimizer, held)


def _precision_and_scaler(optimizer: nnx.Optimizer) -> tuple[Precision, Scaler]:
    if isinstance(optimizer, AmpOptimizer):
        for key, x in optimizer.scaler.items():
            told = "a Variable: assign optimizer.scaler, or optimizer.scaler[key][...]."
            check_type(x, nnx.Variable, f"train_step: optimizer.scaler[{key!r}]", told)
        return optimizer.precision, pure(optimizer.scaler)
    return "bf16-mixed", {}


def _fields_of(objects: nnx.Dict) -> dict[str, Any]:
    """Returns the fields of a state that a step reads from objects."""
    optimizer = objects.optimizer
    trains = nnx.filterlib.to_predicate(optimizer.wrt)

    def is_trained(path: Any, variable: Any) -> bool:
        return path[0] == "model" and trains(path[1:], variable)

    def is_optimizer_variable(path: Any, _: Any) -> bool:
        return path[0] == "optimizer" and path[1] not in ("step", "opt_state")

    precision, scaler = _precision_and_scaler(optimizer)
    return dict(
        precision=precision,
        scaler=scaler or no_scaler(),
        step=pure(optimizer.step),
        opt_state=pure(optimizer.opt_state),
        optimizer_variables=nnx.to_pure_dict(nnx.state(objects, is_optimizer_variable)),
        **split_model(objects.modules, is_trained),
    )


def _as_nnx(objects: nnx.Dict, tree: PyTree) -> nnx.State:
    """Returns a tree like the parameters as `nnx.grad` would."""
    state = nnx.state(nnx.clone(objects.modules.model), objects.optimizer.wrt)
    nnx.replace_by_pure_dict(state, tree["model"])
    return state
