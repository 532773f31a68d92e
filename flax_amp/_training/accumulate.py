"""One gradient from many passes: over micro-batches in turn, over devices at once."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from flax_amp import _tree
from flax_amp._rewriter.nnx_bridge import is_module

PyTree = Any
AxisName = Any


class Result(NamedTuple):
    """What one pass over a batch, or over a micro-batch, gives."""

    grads: PyTree  # unscaled, float32, `None` for integer parameters
    overwrite: PyTree  # fp8 statistics that travel as gradients; usually `None`
    loss: jax.Array
    variables: PyTree  # `None` for those that did not change
    aux: dict[str, Any]


# Micro-batches and devices


def accumulate(
    one_pass: Callable[[PyTree, PyTree, Any], Result],
    zeros: PyTree,
    variables: PyTree,
    batch: PyTree,
    steps: int,
) -> Result:
    """Averages `one_pass(variables, micro_batch, index)` over the micro-batches.

    Args:
      one_pass: one forward and backward pass; variables go from one to the next.
      zeros: zero gradients to add to.
      variables: those to begin with.
      batch: arrays whose leading axis is split, and modules, which are not.
      steps: number of micro-batches.

    Returns:
      Mean gradients and loss, the last variables, and `aux` reduced or stacked.
    """

    changes: PyTree = None

    def body(carry: Any, x: Any) -> Any:
        nonlocal changes
        total, variables = carry
        index, parts = x
        part = _tree.combine(parts, whole)
        result = one_pass(variables, part, index)
        changes = result.variables
        total = jax.tree.map(jnp.add, total, result.grads)
        variables = _tree.combine(result.variables, variables)
        return (total, variables), (result.overwrite, result.loss, result.aux)

    # Modules in the batch are no rows of examples; a bare variable holds some.
    whole, rows = (
        jax.tree.map(
            lambda x, kept=kept: x if is_module(x) is kept else None,
            batch,
            is_leaf=is_module,
        )
        for kept in (True, False)
    )
    parts = _split_batch(rows, steps)
    (total, variables), (overwrite, losses, aux) = jax.lax.scan(
        body, (zeros, variables), (jnp.arange(steps), parts)
    )
    return Result(
        grads=jax.tree.map(lambda g: g / steps, total),
        overwrite=jax.tree.map(functools.partial(jnp.max, axis=0), overwrite),
        loss=losses.mean(),
        variables=_tree.partition_like(variables, changes),
        aux=jax.tree.map(_reduce_aux, aux, is_leaf=_reduces_itself),
    )


def _split_batch(batch: PyTree, steps: int) -> PyTree:
    """Turns every leaf [n, ...] into [steps, n / steps, ...]."""
    leaves = jax.tree_util.tree_leaves_with_path(batch)
    shapes = {jax.tree_util.keystr(path): np.shape(leaf) for path, leaf in leaves}
    sizes = {shape[:1] for shape in shapes.values()}
    if len(sizes) > 1 or any(not size or size[0] % steps for size in sizes):
        seen = "; ".join(f"batch{path} has shape {s}" for path, s in shapes.items())
        raise ValueError(
            f"train_step: {seen}; expected one leading axis, the same for all and "
            f"divisible by accum_steps={steps}, to split. Change the batch size or "
            "accum_steps, and close over what is not one row for each example."
        )

    # Every steps-th example, not the first n / steps: a batch that is sharded over
    # devices then gives micro-batches that are sharded over all of them.
    def split(leaf: jax.Array) -> jax.Array:
        shape = (leaf.shape[0] // steps, steps, *leaf.shape[1:])
        return jnp.swapaxes(leaf.reshape(shape), 0, 1)

    return jax.tree.map(split, batch)


def _reduces_itself(node: Any) -> bool:
    return callable(getattr(node, "reduce", None))


def _reduce_aux(stacked: Any) -> Any:
    if _reduces_itself(stacked):
        return stacked.reduce()
    scalars = stacked.ndim == 1 and jnp.issubdtype(stacked.dtype, jnp.inexact)
    return stacked.mean() if scalars else stacked


def bound_axis(axis: AxisName, where: str) -> jax.Array | None:
    """Returns this device's number on one or several mapped axes, `None` for none."""
    if axis is None:
        return None
    try:
        return jax.lax.axis_index(axis)
    except NameError as error:
        raise NameError(
            f"{where}: axis_name={axis!r} is not the axis of a map around this call; "
            "expected one of jax.shard_map, jax.pmap or jax.vmap. With jax.jit on a "
            "sharded batch, leave axis_name out: the mean over the batch is the mean "
            "over its devices."
        ) from error


def vary(tree: PyTree, axis_name: AxisName) -> PyTree:
    """Marks arrays as varying over the axes where `shard_map` keeps track of it.

    Parameters, so that JAX does not sum their gradients over devices; and a loss that
    was reduced over devices already, whose derivative on one device is then that of the
    losses of all, as without `check_vma`. The mean over devices is right for both.
    """
    axes = axis_name if isinstance(axis_name, tuple) else (axis_name,)
    manual = jax.sharding.get_abstract_mesh().manual_axes
    axes = tuple(axis for axis in axes if axis in manual)

    def vary_leaf(leaf: Any) -> Any:
        # A key is left alone: it cannot be averaged back to one that does not vary.
        if not axes or not _tree.is_array(leaf):
            return leaf
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return leaf
        varying = getattr(getattr(jax.typeof(leaf), "mat", None), "varying", ())
        missing = tuple(axis for axis in axes if axis not in varying)
        return jax.lax.pcast(leaf, missing, to="varying") if missing else leaf

    return jax.tree.map(vary_leaf, tree)


def synchronize(result: Result, axis: AxisName, variables: PyTree) -> Result:
    """Makes a result the same on every device of one or several mapped axes.

    A mean over devices is not finite when one of them is not, so all of them decide
    alike whether to skip.

    Args:
      result: that of each device.
      axis: the axes.
      variables: the old ones, the same on every device.
    """

    def mean(tree: PyTree) -> PyTree:
        return jax.lax.pmean(vary(tree, axis), axis)

    def agree(leaf: jax.Array) -> jax.Array:
        if _tree.is_inexact_array(leaf):
            return mean(leaf)
        return jax.lax.pmax(vary(jnp.asarray(leaf), axis), axis)

    def agree_on_variable(new: Any, old: jax.Array) -> Any:
        if new is None or jnp.issubdtype(jnp.result_type(old), jax.dtypes.prng_key):
            return None  # a device's keys are the common ones, folded with its number
        if not _tree.is_inexact_array(new):
            return agree(new)
        # The mean of equal numbers need not be the number: what passed through a jit
        # unchanged must come out so, and the mean of its change is 0.
        base = jnp.where(jnp.isfinite(old), old, 0)
        return base + mean(new - base)

    def mean_scalar(leaf: Any) -> Any:
        scalar = _tree.is_inexact_array(leaf) and leaf.ndim == 0
        return mean(leaf) if scalar else leaf

    return Result(
        grads=mean(result.grads),
        overwrite=jax.tree.map(agree, result.overwrite),
        loss=mean(result.loss),
        variables=_tree.map_or_none(agree_on_variable, result.variables, variables),
        aux=jax.tree.map(mean_scalar, result.aux, is_leaf=_reduces_itself),
    )
