"""The user's loss function as a pure function of arrays."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from flax_amp import _tree
from flax_amp._rewriter.nnx_bridge import changes_in
from flax_amp._rewriter.nnx_scopes import module_scopes
from flax_amp._training import scaled_grad
from flax_amp._training.train_state import AmpTrainState, merge_model, variables_of

PyTree = Any

# What the step itself reports among its metrics.
RESERVED = ("loss", "grads_finite", "scaler", "grad_norm", "skipped_total")

# What a loss is given if it declares them.
KEYWORDS = ("state", "rngs")


def pure_loss(
    loss_fn: Callable[..., Any],
    has_aux: bool,
    state: AmpTrainState,
    *,
    where: str,
    names: bool,
) -> Callable[..., Any]:
    """Returns `(params, variables, batch, rngs) -> (loss, updates, aux)`.

    The updates are the new variables, with `None` for those that the loss left alone.

    Args:
      loss_fn: the user's function.
      has_aux: whether it returns `(loss, aux)`.
      state: what it may ask for.
      where: who calls, for messages.
      names: open a scope around each call of an NNX module.
    """
    name = f"{where}: {getattr(loss_fn, '__name__', 'loss_fn')}"

    def pure(params: PyTree, variables: PyTree, batch: PyTree, rngs: Any) -> Any:
        changed = changes_in(batch, "batch")
        target, out = call(loss_fn, state, params, variables, batch, rngs, names=names)
        check_unchanged(changed(), name)
        collections = variables if state.graphdef is None else {}
        loss, aux = _split_output(out, has_aux, collections, name)
        updates = aux.pop("variables", {})
        if state.graphdef is not None:
            if updates:
                raise ValueError(
                    f"{name} returned aux['variables'] for an NNX model; expected "
                    "none: the model's own state is collected. Drop it from aux."
                )
            updates = variables_of(target, params)
            updates = _conform(variables, updates, name)
        elif updates:
            updates = _conform_collections(variables, updates, name)
        return loss, _changed({**variables, **updates}, variables), aux

    return pure


def call(
    fn: Callable[..., Any],
    state: AmpTrainState,
    params: PyTree,
    variables: PyTree,
    batch: PyTree,
    rngs: PyTree,
    *,
    names: bool,
    evaluate: bool = False,
) -> tuple[Any, Any]:
    """Returns the parameters or the module that `fn` was given, and its result."""
    keywords = keywords_of(fn, state, params, variables, rngs)
    if state.graphdef is None:
        return params, fn(params, batch, **keywords)
    model = merge_model(state.graphdef, params, variables)
    if evaluate:
        model.eval()
    with module_scopes(model, wanted=names):
        return model, fn(model, batch, **keywords)


def check_unchanged(changes: list[str], name: str) -> None:
    """Raises a ValueError if modules in a batch were changed."""
    if changes:
        raise ValueError(
            f"{name} changed {', '.join(changes)}; expected modules in the batch to "
            "stay as they are: a compiled step cannot hand their changes back. For "
            "random numbers, pass rngs={'dropout': jax.random.key(0)} to "
            "AmpTrainState.create, declare the keyword rngs and make "
            "nnx.Rngs(**rngs) of it; return what is counted or measured in aux; or "
            "use make_nnx_train_step, which carries changes on."
        )


def _changed(new: PyTree, old: PyTree) -> PyTree:
    """Returns the new leaves, with `None` for those that are the old ones."""
    return jax.tree.map(lambda x, y: None if x is y else x, new, old)


def keywords_of(
    fn: Callable[..., Any],
    state: AmpTrainState,
    params: PyTree,
    variables: PyTree,
    rngs: PyTree,
) -> dict[str, Any]:
    """Returns those of the keywords `state` and `rngs` that `fn` declares."""
    offered = {
        "state": state.replace(params=params, variables=variables),
        "rngs": rngs,
    }
    return {name: offered[name] for name in declared(fn)}


def declared(fn: Callable[..., Any], keywords: Sequence[str] = KEYWORDS) -> list[str]:
    """Returns those of some keywords that a function declares."""
    try:
        parameters = inspect.signature(fn).parameters
    except (TypeError, ValueError):  # some builtins have no signature
        return []
    return [name for name in keywords if name in parameters]


def _split_output(
    out: Any, has_aux: bool, collections: PyTree, name: str
) -> tuple[Any, dict[str, Any]]:
    loss, aux = scaled_grad.split_aux(out, has_aux, name)
    if not has_aux:
        return loss, {}
    if not isinstance(aux, Mapping):
        raise TypeError(
            f"{name} returned a {type(aux).__name__} as aux; expected a dict, whose "
            "entries become metrics. Return e.g. (loss, {'accuracy': accuracy})."
        )
    aux = dict(aux)
    if keys := [key for key in aux if not isinstance(key, str)]:
        raise TypeError(
            f"{name} returned aux with the keys {keys}; expected strings, the names of "
            "metrics. Write them out, e.g. {'layer_0': ...}."
        )
    if lost := sorted(set(aux) & set(collections)):
        raise ValueError(
            f"{name} returned aux with {lost}, collections of state.variables; "
            "expected them in aux['variables'], which updates the state. Return "
            "(loss, {'variables': updates})."
        )
    metrics = {key: value for key, value in aux.items() if key != "variables"}
    if bad := [
        f"aux{jax.tree_util.keystr(path)}, a {type(leaf).__name__}"
        for path, leaf in jax.tree_util.tree_leaves_with_path(metrics)
        if not _tree.is_array(leaf) and not isinstance(leaf, bool | int | float)
    ]:
        raise TypeError(
            f"{name} returned {'; '.join(bad)}; expected arrays and numbers, which a "
            "compiled step can return. Keep the rest outside of the loss."
        )
    return loss, aux


def _conform_collections(old: PyTree, updates: Any, name: str) -> PyTree:
    """Checks the Linen collections that a loss returned against those of the state."""
    seen = sorted(updates) if isinstance(updates, Mapping) else type(updates).__name__
    if not isinstance(updates, Mapping) or set(updates) - set(old):
        raise ValueError(
            f"{name} returned aux['variables'] with {seen}; expected a dict with some "
            f"of the collections {sorted(old)} of state.variables. Pass them to "
            "AmpTrainState.create(variables=...) or leave them out of aux."
        )
    updates = jax.tree.map(lambda x: x, _plain(updates))
    return {key: _conform(old[key], new, name, key) for key, new in updates.items()}


def _plain(tree: Any) -> Any:
    """Turns mappings of any kind (FrozenDict) into dicts."""
    if isinstance(tree, Mapping):
        return {key: _plain(value) for key, value in tree.items()}
    return tree


def _conform(old: PyTree, new: PyTree, name: str, where: str = "") -> PyTree:
    """Returns `new` strongly typed, or raises an error that lists what differs."""
    before, after = _describe(old), _describe(new)
    if before != after:
        lines = [
            f"{where}{path}: {before.get(path, 'absent')} before, "
            f"{after.get(path, 'absent')} now"
            for path in sorted(before | after)
            if before.get(path) != after.get(path)
        ]
        raise ValueError(
            f"{name} changed the structure of the variables: {'; '.join(lines)}; "
            "expected the same leaves, shapes and dtypes after each step. Create the "
            "state with the variables that the model has after a call."
        )
    return jax.tree.map(
        lambda x, y: x if x is y else jnp.asarray(x).astype(y.dtype), new, old
    )


def _describe(tree: PyTree) -> dict[str, str]:
    return {
        jax.tree_util.keystr(path): f"{jnp.result_type(leaf)}{list(jnp.shape(leaf))}"
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }
