"""One row for each primitive with functions, effects or devices inside.

And the names of those that have no row. The rows are added to the table of
`_primitive_rows.py`.
"""

import fnmatch
import functools

import jax
import jax.numpy as jnp
import numpy as np
from _primitive_rows import (
    LINE,
    MOVE,
    OPAQUE,
    ROWS,
    STRUCTURED,
    SUM,
    SYMMETRIC,
    A,
    W,
    rows,
)  # fmt: skip
from jax import lax
from jax.custom_batching import custom_vmap
from jax.experimental import pallas as pl
from jax.experimental import xla_metadata
from jax.experimental.custom_partitioning import custom_partitioning
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import PartitionSpec as P

from _programs import ROWS_OVER_DEVICES, layer, over_devices, with_jvp, with_vjp

# --- structured ----------------------------------------------------------------------


vmap_layer = custom_vmap(layer)
vmap_layer.def_vmap(
    lambda size, batched, *args: (
        jax.vmap(layer, [0 if b else None for b in batched])(*args),
        True,
    )
)


def checkpointed(w, x):
    """The backward pass of a shard_map that stores a number, in a checkpoint."""

    def scaled(w, x):
        return jnp.sin(jnp.sin(x.sum())) * (x @ w)

    mapped = over_devices(scaled, (P(), P("data")))
    policy = jax.checkpoint_policies.everything_saveable
    return jax.vjp(jax.checkpoint(mapped, policy=policy), w, x)[1](x)


def while_loop(w, x):
    step = lambda c: (c[0] + 1, layer(w, c[1]))  # noqa: E731
    return lax.while_loop(lambda c: c[0] < 3, step, (0, x))[1]


def linear_solve(w, b):
    def iterate(matvec, b):
        return lax.fori_loop(0, 60, lambda _, y: y + (b - matvec(y)) / 5, b)

    return lax.custom_linear_solve(lambda v: w @ v, b, iterate, iterate)


rows(
    STRUCTURED,
    jit=(jax.jit(layer), W, A),
    scan=(lambda w, x: lax.scan(lambda c, _: (layer(w, c), c), x, length=3), W, A),
    cond=(lambda w, x: lax.cond(x[0, 0] > -9, layer, lambda w, x: x @ w, w, x), W, A),
    remat2=(jax.checkpoint(layer), W, A),
    custom_jvp_call=(with_jvp(layer), W, A),
    custom_vjp_call=(with_vjp(layer), W, A),
    custom_vmap_call=(vmap_layer, W, A),
    shard_map=(
        over_devices(layer, (P(), P("data"))), W, np.tile(A, (4, 1))
    ),
    linear_call=(
        lambda w, x: jax.custom_derivatives.linear_call(
            lambda w, x: x @ w, lambda w, y: y @ w.T, w, x
        ),
        W, A,
    ),
    custom_linear_solve=(linear_solve, SYMMETRIC, LINE[:3]),
    closed_call=(checkpointed, W, np.tile(A, (8, 1))),
    eval_jaxpr=(checkpointed, W, np.tile(A, (8, 1))),
    **{"while": (while_loop, W, A)},
)  # fmt: skip

# --- opaque: functions ---------------------------------------------------------------

partitioned = custom_partitioning(layer)
partitioned.def_partition(
    infer_sharding_from_operands=lambda mesh, args, out: out.sharding,
    partition=lambda mesh, args, out: (mesh, layer, out.sharding, None),
    sharding_rule="i j, k i -> k j",
)


def kernel(x, out):
    out[...] = x[...] * 2


rows(
    OPAQUE,
    composite=(lax.composite(layer, "flax_amp.layer"), W, A),
    custom_partitioning=(partitioned, W, A),
    pallas_call=(
        lambda x: pl.pallas_call(
            kernel, jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True
        )(x),
        A,
    ),
)

ON_DEVICES = np.tile(LINE[:4], (8, 1))


def over(fn, in_spec=ROWS_OVER_DEVICES, out_spec=ROWS_OVER_DEVICES, **options):
    """A function of the rows of an array, one on each device, and the array."""
    return over_devices(fn, (in_spec,), out_spec, **options), ON_DEVICES


def to_one(fn):
    """The same, with a result that is equal on all devices."""
    return over(fn, out_spec=P())


def of_one(fn):
    """The same, of an array that is equal on all devices."""
    return over(fn, in_spec=P())


# --- opaque: effects and memory ------------------------------------------------------


def with_ref(use):
    def fn(x):
        ref = jax.new_ref(x)
        use(ref)
        return jax.freeze(ref)

    return fn


rows(
    OPAQUE,
    # What is outside of the program sees float32.
    pure_callback=(
        lambda x: jax.pure_callback(np.sin, x, x, vmap_method="sequential"),
        A,
    ),
    debug_callback=(lambda x: jax.debug.callback(lambda x: None, x), A),
    # The memory behind a reference has one dtype.
    new_ref=(with_ref(lambda ref: None), A),
    freeze=(with_ref(lambda ref: ref[0]), A),
    get=(with_ref(lambda ref: ref[0]), A),
    swap=(with_ref(lambda ref: jax.ref.swap(ref, 0, ref[1] * 2)), A),
    addupdate=(with_ref(lambda ref: jax.ref.addupdate(ref, 0, ref[1])), A),
)

# --- devices -------------------------------------------------------------------------

EXPLICIT = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))
to_varying, to_reduced, to_unreduced = (
    functools.partial(lax.pcast, axis_name="data", to=to)
    for to in ("varying", "reduced", "unreduced")
)


ragged = np.ones(8, np.int32)
rows(
    SUM,
    psum=over(lambda x: lax.psum(x, "data"), check_vma=False),
    psum_invariant=to_one(lambda x: lax.psum(x, "data")),
    reduce_scatter=of_one(lambda x: lax.psum_scatter(x, "data", scatter_dimension=0)),
    unreduced_psum=to_one(lambda x: lax.psum(to_unreduced(x), "data")),
    unreduced_reduce_scatter=over(
        lambda x: lax.psum_scatter(
            to_unreduced(x.repeat(8, 0)), "data", scatter_dimension=0, tiled=True
        )
    ),
)
rows(
    MOVE,
    all_gather=over(lambda x: lax.all_gather(x, "data")),
    all_to_all=over(lambda x: lax.all_to_all(jnp.tile(x, 2), "data", 1, 0, tiled=True)),
    ppermute=over(lambda x: lax.ppermute(x, "data", [(0, 1), (1, 0)])),
    pmax=to_one(lambda x: lax.pmax(x, "data")),
    pmin=to_one(lambda x: lax.pmin(x, "data")),
    pvary=of_one(to_varying),
    pbroadcast=over(lambda x: lax.pbroadcast(x, ("data",), 0)),
    sharding_constraint=(
        lambda x: lax.with_sharding_constraint(
            x, jax.sharding.SingleDeviceSharding(jax.devices()[0])
        ),
        A,
    ),
    # Experimental.
    all_gather_invariant=to_one(lambda x: lax.all_gather(x, "data", to="invarying")),
    all_gather_reduced=over(
        lambda x: to_varying(lax.all_gather(x, "data", to="reduced"))
    ),
    preduced=of_one(lambda x: to_varying(to_reduced(x))),
    reduced_vary_cast=of_one(lambda x: to_varying(to_reduced(x))),
    pbroadcast_dynamic=over(lambda x: lax.pbroadcast(x, ("data",), jnp.int32(0))),
    ragged_all_to_all=over(
        lambda x: lax.ragged_all_to_all(
            y := x.repeat(8, 0), y, *[ragged] * 4, axis_name="data"
        )
    ),
    xla_metadata_value=(lambda x: xla_metadata.set_xla_metadata(x, key="value"), A),
    reshard=(
        lambda x: jax.reshard(x, jax.sharding.NamedSharding(EXPLICIT, P("data"))),
        ON_DEVICES,
    ),
    layout_constraint=(lambda x: with_layout_constraint(x, Layout((1, 0))), A),
)
rows(
    OPAQUE,
    platform_index=(
        lambda x: lax.platform_dependent(x, cpu=jnp.exp, default=jnp.log),
        A,
    ),
)

ROWS["reduced_vary_cast_p"] = ROWS["reduced_vary_cast"]  # so JAX 0.10 and 0.11 say

# --- what has no row -----------------------------------------------------------------

# The rewriter has no row for these either: they run as written, as those of their kind
# that have rows here.
AS_WRITTEN = """
    reduce_window nextafter population_count clz mulhi reduce_xor conj random_[!bg]*
    rng_* empty threefry2x32 lu_pivots_to_permutation todense remat_opt call_exported
    run_state call_hi_primitive scaled_dot io_callback debug_print create_token
    after_all ffi_call empty_ref free_ref axis_index program_order xla_metadata_call
    fused_call scaled_matmul_wrapper check symmetric_product psend precv
    inspect_sharding dce_sink vary_unreduced_cast*
    bcoo_[!d]* bcoo_dot_general_sampled bcsr_* coo_* csr_[!s]* csr_spm? spsolve
    """
# No public function gives these in the jaxpr of a program, in each version of JAX.
WITHOUT_FUNCTION = """
    *_start *_done le_to eq_to lt_to geqp3 philox?x32 threefry4x32 iota_2x32_shape
    scaled_matmul empty2 select_and_scatter dimension_size shape_assertion dim_as_value
    unreduced_pmax unreduced_pmin relayout dot_product_attention_* cudnn_fusion rnn_?wd
    custom_lin call_hi_primitive_linearized unreachable zeros_like
    custom_jvp_call_jaxpr stage host_local_array_to_global_array
    global_array_to_host_local_array consume assert_consumed_value
    with_memory_space_constraint call to_edtype from_edtype tie pin unpin create_linear
    broadcast_to accum_grad_in_ref box_get box_set new_box log_extend log_read new_log
    """


def is_in(name: str, patterns: str) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns.split())


# They have a row, but are not in each version of JAX.
OTHER_VERSIONS = set(
    """log2 one_minus_square pbroadcast_dynamic polynomial reduced_vary_cast
    reduced_vary_cast_p xla_metadata_value closed_call eval_jaxpr""".split()
)
# Traced, but not run: there is no kernel for the CPU, or it needs a mesh around the
# program.
NOT_RUN = {"pbroadcast", "pbroadcast_dynamic", "ragged_all_to_all", "reshard"}
