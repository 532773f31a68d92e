"""What users pass, checked when they pass it, and the names of its types.

Every message says what was passed, what was expected, and what to do. What JAX, Flax or
optax refuse with a clear error is left to them.
"""

import contextlib
import inspect
import operator
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.tree_util import keystr, tree_leaves_with_path

from flax_amp import _tree
from flax_amp._rewriter.rewritten import is_rewritten
from flax_amp.policy import Policy, PolicyEntries, Precision, long_word

Array = jax.Array
PyTree = _tree.PyTree

# What a step reports, by name: arrays, or what the `aux` of a loss holds.
Metrics = dict[str, Any]
# A function of the user's: `fn(params, batch)` or `fn(model, batch)`.
UserFn = Callable[..., Any]
# The name of a mapped axis, several of them, or `None` for none.
AxisName = Hashable | tuple[Hashable, ...] | None


class Options(NamedTuple):
    """The checked arguments of a function that makes a step."""

    caller: str  # the function that the messages name
    loss_fn: UserFn
    precision: Precision | None  # instead of that of the state
    amp_policy: PolicyEntries | None
    has_aux: bool = False
    redo_on_nan: int = 0
    accum_steps: int = 1
    axis_name: AxisName = None
    metrics_fn: UserFn | None = None  # measures gradients and updates

    @property
    def loss_name(self) -> str:
        """What messages call the loss."""
        return f"{self.caller}: {getattr(self.loss_fn, '__name__', 'loss_fn')}"

    @property
    def open_scopes(self) -> bool:
        """Whether NNX modules open scopes, for the keys of the policy."""
        return Policy(self.amp_policy).names_scopes


def check_options(
    caller: str,
    loss_fn: Any,
    precision: Any,
    amp_policy: Any,
    redo_on_nan: Any,
    accum_steps: Any,
    **others: Any,
) -> Options:
    """Checks the arguments of `caller`."""
    check_function(loss_fn, f"{caller}: loss_fn")
    retries = check_count(redo_on_nan, f"{caller}: {redo_on_nan=}", "of retries", 0)
    seen = f"{caller}: {accum_steps=}"
    return Options(
        caller=caller,
        loss_fn=loss_fn,
        precision=check_amp_options(loss_fn, caller, precision, amp_policy),
        amp_policy=amp_policy,
        redo_on_nan=retries,
        accum_steps=check_count(accum_steps, seen, "of micro-batches"),
        **others,
    )


def check_amp_options(
    fn: UserFn, caller: str, precision: Any, amp_policy: Any
) -> Precision | None:
    """Returns the long word for a precision, after checking the options of a step."""
    Policy(amp_policy)  # a wrong one fails where the step is made
    given = dict(precision=precision, amp_policy=amp_policy)
    names = [name for name, value in given.items() if value is not None]
    if names and is_rewritten(fn):
        raise ValueError(
            f"{caller}: {getattr(fn, '__name__', 'the function')} is amp(...) already, "
            f"and {', '.join(names)} is given, too; expected one of them. Pass the "
            "option to amp."
        )
    if precision is None:
        return None
    return long_word(precision, f"{caller}: precision")


def check_type(value: object, types: Any, name: str, expected: str) -> None:
    """Raises a TypeError unless `isinstance(value, types)`."""
    if not isinstance(value, types):
        raise TypeError(f"{name} is {describe(value)}; expected {expected}")


def check_count(value: Any, seen: str, what: str, least: int = 1) -> int:
    """Returns an integer, of Python or NumPy, or raises a ValueError if it is none.

    `seen` is the argument with its value for the message, `what` is what it counts.
    """
    # jaxamp annotates `redo_on_nan` as a bool, which is an integer.
    with contextlib.suppress(TypeError):
        if (count := operator.index(value)) >= least:
            return count
    raise ValueError(
        f"{seen}; expected an integer of at least {least}, the number {what}."
    )


def check_function(fn: Any, name: str) -> None:
    """Raises a TypeError if `fn` is no function."""
    wanted = "a function of (params, batch, *args), or of (model, batch, *args) for NNX"
    check_type(fn, Callable, name, f"{wanted}.")


def check_params(params: PyTree, caller: str, *, may_be_half: bool = False) -> None:
    """Raises a ValueError that names the first three parameters of a wrong dtype.

    With `may_be_half` they may be bfloat16: the optimizer then rounds their updates.
    """
    right = [jnp.float32, jnp.complex64] + [jnp.bfloat16] * may_be_half
    if wrong := [
        f"{keystr(path)}: {leaf.dtype}"
        for path, leaf in tree_leaves_with_path(params)
        if _tree.is_key(leaf)
        or _tree.is_inexact_array(leaf)
        and leaf.dtype not in right
    ]:
        raise ValueError(
            f"{caller}: {len(wrong)} parameters are not float32: {first_of(wrong)}; "
            "expected float32 master weights, which amp casts at each use. Make the "
            "model with param_dtype=jnp.float32. To store them in bfloat16, use "
            "AmpTrainState.create(param_dtype=jnp.bfloat16), or "
            "flax_amp.optim.small_state for an optimizer of NNX."
        )


def check_selection(params: PyTree, wrt: Any, caller: str) -> None:
    """Raises a ValueError if a filter selects no parameters to train."""
    if not jax.tree.leaves(params):
        raise ValueError(
            f"{caller}: {wrt=} selects no variable of the model; expected a filter for "
            "the parameters to train. nnx.state(model) shows what there is."
        )


def declared_keywords(fn: UserFn) -> list[str]:
    """Returns `state` and `rngs`, as far as `fn` declares them.

    A default other than `None` counts as bound, as `functools.partial` binds it.
    """
    try:
        declared = inspect.signature(fn).parameters
    except (TypeError, ValueError):  # some builtins have no signature
        return []
    defaults = {name: p.default for name, p in declared.items()}
    unbound = (None, inspect.Parameter.empty)
    return [
        name
        for name in ("state", "rngs")
        if any(defaults.get(name, fn) is x for x in unbound)
    ]


# Values in messages


def first_of(items: Sequence[str], count: int = 3, separator: str = ", ") -> str:
    """Returns the first items as text, and how many more there are."""
    more = f" and {len(items) - count} more" if len(items) > count else ""
    return separator.join(items[:count]) + more


def describe(value: Any) -> str:
    """Returns dtype and shape of a number or an array; the type of all else."""
    if _tree.is_numeric(value):
        return f"{jnp.result_type(value)}{list(jnp.shape(value))}"
    name = type(value).__name__
    return f"{'an' if name[0] in 'AEIOUaeio' else 'a'} {name}"


def differences(old: PyTree, new: PyTree, key: Callable[[Any], Any]) -> list[str]:
    """Lists the leaves that only one tree has, or whose keys differ."""
    before, after = (
        {keystr(path): key(leaf) for path, leaf in tree_leaves_with_path(tree)}
        for tree in (old, new)
    )
    return [
        f"{path}: {before.get(path, 'absent')} before, {after.get(path, 'absent')} now"
        for path in sorted(before | after)
        if before.get(path) != after.get(path)
    ]
