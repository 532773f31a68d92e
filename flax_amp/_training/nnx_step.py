"""The training step for loops that keep `nnx.Optimizer`."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.typing import DTypeLike

from flax_amp import _tree
from flax_amp._rewriter.nnx_bridge import is_module, is_node
from flax_amp._rewriter.recompute.regions import Recompute
from flax_amp._training.accumulate import AxisName
from flax_amp._training.compiled import explaining_donation
from flax_amp._training.finite import counted
from flax_amp._training.gradients import (
    Options,
    all_gradients,
    explaining_update,
    gradients,
    make_options,
    metrics_of,
)
from flax_amp._training.hyperparams import hyperparam_metrics
from flax_amp._training.scaler import Scaler, checked_scaler
from flax_amp._training.train_state import (
    AmpTrainState,
    check_params,
    check_selection,
    split_model,
)
from flax_amp.optim._variables import pure
from flax_amp.policy import PolicyEntries

PyTree = Any


def make_nnx_train_step(
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
    donate: bool = True,
    jit: bool = True,
) -> Callable[..., tuple[Scaler, dict[str, Any]]]:
    """Makes a training step that updates a model and its `nnx.Optimizer` in place.

    The step of `make_train_step` for loops that keep their own objects. A step that is
    not finite changes nothing in either, the optimizer's own `step` included.

    Args:
      loss_fn: `loss_fn(model, batch)`, which returns a scalar float loss. Modules in
        the batch, such as an `nnx.Rngs` or an `nnx.metrics.Metric`, are updated like
        the model, but do not train.
      has_aux: `loss_fn` returns `(loss, aux)`, where `aux` is a dict of metrics.
      compute_dtype: see `flax_amp.amp`.
      amp_policy: see `flax_amp.amp`.
      recompute: see `flax_amp.amp`.
      reduce_dtype: see `flax_amp.amp`.
      merge_layers: see `flax_amp.amp`.
      redo_on_nan: see `make_train_step`, as for the following ones.
      accum_steps: see there.
      axis_name: see there.
      donate: let the new arrays reuse the memory of the old ones. Say False if the
        optimizer's state begins with the parameters themselves, as that of
        `optax.contrib.mechanize`: a buffer cannot be donated twice.
      jit: compile the step, with `nnx.jit`.

    Returns:
      `train_step(model, optimizer, scaler, batch) -> (scaler, metrics)`. The optimizer
      says by its own `wrt` what trains. The scaler is a dict as from
      `flax_amp.init_scaler`; pass the returned one to the next step. The metrics are
      those of `make_train_step`; `skipped_total` only if the optimizer's `tx` is an
      `optax.apply_if_finite(tx, 2**31 - 1)`, whose counters `check_progress` reads.

    Raises:
      TypeError: if an argument is of a wrong kind; when called, if model, optimizer
        or what the loss returns is not what is expected.
      ValueError: as `make_train_step`; when called, if a parameter is not float32.

    Example:
      >>> import optax
      >>> from flax_amp import init_scaler
      >>> model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
      >>> optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
      >>> train_step = make_nnx_train_step(lambda model, x: (model(x) ** 2).mean())
      >>> scaler, metrics = train_step(
      ...     model, optimizer, init_scaler(), jnp.ones((4, 3))
      ... )
      >>> int(optimizer.step[...]), bool(metrics["grads_finite"])
      (1, True)
    """
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
    )

    def pure_step(
        model: nnx.Module, optimizer: nnx.Optimizer, scaler: Scaler, batch: PyTree
    ) -> tuple[Scaler, dict[str, Any]]:
        return _step(options, model, optimizer, scaler, batch)

    step = pure_step
    if jit:
        step = nnx.jit(pure_step, donate_argnums=(0, 1, 2) if donate else ())

    checked = False

    def train_step(
        model: nnx.Module, optimizer: nnx.Optimizer, scaler: Scaler, batch: PyTree
    ) -> tuple[Scaler, dict[str, Any]]:
        nonlocal checked
        _check(model, optimizer)
        # The first time all of it; later on, that would wait for the step before.
        with explaining_donation("train_step", "scaler", scaler):
            scaler = checked_scaler(scaler, "train_step: scaler", wait=not checked)
            checked = True
            return step(model, optimizer, scaler, batch)

    return train_step


def _step(
    options: Options,
    model: nnx.Module,
    optimizer: nnx.Optimizer,
    scaler: Scaler,
    batch: PyTree,
) -> tuple[Scaler, dict[str, Any]]:
    # A bare variable may hold rows of the batch, which micro-batches split.
    nodes, batch = _take_nodes(batch, is_module if options.accum_steps > 1 else is_node)
    # Modules in the batch go where the model goes. `model` sorts before `others`, so
    # state that both share gets its path in the model.
    whole = nnx.Dict(model=model, others=nnx.List(nodes))
    before = _arrays((whole, optimizer))
    trained = {
        ("model", *path)
        for path, _ in nnx.to_flat_state(nnx.state(model, optimizer.wrt))
    }
    graphdef, params, variables = split_model(whole, lambda path, _: path in trained)
    check_selection(params, optimizer.wrt, "train_step")
    check_params(params["model"], "train_step")
    state = AmpTrainState(
        step=optimizer.step[...],
        apply_fn=None,  # type: ignore[arg-type]  # as create does for a model
        params=params,
        tx=optimizer.tx,
        opt_state=None,
        scaler=scaler,
        variables=variables,
        rngs={},
        graphdef=graphdef,
    )

    given = options.loss_fn

    def loss_fn(whole: nnx.Dict, batch: PyTree) -> Any:
        return given(whole.model, _put_nodes(batch, whole.others))

    loss_fn.__name__ = getattr(given, "__name__", "loss_fn")
    options = options._replace(loss_fn=loss_fn)
    new_scaler, finite, result = gradients(options, state, batch)
    grads = nnx.state(model, optimizer.wrt)
    nnx.replace_by_pure_dict(grads, all_gradients(result, params)["model"])
    counters = _skip_counts(optimizer, finite)
    with explaining_update(options.where):
        optimizer.update(model, grads)
    _assign(whole, _tree.combine(result.variables, variables))

    kept = _tree.select(finite, _arrays((whole, optimizer)), before)
    nnx.update((whole, optimizer), kept)
    for name, count in counters.items():
        getattr(optimizer.opt_state, name).set_value(count)
    more = hyperparam_metrics(optimizer.opt_state)
    if counters:
        more["skipped_total"] = counters["total_notfinite"]
    return new_scaler, metrics_of(options, new_scaler, finite, result, **more)


def _skip_counts(optimizer: nnx.Optimizer, finite: jax.Array) -> dict[str, jax.Array]:
    """Returns the new counters of `apply_if_finite`, if `tx` is inside of one."""
    if not isinstance(optimizer.opt_state, optax.ApplyIfFiniteState):
        return {}
    return counted(pure(optimizer.opt_state), finite)


def _take_nodes(
    batch: PyTree, taken: Callable[[Any], bool]
) -> tuple[list[Any], PyTree]:
    """Returns the modules in a batch, and the batch with their numbers for them."""
    leaves, structure = jax.tree.flatten(batch, is_leaf=taken)
    nodes = [leaf for leaf in leaves if taken(leaf)]
    numbers = map(_Number, range(len(nodes)))
    return nodes, jax.tree.unflatten(
        structure, [next(numbers) if taken(leaf) else leaf for leaf in leaves]
    )


def _put_nodes(batch: PyTree, nodes: Any) -> PyTree:
    """Undoes `_take_nodes`."""
    return jax.tree.map(
        lambda leaf: nodes[leaf.number] if isinstance(leaf, _Number) else leaf,
        batch,
        is_leaf=lambda leaf: isinstance(leaf, _Number),
    )


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Number:
    """Stands for a module in a batch; no array, so no transformation touches it."""

    number: int


def _arrays(node: Any) -> nnx.State:
    """Returns the state of a node in variables of its own."""
    return jax.tree.map(lambda leaf: leaf, nnx.state(node))


def _assign(model: nnx.Module, variables: PyTree) -> None:
    """Puts the variables of `split_model` into a model."""
    paths = set(nnx.traversals.flatten_mapping(variables))
    state = nnx.state(model, lambda path, _: path in paths)
    nnx.replace_by_pure_dict(state, variables)
    nnx.update(model, state)


def _check(model: Any, optimizer: Any) -> None:
    if not isinstance(model, nnx.Module):
        raise TypeError(
            f"train_step: model is a {type(model).__name__}; expected an nnx.Module. "
            "For Linen use make_train_step."
        )
    if not isinstance(optimizer, nnx.Optimizer) or hasattr(optimizer, "model"):
        raise TypeError(
            f"train_step: optimizer is a {type(optimizer).__name__}; expected an "
            "nnx.Optimizer. Make it with nnx.Optimizer(model, tx, wrt=nnx.Param)."
        )
