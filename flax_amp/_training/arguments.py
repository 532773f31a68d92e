"""What users pass, checked when they pass it, and the names of its types.

Every message says what was passed, with its path, what was expected, and what to do. A
check that reads a table of its own stands beside that table: the ranges of a scaler in
`scaler.py`, the words in `precision.py`. What a loss returns is checked in `loss.py`.
"""

import contextlib
import functools
import inspect
import operator
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import core, nnx
from jax.tree_util import keystr, tree_leaves_with_path
from jax.typing import DTypeLike

from flax_amp import _tree

Array = jax.Array
PyTree = _tree.PyTree

# A pytree of arrays whose leading axis counts the examples.
Batch = PyTree
# What a step reports, by name: arrays, or what the `aux` of a loss holds.
Metrics = dict[str, Any]
# PRNG keys by the name of their stream.
Rngs = dict[str, Array]
# A function of the user's: `fn(params, batch)` or `fn(model, batch)`.
UserFn = Callable[..., Any]
# The name of a mapped axis, several of them, or `None` for none.
AxisName = Hashable | tuple[Hashable, ...] | None

# The keywords that a user's function may declare.
KEYWORDS = ("state", "rngs")


# Any argument


def check_type(value: object, types: Any, name: str, expected: str) -> None:
    """Raises a TypeError unless `isinstance(value, types)`."""
    if not isinstance(value, types):
        raise TypeError(f"{name} is a {type(value).__name__}; expected {expected}")


def check_count(value: Any, seen: str, what: str, least: int = 1) -> int:
    """Returns an integer, of Python or NumPy, or raises a ValueError if it is none.

    `seen` is the argument with its value for the message, `what` is what it counts.
    """
    with contextlib.suppress(TypeError):
        count = operator.index(value)
        if count >= least and not isinstance(value, bool):
            return count
    raise ValueError(
        f"{seen}; expected an integer of at least {least}, the number {what}."
    )


def check_leaves(tree: PyTree, name: str, caller: str, expected: str) -> None:
    """Raises a TypeError that lists the leaves that are neither arrays nor numbers."""
    if wrong := [
        ", ".join(filter(None, (f"{name}{keystr(path)}", describe(leaf))))
        for path, leaf in tree_leaves_with_path(tree)
        if not _tree.is_numeric(leaf)
    ]:
        raise TypeError(f"{caller} {'; '.join(wrong)}; expected {expected}")


def first_of(items: Sequence[str], count: int = 3, separator: str = ", ") -> str:
    """Returns the first items as text, and how many more there are."""
    more = f" and {len(items) - count} more" if len(items) > count else ""
    return separator.join(items[:count]) + more


def describe(value: Any) -> str:
    """Returns dtype and shape of a number or an array; the type of all else."""
    if _tree.is_numeric(value):
        return f"{jnp.result_type(value)}{list(jnp.shape(value))}"
    dtype = getattr(value, "dtype", None)
    return f"a {type(value).__name__}" if dtype is None else f"a NumPy array of {dtype}"


def differences(
    old: PyTree,
    new: PyTree,
    describe: Callable[[Any], Any],
    prefix: str = "",
    names: tuple[str, str] = ("before", "now"),
) -> list[str]:
    """Lists the leaves that only one tree has, or whose descriptions differ."""
    of_old, of_new = names
    before, after = (
        {
            f"{prefix}{keystr(path)}": describe(leaf)
            for path, leaf in tree_leaves_with_path(tree)
        }
        for tree in (old, new)
    )
    return [
        f"{path}: {before.get(path, 'absent')} {of_old}, "
        f"{after.get(path, 'absent')} {of_new}"
        for path in sorted(before | after)
        if before.get(path) != after.get(path)
    ]


# The functions of users


def declared_keywords(fn: UserFn, keywords: Sequence[str] = KEYWORDS) -> list[str]:
    """Returns those of the keywords that `fn` declares and the user has not bound."""
    try:
        declared = set(inspect.signature(fn).parameters)
    except (TypeError, ValueError):  # some builtins have no signature
        return []
    # The signature is that of the innermost function, and it also lists the keywords
    # that functools.partial has bound on the way there.
    inside: Any = fn
    while inside is not None:
        if isinstance(inside, functools.partial):
            declared -= inside.keywords.keys()
            inside = inside.func
        else:
            inside = getattr(inside, "__wrapped__", None)
    return [name for name in keywords if name in declared]


def _signature(fn: UserFn) -> inspect.Signature | None:
    """Returns how a function is called, which a decorator may have changed."""
    try:
        return inspect.signature(fn, follow_wrapped=False)
    except (TypeError, ValueError):  # some builtins have no signature
        return None


def _misfit(fn: UserFn, *args: Any, **keywords: Any) -> str:
    """Says what of the signature of a function does not fit a call; '' if it fits."""
    if (signature := _signature(fn)) is not None:
        try:
            signature.bind(*args, **keywords)
        except TypeError as error:
            return f"the signature {signature} ({error})"
    return ""


def check_function(fn: Any, name: str, keywords: tuple[str, ...] = KEYWORDS) -> UserFn:
    """Returns `fn`, or raises a TypeError if a step could not call it.

    `name` is what the messages call it, `keywords` are those that it may declare.
    """
    wanted = "a function of (params, batch, *args), or of (model, batch, *args) for NNX"
    check_type(fn, Callable, name, f"{wanted}.")
    signature = _signature(fn) or inspect.Signature()
    declared = dict.fromkeys(declared_keywords(fn, keywords))
    # The number of further arguments is known only in a call. Here, those are filled
    # that have no default.
    further = sum(
        parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        and parameter.default is parameter.empty
        and key not in declared
        for key, parameter in signature.parameters.items()
    )
    if misfit := _misfit(fn, *[None] * max(further, 2), **declared):
        allowed = f", with the keywords {' and '.join(keywords)} if it declares them"
        raise TypeError(
            f"{name} has {misfit}; expected {wanted}"
            f"{allowed if keywords else ''}. Take further arguments after the batch "
            "and before keywords: the step hands on what follows its batch. Or bind "
            "them with functools.partial."
        )
    return fn


def call_checked(fn: UserFn, *args: PyTree, **keywords: Any) -> PyTree:
    """Calls a user's function, after checking that it takes these arguments."""
    # Before the call: a TypeError of the call may come from inside of the function.
    if misfit := _misfit(fn, *args, **keywords):
        raise TypeError(
            f"{getattr(fn, '__name__', 'loss_fn')} has {misfit}; the step got "
            f"{len(args) - 2} further arguments after its batch. Expected those that "
            "the function takes there: pass them to the step, by position. In the "
            "function, the keywords state and rngs come after them."
        )
    return fn(*args, **keywords)


def check_metrics_fn(fn: Any, name: str) -> UserFn | None:
    """Returns `fn`, or raises a TypeError unless it takes what a `metrics_fn` gets."""
    expected = (
        "a function of (state, grads, updates), or of (model, grads, updates) for NNX."
    )
    check_type(fn, Callable | None, name, expected)
    if fn is not None and (misfit := _misfit(fn, None, None, None)):
        raise TypeError(f"{name} has {misfit}; expected {expected} Declare all three.")
    return fn


# The options of a step


class Options(NamedTuple):
    """The checked arguments of `make_train_step` or `make_nnx_train_step`."""

    loss_fn: UserFn
    has_aux: bool
    amp: Mapping[Any, Callable[[UserFn], UserFn]]  # for each word of `precision.py`
    redo_on_nan: int
    accum_steps: int
    axis_name: AxisName
    caller: str  # the function that the messages name
    open_scopes: bool  # whether NNX modules open scopes, for the keys of the policy
    metrics_fn: UserFn | None  # measures gradients and updates
    check_update: bool  # whether an update that is not finite skips the step


def check_options(
    loss_fn: object,
    caller: str,
    *,
    keywords: tuple[str, ...] = KEYWORDS,
    redo_on_nan: object,
    accum_steps: int,
    axis_name: AxisName,
    metrics_fn: UserFn | None,
    check_update: bool,
    **others: Any,
) -> Options:
    """Checks the arguments of `caller`. The loss may declare `keywords`."""
    seen = f"{caller}: {accum_steps=}"
    check_type(check_update, bool, f"{caller}: check_update", "True or False.")
    return Options(
        caller=caller,
        metrics_fn=check_metrics_fn(metrics_fn, f"{caller}: metrics_fn"),
        loss_fn=check_function(loss_fn, f"{caller}: loss_fn", keywords),
        redo_on_nan=check_retries(redo_on_nan, caller),
        accum_steps=check_count(accum_steps, seen, "of micro-batches"),
        axis_name=check_axis_name(axis_name, caller),
        check_update=check_update,
        **others,
    )


def check_retries(redo_on_nan: object, caller: str) -> int:
    """Returns `redo_on_nan` as an integer, or raises an error that names `caller`."""
    # The signature of jaxamp annotates this argument as a bool.
    given = int(redo_on_nan) if isinstance(redo_on_nan, bool) else redo_on_nan
    what = "of times that gradients are computed again with a lower scale"
    return check_count(given, f"{caller}: {redo_on_nan=}", what, least=0)


def check_axis_name(axis_name: AxisName, caller: str) -> AxisName:
    """Returns `axis_name`, or raises a TypeError if it cannot name a mapped axis."""
    names = axis_name if isinstance(axis_name, tuple) else (axis_name,)
    # JAX takes an integer for a position in the shape, not for the name of an axis.
    if any(isinstance(name, int | list | dict | set) for name in names):
        raise TypeError(
            f"{caller}: {axis_name=}; expected the name of a mapped axis, such as "
            "'data', or a tuple of names. Pass the axis_name of your jax.vmap or "
            "jax.pmap, or an axis of the mesh of your jax.shard_map."
        )
    return axis_name


def check_shardings(shardings: PyTree, state: PyTree) -> None:
    """Raises a ValueError unless shardings are a prefix of a state."""
    try:
        _tree.map_or_none(lambda *_: None, shardings, state)
    except ValueError as error:
        raise ValueError(
            f"make_train_step: state_shardings do not fit the state: {error} Expected "
            "one sharding for all leaves, or a state of the same structure: the same "
            "parameters, the same tx, and the same hyper-parameters where they are "
            "static numbers. Make the step anew, with "
            "state_shardings=jax.tree.map(lambda x: x.sharding, state)."
        ) from error


def check_argnums(argnums: Any, args: Sequence[Any], caller: str) -> None:
    """Raises a TypeError unless `argnums` select some of the positional arguments."""
    nums = argnums if isinstance(argnums, Sequence) else [argnums]
    nums = [getattr(num, "argnum", num) for num in nums]
    if not all(isinstance(num, int | np.integer) for num in nums):
        raise TypeError(
            f"{caller}: {argnums=}; expected an integer, an nnx.DiffState, or a "
            "sequence of them. Leave argnums out for the first argument."
        )
    if any(not -len(args) <= num < len(args) for num in nums):
        raise TypeError(
            f"{caller}: {argnums=} names an argument that was not passed by "
            f"position; got {len(args)} positional arguments. Pass it by position."
        )


# States, models and optimizers


def check_state(state: Any, kind: type, caller: str) -> None:
    """Raises a TypeError unless a state has the kinds of fields that `create` makes.

    `kind` is `AmpTrainState`, whose module imports this one.
    """
    check_type(
        state,
        kind,
        f"{caller}: state",
        "an AmpTrainState. Make it with flax_amp.AmpTrainState.create(...). Or train "
        "an nnx.Module of your own with make_nnx_train_step, and evaluate it with "
        "nnx.jit(flax_amp.amp(fn)).",
    )
    for name in ("variables", "rngs"):
        field = getattr(state, name)
        check_type(
            field, Mapping, f"{caller}: state.{name}", "a dict. Pass {} for none."
        )
    check_type(
        state.opt_state,
        optax.ApplyIfFiniteState,
        f"{caller}: state.opt_state",
        "an optax.ApplyIfFiniteState. Make the state with AmpTrainState.create, which "
        "wraps tx.",
    )


def check_nnx(model: object, optimizer: object) -> None:
    """Raises a TypeError unless these are a model of NNX and its optimizer."""
    expected = "an nnx.Module. For Linen use make_train_step."
    check_type(model, nnx.Module, "train_step: model", expected)
    if not isinstance(optimizer, nnx.Optimizer) or hasattr(optimizer, "model"):
        raise TypeError(
            f"train_step: optimizer is a {type(optimizer).__name__}; expected an "
            "nnx.Optimizer. Make it with nnx.Optimizer(model, tx, wrt=nnx.Param)."
        )


def check_model(model: object, params: PyTree, variables: object) -> None:
    """Raises a TypeError unless `create` got a model, and that alone."""
    check_type(
        model,
        nnx.Module,
        "AmpTrainState.create: model",
        "an nnx.Module. For a Linen model pass apply_fn=model.apply and params.",
    )
    if params is not None or variables is not None:
        raise TypeError(
            "AmpTrainState.create: got model together with params or variables; "
            "expected model alone, which holds both. Drop the others."
        )


def check_selection(params: PyTree, wrt: nnx.filterlib.Filter, caller: str) -> None:
    """Raises a ValueError if a filter selects no parameters to train."""
    if not jax.tree.leaves(params):
        raise ValueError(
            f"{caller}: wrt={wrt} selects no variable of the model; "
            "expected a filter for the parameters to train, such as nnx.Param. "
            "nnx.state(model) shows what there is."
        )


def check_params(params: PyTree, caller: str, *, may_be_half: bool = False) -> None:
    """Raises a ValueError that names the first three parameters of a wrong dtype.

    With `may_be_half` they may be bfloat16: the optimizer then rounds their updates.
    """
    right = [jnp.float32, jnp.complex64] + [jnp.bfloat16] * may_be_half
    check_leaves(params, "params", f"{caller}: got", "arrays and numbers.")
    wrong = []
    for path, leaf in tree_leaves_with_path(params):
        dtype = getattr(leaf, "dtype", None)
        if _tree.is_key(leaf):
            raise ValueError(
                f"{caller}: the parameter {keystr(path)} is a PRNG key; "
                "expected arrays that can be differentiated. Leave random streams out "
                "of params, and out of what wrt selects."
            )
        floating = dtype is not None and jnp.issubdtype(dtype, jnp.inexact)
        if floating and dtype not in right:
            wrong.append(f"{keystr(path)}: {dtype}")
    if wrong:
        raise ValueError(
            f"{caller}: {len(wrong)} parameters are not float32: "
            f"{first_of(wrong)}; expected float32 master weights, "
            "which amp casts at each use. Make the model with param_dtype=jnp.float32 "
            "or cast them with jax.tree.map(lambda x: x.astype(jnp.float32), params). "
            "To store them in bfloat16, use AmpTrainState.create(param_dtype="
            "jnp.bfloat16), or flax_amp.optim.small_state for an nnx.Optimizer."
        )


def param_dtype_is_half(dtype: DTypeLike) -> bool:
    """Whether `param_dtype` is bfloat16.

    Raises:
      ValueError: if it is neither that nor float32.
    """
    try:
        found = jnp.dtype(dtype)
    except TypeError:
        found = None
    if found not in (jnp.float32, jnp.bfloat16):
        raise ValueError(
            f"AmpTrainState.create: param_dtype={dtype!r}; expected float32 or "
            "bfloat16. In float16, weights below 6e-8 would become 0. Choose what to "
            "compute in with precision=."
        )
    return found == jnp.bfloat16


def check_collections(params: PyTree, variables: Any) -> PyTree:
    """Returns the collections of a Linen model other than its parameters."""
    if params is None:
        raise TypeError(
            "AmpTrainState.create: got neither params nor model; expected params (and "
            "apply_fn) of a Linen model, or an nnx.Module as model."
        )
    check_type(
        params,
        Mapping | list | tuple,
        "AmpTrainState.create: params",
        "a dict of arrays. Put what you have into a dict of its arrays: {'w': array}.",
    )
    expected = "a dict of collections such as {'batch_stats': ...}."
    variables = {} if variables is None else variables
    check_type(variables, Mapping, "AmpTrainState.create: variables", expected)
    if "params" in variables:
        raise ValueError(
            "AmpTrainState.create: variables holds the collection 'params'; expected "
            "the other collections only. Take it out and pass it as params."
        )
    check_leaves(
        variables, "variables", "AmpTrainState.create: got", "arrays and numbers."
    )
    return core.unfreeze(dict(variables))


def check_streams(rngs: Any) -> Rngs:
    """Returns typed PRNG keys by the name of their stream."""
    rngs = {} if rngs is None else rngs
    check_type(
        rngs,
        Mapping,
        "AmpTrainState.create: rngs",
        "a dict of keys by the name of their stream: {'dropout': jax.random.key(0)}.",
    )
    return {name: _check_key(name, key) for name, key in rngs.items()}


def _check_key(name: str, key: Any) -> Array:
    dtype = getattr(key, "dtype", None)
    if _tree.is_key(key):
        if key.shape == ():
            return key
    elif dtype == jnp.uint32 and key.ndim == 1:  # from jax.random.PRNGKey
        return jax.random.wrap_key_data(jnp.asarray(key))
    seen = type(key).__name__ if dtype is None else f"{dtype}{list(key.shape)}"
    raise TypeError(
        f"AmpTrainState.create: rngs[{name!r}] is {seen}; expected one PRNG key. "
        "Make it with jax.random.key(seed)."
    )


def check_optimizer(tx: Any) -> None:
    """Raises a TypeError unless `tx` is an optimizer of optax."""
    if hasattr(tx, "wrapped_factory"):
        raise TypeError(
            f"AmpTrainState.create: tx is the function {tx.__name__}; expected an "
            f"optimizer. Call it: optim.{tx.__name__}(...)."
        )
    if isinstance(tx, type) or not (
        callable(getattr(tx, "init", None)) and hasattr(tx, "update")
    ):
        raise TypeError(
            f"AmpTrainState.create: tx is a {type(tx).__name__}; expected an optax "
            "optimizer with init and update, such as optax.adamw(3e-4)."
        )


def check_order(opt_state: PyTree) -> None:
    """Raises a ValueError if gradients are added up before they are tested."""
    for node in _tree.nodes(opt_state, optax.MultiStepsState):
        if _tree.nodes(node.inner_opt_state, optax.ApplyIfFiniteState):
            raise ValueError(
                "AmpTrainState.create: tx is MultiSteps around apply_if_finite, which "
                "tests gradients after they were added up: one inf would stay in the "
                "sum forever. Expected apply_if_finite outermost: pass "
                "optax.MultiSteps(optimizer, k), create wraps it."
            )
