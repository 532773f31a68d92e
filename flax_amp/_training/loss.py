"""The user's loss, of Linen or NNX, as a function of arrays, and its output."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import core, nnx

from flax_amp import _tree
from flax_amp._checks import describe
from flax_amp._rewriter.nnx_bridge import watch_changes
from flax_amp._rewriter.nnx_scopes import module_scopes
from flax_amp._rewriter.transform import (
    TracedCall,
    is_rewritten,
    rewrite,
    rewritten,
)
from flax_amp._training import Array, Metrics, PyTree, UserFn
from flax_amp._training.arguments import Options, check_leaves, differences
from flax_amp._training.train_state import AmpTrainState, split_model
from flax_amp.policy import Policy, read_options

# The key of `aux` for the weight of a loss in the average over parts of a batch.
WEIGHT = "weight"


class LossOutput(NamedTuple):
    """The results of a loss, and the arrays that the loss leaves in the model."""

    loss: Array
    weight: Array | None = None  # float32[]; `None` if each part counts the same
    # New values of trained parameters, and of variables; `None` for each leaf that the
    # loss has not written.
    new_params: PyTree = None
    new_variables: PyTree = None
    aux: PyTree = None


def pure_loss(options: Options, state: AmpTrainState) -> UserFn:
    """Returns `(params, variables, batch, rngs, *args) -> LossOutput`."""
    name = options.loss_name

    # The messages of JAX call arrays by the names of these arguments.
    def pure(
        params: PyTree, variables: PyTree, batch: PyTree, rngs: PyTree, *args: PyTree
    ) -> LossOutput:
        inputs = params, variables, batch, rngs, *args
        first_argument, out = call_user_fn(options, state, *inputs)
        loss, aux = split_aux(out, options.has_aux, name)
        metrics: Metrics = {}
        weight = None
        if isinstance(aux, Mapping) and all(isinstance(key, str) for key in aux):
            metrics = dict(aux)
            weight = _pop_weight(metrics, name)
        elif options.has_aux:
            metrics = {"aux": aux}
        check_leaves(metrics, name, "aux")
        if state.graphdef is not None:
            # By path, not by type: `wrt` may have selected any kind of variable.
            trained = nnx.traversals.flatten_mapping(params)
            new = split_model(first_argument, lambda path, _: path in trained)
            new_params = _none_where_unchanged(params, new["params"], name)
            left = new["variables"]
        else:
            new_params = jax.tree.map(lambda _: None, params)
            left = variables | _pop_collections(metrics, variables, name)
        return LossOutput(
            loss=jnp.asarray(loss),
            weight=weight,
            new_params=new_params,
            new_variables=_none_where_unchanged(variables, left, name),
            aux=metrics,
        )

    return pure


def with_name_of(fn: UserFn, pure: Any) -> UserFn:
    """Gives `pure`, which calls the user's `fn`, its name and its mark of `amp`."""
    pure.__name__ = getattr(fn, "__name__", "loss_fn")  # which JAX's messages show
    return rewritten(pure) if is_rewritten(fn) else pure


def in_precision(
    pure: UserFn,
    options: Options,
    state: AmpTrainState,
    *,
    recompute: bool = True,
    observe: Callable[[TracedCall], None] | None = None,
) -> UserFn:
    """Returns a function of the user's in the precision of the step.

    A function that is `amp(...)` already is taken as the user made it. A step without a
    backward pass gives `recompute=False`: `amp` then adds no `jax.checkpoint` to the
    program. `observe` sees the traced function before the function is rewritten. Where
    nothing is rewritten or averaged, the function is not traced, and `observe` is not
    called.
    """
    pure = with_name_of(options.loss_fn, pure)
    word = options.precision or state.precision
    entries = options.amp_policy
    if is_rewritten(pure):
        word = "32-true"
        entries = None
    dtype, entries = read_options(options.caller, word, None, None, entries)
    policy = Policy(entries)
    is_identity = dtype == jnp.float32 and not policy.may_leave_float32
    if is_identity and not options.averages:
        return pure
    # A float32 loss is rewritten, too, so that the same trace serves `observe` and the
    # step.
    run = rewrite(
        pure,
        policy,
        dtype,
        recompute,
        observe=observe,
        reduce_in_float32=bool(options.reduce_in_float32),
    )
    return rewritten(run)


def fold_in(rngs: PyTree, data: Any) -> PyTree:
    """Folds a number into every key."""
    return {name: jax.random.fold_in(key, data) for name, key in rngs.items()}


def call_user_fn(
    options: Options, state: AmpTrainState, *inputs: PyTree, evaluate: bool = False
) -> tuple[PyTree, PyTree]:
    """Calls the user's function; returns its first argument and its result.

    The first argument is the tree of parameters, or the merged module for NNX. `inputs`
    are parameters, variables, the batch, keys, and further arguments.
    """
    params, variables, batch, rngs, *args = inputs
    fn = options.loss_fn
    # A loss that declares `state` sees the parameters of this pass. The loss is
    # differentiated with respect to these parameters, and in mixed precision these
    # parameters are cast.
    state = state.replace(params=params, variables=variables)
    offered = {"state": state, "rngs": rngs}
    keywords = {key: offered[key] for key in declared_keywords(fn)}
    watched = watch_changes(batch, "batch"), watch_changes(args, "args")
    if state.graphdef is None:
        first_argument = state.params
        out = fn(first_argument, batch, *args, **keywords)
    else:
        # Each call makes a new model, so that the caller's arrays stay as they are.
        # `pure_loss` collects the changes from the new model.
        first_argument = nnx.merge(state.graphdef, state.params, state.variables)
        if evaluate:
            first_argument.eval()
        names_scopes = Policy(options.amp_policy).names_scopes
        with module_scopes(first_argument, wanted=names_scopes):
            out = fn(first_argument, batch, *args, **keywords)
    if changed := [variable for changes in watched for variable in changes()]:
        raise ValueError(
            f"{options.loss_name} changed {', '.join(changed)}; expected modules among "
            "the arguments to stay as they are. Use make_nnx_train_step, which updates "
            "modules. Or draw random numbers from nnx.Rngs(**rngs) of the keyword "
            "rngs, with AmpTrainState.create(rngs=...), and return measurements in aux."
        )
    return first_argument, out


def declared_keywords(fn: UserFn) -> list[str]:
    """Returns `state` and `rngs`, as far as `fn` declares them.

    A keyword with a default other than `None` counts as bound, because
    `functools.partial` binds a keyword in the same way.
    """
    declared = inspect.signature(fn).parameters
    found = [declared[name] for name in ("state", "rngs") if name in declared]
    unbound = (None, inspect.Parameter.empty)
    return [p.name for p in found if any(p.default is x for x in unbound)]


# The result of a loss


def check_loss(loss: PyTree, name: str, hint: str = "") -> None:
    """Raises a TypeError, with `hint` at its end, unless `loss` is a scalar float."""
    is_scalar = isinstance(loss, float) or (_tree.is_array(loss) and loss.shape == ())
    if is_scalar and jnp.issubdtype(jnp.result_type(loss), jnp.floating):
        return
    raise TypeError(
        f"{name} returned {describe(loss)} as its loss; expected a scalar float. "
        f"Reduce the loss, e.g. with .mean(){hint}."
    )


def split_aux(out: PyTree, has_aux: bool, name: str) -> tuple[Array, PyTree]:
    """Splits the result of a loss function into `(loss, aux)`, after checking it."""
    if not has_aux:
        hint = "; if the function returns a (loss, aux) pair, pass has_aux=True"
        check_loss(out, name, hint)
        return out, None
    if not (isinstance(out, tuple) and len(out) == 2):
        raise TypeError(
            f"{name} returned {describe(out)}; expected a (loss, aux) pair because of "
            "has_aux=True. Return the pair or drop has_aux=True."
        )
    loss, aux = out
    check_loss(loss, name)
    return loss, aux


def merge_metrics(own: Metrics, measured: Metrics, aux: Metrics) -> Metrics:
    """Returns the metrics of a step; a metric whose name is taken is renamed.

    So a loss that returns its value in `aux`, as in Flax's examples, needs no change.
    """
    merged = dict(own)
    for source, found in ("metrics_fn", measured), ("aux", aux):
        for key, value in found.items():
            while key in merged:
                key = f"{source}/{key}"
            merged[key] = value
    return merged


def _pop_collections(aux: Metrics, old: PyTree, name: str) -> PyTree:
    """Takes the updated collections of a Linen model out of its `aux`."""
    if misplaced := sorted(aux.keys() & set(old)):
        raise ValueError(
            f"{name} returned aux with {misplaced}, collections of state.variables; "
            "expected them in aux['variables'], which updates the state. Return "
            "(loss, {'variables': updates})."
        )
    # `jax.tree.map` sorts the keys of a dict: the keys of the state are sorted, too.
    return jax.tree.map(lambda x: x, core.unfreeze(dict(aux.pop("variables", {}))))


def _pop_weight(aux: Metrics, name: str) -> Array | None:
    """Takes the weight of a loss out of its `aux`, as float32[]."""
    if WEIGHT not in aux:
        return None
    weight = aux.pop(WEIGHT)
    is_real = _tree.is_numeric(weight) and not (
        _tree.is_key(weight) or jnp.iscomplexobj(weight)
    )
    if not is_real or jnp.shape(weight) != ():
        raise TypeError(
            f"{name} returned {describe(weight)} as aux['weight']; expected a scalar: "
            "the number of tokens or of examples of the loss, by which the step "
            "averages losses over micro-batches and devices. Return a sum, such as "
            "mask.sum(), or give a metric another name."
        )
    return jnp.asarray(weight, jnp.float32)


def _none_where_unchanged(old: PyTree, new: PyTree, name: str) -> PyTree:
    """Returns new parameters or variables, `None` for each leaf that did not change.

    The comparison is by identity, because a leaf that the loss did not write is still
    the same object here, inside of the loss. Outside, `amp` returns new objects.
    """
    if changed := differences(old, new, describe):
        raise ValueError(
            f"{name} changed the structure of the variables: {'; '.join(changed)}; "
            "expected the same leaves, shapes and dtypes after each step. Create the "
            "state with the variables that the model has after a call, an NNX model "
            "with all variables in its __init__. In the loss, pop the values that the "
            "model sows, and return these values: (loss, nnx.pop(model, "
            "nnx.Intermediate)), with has_aux=True; if the model was called before "
            "training, pop once before the first step."
        )
    return jax.tree.map(lambda x, y: None if x is y else jnp.asarray(x), new, old)
