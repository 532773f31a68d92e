"""The training step for loops with their own `nnx.Optimizer`."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.typing import DTypeLike

from flax_amp import _tree
from flax_amp._rewriter.recompute.regions import Recompute
from flax_amp._rewriter.rewritten import rewritten
from flax_amp._training.aliases import (
    AxisName,
    Batch,
    Metrics,
    PyTree,
    UserFn,
    check_type,
)
from flax_amp._training.finite import apply_if_finite_counters, count_skips
from flax_amp._training.gradients import (
    Options,
    complete_grads,
    compute_gradients,
    explain_update,
    make_metrics,
    make_options,
    measure_update,
    select_scaler,
    select_update,
)
from flax_amp._training.hyperparams import hyperparam_metrics
from flax_amp._training.loss import call_checked, named_after
from flax_amp._training.precision import (
    Precision,
    UnscaledWarning,
    check_precision,
    first_scaler,
)
from flax_amp._training.scaler import SKIP_COUNTS, Scaler, validate_scaler
from flax_amp._training.step_call import (
    Step,
    check_distinct,
    explain_deleted,
    explain_leaves,
    has_several_devices,
)
from flax_amp._training.train_state import (
    AmpTrainState,
    check_params,
    check_selection,
    split_model,
)
from flax_amp.optim._optimizer import pure
from flax_amp.policy import PolicyEntries


class NnxTrainStep(Protocol):
    """A training step that updates a model and its optimizer in place."""

    def __call__(
        self,
        model: nnx.Module,
        optimizer: nnx.Optimizer,
        scaler: Scaler | None,
        batch: Batch,
        *args: PyTree,
    ) -> tuple[Scaler, Metrics]: ...


def make_nnx_train_step(
    loss_fn: UserFn,
    *,
    has_aux: bool = False,
    precision: Precision = "bf16-mixed",
    compute_dtype: DTypeLike | None = None,
    amp_policy: PolicyEntries | None = None,
    recompute: Recompute = "auto",
    reduce_dtype: DTypeLike | None = None,
    merge_layers: bool = True,
    redo_on_nan: int = 0,
    accum_steps: int = 1,
    axis_name: AxisName = None,
    metrics_fn: UserFn | None = None,
    check_update: bool = True,
    donate: bool = True,
    jit: bool = True,
) -> NnxTrainStep:
    """Makes a training step that updates a model and its `nnx.Optimizer` in place.

    It does what the step of `make_train_step` does, for a model and an optimizer of
    your own. A step that is not finite changes neither of them, not even the
    optimizer's own `step`.

    Args:
      loss_fn: `loss_fn(model, batch, *args)`, which returns a scalar float loss, where
        `args` are the further arguments of the step, if there are any. Modules in the
        batch or in `args`, such as an `nnx.Rngs` or an `nnx.metrics.Metric`, are
        updated like the model, but do not train.
      has_aux: `loss_fn` returns `(loss, aux)`, where `aux` is a dict of metrics, or any
        other pytree, which becomes the metric `aux`.
      precision: what to compute in, and the scaler to start with: "bf16-mixed",
        "16-mixed" or "32-true", as in `AmpTrainState.create`.
      compute_dtype: what to compute in, instead of `precision`.
      amp_policy, recompute, reduce_dtype, merge_layers: see `flax_amp.amp`.
      redo_on_nan, accum_steps, axis_name: see `make_train_step`.
      metrics_fn: `metrics_fn(model, grads, updates)`, as in `make_train_step`. `model`
        is a copy of the model before the update; `grads` and `updates` are an
        `nnx.State` of what trains, as `nnx.grad` returns it.
      check_update: see `make_train_step`.
      donate: let the new arrays reuse the memory of the old ones, which are then
        deleted.
      jit: compile the step, with `nnx.jit`.

    Returns:
      `train_step(model, optimizer, scaler, batch, *args) -> (scaler, metrics)`. The
      `wrt` of the optimizer selects what trains. The first scaler is `None`, for that
      of `precision`, or a dict as from `flax_amp.init_scaler`; pass the returned scaler
      to the next step. It has two more keys, `skipped_total` and `skipped_in_a_row`,
      which `check_progress((optimizer, scaler))` reads; they are added unless the
      scaler is traced, as a carry of `jax.lax.scan` is, whose keys must not change. The
      metrics are those of `make_train_step`.

    Raises:
      TypeError: if an argument is of a wrong kind; when called, if the model, the
        optimizer or the result of the loss is not what is expected.
      ValueError: as `make_train_step`, or if `precision` is another word; when called,
        if a parameter is not float32.
      RuntimeError: when called, if an earlier step has deleted the scaler.

    Example:
      >>> import jax.numpy as jnp
      >>> import optax
      >>> model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
      >>> optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
      >>> train_step = make_nnx_train_step(lambda model, x: (model(x) ** 2).mean())
      >>> scaler = None
      >>> scaler, metrics = train_step(model, optimizer, scaler, jnp.ones((4, 3)))
      >>> int(optimizer.step[...]), bool(metrics["grads_finite"])
      (1, True)
    """
    precision = check_precision(precision, "make_nnx_train_step: precision")
    options = make_options(
        loss_fn,
        "make_nnx_train_step",
        keywords=(),
        has_aux=has_aux,
        compute_dtype=compute_dtype,
        amp_policy=amp_policy,
        recompute=recompute,
        reduce_dtype=reduce_dtype,
        merge_layers=merge_layers,
        redo_on_nan=redo_on_nan,
        accum_steps=accum_steps,
        axis_name=axis_name,
        metrics_fn=metrics_fn,
        check_update=check_update,
    )

    def pure_step(
        model: nnx.Module,
        optimizer: nnx.Optimizer,
        scaler: Scaler,
        batch: Batch,
        *args: PyTree,
    ) -> tuple[Scaler, Metrics]:
        return _step(options, precision, model, optimizer, scaler, batch, args)

    step = pure_step
    if jit:
        step = nnx.jit(pure_step, donate_argnums=(0, 1, 2) if donate else ())

    warn_if_unscaled = UnscaledWarning(compute_dtype)
    first = True

    @rewritten
    def train_step(
        model: nnx.Module,
        optimizer: nnx.Optimizer,
        scaler: Scaler | None,
        batch: Batch,
        *args: PyTree,
    ) -> tuple[Scaler, Metrics]:
        nonlocal first
        _check(model, optimizer)
        if first and jit and donate:
            _copy_repeated_arrays(model, optimizer)
        scaler = first_scaler(precision) if scaler is None else scaler
        with explain_deleted("train_step", "scaler", scaler):
            # Values on the device are checked in the first step only: later, that would
            # wait for the step before.
            counts = _skip_counts(scaler)
            scaler = validate_scaler(scaler, "train_step: scaler", wait=first)
            scaler = _with_counts(scaler, counts)
            first = False
            warn_if_unscaled(precision, scaler, stacklevel=3)
            if not jit:
                return step(model, optimizer, scaler, batch, *args)
            inputs = {"batch": batch, "args": args}
            if donate and has_several_devices():
                _check_distinct(model, optimizer, scaler, inputs)
            try:
                return step(model, optimizer, scaler, batch, *args)
            except (RuntimeError, TypeError, ValueError):
                with explain_leaves("train_step", inputs):
                    if donate:
                        _check_distinct(model, optimizer, scaler, inputs)
                    raise

    return Step(train_step)


def _step(
    options: Options,
    precision: Precision,
    model: nnx.Module,
    optimizer: nnx.Optimizer,
    scaler: Scaler,
    batch: Batch,
    args: tuple[PyTree, ...],
) -> tuple[Scaler, Metrics]:
    # Micro-batches split an nnx.Variable by itself, since it may hold examples.
    whole_nodes = (nnx.Pytree, nnx.Variable)
    in_batch = whole_nodes if options.accum_steps == 1 else (nnx.Pytree,)
    modules, batch = _take_out(in_batch, batch)
    more_modules, args = _take_out(whole_nodes, args)
    modules += more_modules
    # One Dict holds the model and the modules of the inputs. `model` sorts before
    # `others`, so state that both share gets its path in the model.
    whole = nnx.Dict(model=model, others=nnx.List(modules))
    before = _copy_state((whole, optimizer))
    trained = {
        ("model", *path)
        for path, _ in nnx.to_flat_state(nnx.state(model, optimizer.wrt))
    }
    graphdef, params, variables = split_model(whole, lambda path, _: path in trained)
    check_selection(params, optimizer.wrt, "train_step")
    check_params(params["model"], "train_step")
    state = AmpTrainState(
        step=optimizer.step[...],
        apply_fn=None,  # type: ignore[arg-type]  # as in `create` for a model
        params=params,
        tx=optimizer.tx,
        opt_state=None,
        scaler=scaler,
        variables=variables,
        rngs={},
        graphdef=graphdef,
        precision=precision,
    )

    user_loss_fn = options.loss_fn

    def loss_fn(whole: nnx.Dict, batch: Batch, *args: PyTree) -> PyTree:
        inputs = _tree.replace_nodes((batch, *args), _Placeholder, whole.others)
        return call_checked(user_loss_fn, whole.model, *inputs)

    loss_fn.__name__ = getattr(user_loss_fn, "__name__", "loss_fn")
    options = options._replace(loss_fn=named_after(loss_fn, user_loss_fn))
    moved_scaler, finite, result = compute_gradients(options, state, batch, args)
    grads = nnx.state(model, optimizer.wrt)
    nnx.replace_by_pure_dict(grads, complete_grads(result, params)["model"])
    old_counters = pure(optimizer.opt_state)
    old = model if options.metrics_fn is None else nnx.clone(model)
    with explain_update(options.caller, optimizer.tx, optimizer.opt_state, grads):
        optimizer.update(model, grads)
    weights = (nnx.state(node, optimizer.wrt) for node in (old, model))
    measured = measure_update(options, old, grads, *weights)
    _set_variables(whole, _tree.combine(result.variables, variables))

    after = _copy_state((whole, optimizer))
    applied, selected = select_update(options, finite, after, before)
    nnx.update((whole, optimizer), selected)
    more = hyperparam_metrics(optimizer.opt_state)
    new_scaler = select_scaler(applied, finite, moved_scaler, state.scaler)
    if SKIP_COUNTS[0] in scaler:
        in_a_row, total = map(scaler.__getitem__, SKIP_COUNTS)
        counted = count_skips(in_a_row, total, applied)
        new_scaler |= dict(zip(SKIP_COUNTS, counted, strict=True))
        more["skipped_total"] = new_scaler["skipped_total"]
    if isinstance(old_counters, optax.ApplyIfFiniteState):  # which check_progress reads
        counters = apply_if_finite_counters(old_counters, applied)
        for name, value in counters.items():
            getattr(optimizer.opt_state, name).set_value(value)
        more["skipped_total"] = counters["total_notfinite"]
    return new_scaler, make_metrics(
        options, new_scaler, applied, result, measured, **more
    )


def _check_distinct(
    model: nnx.Module, optimizer: nnx.Optimizer, scaler: Scaler, inputs: PyTree
) -> None:
    """Raises a ValueError if an array that a step donates is among its inputs, too.

    Modules among the inputs may share variables with the model.
    """
    nodes = {"model": model, "optimizer": optimizer}
    states = {name: nnx.to_pure_dict(nnx.state(node)) for name, node in nodes.items()}
    _, arrays = _take_out((nnx.Pytree, nnx.Variable), inputs)
    check_distinct("train_step", states | {"scaler": scaler}, arrays)


def _skip_counts(scaler: Any) -> Scaler:
    """Returns the counts of skipped steps that are in a scaler."""
    if not isinstance(scaler, Mapping):
        return {}
    kept = [key for key in SKIP_COUNTS if key in scaler]
    return {key: jnp.asarray(scaler[key], jnp.int32) for key in kept}


def _with_counts(scaler: Scaler, counts: Scaler) -> Scaler:
    """Returns a scaler with its counts, or with new ones unless it is traced."""
    old = scaler["count"]
    if len(counts) < len(SKIP_COUNTS) and not isinstance(old, jax.core.Tracer):
        # `count - count` is a zero on the devices of the scaler, without a transfer.
        counts = {key: old - old for key in SKIP_COUNTS} | counts
    return scaler | counts


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
    parameters themselves, and a buffer must not be donated twice.
    """
    seen = set(map(id, jax.tree.leaves(nnx.state(model))))
    state = nnx.state(optimizer)
    leaves, structure = jax.tree.flatten(state)
    if len(seen.union(map(id, leaves))) == len(seen) + len(leaves):
        return
    copies = []
    for leaf in leaves:
        copies.append(_tree.own(leaf) if id(leaf) in seen else leaf)
        seen.add(id(leaf))
    nnx.update(optimizer, jax.tree.unflatten(structure, copies))


def _copy_state(node: Any) -> nnx.State:
    """Returns the state of a node, in Variable objects that the node does not share."""
    return jax.tree.map(lambda leaf: leaf, nnx.state(node))


def _set_variables(model: nnx.Module, variables: PyTree) -> None:
    """Writes the variables of `split_model` into a model."""
    paths = set(nnx.traversals.flatten_mapping(variables))
    state = nnx.state(model, lambda path, _: path in paths)
    nnx.replace_by_pure_dict(state, variables)
    nnx.update(model, state)


def _check(model: object, optimizer: object) -> None:
    expected = "an nnx.Module. For Linen use make_train_step."
    check_type(model, nnx.Module, "train_step: model", expected)
    if not isinstance(optimizer, nnx.Optimizer) or hasattr(optimizer, "model"):
        raise TypeError(
            f"train_step: optimizer is a {type(optimizer).__name__}; expected an "
            "nnx.Optimizer. Make it with nnx.Optimizer(model, tx, wrt=nnx.Param)."
        )
