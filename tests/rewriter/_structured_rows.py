"""One row for each primitive with functions, effects or devices inside.

And the names of those that have no row, with the reason. The rows are added to the
table of `_primitive_rows.py`.
"""

import fnmatch
import functools

import jax
import jax.experimental.fused
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
    only_in,
    rows,
)  # fmt: skip
from jax import lax
from jax.custom_batching import custom_vmap
from jax.experimental import pallas as pl
from jax.experimental import xla_metadata
from jax.experimental.custom_partitioning import custom_partitioning
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import PartitionSpec as P

from _programs import ROWS_OVER_DEVICES, over_devices
from _structured import cond_of, jvp_layer, layer, scan, vjp_layer, while_loop

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


def linear_solve(w, b):
    def iterate(matvec, b):
        return lax.fori_loop(0, 60, lambda _, y: y + (b - matvec(y)) / 5, b)

    return lax.custom_linear_solve(lambda v: w @ v, b, iterate, iterate)


rows(
    STRUCTURED,
    "what is inside of it is rewritten",
    jit=(jax.jit(layer), W, A),
    scan=(functools.partial(scan, layer), W, A),
    cond=(cond_of, W, A),
    remat2=(jax.checkpoint(layer), W, A),
    custom_jvp_call=(jvp_layer, W, A),
    custom_vjp_call=(vjp_layer, W, A),
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
    **{"while": (functools.partial(while_loop, layer), W, A)},
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


def fused(w, x):
    @jax.custom_vjp
    def f(w, x):
        return layer(w, x)

    f.defvjp(
        lambda w, x: (layer(w, x), (w, x)),
        lambda res, g: jax.vjp(layer, *res)[1](g),
        optimize_remat=True,
    )
    return jax.vjp(f, w, x)[0]


def swap(ref):
    ref[0] = ref[1] * 2


rows(
    OPAQUE,
    "what is inside may be lowered as a whole, or was compiled in float32",
    composite=(lax.composite(layer, "flax_amp.layer"), W, A),
    custom_partitioning=(partitioned, W, A),
    remat_opt=(fused, W, A),
    pallas_call=(
        lambda x: pl.pallas_call(
            kernel, jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True
        )(x),
        A,
    ),
    call_exported=(lambda x: exported().call(x), A),
    run_state=(pl.run_state(swap), A),
    call_hi_primitive=(
        lambda x: lax.custom_root(
            lambda y: y - x, x, lambda f, y: y - f(y), lambda g, y: y / g(1.0)
        ),
        A[0, 0],
    ),
    scaled_dot=(
        lambda x, w: lax.scaled_dot(
            x, w, lhs_scale=None, rhs_scale=None, preferred_element_type=x.dtype
        ),
        A, W,
    ),
)  # fmt: skip


@functools.cache
def exported():
    return jax.export.export(jax.jit(jnp.sin))(jax.ShapeDtypeStruct((2, 3), "float32"))


only_in("closed_call", "0.10")
only_in("eval_jaxpr", "0.11", "0.12")
only_in("call_hi_primitive", "0.11", "0.12")

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


def struct(x):
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def callback(kind):
    return lambda x: kind(np.sin, struct(x), x)


def with_ref(use):
    def fn(x):
        ref = jax.new_ref(x)
        use(ref)
        return jax.freeze(ref)

    return fn


def add(ref):
    jax.ref.addupdate(ref, 0, ref[1])


rows(
    OPAQUE,
    "what is outside of the program sees float32",
    pure_callback=(
        lambda x: jax.pure_callback(np.sin, struct(x), x, vmap_method="sequential"),
        A,
    ),
    io_callback=(callback(jax.experimental.io_callback), A),
    debug_callback=(lambda x: jax.debug.callback(lambda x: None, x), A),
    debug_print=(lambda x: jax.debug.print("{}", x), A),
    create_token=(lambda x: (x, lax.create_token())[0], A),
    after_all=(lambda x: (x, lax.after_all(lax.create_token()))[0], A),
    ffi_call=(lambda x: jax.ffi.ffi_call("a", struct(x))(x), A),
)
rows(
    OPAQUE,
    "the memory behind a reference has one dtype",
    new_ref=(with_ref(lambda ref: None), A),
    freeze=(with_ref(lambda ref: ref[0]), A),
    get=(with_ref(lambda ref: ref[0]), A),
    swap=(with_ref(swap), A),
    addupdate=(with_ref(add), A),
    empty_ref=(lambda x: jax.freeze(jax.empty_ref(jax.typeof(x))), A),
    free_ref=(lambda x: jax.free_ref(jax.new_ref(x)), A),
)

# --- devices -------------------------------------------------------------------------

EXPLICIT = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))
to_varying, to_reduced, to_unreduced = (
    functools.partial(lax.pcast, axis_name="data", to=to)
    for to in ("varying", "reduced", "unreduced")
)


rows(
    SUM,
    "a sum over devices, or on its way to be one",
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
    "moves or chooses between devices",
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
)
ragged = np.ones(8, np.int32)
rows(
    MOVE,
    "moves or chooses between devices, experimental",
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
    "numbers of devices and platforms",
    platform_index=(
        lambda x: lax.platform_dependent(x, cpu=jnp.exp, default=jnp.log),
        A,
    ),
    axis_index=over(lambda x: lax.axis_index("data")[None]),
)

ROWS["reduced_vary_cast_p"] = ROWS["reduced_vary_cast"]  # so JAX 0.10 and 0.11 say

# --- what has no row -----------------------------------------------------------------

WITHOUT_ROW = {  # the reason: names and patterns
    "the asynchronous collectives have no public function yet": "*_start *_done",
    "stands in lowered programs only, where another primitive is in the jaxpr": (
        """eq_to lt_to geqp3 philox?x32 threefry4x32 iota_2x32_shape scaled_matmul
        csr_spm? empty2 select_and_scatter dimension_size shape_assertion
        dim_as_value"""
    ),
    "is sparse: no row of the rewriter's table, as those of two that have rows here": (
        "bcoo_[!d]* bcoo_dot_general_sampled bcsr_* coo_* csr_[!s]* spsolve"
    ),
    "is new in JAX 0.12, and moves between devices or layouts": (
        "unreduced_pmax unreduced_pmin relayout"
    ),
    "is experimental or new: none of the rewriter's table, as the opaque ones here": (
        """program_order xla_metadata_call fused_call scaled_matmul_wrapper check
        symmetric_product psend precv inspect_sharding dce_sink vary_unreduced_cast*"""
    ),
    "needs cuDNN while it is traced": "dot_product_attention_* cudnn_fusion rnn_?wd",
    "JAX binds it inside of its transformations and leaves it in no jaxpr": (
        """custom_lin call_hi_primitive_linearized unreachable zeros_like
        custom_jvp_call_jaxpr stage"""
    ),
    "moves data between processes, outside of programs": (
        "host_local_array_to_global_array global_array_to_host_local_array"
    ),
    "checks keys, and is in no program": "consume assert_consumed_value",
    "private, without a public function": (
        """with_memory_space_constraint call to_edtype from_edtype tie pin unpin
        create_linear broadcast_to accum_grad_in_ref box_get box_set new_box log_extend
        log_read new_log"""
    ),
}


def has_no_row(name: str) -> bool:
    patterns = " ".join(WITHOUT_ROW.values()).split()
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


# They have a row, but are not in each version of JAX.
OTHER_VERSIONS = set(
    """log2 one_minus_square pbroadcast_dynamic polynomial reduced_vary_cast
    reduced_vary_cast_p xla_metadata_value closed_call""".split()
)
# Traced, but not run: there is no kernel for the CPU,
NOT_RUN = set(
    """ffi_call pbroadcast pbroadcast_dynamic ragged_all_to_all """
    # ... it needs a mesh around the program,
    """reshard """
    # ... or it gives other numbers each time.
    """rng_uniform empty empty_ref""".split()
)
