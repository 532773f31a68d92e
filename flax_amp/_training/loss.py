"""The user's loss function as a pure function of arrays, and checks of what it returns.

A loss of a Linen model is `loss_fn(params, batch, *args)` and one of an NNX model is
`loss_fn(model, batch, *args)`. `pure_loss` gives both one form: arrays in; the loss,
updated variables and `aux` out.
"""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import core, nnx

from flax_amp import _tree
from flax_amp._rewriter.nnx_bridge import changes_in
from flax_amp._rewriter.nnx_scopes import module_scopes
from flax_amp._training.arguments import (
    Array,
    Metrics,
    Options,
    PyTree,
    UserFn,
    declared_keywords,
    describe,
    differences,
)
from flax_amp._training.train_state import AmpTrainState, variables_of


def pure_loss(options: Options, state: AmpTrainState) -> UserFn:
    """Returns `(params, variables, batch, rngs, *args) -> (loss, updates, aux)`.

    The updates are the new variables, with `None` for those that did not change. The
    state says what the model is, and is for a function that declares it.
    """
    name = options.loss_name

    def pure(
        params: PyTree, variables: PyTree, batch: PyTree, rngs: PyTree, *args: PyTree
    ) -> tuple[Array, PyTree, Metrics]:
        # A loss that declares `state` sees the parameters of this pass: those are what
        # is differentiated, and in mixed precision what is cast.
        now = state.replace(params=params, variables=variables)
        with inputs_unchanged(batch, args, name):
            target, out = call_user_fn(
                options.loss_fn, now, batch, rngs, args, open_scopes=options.open_scopes
            )
        loss, aux = split_output(out, options)
        if state.graphdef is not None:
            updates = match_variables(variables, variables_of(target, params), name)
        else:
            updates = variables | _collections(aux, variables, name)
        # An array that is still the same object did not change. That is told here: what
        # `amp` returns are other objects.
        changed = jax.tree.map(
            lambda new, old: None if new is old else new, updates, variables
        )
        return loss, changed, aux

    return named_after(pure, options.loss_fn)


def named_after(pure: Any, fn: UserFn) -> UserFn:
    """Gives `pure` the name of the user's function, which JAX's messages show."""
    pure.__name__ = getattr(fn, "__name__", "loss_fn")
    return pure  # type: ignore[no-any-return]


def fold_in(rngs: PyTree, data: Any) -> PyTree:
    """Folds a number into every key."""
    return {name: jax.random.fold_in(key, data) for name, key in rngs.items()}


def call_user_fn(
    fn: UserFn,
    state: AmpTrainState,
    batch: PyTree,
    rngs: PyTree,
    args: tuple[PyTree, ...],
    *,
    open_scopes: bool,
    evaluate: bool = False,
) -> tuple[PyTree, PyTree]:
    """Returns the parameters or the module that `fn` was given, and its result.

    `state` holds the parameters and the variables of this pass, and `rngs` are its
    keys. An NNX module gets a named scope around each call with `open_scopes`, and is
    called in evaluation mode with `evaluate`.
    """
    offered = {"state": state, "rngs": rngs}
    keywords = {name: offered[name] for name in declared_keywords(fn)}
    if state.graphdef is None:
        return state.params, fn(state.params, batch, *args, **keywords)
    # A new model for each call, so that the caller's arrays stay what they are. Its
    # changes are collected from it (`variables_of`).
    model = nnx.merge(state.graphdef, state.params, state.variables)
    if evaluate:
        model.eval()
    with module_scopes(model, wanted=open_scopes):
        return model, fn(model, batch, *args, **keywords)


@contextlib.contextmanager
def inputs_unchanged(
    batch: PyTree, args: tuple[PyTree, ...], name: str, *, wanted: bool = True
) -> Iterator[None]:
    """Raises a ValueError if modules in the batch or in `args` are changed inside."""
    watched = [changes_in(batch, "batch"), changes_in(args, "args")] if wanted else []
    yield  # an error of the function is its own: nothing is checked after it
    if changes := [change for changes in watched for change in changes()]:
        raise ValueError(
            f"{name} changed {', '.join(changes)}; expected modules in the batch, or "
            "in further arguments, to stay as they are: a compiled step cannot return "
            "their changes. For random numbers, pass rngs={'dropout': "
            "jax.random.key(0)} to AmpTrainState.create, declare the keyword rngs and "
            "make nnx.Rngs(**rngs) from it. Return counts and measurements in aux. Or "
            "use make_nnx_train_step, which updates the modules in its arguments."
        )


# What a loss returns


def check_loss(loss: PyTree, name: str, hint: str = "") -> None:
    """Raises a TypeError, with `hint` at its end, unless `loss` is a scalar float."""
    is_scalar = isinstance(loss, float) or (_tree.is_array(loss) and loss.shape == ())
    if is_scalar and jnp.issubdtype(jnp.result_type(loss), jnp.floating):
        return
    raise TypeError(
        f"{name} returned {describe(loss)} as its loss; expected a scalar float. "
        f"Reduce it, e.g. with .mean(){hint}."
    )


def split_aux(out: PyTree, has_aux: bool, name: str) -> tuple[Array, PyTree]:
    """Splits the result of a loss function into `(loss, aux)`, after checking it."""
    if has_aux and not (isinstance(out, tuple) and len(out) == 2):
        raise TypeError(
            f"{name} returned {describe(out)}; expected a (loss, aux) pair because of "
            "has_aux=True. Return the pair or drop has_aux=True."
        )
    loss, aux = out if has_aux else (out, None)
    hint = "" if has_aux else "; if it returns a (loss, aux) pair, pass has_aux=True"
    check_loss(loss, name, hint)
    return loss, aux


def split_output(out: PyTree, options: Options) -> tuple[Array, Metrics]:
    """Splits the result of a step's loss into the loss and its `aux`, as a dict."""
    name = options.loss_name
    loss, aux = split_aux(out, options.has_aux, name)
    if not options.has_aux:
        return loss, {}
    # Metrics have names. What has none (a tuple, a dataclass, a dict by layer number)
    # becomes one metric, `aux`.
    is_named = isinstance(aux, Mapping) and all(isinstance(key, str) for key in aux)
    metrics = dict(aux) if is_named else {"aux": aux}
    return loss, metrics


def merge_metrics(
    options: Options, own: Metrics, measured: Metrics, aux: Metrics
) -> Metrics:
    """Returns the metrics of a step: its own ones, `measured`, and those of `aux`.

    An entry of `aux` with the name of another metric becomes `aux/<name>`. So a loss
    that returns itself in `aux`, as Flax's examples do, needs no change: `loss` stays
    the step's.
    """
    if taken := sorted(measured.keys() & own.keys()):
        raise ValueError(
            f"{options.caller}: metrics_fn returned {taken}, which the step reports "
            "itself; expected other names. Rename them."
        )
    own = own | measured
    renamed = {f"aux/{key}" if key in own else key: x for key, x in aux.items()}
    if own.keys() & renamed.keys() or len(renamed) < len(aux):
        raise ValueError(
            f"{options.caller}: the loss returned aux with {sorted(aux)}; expected no "
            "two entries that would have one name as aux/<name>. Rename one."
        )
    return own | renamed


def _collections(aux: Metrics, old: PyTree, name: str) -> PyTree:
    """Takes the updated collections of a Linen model out of its `aux`."""
    if misplaced := sorted(aux.keys() & set(old)):
        raise ValueError(
            f"{name} returned aux with {misplaced}, collections of state.variables; "
            "expected them in aux['variables'], which updates the state. Return "
            "(loss, {'variables': updates})."
        )
    updates = aux.pop("variables", {})
    seen = sorted(updates) if isinstance(updates, Mapping) else describe(updates)
    if not isinstance(updates, Mapping) or set(updates) - set(old):
        raise ValueError(
            f"{name} returned aux['variables'] with {seen}; expected a dict with some "
            f"of the collections {sorted(old)} of state.variables. Pass them to "
            "AmpTrainState.create(variables=...) or leave them out of aux."
        )
    # A dict that is mapped has its keys sorted, as the collections of the state have.
    updates = jax.tree.map(lambda x: x, core.unfreeze(dict(updates)))
    return match_variables({key: old[key] for key in updates}, updates, name)


def match_variables(old: PyTree, new: PyTree, name: str) -> PyTree:
    """Returns `new` in the types of `old`, or raises an error that lists what differs.

    The same object says that a variable did not change.
    """
    if changed := differences(old, new, describe):
        raise ValueError(
            f"{name} changed the structure of the variables: {'; '.join(changed)}; "
            "expected the same leaves, shapes and dtypes after each step. Create the "
            "state with the variables that the model has after a call, an NNX model "
            "with all of them in its __init__. What a model sows, pop in the loss and "
            "return it: (loss, nnx.pop(model, nnx.Intermediate)), with has_aux=True; "
            "if it was called before training, pop once before the first step."
        )
    return jax.tree.map(lambda x, y: x if x is y else jnp.asarray(x), new, old)
