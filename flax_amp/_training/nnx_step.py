"""`make_nnx_train_step`: the training step of a model and its optimizer.

It is the step of a train state, `core.run_step`: the state is read from the objects,
and the new one is written back into them last of all, so an error leaves them as they
were.
"""

import dataclasses
import functools
import weakref
from collections.abc import Callable
from typing import Any, Self

import jax
from flax import nnx, struct

from flax_amp import _tree
from flax_amp._rewriter.rewritten import rewritten
from flax_amp._training.arguments import (
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
from flax_amp._training.core import run_step
from flax_amp._training.loss import with_name_of
from flax_amp._training.optimizer import AmpOptimizer
from flax_amp._training.scaler import needs_scale, no_scaler, warn_if_unscaled
from flax_amp._training.step_call import copy_aliases, reraise_with_path
from flax_amp._training.train_state import AmpTrainState, bare_state, split_model
from flax_amp.optim._optimizer import pure
from flax_amp.optim._small_state import rounds_parameters
from flax_amp.policy import PolicyEntries, Precision


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
) -> Callable[..., Metrics]:
    """Makes a training step that updates a model and its optimizer in place.

    It does what the step of `make_train_step` does. A step that is not finite changes
    neither model nor optimizer, but for the optimizer's `step`, which counts skipped
    steps, too, and the scaler and the counters of a `flax_amp.AmpOptimizer`.

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
      a `flax_amp.AmpOptimizer` or an `optax.apply_if_finite`, there is no
      `skipped_total`.

    Raises:
      TypeError, ValueError, RuntimeError: as `make_train_step`; a TypeError also where
        a plain `nnx.Optimizer` comes with float16, which needs a scaler.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
      >>> optimizer = AmpOptimizer(model, optax.sgd(0.1))
      >>> train_step = make_nnx_train_step(lambda model, x: (model(x) ** 2).mean())
      >>> metrics = train_step(model, optimizer, jnp.ones((4, 3)))
      >>> int(optimizer.step[...]), bool(metrics["grads_finite"])
      (1, True)
    """
    options = check_options(
        "make_nnx_train_step",
        loss_fn,
        precision,
        amp_policy,
        redo_on_nan,
        accum_steps,
        has_aux=has_aux,
        axis_name=axis_name,
        metrics_fn=metrics_fn,
    )
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
            _check(options, model, optimizer)
            if jit and donate:
                modules, inputs = _take_out(_WHOLE_NODES, (batch, args))
                old = nnx.state((model, optimizer))
                new = copy_aliases(old, (nnx.state(modules), inputs))
                nnx.update((model, optimizer), new)
        try:
            metrics: Metrics = step(model, optimizer, batch, *args)
        except (RuntimeError, ValueError) as error:
            given = dict(model=model, optimizer=optimizer, batch=batch, args=args)
            reraise_with_path(error, "train_step", **given)
        last = weakref.ref(optimizer)
        return metrics

    return train_step


def _check(options: Options, model: Any, optimizer: Any) -> None:
    """Raises a TypeError unless these are a model and an optimizer that fit a step."""
    expected = "an nnx.Module. For Linen use make_train_step."
    check_type(model, nnx.Module, "train_step: model", expected)
    expected = "a flax_amp.AmpOptimizer, made with AmpOptimizer(model, tx)."
    check_type(optimizer, nnx.Optimizer, "train_step: optimizer", expected)
    precision = options.precision or _precision_of(optimizer)
    if isinstance(optimizer, AmpOptimizer):
        warn_if_unscaled(precision, pure(optimizer.scaler), stacklevel=4)
    elif needs_scale(precision):
        raise TypeError(
            "train_step: the optimizer has no loss scaler, without which gradients "
            "below 6e-8 become zero in float16; expected a flax_amp.AmpOptimizer. Make "
            "it with AmpOptimizer(model, tx, wrt=wrt, precision='16-mixed')."
        )


def _precision_of(optimizer: nnx.Optimizer) -> Precision:
    return optimizer.precision if isinstance(optimizer, AmpOptimizer) else "bf16-mixed"


def _step(
    options: Options,
    model: nnx.Module,
    optimizer: nnx.Optimizer,
    batch: PyTree,
    *args: PyTree,
) -> Metrics:
    # A bare nnx.Variable in the batch may hold examples, so it is split.
    in_batch = _WHOLE_NODES if options.accum_steps == 1 else (nnx.Pytree,)
    others, batch = _take_out(in_batch, batch)
    more_others, args = _take_out(_WHOLE_NODES, args)
    # What several of them share has its path in the one that sorts first: `model`,
    # `others`, `optimizer`.
    modules = nnx.Dict(model=model, others=nnx.List(others + more_others))
    objects = nnx.Dict(modules=modules, optimizer=optimizer)
    options = _adapted(options, objects)
    new, metrics = run_step(options, _read(objects), batch, args)
    new.write_back()
    return metrics


def _adapted(options: Options, objects: nnx.Dict) -> Options:
    """Returns options whose functions take the modules of a state, not the model."""
    loss_fn, metrics_fn = options.loss_fn, options.metrics_fn

    def loss_of_modules(modules: nnx.Dict, *inputs: PyTree) -> PyTree:
        inputs = _tree.replace_nodes(inputs, _Placeholder, modules.others)
        return loss_fn(modules.model, *inputs)

    options = options._replace(loss_fn=with_name_of(loss_fn, loss_of_modules))
    if metrics_fn is None:
        return options

    def metrics_of_state(state: PyTree, *trees: PyTree) -> PyTree:
        model = nnx.clone(objects.modules.model)
        return metrics_fn(model, *(_as_nnx(objects, tree) for tree in trees))

    return options._replace(metrics_fn=metrics_of_state)


class _ObjectsState(AmpTrainState):
    """A model, the modules beside it and their optimizer as a state, for one step.

    `params` and `variables` are of the modules, `step`, `opt_state` and `scaler` of the
    optimizer. `rest` is what else that holds, such as what a subclass adds.
    """

    rest: PyTree
    objects: nnx.Dict = struct.field(pytree_node=False)

    def apply_gradients(  # type: ignore[override]
        self, *, grads: PyTree, variables: PyTree, finite: bool
    ) -> Self:
        """Returns the state after an update of copies of the objects."""
        new = nnx.clone(self.objects)
        nnx.update(new.modules, variables)
        given = {"finite": finite} if isinstance(new.optimizer, AmpOptimizer) else {}
        new.optimizer.update(new.modules.model, _as_nnx(new, grads), **given)
        return self.replace(**_arrays_of(new))

    def write_back(self) -> None:
        """Writes the arrays into the objects."""
        optimizer = self.objects.optimizer
        nnx.update(self.objects.modules, self.params)
        nnx.update(self.objects.modules, self.variables)
        nnx.update(self.objects, self.rest)
        nnx.update(optimizer.opt_state, nnx.state(self.opt_state))
        held: dict[str, Any] = {"step": self.step}
        if isinstance(optimizer, AmpOptimizer):
            held["scaler"] = self.scaler
        nnx.update(optimizer, held)


def _read(objects: nnx.Dict) -> _ObjectsState:
    """Returns the state of objects, after checking what trains."""
    optimizer = objects.optimizer
    arrays = _arrays_of(objects)
    check_selection(arrays["params"], optimizer.wrt, "train_step")
    may_be_half = rounds_parameters(arrays["opt_state"])
    check_params(arrays["params"]["model"], "train_step", may_be_half=may_be_half)
    is_amp = isinstance(optimizer, AmpOptimizer)
    return bare_state(
        _ObjectsState,
        **arrays,
        scaler=pure(optimizer.scaler) if is_amp else no_scaler(),
        precision=_precision_of(optimizer),
        objects=objects,
    )


def _arrays_of(objects: nnx.Dict) -> dict[str, Any]:
    """Returns the fields of a state that a step reads from objects."""
    modules, optimizer = objects.modules, objects.optimizer
    # By path: `wrt` must not select parameters of the other modules.
    flat = nnx.to_flat_state(nnx.state(modules.model, optimizer.wrt))
    trained = {("model", *path) for path, _ in flat}
    graphdef, params, variables = split_model(modules, lambda path, _: path in trained)

    def is_rest(path: Any, _: Any) -> bool:
        fields = ("step", "opt_state", "scaler")
        return path[0] == "optimizer" and path[1] not in fields

    return dict(
        step=pure(optimizer.step),
        graphdef=graphdef,
        params=params,
        variables=variables,
        opt_state=pure(optimizer.opt_state),
        rest=nnx.to_pure_dict(nnx.state(objects, is_rest)),
    )


def _as_nnx(objects: nnx.Dict, tree: PyTree) -> nnx.State:
    """Returns a tree like the parameters as `nnx.grad` would."""
    state = nnx.state(nnx.clone(objects.modules.model), objects.optimizer.wrt)
    nnx.replace_by_pure_dict(state, tree["model"])
    return state


# Types that are replaced by placeholders in the inputs of a loss, and not split.
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
