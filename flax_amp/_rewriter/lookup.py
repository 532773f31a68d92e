"""`lookup`: a gather whose gradient waits, on a GPU, until there is something to add.

The gradient of a table of embeddings is a scatter into zeros, in float32 and as large
as the table. Nothing makes them wait: XLA puts them before the backward pass, of which
the gradient of an embedding is the last. Here a barrier ties them to what is added.
Where the table is read a second time there must be none: XLA adds to that gradient.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
from jax.experimental import jet
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from flax_amp._compat import Array, Arrays

lookup_p = Primitive("flax_amp_lookup")
_gather_p = jax.lax.gather_p


def _tangent(t: Array, table: Array, indices: Array, **params: Any) -> Array:
    # What is out of bounds does not depend on the table, whatever is filled in there.
    return lookup_p.bind(t, indices, **params | {"fill_value": 0})


def _transpose(g: Array, table: Any, indices: Array, **params: Any) -> Arrays:
    if isinstance(g, ad.Zero):
        return [ad.Zero(table.aval), None]
    barrier = jax.lax.optimization_barrier
    # At the number: what only reads constants may run before a barrier that it meets.
    zero, g = jax.lax.platform_dependent(
        jax.lax.full_like(g, 0, shape=()),
        g,
        cuda=lambda *arrays: barrier(arrays),
        rocm=lambda *arrays: barrier(arrays),
        default=lambda *arrays: arrays,
    )
    sharding = table.aval.sharding
    zeros = jax.lax.broadcast_in_dim(zero, table.aval.shape, (), out_sharding=sharding)
    dims = params["dimension_numbers"]
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


def _batch(args: Arrays, dims: Sequence[int], **params: Any) -> Any:
    gather = functools.partial(_gather_p.bind, **params)
    return jax.vmap(gather, in_axes=tuple(dims))(*args), 0


lookup_p.def_impl(_gather_p.bind)
lookup_p.def_effectful_abstract_eval(_gather_p.abstract_eval)
ad.defjvp(lookup_p, _tangent, None)
ad.primitive_transposes[lookup_p] = _transpose
batching.primitive_batchers[lookup_p] = _batch
jet.jet_rules[lookup_p] = jet.jet_rules[_gather_p]
mlir.register_lowering(lookup_p, mlir.lower_fun(_gather_p.bind, multiple_results=False))
