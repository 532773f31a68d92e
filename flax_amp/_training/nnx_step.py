"""`make_nnx_train_step`: the step of loops with their own `nnx.Optimizer`.

The step itself is `core.run_step`. This module adapts a model, its optimizer and the
modules in the batch to it. It lets `run_step` train the model as a state that lives for
one step, and writes what that selects back into the objects of the user.
"""

import dataclasses
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.typing import DTypeLike

from flax_amp import _tree
from flax_amp._rewriter.rewritten import rewritten
from flax_amp._training.arguments import (
    AxisName,
    Batch,
    Metrics,
    Options,
    PyTree,
    UserFn,
    call_checked,
    check_nnx,
    check_options,
    check_params,
    check_selection,
)
from flax_amp._training.core import Decision, Update, run_step
from flax_amp._training.loss import named_after
from flax_amp._training.optimizer import (
    apply_if_finite_counters,
    count_skips,
    explain_update,
    hyperparam_metrics,
)
from flax_amp._training.precision import (
    Precision,
    UnscaledWarning,
    amp_by_precision,
    check_precision,
    first_scaler,
)
from flax_amp._training.scaler import SKIP_COUNTS, Scaler, validate_scaler
from flax_amp._training.step_call import Step, explain_deleted, explain_failure
from flax_amp._training.train_state import AmpTrainState, split_model
from flax_amp.optim._optimizer import pure
from flax_amp.optim._small_state import rounds_parameters
from flax_amp.policy import MatmulDType, Policy, PolicyEntries


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
    matmul_dtype: MatmulDType = None,
    amp_policy: PolicyEntries | None = None,
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
        updated like the model, but do not train. A loss that is already
        `flax_amp.amp(...)` is taken as it is.
      has_aux: `loss_fn` returns `(loss, aux)`, where `aux` is a dict of metrics, or any
        other pytree, which becomes the metric `aux`.
      precision: what to compute in, and the scaler to start with: "bf16-mixed",
        "16-mixed", "32-true" or "fp8-mixed", as in `AmpTrainState.create`.
      compute_dtype: what to compute in, instead of `precision`.
      matmul_dtype: what matrix products run in, instead of `precision`; see
        `flax_amp.amp`.
      amp_policy: see `flax_amp.amp`.
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
    options = check_options(
        loss_fn,
        "make_nnx_train_step",
        keywords=(),
        has_aux=has_aux,
        amp=amp_by_precision(
            loss_fn,
            "make_nnx_train_step",
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
    # Of this step function, not of the scaler: a plain dict cannot hold a flag.
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
        check_nnx(model, optimizer)
        if first and jit and donate:
            _copy_repeated_arrays(model, optimizer)
        # The word for the precision stands in one place. A scaler could not hold it,
        # because it is a plain dict of arrays.
        scaler = first_scaler(precision) if scaler is None else scaler

        def arguments() -> tuple[dict[str, PyTree], dict[str, PyTree]]:
            # Modules among the inputs may share variables with the model.
            nodes = {"model": model, "optimizer": optimizer}
            states = {name: nnx.to_pure_dict(nnx.state(nodes[name])) for name in nodes}
            _, arrays = _take_out(_WHOLE_NODES, {"batch": batch, "args": args})
            return states | {"scaler": scaler}, arrays

        with explain_deleted("train_step", "scaler", scaler):
            # Values on the device are checked in the first step only: later, that would
            # wait for the step before.
            scaler = _complete_with_counts(scaler, wait=first)
            first = False
            warn_if_unscaled(precision, scaler, stacklevel=3)
            if not jit:
                return step(model, optimizer, scaler, batch, *args)
            with explain_failure("train_step", donate, arguments):
                return step(model, optimizer, scaler, batch, *args)

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
    in_batch = _WHOLE_NODES if options.accum_steps == 1 else (nnx.Pytree,)
    modules, batch = _take_out(in_batch, batch)
    more_modules, args = _take_out(_WHOLE_NODES, args)
    # One Dict holds the model and the modules of the inputs. `model` sorts before
    # `others`, so state that both share gets its path in the model.
    whole = nnx.Dict(model=model, others=nnx.List(modules + more_modules))
    adapter = _ModelAdapter(whole, optimizer, scaler)
    # By path: `wrt` must not select parameters of the other modules in `whole`.
    trained = {
        ("model", *path)
        for path, _ in nnx.to_flat_state(nnx.state(model, optimizer.wrt))
    }
    graphdef, params, variables = split_model(whole, lambda path, _: path in trained)
    check_selection(params, optimizer.wrt, "train_step")
    may_be_half = rounds_parameters(optimizer.opt_state)
    check_params(params["model"], "train_step", may_be_half=may_be_half)
    # It lives for this step only. The adapter has the state of the optimizer.
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
    return run_step(options, state, batch, args, adapter)


class _ModelAdapter:
    """A model, the modules of its inputs and its optimizer as what `run_step` trains.

    The step updates them, finite or not, and then writes the selected state into them.
    """

    reserved_names: tuple[str, ...] = ()

    def __init__(self, whole: nnx.Dict, optimizer: nnx.Optimizer, scaler: Scaler):
        self._whole, self._optimizer, self._scaler = whole, optimizer, scaler
        # Now: the update and `finish` change the objects.
        self._before = _copy_state((whole, optimizer))
        self._opt_state = pure(optimizer.opt_state)

    def update(self, grads: PyTree, variables: PyTree, scaler: Scaler) -> Update:
        model, optimizer, wrt = self._whole.model, self._optimizer, self._optimizer.wrt
        state = nnx.state(model, wrt)
        nnx.replace_by_pure_dict(state, grads["model"])
        # The update changes the model in place. The copy has the same arrays.
        old = nnx.clone(model)
        tx, opt_state = optimizer.tx, optimizer.opt_state
        with explain_update("make_nnx_train_step", tx, opt_state, state):
            optimizer.update(model, state)
        _set_variables(self._whole, variables)
        after = _copy_state((self._whole, optimizer))
        params = nnx.state(old, wrt), nnx.state(model, wrt)
        return Update(self._before, after, old, state, params)

    def finish(
        self, update: Update, decision: Decision
    ) -> tuple[Scaler, Scaler, dict[str, PyTree]]:
        """Writes what was selected; lets scaler and skip counters advance."""
        nnx.update((self._whole, self._optimizer), decision.selected)
        opt_state = self._optimizer.opt_state
        more = hyperparam_metrics(opt_state)
        scaler = decision.select_scaler(self._scaler)
        # It has them, unless it is a carry that came without (`_complete_with_counts`).
        if SKIP_COUNTS[0] in self._scaler:
            in_a_row, total = map(self._scaler.__getitem__, SKIP_COUNTS)
            counted = count_skips(in_a_row, total, decision.applied)
            scaler |= dict(zip(SKIP_COUNTS, counted, strict=True))
            more["skipped_total"] = scaler["skipped_total"]
        # `check_progress` reads these counters.
        if isinstance(self._opt_state, optax.ApplyIfFiniteState):
            counters = apply_if_finite_counters(self._opt_state, decision.applied)
            for name, value in counters.items():
                getattr(opt_state, name).set_value(value)
            more["skipped_total"] = counters["total_notfinite"]
        return scaler, scaler, more


def _complete_with_counts(given: Any, *, wait: bool) -> Scaler:
    """Returns a checked scaler with its counts of skipped steps.

    A scaler that lacks them gets new ones. A traced scaler does not: it may be the
    carry of a loop, whose keys must not change.
    """
    scaler = validate_scaler(given, "train_step: scaler", wait=wait)
    kept = [key for key in SKIP_COUNTS if key in given]
    counts = {key: jnp.asarray(given[key], jnp.int32) for key in kept}
    old = scaler["count"]
    if len(counts) < len(SKIP_COUNTS) and not isinstance(old, jax.core.Tracer):
        # `count - count` is a zero on the devices of the scaler, without a transfer.
        counts = {key: old - old for key in SKIP_COUNTS} | counts
    return scaler | counts


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
