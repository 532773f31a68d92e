"""One row for each primitive with functions, effects or devices inside.

And one for each that no public function gives, with the reason. The rows are added to
the table of `_primitive_rows.py`.
"""

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
from jax.experimental import checkify, xla_metadata
from jax.experimental import pallas as pl
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


def in_order(w, x):
    from jax.experimental import overlap

    return overlap.program_order(layer, enforce=False)(w, x)


def grouped(w, x):
    from jax.experimental import scheduling_groups

    return scheduling_groups.scheduling_group(name="group")(layer)(w, x)


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
    program_order=(in_order, W, A),
    xla_metadata_call=(grouped, W, A),
    fused_call=(
        jax.experimental.fused.fused(out_spaces=(jax.memory.Space.Device,))(
            lambda x: (jnp.sin(x),)
        ),
        A,
    ),
    run_state=(pl.run_state(swap), A),
    call_hi_primitive=(
        lambda x: lax.custom_root(
            lambda y: y - x, x, lambda f, y: y - f(y), lambda g, y: y / g(1.0)
        ),
        A[0, 0],
    ),
    scaled_matmul_wrapper=(
        jax.nn.scaled_matmul,
        *[np.ones((1, 32, 32), jnp.float8_e4m3fn)] * 2,
        *[np.ones((1, 32, 1), jnp.float8_e8m0fnu)] * 2,
    ),
    scaled_dot=(
        lambda x, w: lax.scaled_dot(
            x, w, lhs_scale=None, rhs_scale=None, preferred_element_type=x.dtype
        ),
        A, W,
    ),
    symmetric_product=(
        lambda x, y: lax.linalg.symmetric_product(x, y, alpha=1.0, beta=1.0),
        A, SYMMETRIC[:2, :2],
    ),
)  # fmt: skip


@functools.cache
def exported():
    return jax.export.export(jax.jit(jnp.sin))(jax.ShapeDtypeStruct((2, 3), "float32"))


only_in("closed_call", "0.10")
only_in("eval_jaxpr", "0.11", "0.12")
only_in("call_hi_primitive", "0.11", "0.12")

ON_DEVICES = np.tile(LINE[:4], (8, 1))


def on_devices(fn, in_spec=ROWS_OVER_DEVICES, out_spec=ROWS_OVER_DEVICES, **options):
    return over_devices(fn, (in_spec,), out_spec, **options)


# --- opaque: effects and memory ------------------------------------------------------


def callback(kind):
    return lambda x: kind(np.sin, jax.ShapeDtypeStruct(x.shape, x.dtype), x)


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
        lambda x: jax.pure_callback(
            np.sin, jax.ShapeDtypeStruct(x.shape, x.dtype), x, vmap_method="sequential"
        ),
        A,
    ),
    io_callback=(callback(jax.experimental.io_callback), A),
    debug_callback=(lambda x: jax.debug.callback(lambda x: None, x), A),
    debug_print=(lambda x: jax.debug.print("{}", x), A),
    psend=(
        on_devices(lambda x: (x, lax.psend(x, "data", [(0, 1)]))[0], check_vma=False),
        ON_DEVICES,
    ),
    precv=(
        on_devices(
            lambda x: lax.precv(
                lax.create_token(),
                jax.ShapeDtypeStruct(x.shape, x.dtype),
                "data",
                [(0, 1)],
            ),
            check_vma=False,
        ),
        ON_DEVICES,
    ),
    create_token=(lambda x: (x, lax.create_token())[0], A),
    after_all=(lambda x: (x, lax.after_all(lax.create_token()))[0], A),
    dce_sink=(lambda x: (x, lax.dce_sink(x))[0], A),
    inspect_sharding=(
        lambda x: jax.debug.inspect_array_sharding(x, callback=lambda s: None),
        A,
    ),
    ffi_call=(
        lambda x: jax.ffi.ffi_call("a", jax.ShapeDtypeStruct(x.shape, x.dtype))(x),
        A,
    ),
    check=(lambda x: checkify.check(x[0, 0] > 0, "{}", x), A),
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


def unreduced(collective):
    return on_devices(lambda x: collective(to_unreduced(x), "data"), out_spec=P())


def unreduced_extreme(collective, reduction, kind):
    def fn(x):
        kinds = dict(
            unreduced={"data"}, unreduced_kind=jax.sharding.UnreducedKind[kind]
        )
        over = jax.sharding.NamedSharding(EXPLICIT, P(None, **kinds))
        x = jax.reshard(x, jax.sharding.NamedSharding(EXPLICIT, P("data")))
        x = reduction(x, (0,), out_sharding=over)
        reduce = jax.shard_map(
            lambda x: collective(x, "data"), mesh=EXPLICIT, out_specs=P()
        )
        return reduce(x)

    return fn


def relaid(x):
    return jax.experimental.layout.explicit_layout(jnp.sin, in_layouts=Layout((1, 0)))(
        x
    )


rows(
    SUM,
    "a sum over devices",
    psum=(on_devices(lambda x: lax.psum(x, "data"), check_vma=False), ON_DEVICES),
    psum_invariant=(
        on_devices(lambda x: lax.psum(x, "data"), out_spec=P()),
        ON_DEVICES,
    ),
    reduce_scatter=(
        on_devices(lambda x: lax.psum_scatter(x, "data", scatter_dimension=0), P()),
        ON_DEVICES,
    ),
)
rows(
    MOVE,
    "moves or chooses between devices",
    all_gather=(on_devices(lambda x: lax.all_gather(x, "data")), ON_DEVICES),
    all_to_all=(
        on_devices(lambda x: lax.all_to_all(x, "data", 1, 0, tiled=True)),
        np.tile(LINE[:4], (8, 2)),
    ),
    ppermute=(
        on_devices(lambda x: lax.ppermute(x, "data", [(0, 1), (1, 0)])),
        ON_DEVICES,
    ),
    pmax=(on_devices(lambda x: lax.pmax(x, "data"), out_spec=P()), ON_DEVICES),
    pmin=(on_devices(lambda x: lax.pmin(x, "data"), out_spec=P()), ON_DEVICES),
    pvary=(on_devices(lambda x: lax.pcast(x, "data", to="varying"), P()), ON_DEVICES),
    pbroadcast=(on_devices(lambda x: lax.pbroadcast(x, ("data",), 0)), ON_DEVICES),
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
    all_gather_invariant=(
        on_devices(lambda x: lax.all_gather(x, "data", to="invarying"), out_spec=P()),
        ON_DEVICES,
    ),
    all_gather_reduced=(
        on_devices(lambda x: to_varying(lax.all_gather(x, "data", to="reduced"))),
        ON_DEVICES,
    ),
    preduced=(on_devices(lambda x: to_varying(to_reduced(x)), P()), ON_DEVICES),
    reduced_vary_cast=(
        on_devices(lambda x: to_varying(to_reduced(x)), P()),
        ON_DEVICES,
    ),
    pbroadcast_dynamic=(
        on_devices(lambda x: lax.pbroadcast(x, ("data",), jnp.int32(0))),
        ON_DEVICES,
    ),
    ragged_all_to_all=(
        on_devices(
            lambda x: lax.ragged_all_to_all(x, x, *[ragged] * 4, axis_name="data")
        ),
        np.tile(ON_DEVICES, (8, 1)),
    ),
    xla_metadata_value=(lambda x: xla_metadata.set_xla_metadata(x, key="value"), A),
    unreduced_pmax=(unreduced_extreme(lax.pmax, lax.reduce_max, "max"), ON_DEVICES),
    unreduced_pmin=(unreduced_extreme(lax.pmin, lax.reduce_min, "min"), ON_DEVICES),
    reshard=(
        lambda x: jax.reshard(x, jax.sharding.NamedSharding(EXPLICIT, P("data"))),
        ON_DEVICES,
    ),
    layout_constraint=(lambda x: with_layout_constraint(x, Layout((1, 0))), A),
    relayout=(relaid, A),
)
rows(
    SUM,
    "a sum over devices, or on its way to be one",
    unreduced_psum=(unreduced(lax.psum), ON_DEVICES),
    unreduced_reduce_scatter=(
        on_devices(
            lambda x: lax.psum_scatter(
                to_unreduced(x), "data", scatter_dimension=0, tiled=True
            )
        ),
        np.tile(ON_DEVICES, (8, 1)),
    ),
)
rows(
    OPAQUE,
    "the terms of a sum over devices",
    vary_unreduced_cast=(unreduced(lax.psum), ON_DEVICES),
)
for name in ("reduced_vary_cast", "vary_unreduced_cast"):  # so JAX 0.10 and 0.11 say
    ROWS[f"{name}_p"] = ROWS[name]
rows(
    OPAQUE,
    "numbers of devices and platforms",
    platform_index=(
        lambda x: lax.platform_dependent(x, cpu=jnp.exp, default=jnp.log),
        A,
    ),
    axis_index=(on_devices(lambda x: lax.axis_index("data")[None]), ON_DEVICES),
)

only_in("relayout", "0.12")

# --- what no public function gives ---------------------------------------------------

UNREACHABLE: dict[str, str] = {}


def unreachable(reason: str, names: str) -> None:
    for name in names.split():
        assert name not in UNREACHABLE, name
        UNREACHABLE[name] = reason


unreachable(
    "the asynchronous collectives have no public function yet",
    """all_gather_start all_gather_done all_gather_reduced_start all_to_all_start
    all_to_all_done pbroadcast_start pbroadcast_done ppermute_start ppermute_done
    psum_start psum_done psum_invariant_start reduce_scatter_start reduce_scatter_done
    unreduced_psum_start unreduced_reduce_scatter_start""",
)
unreachable(
    "stands in lowered programs only, where another primitive is in the jaxpr",
    """eq_to lt_to geqp3 philox2x32 philox4x32 threefry4x32 iota_2x32_shape
    scaled_matmul coo_spmm coo_spmv csr_spmm csr_spmv empty2 select_and_scatter
    dimension_size shape_assertion dim_as_value""",
)
unreachable(
    "needs cuDNN while it is traced",
    """dot_product_attention_fwd dot_product_attention_fwd_wrapper
    dot_product_attention_bwd dot_product_attention_bwd_wrapper
    dot_product_attention_fp8_fwd dot_product_attention_fp8_fwd_wrapper
    dot_product_attention_fp8_bwd dot_product_attention_fp8_bwd_wrapper cudnn_fusion
    rnn_fwd rnn_bwd""",
)
unreachable(
    "JAX binds it inside of its transformations and leaves it in no jaxpr",
    """custom_lin call_hi_primitive_linearized unreachable zeros_like
    custom_jvp_call_jaxpr stage""",
)
unreachable(
    "moves data between processes, outside of programs",
    "host_local_array_to_global_array global_array_to_host_local_array",
)
unreachable("checks keys, and is in no program", "consume assert_consumed_value")
unreachable(
    "private, without a public function",
    """with_memory_space_constraint call to_edtype from_edtype tie pin unpin
    create_linear broadcast_to accum_grad_in_ref box_get box_set new_box
    log_extend log_read new_log""",
)

# Named here, but not in each version of JAX.
OTHER_VERSIONS = set(
    """log2 one_minus_square pbroadcast_dynamic polynomial program_order
    reduced_vary_cast reduced_vary_cast_p relayout unreduced_pmax unreduced_pmin
    vary_unreduced_cast vary_unreduced_cast_p with_memory_space_constraint
    xla_metadata_value xla_metadata_call box_get box_set call closed_call log_extend
    log_read new_box new_log pbroadcast_done pbroadcast_start psum_start
    unreduced_psum_start unreduced_reduce_scatter_start""".split()
)
# Traced, but not run: there is no kernel for the CPU,
NOT_RUN = set(
    """ffi_call fused_call pbroadcast pbroadcast_dynamic ragged_all_to_all psend precv
    """
    # ... it needs a mesh around the program, or `checkify`,
    """reshard unreduced_pmax unreduced_pmin check """
    # ... or it gives other numbers each time.
    """rng_uniform empty empty_ref""".split()
)
# JAX cannot lower them.
NOT_BATCHED = ("bcoo_extract",)
