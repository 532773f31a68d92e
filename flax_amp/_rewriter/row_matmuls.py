"""Matmuls of bfloat16 as matmuls of rows by columns, which a CPU adds up in float32.

XLA for the CPU hands a matmul of bfloat16 to YNNPACK if YNNPACK takes the matmul, and
computes all remaining matmuls in float32. Since JAX 0.11, XLA reshapes a matmul with
several axes of a kind to two dimensions, asks YNNPACK about the reshaped matmul, and
then merges a transpose into the matmul. YNNPACK refuses the merged matmul, and XLA runs
a plain loop that adds up in bfloat16. The derivative by the weight of `x @ w` is the
common case:

    x: bf16[8, 128, 256]    w: bf16[256, 512]    g: bf16[8, 128, 512]
    transpose(dot_general(g, x, contracting axes 0 and 1))    error 0.0205
    the same, of `g` and `x` as rows bf16[1024, ...]          error 0.0017

The loop takes 20 times as long, too. XLA does not change a matmul of rows by columns
with the axes of a batch in front. Derivatives of any order are matmuls of rows by
columns again. A lowering for CPUs could not give this form to the derivatives, because
they are JAX's own derivatives of `dot_general`. So the form depends on the device on
which JAX runs by default where the program is traced. A program that a CPU host
compiles for another device gets this form, too, unless `jax.default_device` names that
device.
"""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from flax_amp import _compat
from flax_amp._compat import Array, Arrays, Eqn, Params


def bind_matmul(eqn: Eqn, factors: Arrays, params: Params) -> Array:
    """Binds a matmul to new factors and parameters.

    On a CPU a `dot_general` of bfloat16 becomes a matmul of rows by columns, between
    transposes and reshapes.
    """
    if not _is_affected(eqn, factors):
        return _compat.bind(eqn, factors, params)[0]
    x, w = factors
    contracted, (x_batch, w_batch) = params["dimension_numbers"]
    # In the order of the axes of `x`, so that `x` is not transposed.
    pairs = sorted(zip(*contracted, strict=True))
    x_axes = [i for i, _ in pairs]
    w_axes = [i for _, i in pairs]
    rows = [i for i in range(x.ndim) if i not in {*x_batch, *x_axes}]
    columns = [i for i in range(w.ndim) if i not in {*w_batch, *w_axes}]
    n = len(x_batch)
    in_front = tuple(range(n))
    is_row_form = (
        tuple(x_batch) == tuple(w_batch) == in_front
        and len(x_axes) == len(rows) == len(columns) == 1
        # The derivative of `einsum("dn,md->nm", x, w)` by `x` is a transposed result.
        and (x_axes, w_axes) != ([n], [n + 1])
    )
    # Where two groups have several axes, as in `einsum("bsd,dhe->bshe", x, w)`, a
    # reshape stands between each derivative and its transpose: XLA merges no
    # transpose there.
    several = sum(len(group) > 1 for group in (rows, columns, pairs))
    # XLA does not ask YNNPACK about a vector, and an outer product adds nothing up.
    if is_row_form or several > 1 or not (rows and columns and pairs):
        return _compat.bind(eqn, factors, params)[0]
    numbers = ((n + 1,), (n,)), (in_front, in_front)
    merged = (
        _merged(x, x_batch, rows, x_axes),
        _merged(w, w_batch, w_axes, columns),
    )
    y = _compat.bind(eqn, merged, {**params, "dimension_numbers": numbers})[0]
    sizes = [x.shape[i] for i in (*x_batch, *rows)] + [w.shape[i] for i in columns]
    return lax.reshape(y, sizes)


def _is_affected(eqn: Eqn, factors: Arrays) -> bool:
    """Whether XLA may compute a matmul in the plain loop, and no axis is sharded.

    A reshape that merges the axes of a batch and of a sequence would gather a sequence
    that is sharded. Types and contexts tell of a mesh. If `in_shardings` alone places
    the arguments, nothing tells of the mesh.
    """
    if eqn.primitive.name != "dot_general":
        return False
    if any(x.dtype != jnp.bfloat16 for x in factors):
        return False
    if _compat.is_in_mesh() or any(map(_may_be_sharded, factors)):
        return False
    return bool(_compat.default_device().platform == "cpu")


def _may_be_sharded(x: Array) -> bool:
    """Whether an axis of an array may be on several devices, outside of `shard_map`."""
    mesh = jax.typeof(x).sharding.mesh
    automatic = jax.sharding.AxisType.Auto
    manual = jax.sharding.AxisType.Manual
    return any(
        kind is not manual and (size > 1 or kind is not automatic)
        for kind, size in zip(mesh.axis_types, mesh.axis_sizes, strict=True)
    )


def _merged(x: Array, batch: Sequence[int], *groups: Sequence[int]) -> Array:
    """Returns an array with batch axes in front, and a merged axis for each group."""
    in_order = lax.transpose(x, [*batch, *(i for group in groups for i in group)])
    merged = [math.prod(x.shape[i] for i in group) for group in groups]
    return lax.reshape(in_order, [*(x.shape[i] for i in batch), *merged])
