"""Checks of arguments for which JAX, Flax and optax have no clear error."""

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import keystr, tree_leaves_with_path

from flax_amp import _tree
from flax_amp._checks import check_count, check_type, describe, first_of
from flax_amp._rewriter.transform import is_rewritten
from flax_amp._training import AxisName, PyTree, UserFn
from flax_amp.policy import Policy, PolicyEntries, Precision, long_word


class Options(NamedTuple):
    """The arguments of a function that makes a step."""

    caller: str  # the function that the messages name
    loss_fn: UserFn
    precision: Precision | None  # wins over the precision of the state
    amp_policy: PolicyEntries | None
    reduce_in_float32: bool = False
    has_aux: bool = False
    redo_on_nan: int = 0
    accum_steps: int = 1
    axis_name: AxisName = None
    metrics_fn: UserFn | None = None  # measures gradients and updates

    @property
    def axes(self) -> tuple[Hashable, ...]:
        """The names of the mapped axes over which a step averages."""
        return axes_of(self.axis_name)

    @property
    def averages(self) -> bool:
        """Whether a step averages over micro-batches or over devices."""
        return self.accum_steps > 1 or bool(self.axes)

    @property
    def loss_name(self) -> str:
        """The name of the loss in messages."""
        return f"{self.caller}: {getattr(self.loss_fn, '__name__', 'the function')}"


def axes_of(axis_name: AxisName) -> tuple[Hashable, ...]:
    """Returns the names of mapped axes as a tuple."""
    if axis_name is None:
        return ()
    return axis_name if isinstance(axis_name, tuple) else (axis_name,)


def check_options(given: Options) -> Options:
    """Checks options; returns them with a long word and with counts as ints."""
    caller = given.caller
    expected = "a function of (params, batch, *args), or of (model, ...) for NNX."
    check_type(given.loss_fn, Callable, f"{caller}: the function", expected)
    expected = "a function of (state, grads, updates), or of (model, ...) for NNX."
    check_type(given.metrics_fn, Callable | None, f"{caller}: metrics_fn", expected)
    flags = dict(has_aux=given.has_aux, reduce_in_float32=given.reduce_in_float32)
    check_flags(caller, **flags)
    Policy(given.amp_policy)  # a wrong policy fails where the step is made
    names = [x for x in ("precision", "amp_policy") if getattr(given, x) is not None]
    if given.reduce_in_float32:
        names.append("reduce_in_float32")
    if names and is_rewritten(given.loss_fn):
        raise ValueError(
            f"{given.loss_name} is amp(...) already, and {', '.join(names)} is given; "
            "expected no option beside amp(...). Pass the option to amp."
        )
    precision = given.precision
    if precision is not None:
        precision = long_word(precision, f"{caller}: precision")
    seen = f"{caller}: redo_on_nan={given.redo_on_nan!r}"
    retries = check_count(given.redo_on_nan, seen, "of retries", 0)
    seen = f"{caller}: accum_steps={given.accum_steps!r}"
    micro_batches = check_count(given.accum_steps, seen, "of micro-batches")
    return given._replace(
        precision=precision, redo_on_nan=retries, accum_steps=micro_batches
    )


def check_flags(caller: str, **flags: Any) -> None:
    """Raises a TypeError unless these arguments are True or False."""
    for name, value in flags.items():
        check_type(value, bool | np.bool_, f"{caller}: {name}", "True or False.")


def check_params(
    params: PyTree, caller: str, unchanged: PyTree, *, may_be_half: bool = False
) -> None:
    """Raises a ValueError that names parameters of a wrong dtype.

    `unchanged` is a tree of flags: True for a parameter that no step changes. Such a
    parameter may be in half precision. With `may_be_half` all parameters may be
    bfloat16, because the optimizer rounds their updates.
    """
    right = [jnp.float32, jnp.complex64] + [jnp.bfloat16] * may_be_half
    leaves = tree_leaves_with_path(params)
    flags = jax.tree.leaves(unchanged)
    if wrong := [
        f"{keystr(path)}: {leaf.dtype}"
        for (path, leaf), is_unchanged in zip(leaves, flags, strict=True)
        if _tree.is_key(leaf)
        or _tree.is_inexact_array(leaf)
        and leaf.dtype not in right
        and not is_unchanged
    ]:
        raise ValueError(
            f"{caller}: {len(wrong)} parameters that train are not float32: "
            f"{first_of(wrong)}; expected float32 master weights, which amp casts at "
            "each use. Make the model with param_dtype=jnp.float32. To store them in "
            "bfloat16, use AmpTrainState.create(param_dtype=jnp.bfloat16), or "
            "flax_amp.optim.small_state for an optimizer of NNX. To leave some "
            "parameters in bfloat16 or float16 as they are, select other parameters "
            "with wrt=, or give these parameters optax.set_to_zero() in an "
            "optax.multi_transform."
        )


def check_selection(params: PyTree, wrt: Any, caller: str) -> None:
    """Raises a ValueError if a filter selects no parameters to train."""
    if not tree_leaves_with_path(params):
        raise ValueError(
            f"{caller}: {wrt=} selects no variable of the model; expected a filter for "
            "the parameters to train. nnx.state(model) shows the variables."
        )


def first_foreign(tree: PyTree, name: str) -> str:
    """Returns the path and the type of the first leaf that is neither array nor number.

    The text is empty if there is no such leaf.
    """
    for path, leaf in tree_leaves_with_path(tree):
        if not _tree.is_numeric(leaf):
            return f"{name}{keystr(path)} is {describe(leaf)}"
    return ""


def check_leaves(tree: PyTree, caller: str, name: str) -> None:
    """Raises a TypeError unless a compiled step can return all leaves of a tree."""
    if foreign := first_foreign(tree, name):
        raise TypeError(
            f"{caller}: {foreign}; expected arrays and numbers: a compiled step "
            "returns nothing else. Leave this value out."
        )


def differences(old: PyTree, new: PyTree, key: Callable[[Any], Any]) -> list[str]:
    """Lists the leaves that a tree lacks, or whose results of `key` differ."""
    before, after = (
        {keystr(path): key(leaf) for path, leaf in tree_leaves_with_path(tree)}
        for tree in (old, new)
    )
    return [
        f"{path}: {before.get(path, 'absent')} before, {after.get(path, 'absent')} now"
        for path in sorted(before | after)
        if before.get(path) != after.get(path)
    ]
