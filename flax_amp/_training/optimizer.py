"""The optimizer of a run, which skips by itself, and its hyper-parameters."""

import contextlib
import dataclasses
import re
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT
from flax.nnx.training.optimizer import OptState
from jax.tree_util import DictKey, GetAttrKey, tree_leaves_with_path

from flax_amp import _tree
from flax_amp._checks import describe
from flax_amp._training import Array, PyTree
from flax_amp._training.arguments import check_selection
from flax_amp._training.scaler import check_scaler, first_scaler
from flax_amp.optim import _small_state as small
from flax_amp.optim._extra_args import taking_any
from flax_amp.optim._optimizer import (
    Optimizer,
    check_optimizer,
    pure,
    update_state,
)
from flax_amp.policy import Precision, long_word


class SkipState(optax.ApplyIfFiniteState):
    """An `optax.ApplyIfFiniteState` that also has the fields of the state inside."""

    __slots__ = ()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.inner_state, name)


@dataclasses.dataclass(frozen=True)
class _Skipping:
    """An optimizer whose updates are skipped if they are not finite.

    This class selects, where `optax.apply_if_finite` branches. And this class never
    gives up, where `optax.apply_if_finite` applies an update that is not finite after
    some skips in a row: the scaler needs many skips in a row to find its scale. An
    instance is static data, not a pair of closures: two states with the same optimizer
    share a compiled step.
    """

    inner: Any

    def init(self, params: PyTree) -> SkipState:
        """Returns the state of a new run."""
        zero = jnp.zeros((), jnp.int32)
        return SkipState(zero, jnp.array(True), zero, self.inner.init(_floats(params)))

    def update(
        self,
        updates: PyTree,
        state: SkipState,
        params: PyTree | None = None,
        *,
        finite: bool | None = None,
        **extra_args: Any,
    ) -> tuple[PyTree, SkipState]:
        """Returns the updates, zeros if they are not finite, and the next state.

        With `finite=True`, nothing is checked: the training step selects.
        """
        if not isinstance(state, optax.ApplyIfFiniteState):
            raise TypeError(
                f"The state of the optimizer is {describe(state)}; expected an "
                "optax.ApplyIfFiniteState, which counts skipped steps. To continue "
                "with a state of optax, put that state inside: state.replace(opt_state="
                "state.opt_state._replace(inner_state=opt_state))."
            )
        # The moments of an optimizer have the dtype of the parameters, but its updates
        # are floats, so the state of an integer parameter would change its dtype.
        like = updates if params is None else params
        floats, integers = _tree.partition(like, _tree.is_inexact_array)
        kept = _tree.partition_like(updates, floats)
        if "grad" in extra_args:  # which some optimizers compare with the updates
            extra_args["grad"] = _tree.partition_like(extra_args["grad"], floats)
        new, inner_state = taking_any(self.inner).update(
            kept, state.inner_state, None if params is None else floats, **extra_args
        )
        if finite is None:
            is_finite = _tree.all_finite((kept, new))
            # An update may be finite and its moments not: squares of 1e20 overflow.
            is_finite &= _tree.stays_finite(inner_state, state.inner_state)
            new = _tree.select(is_finite, new, optax.tree.zeros_like(new))
            inner_state = _tree.select(is_finite, inner_state, state.inner_state)
            state = state._replace(**next_counters(state, is_finite))
        if jax.tree.leaves(integers):
            new = _tree.combine(new, jax.tree.map(jnp.zeros_like, integers))
        return new, state._replace(inner_state=inner_state)


def _floats(tree: PyTree) -> PyTree:
    """Returns a tree without its integers."""
    return _tree.partition(tree, _tree.is_inexact_array)[0]


def next_counters(state: Any, finite: Array) -> dict[str, Array]:
    """Returns the counters of an `optax.ApplyIfFiniteState` after one more step."""
    in_a_row = state.notfinite_count
    total = state.total_notfinite
    return {
        "notfinite_count": jnp.where(finite, 0, optax.safe_increment(in_a_row)),
        "last_finite": finite,
        "total_notfinite": jnp.where(finite, total, optax.safe_increment(total)),
    }


def skipping(tx: Any, params: PyTree) -> tuple[Any, ...]:
    """Returns two optimizers that skip: the first makes the state, the second updates.

    For an optimizer of optax, the two are the same object.
    """
    if not isinstance(tx, Optimizer):
        made = jax.eval_shape(tx.init, _floats(params))
        if not isinstance(made, optax.ApplyIfFiniteState):
            tx = _Skipping(tx)
        return tx, tx
    if tx.opt_state is None and tx._factory is optax.apply_if_finite:
        tx = tx.inner
    # `update_state` is the same function for all pytree optimizers. A function that
    # belongs to a single optimizer would be a static field with the hyper-parameters of
    # that optimizer: each state would compile again, and tracers would leak out of a
    # `create` under `vmap`.
    init = (lambda _: tx) if tx.opt_state is not None else tx.init
    make: Any = optax.GradientTransformationExtraArgs
    return _Skipping(make(init, update_state)), _Skipping(make(None, update_state))


@contextlib.contextmanager
def naming_missing_arguments(caller: str) -> Iterator[None]:
    """If an optimizer misses an extra argument, the error names the given arguments."""
    try:
        yield
    except TypeError as error:
        missing = re.search(r"missing .*required keyword-only arg.*", str(error))
        if missing is None:
            raise
        line_search = ""
        if "value_fn" in missing[0]:
            line_search = (
                " A line search (value_fn) evaluates the loss several times in an "
                "update, and a step evaluates the loss once."
            )
        raise TypeError(
            f"{caller}: the update of the optimizer is {missing[0]}; expected an "
            "optimizer that takes only value, loss, grad and grad_norm."
            f"{line_search} Write this step by hand, with "
            "jax.value_and_grad(flax_amp.amp(loss_fn)) "
            "(docs/recipes/value_and_grad.md)."
        ) from error


def store_in_half(params: PyTree, tx: Any) -> tuple[PyTree, Any]:
    """Returns parameters in bfloat16, and the optimizer that rounds them.

    Parameters with fewer than two dimensions, and Flax's fp8 statistics, stay as they
    are. The optimizer is put in `small_state`, unless `small_state` is the outermost
    part of the optimizer already.
    """

    def stored(keys: Any, leaf: Any) -> Any:
        is_statistic = getattr(keys[0], "key", "") == OVERWRITE_WITH_GRADIENT
        is_float = getattr(leaf, "dtype", None) == jnp.float32
        if is_float and small.has_two_dimensions("", leaf) and not is_statistic:
            return jnp.asarray(leaf).astype(jnp.bfloat16)
        return leaf

    params = jax.tree_util.tree_map_with_path(stored, params)
    inner = tx
    if isinstance(tx, Optimizer):
        inner = tx.to_optax(in_state=True)
    if not small.rounds_parameters(jax.eval_shape(inner.init, params)):
        tx = small.small_state(tx, where=small.no_moments)
    return params, tx


# The optimizer of NNX


class AmpOptimizer(nnx.Optimizer):
    """An `nnx.Optimizer` for mixed precision: all that a run holds beside its model.

    A checkpoint needs no more than `nnx.state((model, optimizer))`. The method
    `update`, for loops of your own, skips gradients that are not finite. The `update`
    of a subclass should pass its keywords on. `step`, `opt_state`, `scaler` and
    `precision` are as in `AmpTrainState`, the arrays as Variables.

    Example:
      >>> import optax
      >>> model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
      >>> optimizer = AmpOptimizer(model, optax.adamw(3e-4), precision="16-mixed")
      >>> float(optimizer.scaler["scaler"][...])
      32768.0
    """

    def __init__(
        self,
        model: nnx.Module,
        tx: Any,
        *,
        wrt: nnx.filterlib.Filter = nnx.Param,
        precision: Precision = "bf16-mixed",
        scaler: Mapping[str, Any] | None = None,
    ):
        """Makes the optimizer of a new run; see `AmpTrainState.create`."""
        check_optimizer(tx, "AmpOptimizer")
        self.precision = precision
        params = nnx.as_pure(nnx.state(model, wrt))
        check_selection(params, wrt, "AmpOptimizer")
        initializer, updater = skipping(tx, params)
        super().__init__(model, initializer, wrt=wrt)
        self.tx = updater
        if scaler is None:
            scaler = first_scaler(self.precision)
        self.scaler = scaler
        # The `init` of an optimizer may return the parameters themselves, and no
        # buffer may be donated twice.
        nnx.update(self, jax.tree.map(_tree.strong_copy, nnx.state(self)))

    def __setattr__(self, name: str, value: Any) -> None:
        """Sets an attribute; a scaler such as `init_scaler()` becomes Variables."""
        if name == "scaler":
            new = check_scaler(pure(value), "AmpOptimizer: scaler", wait=True)
            # Copies, because a step deletes the arrays of the optimizer.
            value = nnx.data({k: OptState(_tree.own(x)) for k, x in new.items()})
        if name == "precision":
            value = long_word(value, "AmpOptimizer: precision")
        super().__setattr__(name, value)

    @property
    def hyperparams(self) -> dict[str, Array]:
        """The hyper-parameters by name, as `AmpTrainState.hyperparams`."""
        return collect_hyperparams(self.opt_state)

    def replace_hyperparams(self, **changes: Any) -> None:
        """Sets new values, by the names of `hyperparams`, and compiles nothing."""
        caller = "AmpOptimizer.replace_hyperparams"
        self.opt_state = replace_hyperparams(self.opt_state, changes, caller)


# Hyper-parameters


def collect_hyperparams(opt_state: PyTree) -> dict[str, Array]:
    """Returns the hyper-parameters of all optimizers in a state, by name."""
    # Copies, because the state may be donated.
    return {
        f"{label}{name}": _tree.strong_copy(value)
        for label, holder in _holders(pure(opt_state)).items()
        for name, value in getattr(holder, "hyperparams", holder).items()
    }


def replace_hyperparams(
    opt_state: PyTree, changes: Mapping[str, Any], caller: str
) -> PyTree:
    """Returns a state with new values for names of `collect_hyperparams`."""
    holders = _holders(pure(opt_state)).items()
    labels = [label for label, holder in holders if isinstance(holder, Optimizer)]
    nodes = []
    left = dict(changes)
    for label, node in zip(labels, _tree.nodes(opt_state, Optimizer), strict=True):
        names = [name for name in changes if name.startswith(label)]
        of_node = {name.removeprefix(label): left.pop(name) for name in names}
        if of_node:
            node = node.replace(**of_node)
        nodes.append(node)
    if left:
        raise TypeError(
            f"{caller}: got {', '.join(left)}; the optimizer has "
            f"{[*collect_hyperparams(opt_state)]}. Expected hyper-parameters of an "
            "optimizer of flax_amp.optim, such as tx=flax_amp.optim.adamw(3e-4); "
            "values that optax.inject_hyperparams keeps cannot be replaced."
        )
    return _tree.replace_nodes(opt_state, Optimizer, nodes)


def _holders(opt_state: PyTree) -> dict[str, Any]:
    """Returns pytree optimizers, and the values that optax injects, outside first.

    The keys of the result are the prefixes of the names of hyper-parameters. A single
    optimizer has an empty prefix. Several optimizers have the keys of the dicts on the
    way to them, such as the labels of `optax.multi_transform`, or numbers if a prefix
    is empty or occurs twice.
    """
    found: dict[Any, Any] = {}  # by their paths
    leaves = tree_leaves_with_path(opt_state, lambda x: isinstance(x, Optimizer))
    for path, leaf in leaves:
        if isinstance(leaf, Optimizer):
            found[path] = leaf
        elif path[-2:-1] == (GetAttrKey("hyperparams"),):
            found.setdefault(path[:-2], {})[path[-1].key] = leaf
    keys = [[k.key for k in path if isinstance(k, DictKey)] for path in found]
    labels = ["".join(f"{key}/" for key in way) for way in keys]
    if len(found) == 1:
        labels = [""]
    elif not all(labels) or len({*labels}) < len(labels):
        labels = [f"{number}/" for number in range(len(labels))]
    return dict(zip(labels, found.values(), strict=True))
