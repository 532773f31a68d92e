"""The user's loss function as a pure function of arrays, and checks of what it returns.

A loss of a Linen model is `loss_fn(params, batch, *args)` and one of an NNX model is
`loss_fn(model, batch, *args)`. `pure_loss` gives both one form: arrays in; the loss,
updated variables and `aux` out.
"""

import contextlib
import functools
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import core, errors, nnx
from jax.typing import ArrayLike

from flax_amp import _tree
from flax_amp._rewriter.nnx_bridge import changes_in
from flax_amp._rewriter.nnx_scopes import module_scopes
from flax_amp._training.arguments import (
    KEYWORDS,
    Array,
    Batch,
    Metrics,
    Options,
    PyTree,
    Rngs,
    UserFn,
    call_checked,
    check_leaves,
    declared_keywords,
    describe,
    differences,
)
from flax_amp._training.train_state import AmpTrainState, variables_of


def pure_loss(
    options: Options, state: AmpTrainState
) -> Callable[..., tuple[Array, PyTree, Metrics]]:
    """Returns `(params, variables, batch, rngs, *args) -> (loss, updates, aux)`.

    The updates are the new variables, with `None` for those that did not change. The
    state says what the model is, and is for a function that declares it.
    """
    loss_fn = options.loss_fn
    name = f"{options.caller}: {getattr(loss_fn, '__name__', 'loss_fn')}"

    def pure(
        params: PyTree, variables: PyTree, batch: Batch, rngs: Rngs, *args: PyTree
    ) -> tuple[Array, PyTree, Metrics]:
        # A loss that declares `state` sees the parameters of this pass: those are what
        # is differentiated, and in mixed precision what is cast.
        now = state.replace(params=params, variables=variables)
        with inputs_unchanged(batch, args, name):
            target, out = call_user_fn(
                loss_fn, now, batch, rngs, args, open_scopes=options.open_scopes
            )
        # The variables of an NNX model are in the model, so `aux` may have their names.
        collections = variables if state.graphdef is None else {}
        loss, aux = _split_output(out, options.has_aux, collections, name)
        updates = aux.pop("variables", {})
        # An empty dict, as `apply` with `mutable=[]` returns it, updates nothing.
        given = not (isinstance(updates, Mapping) and not updates)
        if state.graphdef is not None:
            if given:
                raise ValueError(
                    f"{name} returned aux['variables'] for an NNX model; expected "
                    "none: the model's own state is collected. Drop it from aux."
                )
            updates = variables_of(target, params)
            updates = _match_structure(variables, updates, name, hint=_NNX_HINT)
        elif given:
            updates = _match_collections(variables, updates, name)
        # An array that is still the same object did not change. That is told here: what
        # `amp` returns are other objects.
        updates = jax.tree.map(
            lambda new, old: None if new is old else new,
            {**variables, **updates},
            variables,
        )
        return loss, updates, aux

    return named_after(pure, loss_fn)


def fold_in(rngs: Rngs, data: ArrayLike) -> Rngs:
    """Folds a number into every key."""
    return {name: jax.random.fold_in(key, data) for name, key in rngs.items()}


def named_after(pure: UserFn, fn: UserFn) -> UserFn:
    """Gives `pure` the name and the argument names of `fn`, which JAX's messages show.

    `amp` asks JAX for both (`_compat.traced_as`), which finds the name of a function by
    `__wrapped__`. It would take the arguments from there, too, but `pure` has others:
    `__signature__` has those, with `params` and `batch` renamed.
    """
    signature = inspect.signature(pure)
    renamed = dict(zip(("params", "batch"), _leading_names(fn), strict=False))
    # A loss may call its batch `rngs`, or `args`: no signature has a name twice.
    taken = {*signature.parameters, *KEYWORDS} - renamed.keys()
    if taken & set(renamed.values()):
        renamed = {}
    parameters = signature.parameters.values()
    attributes: Any = vars(pure)
    attributes["__signature__"] = signature.replace(
        parameters=[p.replace(name=renamed.get(p.name, p.name)) for p in parameters]
    )
    while isinstance(fn, functools.partial):  # which has no name
        fn = fn.func
    attributes["__wrapped__"] = fn
    return pure


def _leading_names(fn: UserFn) -> list[str]:
    """Returns what `fn` calls its first two arguments, as far as it has names."""
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):  # some builtins have no signature
        return []
    named = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [p.name for p in list(parameters)[:2] if p.kind in named]


def call_user_fn(
    fn: UserFn,
    state: AmpTrainState,
    batch: Batch,
    rngs: Rngs,
    args: tuple[PyTree, ...],
    *,
    open_scopes: bool,
    evaluate: bool = False,
) -> tuple[PyTree, PyTree]:
    """Returns the parameters or the module that `fn` was given, and its result.

    Args:
      fn: the user's function.
      state: holds the parameters and the variables of this pass.
      batch: the second argument of `fn`.
      rngs: the keys of this pass.
      args: the further arguments of `fn`.
      open_scopes: open a named scope around each call of an NNX module.
      evaluate: call an NNX module in evaluation mode.
    """
    offered = {"state": state, "rngs": rngs}
    keywords = {name: offered[name] for name in declared_keywords(fn)}
    if state.graphdef is None:
        with _explain_random_numbers(keywords, rngs):
            return state.params, call_checked(
                fn, state.params, batch, *args, **keywords
            )
    # A new model for each call, so that the caller's arrays stay what they are. Its
    # changes are collected from it (`variables_of`).
    model = nnx.merge(state.graphdef, state.params, state.variables)
    if evaluate:
        model.eval()
    with (
        _explain_random_numbers(keywords, rngs),
        module_scopes(model, wanted=open_scopes),
    ):
        return model, call_checked(fn, model, batch, *args, **keywords)


@contextlib.contextmanager
def _explain_random_numbers(keywords: Collection[str], rngs: Rngs) -> Iterator[None]:
    """Adds a note on random numbers if a function may have failed for lack of them.

    It is no error that a loss declares `rngs` and the state has none. Such a loss is
    right for a model without dropout, and in evaluation.

    Args:
      keywords: those that the function declares.
      rngs: the streams of the state.
    """
    try:
        yield
    except Exception as error:
        # `rngs["dropout"]` of a state without that stream is a KeyError, and everything
        # else that looks like a lack of keys has an error of its own in Flax.
        lacks_stream = "rngs" in keywords and (not rngs or isinstance(error, KeyError))
        if lacks_stream or isinstance(
            error, errors.InvalidRngError | errors.TraceContextError
        ):
            error.add_note(
                "flax_amp: if this is about random numbers: the state has "
                f"{sorted(rngs) or 'none'}. Pass keys to "
                "AmpTrainState.create(rngs={'dropout': jax.random.key(0)}), declare "
                "the keyword rngs, and use rngs['dropout'], apply(..., rngs=rngs) or "
                "nnx.Rngs(**rngs). A function cannot change an nnx.Rngs, or another "
                "NNX module, that it closes over or has from functools.partial: put "
                "it into the batch of make_nnx_train_step."
            )
        raise


@contextlib.contextmanager
def inputs_unchanged(
    batch: Batch, args: tuple[PyTree, ...], name: str, *, wanted: bool = True
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
            f"{name} returned a {type(out).__name__}; expected a (loss, aux) pair "
            "because of has_aux=True. Return the pair or drop has_aux=True."
        )
    if has_aux:
        loss, aux = out
        check_loss(loss, name)
        return loss, aux
    check_loss(out, name, "; if it returns a (loss, aux) pair, pass has_aux=True")
    return out, None


def _split_output(
    out: PyTree, has_aux: bool, collections: PyTree, name: str
) -> tuple[Array, Metrics]:
    """Splits the result of a step's loss into the loss and its `aux`, as a dict."""
    loss, aux = split_aux(out, has_aux, name)
    if not has_aux:
        return loss, {}
    # Metrics have names. What has none (a tuple, a dataclass, a dict by layer number)
    # becomes one metric, `aux`. An empty dict has no key without a name.
    keys = list(aux) if isinstance(aux, Mapping) else [None]
    named = [isinstance(key, str) for key in keys]
    if any(named) and not all(named):
        raise TypeError(
            f"{name} returned aux with the keys {keys}; expected only strings, the "
            "names of metrics, or none. Write them out, e.g. {'layer_0': ...}."
        )
    if not all(named):
        check_returned(aux, "aux", name)
        return loss, {"aux": aux}
    metrics = dict(aux)
    if misplaced := sorted(metrics.keys() & set(collections)):
        raise ValueError(
            f"{name} returned aux with {misplaced}, collections of state.variables; "
            "expected them in aux['variables'], which updates the state. Return "
            "(loss, {'variables': updates})."
        )
    # Checked by itself, against the variables of the state (`_match_collections`).
    variables = {key: metrics.pop(key) for key in ("variables",) if key in metrics}
    check_returned(metrics, "aux", name)
    return loss, metrics | variables


def check_returned(out: PyTree, name: str, caller: str) -> None:
    """Raises a TypeError that lists what a compiled step could not return."""
    check_leaves(
        out,
        name,
        f"{caller} returned",
        "arrays and numbers, all that a compiled step can return. Drop the others, or "
        "make their class a pytree, with flax.struct.dataclass.",
    )


def _match_collections(old: PyTree, updates: PyTree, name: str) -> PyTree:
    """Checks updated collections of a Linen model against those of the state."""
    seen = sorted(updates) if isinstance(updates, Mapping) else type(updates).__name__
    if not isinstance(updates, Mapping) or set(updates) - set(old):
        raise ValueError(
            f"{name} returned aux['variables'] with {seen}; expected a dict with some "
            f"of the collections {sorted(old)} of state.variables. Pass them to "
            "AmpTrainState.create(variables=...) or leave them out of aux."
        )
    # A dict that is mapped has its keys sorted, as the collections of the state have.
    updates = jax.tree.map(lambda x: x, core.unfreeze(dict(updates)))
    return {
        key: _match_structure(old[key], new, name, key) for key, new in updates.items()
    }


_LINEN_HINT = "Create the state with the variables that the model has after a call."
_NNX_HINT = (
    "Create all variables of the model in its __init__. In the loss, pop what the "
    "model sows and return it: (loss, nnx.pop(model, nnx.Intermediate)), with "
    "has_aux=True. If the model was called before training, pop once before the first "
    "step."
)


def _match_structure(
    old: PyTree, new: PyTree, name: str, prefix: str = "", hint: str = _LINEN_HINT
) -> PyTree:
    """Returns `new` strongly typed, or raises an error that lists what differs."""
    if changed := differences(old, new, describe, prefix):
        raise ValueError(
            f"{name} changed the structure of the variables: {'; '.join(changed)}; "
            f"expected the same leaves, shapes and dtypes after each step. {hint}"
        )
    # The same object says that a variable did not change (`pure_loss`). For another
    # one, a weak type would compile the next step again.
    return jax.tree.map(
        lambda x, y: x if x is y else jnp.asarray(x).astype(y.dtype), new, old
    )
