"""`lookup`: a gather from a table of embeddings, whose gradient takes less memory.

The gradient of such a table is a scatter into zeros, in float32 and as large as the
table. Nothing makes the zeros wait: XLA puts them before the backward pass, of which
the gradient of an embedding is the last. Here, on a GPU, a barrier ties them to what is
added. There is none where another equation reads the table, too: XLA then adds this
gradient to the other one, and needs no zeros.

Where a batch has few lookups for the size of the table, and all readers round the rows,
only the sums of these rows are in float32. The gradient of the table is then rounded to
the compute dtype, as the gradients of the weights of products are.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import jet
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from flax_amp._compat import Array, Arrays, Aval, DType

lookup_p = Primitive("flax_amp_lookup")
_LARGEST = 2**31 - 1  # of an int32


def _gather(table: Array, indices: Array, *, dtype: DType | None, **params: Any) -> Any:
    return jax.lax.gather_p.bind(table, indices, **params)


def _tangent(t: Array, table: Array, indices: Array, **params: Any) -> Array:
    # What is out of bounds does not depend on the table, whatever is filled in there.
    return lookup_p.bind(t, indices, **params | {"fill_value": 0})


def _transpose(
    g: Array, table: Any, indices: Array, *, dtype: DType | None, **params: Any
) -> Arrays:
    if isinstance(g, ad.Zero):
        return [ad.Zero(table.aval), None]
    barrier = jax.lax.optimization_barrier
    # The barrier takes the number, not the zeros: XLA may run what reads only constants
    # before a barrier.
    zero, g = jax.lax.platform_dependent(
        jax.lax.full_like(g, 0, shape=()),
        g,
        cuda=lambda *arrays: barrier(arrays),
        rocm=lambda *arrays: barrier(arrays),
        default=lambda *arrays: arrays,
    )
    dims = params["dimension_numbers"]
    if dtype is not None and _reads_few_rows(table.aval, indices, params):
        last = range(1 - len(table.aval.shape), 0)
        terms = jnp.moveaxis(g, dims.offset_dims, last)
        return [_sum_of_rows(zero.astype(dtype), table.aval, indices, terms), None]
    sharding = table.aval.sharding
    zeros = jax.lax.broadcast_in_dim(zero, table.aval.shape, (), out_sharding=sharding)
    scatter_dims = jax.lax.ScatterDimensionNumbers(
        update_window_dims=dims.offset_dims,
        inserted_window_dims=dims.collapsed_slice_dims,
        scatter_dims_to_operand_dims=dims.start_index_map,
        operand_batching_dims=dims.operand_batching_dims,
        scatter_indices_batching_dims=dims.start_indices_batching_dims,
    )
    keys = "indices_are_sorted", "unique_indices", "mode"
    options = {key: params[key] for key in keys}
    return [jax.lax.scatter_add(zeros, indices, g, scatter_dims, **options), None]


def _reads_few_rows(table: Aval, indices: Array, params: dict[str, Any]) -> bool:
    """Whether a gather takes whole rows, and few for the size of the table."""
    dims, mode = params["dimension_numbers"], params["mode"]
    return (
        dims.start_index_map == dims.collapsed_slice_dims == (0,)
        and not dims.operand_batching_dims
        and params["slice_sizes"] == (1, *table.shape[1:])
        and mode != jax.lax.GatherScatterMode.CLIP  # which moves lookups to other rows
        and indices.dtype.itemsize >= 4  # it can hold the number of rows
        and jax.sharding.AxisType.Explicit not in table.sharding.mesh.axis_types
        and all(isinstance(n, int) for n in (*table.shape, *indices.shape))  # `export`
        and _spares_memory(*table.shape, lookups=indices.size)
    )


def _spares_memory(rows: int, *row_shape: int, lookups: int) -> bool:
    """Whether float32 sums of the rows read take less than they spare."""
    width = math.prod(row_shape)
    spared = 2 * rows * width  # bytes, of a table in half precision
    of_lookups = 2 * 4 * lookups * width  # a cotangent and a sum each, in float32
    return of_lookups + 4 * rows <= spared and rows + lookups <= _LARGEST


def _sum_of_rows(zero: Array, table: Aval, indices: Array, terms: Array) -> Array:
    """Returns the gradient of a table: float32 sums of the rows read, rounded once.

    All lookups of a row share one place in `sums`: the number of whichever of them is
    written last. Only that lookup writes the sum to the table. The others get an index
    out of bounds, which is dropped:

        indices   7   2   7            of a table with 9 rows
        place     2   1   2            from `places`, which has a number for each row
        sums      -   b   a + c        of the cotangents (`terms`) a, b and c
        row       9   2   7            where they are written

    Args:
      zero: in the dtype that the gradient is rounded to.
      table: the type of the table.
      indices: the rows, of shape `(..., 1)`.
      terms: the cotangents of the rows, of shape `(..., *table.shape[1:])`.
    """
    rows, *row_shape = table.shape
    count = indices.size
    terms = terms.reshape(count, *row_shape).astype(table.dtype)
    row = indices.reshape(count)
    row = jnp.where((row >= 0) & (row < rows), row.astype(jnp.int32), rows)
    number = jax.lax.iota(jnp.int32, count)
    places = jnp.zeros(rows, jnp.int32).at[row].set(number, mode="drop")
    place = places.at[row].get(mode="fill", fill_value=count)
    sums = jnp.zeros_like(terms).at[place].add(terms, mode="drop")
    row = jnp.where(place == number, row, rows + number)
    zeros = jnp.broadcast_to(zero, table.shape)
    options: Any = dict(mode="drop", unique_indices=True)
    return zeros.at[row].set(sums.astype(zero.dtype), **options).astype(table.dtype)


def _batch(args: Arrays, dims: Sequence[int], **params: Any) -> Any:
    gather = functools.partial(_gather, **params)
    return jax.vmap(gather, in_axes=tuple(dims))(*args), 0


def _jet(primals: Any, series: Any, *, dtype: DType | None, **params: Any) -> Any:
    return jet.jet_rules[jax.lax.gather_p](primals, series, **params)


def _abstract_eval(
    table: Any, indices: Any, *, dtype: DType | None, **params: Any
) -> Any:
    return jax.lax.gather_p.abstract_eval(table, indices, **params)


lookup_p.def_impl(_gather)
lookup_p.def_effectful_abstract_eval(_abstract_eval)
ad.defjvp(lookup_p, _tangent, None)
ad.primitive_transposes[lookup_p] = _transpose
batching.primitive_batchers[lookup_p] = _batch
jet.jet_rules[lookup_p] = _jet  # type: ignore[assignment]
mlir.register_lowering(lookup_p, mlir.lower_fun(_gather, multiple_results=False))
