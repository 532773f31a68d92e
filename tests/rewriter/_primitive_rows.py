"""One row for each primitive that computes or moves numbers.

`_structured_rows.py` has those with functions inside, effects, devices; and those that
no public function gives. `test_primitives.py` reads both.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.extend.random
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import sparse
from jax.lax import linalg

PRODUCT, ARITHMETIC, SUM, MOVE = "product", "arithmetic", "sum", "move"
STRUCTURED, OPAQUE = "structured", "opaque"

# The classes whose results may be in half precision between products. All others run in
# float32.
MAY_BE_HALF = (PRODUCT, MOVE, STRUCTURED)


class Row(NamedTuple):
    """A primitive, and what `amp` makes of it.

    Attributes:
      family: its class.
      why: why it is in that class.
      call: a public function that gives the primitive.
      args: its arguments. Every number of them is exact in bfloat16.
      versions: of JAX, in which the function gives it; empty for all that have it.
    """

    family: str
    why: str
    call: Callable[..., Any]
    args: tuple[Any, ...]
    versions: tuple[str, ...] = ()


ROWS: dict[str, Row] = {}


def rows(family: str, why: str, **calls: Any) -> None:
    """Adds rows of one class: `name=(call, *args)`; `_` stands for `-` in a name."""
    for name, (call, *args) in calls.items():
        assert name not in ROWS, name
        ROWS[name] = Row(family, why, call, tuple(args))


def only_in(name: str, *versions: str) -> None:
    """Says that the public function gives a primitive in some versions of JAX only."""
    ROWS[name] = ROWS[name]._replace(versions=versions)


def array(*numbers: Any) -> np.ndarray:
    return np.array(numbers, np.float32)


A = array([0.125, 0.25, 0.375], [0.5, 0.625, 0.75])
B = array([0.75, 0.375, 0.5], [0.25, 0.875, 0.125])
ABOVE_1 = A + 1
SIGNED = A * array([1, -1, 1], [-1, 1, -1])
W = array([0.5, -0.25, 0.125], [1, 0.75, -0.5], [0.25, 0.5, -1])
SYMMETRIC = array([4, 1, 0.5], [1, 3, -0.25], [0.5, -0.25, 2])
LINE = array(0.5, -1, 0.25, 2, -0.125, 0.75)
INTEGERS = np.array([[3, 1, 2], [0, 5, 4]], np.int32)
BOOLS = np.array([[True, False, True], [False, True, True]])
COMPLEX = (A + 1j * B).astype(np.complex64)
WORDS = np.array([3, 1, 2, 7], np.uint32)
IMAGE = np.arange(16, dtype=np.float32).reshape(1, 4, 4, 1)[:, ::-1] / 8
KERNEL = array([0.5, -1], [0.25, 2]).reshape(2, 2, 1, 1)
KEY = jax.random.key(0)

# --- products ------------------------------------------------------------------------

rows(
    PRODUCT,
    "the hardware multiplies halves faster, and accumulates in float32",
    dot_general=(jnp.matmul, A, W),
    conv_general_dilated=(
        lambda x, k: lax.conv_general_dilated(
            x, k, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        ),
        IMAGE,
        KERNEL,
    ),
    ragged_dot_general=(
        lambda x, w: lax.ragged_dot(x, w, np.array([1, 1], np.int32)),
        A,
        np.stack([W, -W]),
    ),
)

# --- arithmetic and sums -------------------------------------------------------------

rows(
    ARITHMETIC,
    "the result may be much larger than the operand",
    exp=(lax.exp, A),
    exp2=(lax.exp2, A),
    expm1=(lax.expm1, A),
    log=(lax.log, A),
    log1p=(lax.log1p, A),
    log2=(jnp.log2, A),
    pow=(lax.pow, A, B),
    integer_pow=(lambda x: lax.integer_pow(x, 3), A),
    square=(lax.square, A),
    rsqrt=(lax.rsqrt, A),
    sinh=(lax.sinh, A),
    cosh=(lax.cosh, A),
    tan=(lax.tan, A),
    asin=(lax.asin, A),
    acos=(lax.acos, A),
    asinh=(lax.asinh, A),
    acosh=(lax.acosh, ABOVE_1),
    atanh=(lax.atanh, A),
    erf_inv=(lax.erf_inv, A),
    lgamma=(lax.lgamma, A),
    digamma=(lax.digamma, A),
    polygamma=(lambda x: lax.polygamma(lax.full_like(x, 1), x), A),
    zeta=(lax.zeta, ABOVE_1 + 1, B),
    igamma=(lax.igamma, A, B),
    igammac=(lax.igammac, A, B),
    igamma_grad_a=(lax.igamma_grad_a, A, B),
    bessel_i0e=(lax.bessel_i0e, A),
    bessel_i1e=(lax.bessel_i1e, A),
    regularized_incomplete_beta=(lax.betainc, A, B, A),
    polynomial=(lambda x: jnp.polyval(np.ones(3, x.dtype), x), A),
)
rows(
    SUM,
    "a long sum loses small terms",
    reduce_sum=(lambda x: x.sum(0), A),
    reduce_prod=(lambda x: x.prod(0), A),
    cumsum=(lambda x: lax.cumsum(x), A),
    cumprod=(lambda x: lax.cumprod(x), A),
    cumlogsumexp=(lambda x: lax.cumlogsumexp(x), A),
    reduce_window_sum=(
        lambda x: lax.reduce_window(x, 0.0, lax.add, (1, 2), (1, 1), "VALID"),
        A,
    ),
)
rows(
    SUM,
    "no kernels for halves, and conditioning needs the digits",
    cholesky=(linalg.cholesky, SYMMETRIC),
    cholesky_update=(linalg.cholesky_update, SYMMETRIC, LINE[:3]),
    lu=(lambda x: linalg.lu(x)[0], SYMMETRIC),
    qr=(linalg.qr, SYMMETRIC),
    geqrf=(lambda x: jnp.linalg.qr(x, mode="raw"), SYMMETRIC),
    householder_product=(linalg.householder_product, W, LINE[:3]),
    ormqr=(linalg.ormqr, W, LINE[:3], SYMMETRIC),
    eig=(lambda x: linalg.eig(x)[0], SYMMETRIC),
    eigh=(lambda x: linalg.eigh(x)[1], SYMMETRIC),
    svd=(lambda x: linalg.svd(x, compute_uv=False), SYMMETRIC),
    schur=(lambda x: linalg.schur(x)[0], SYMMETRIC),
    hessenberg=(lambda x: linalg.hessenberg(x)[0], SYMMETRIC),
    triangular_solve=(
        lambda a, b: linalg.triangular_solve(a, b, left_side=True), SYMMETRIC, W
    ),
    tridiagonal=(lambda x: linalg.tridiagonal(x)[1], SYMMETRIC),
    tridiagonal_solve=(
        linalg.tridiagonal_solve,
        array(0, 1, 0.5), array(4, 3, 2), array(1, 0.5, 0), W,
    ),
    fft=(lambda x: jnp.fft.rfft(x), LINE),
)  # fmt: skip


def max_pool(x):
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 1, 1, 1), "VALID")


rows(
    ARITHMETIC,
    "between two products nothing is rounded",
    add=(lax.add, A, B),
    sub=(lax.sub, A, B),
    mul=(lax.mul, A, B),
    div=(lax.div, A, B),
    floor=(lax.floor, SIGNED),
    ceil=(lax.ceil, SIGNED),
    round=(lax.round, SIGNED),
    tanh=(lax.tanh, A),
    logistic=(lax.logistic, A),
    erf=(lax.erf, A),
    erfc=(lax.erfc, A),
    sin=(lax.sin, A),
    cos=(lax.cos, A),
    atan=(lax.atan, A),
    atan2=(lax.atan2, A, B),
    sqrt=(lax.sqrt, A),
    cbrt=(lax.cbrt, A),
    rem=(lax.rem, B, A),
    one_minus_square=(lambda x: jax.vjp(jnp.tanh, x)[1](x), A),
    add_any=(lambda x: jax.vjp(lambda x: jnp.sin(x) * x, x)[1](x), A),
    select_and_scatter_add=(lambda x: jax.vjp(max_pool, x)[1](x[:, 1:, 1:]), IMAGE),
    select_and_gather_add=(lambda x: jax.jvp(max_pool, (x,), (x,))[1], IMAGE),
    scatter_add=(lambda x, y: x.at[0].add(y[1]), A, B),
    scatter_sub=(lambda x, y: x.at[0].subtract(y[1]), A, B),
    scatter_mul=(lambda x, y: x.at[0].multiply(y[1]), A, B),
)
for name in ("add", "sub", "mul"):
    ROWS[f"scatter-{name}"] = ROWS.pop(f"scatter_{name}")

# --- moves ---------------------------------------------------------------------------


def reduce_window(operation, init):
    return lambda x: lax.reduce_window(x, init, operation, (1, 2), (1, 1), "VALID")


rows(
    MOVE,
    "moves data: exact in any dtype",
    reshape=(lambda x: x.reshape(3, 2), A),
    squeeze=(lambda x: x.squeeze(0), A[:1]),
    broadcast_in_dim=(lambda x: jnp.broadcast_to(x[None], (4, 2, 3)), A),
    transpose=(lambda x: x.T, A),
    rev=(lambda x: lax.rev(x, (1,)), A),
    slice=(lambda x: lax.slice(x, (0, 1), (2, 3)), A),
    dynamic_slice=(lambda x, i: lax.dynamic_slice(x, (i, i), (1, 2)), A, np.int32(1)),
    dynamic_update_slice=(
        lambda x, y, i: lax.dynamic_update_slice(x, y, (i, i)),
        A,
        B[:1],
        np.int32(1),
    ),
    gather=(lambda x, i: (x.at[i].get(mode="clip"), x), A, np.int32([1])),
    scatter=(lambda x, y: x.at[0].set(y[1]), A, B),
    split=(lambda x: lax.split(x, (1, 2), 1), A),
    unstack=(lambda x: lax.unstack(x), A),
    tile=(lambda x: lax.tile(x, (2, 1)), A),
    copy=(lambda x: jnp.array(x, copy=True), A),
    concatenate=(lambda x, y: jnp.concatenate([x, y]), A, B),
    pad=(lambda x: jnp.pad(x, 1), A),
    stack=(lambda x, y: lax.stack([x, y]), A, B),
    select_n=(jnp.where, BOOLS, A, B),
    stop_gradient=(lax.stop_gradient, A),
    optimization_barrier=(lax.optimization_barrier, A),
    name=(lambda x: jax.ad_checkpoint.checkpoint_name(x, "x"), A),
    device_put=(lambda x: jax.device_put(x, jax.devices()[0]), A),
    sort=(lambda x: lax.sort(x), B),
    top_k=(lambda x: lax.top_k(x, 2)[0], B),
    approx_top_k=(lambda x: lax.approx_max_k(x, 2)[0], B),
)
rows(
    MOVE,
    "chooses or compares: nothing is rounded",
    reduce_max=(lambda x: x.max(1), B),
    reduce_min=(lambda x: x.min(1), B),
    reduce_window_max=(reduce_window(lax.max, -np.inf), B),
    reduce_window_min=(reduce_window(lax.min, np.inf), B),
    cummax=(lambda x: lax.cummax(x), B),
    cummin=(lambda x: lax.cummin(x), B),
    argmax=(lambda x: jnp.argmax(x, 1), B),
    argmin=(lambda x: jnp.argmin(x, 1), B),
    eq=(lax.eq, A, B),
    ne=(lax.ne, A, B),
    lt=(lax.lt, A, B),
    le=(lax.le, A, B),
    gt=(lax.gt, A, B),
    ge=(lax.ge, A, B),
    is_finite=(lax.is_finite, A),
    le_to=(jnp.searchsorted, LINE, A),
    neg=(lax.neg, A),
    max=(lax.max, A, B),
    min=(lax.min, A, B),
    abs=(lax.abs, SIGNED),
    sign=(lax.sign, SIGNED),
    clamp=(lax.clamp, A * 0.25, B, A + 0.125),
)
only_in("le_to", "0.10", "0.11")
ROWS["scatter-max"] = Row(MOVE, "chooses", lambda x, y: x.at[0].max(y[1]), (A, B))
ROWS["scatter-min"] = Row(MOVE, "chooses", lambda x, y: x.at[0].min(y[1]), (A, B))

# --- opaque: numbers -----------------------------------------------------------------

rows(
    OPAQUE,
    "its function, given as Python code or jaxpr, is a float32 one",
    reduce=(lambda x: lax.reduce(x, x[0, 0], lambda a, b: a * b + a, (1,)), A),
    reduce_window=(
        lambda x: lax.reduce_window(
            x, 0.0, lambda a, b: a + b * b, (1, 2), (1, 1), "VALID"
        ),
        A,
    ),
)
rows(
    OPAQUE,
    "means a dtype: its own, or the bits of its operand",
    convert_element_type=(lambda x: x.astype(np.int32), A),
    bitcast_convert_type=(lambda x: lax.bitcast_convert_type(x, np.int32), A),
    reduce_precision=(lambda x: lax.reduce_precision(x, 5, 3), A),
    nextafter=(lax.nextafter, A, B),
)
rows(
    OPAQUE,
    "works on integers and booleans",
    population_count=(lax.population_count, INTEGERS),
    clz=(lax.clz, INTEGERS),
    mulhi=(lax.mulhi, INTEGERS, INTEGERS),
    shift_left=(lax.shift_left, INTEGERS, INTEGERS),
    shift_right_arithmetic=(lax.shift_right_arithmetic, INTEGERS, INTEGERS),
    shift_right_logical=(lax.shift_right_logical, INTEGERS, INTEGERS),
    reduce_and=(lambda x: lax.reduce_and(x, (0,)), INTEGERS),
    reduce_or=(lambda x: lax.reduce_or(x, (0,)), INTEGERS),
    reduce_xor=(lambda x: lax.reduce_xor(x, (0,)), INTEGERS),
    **{
        "and": (lax.bitwise_and, INTEGERS, INTEGERS),
        "or": (lax.bitwise_or, INTEGERS, INTEGERS),
        "xor": (lax.bitwise_xor, INTEGERS, INTEGERS),
        "not": (lax.bitwise_not, INTEGERS),
    },
)
rows(
    OPAQUE,
    "complex numbers have no half precision",
    complex=(lax.complex, A, B),
    real=(lax.real, COMPLEX),
    imag=(lax.imag, COMPLEX),
    conj=(lax.conj, COMPLEX),
)
rows(
    OPAQUE,
    "makes its numbers itself",
    iota=(lambda x: jnp.arange(300.0, dtype=x.dtype), A),
    rng_bit_generator=(lambda k: lax.rng_bit_generator(k, (3,)), WORDS),
    rng_uniform=(lambda x: lax.rng_uniform(x[0, 0], x[1, 0], (3,)), A),
    random_bits=(jax.random.bits, KEY),
    random_seed=(jax.random.key, np.int32(3)),
    random_split=(jax.random.split, KEY),
    random_fold_in=(jax.random.fold_in, KEY, np.int32(3)),
    random_wrap=(jax.random.wrap_key_data, WORDS[:2]),
    random_unwrap=(jax.random.key_data, KEY),
    random_clone=(jax.random.clone, KEY),
    random_gamma=(lambda a: jax.random.gamma(KEY, a, dtype=a.dtype), A),
    empty=(lambda x: lax.empty((3,), x.dtype), A),
    threefry2x32=(lambda k, x: jax.extend.random.threefry_2x32(k, x), WORDS[:2], WORDS),
    lu_pivots_to_permutation=(
        lambda x: linalg.lu_pivots_to_permutation(x, 3),
        np.int32([2, 1, 2]),
    ),
)

# --- sparse --------------------------------------------------------------------------

DIAGONAL = np.array([[0, 0], [1, 1], [2, 2]], np.int32)
COLUMNS, ROW_STARTS = DIAGONAL[:, 0], np.arange(4, dtype=np.int32)


def bcoo(x):
    return sparse.BCOO((x, DIAGONAL), shape=(3, 3))


def bcsr(x):
    return sparse.BCSR((x, COLUMNS, ROW_STARTS), shape=(3, 3))


def coo(x):
    return sparse.COO((x, COLUMNS, COLUMNS), shape=(3, 3))


def csr(x):
    return sparse.CSR((x, COLUMNS, ROW_STARTS), shape=(3, 3))


THREE = LINE[:3]
rows(
    OPAQUE,
    "JAX's sparse matrices are experimental, and have kernels for float32",
    bcoo_fromdense=(lambda x: sparse.BCOO.fromdense(x, nse=6).data, A),
    bcoo_todense=(lambda x: bcoo(x).todense(), THREE),
    bcoo_dot_general=(lambda x, y: bcoo(x) @ y, THREE, W),
    bcoo_dot_general_sampled=(
        lambda x, y: sparse.bcoo_dot_general_sampled(
            x, y, DIAGONAL, dimension_numbers=(((1,), (0,)), ((), ()))
        ),
        W, SYMMETRIC,
    ),
    bcoo_spdot_general=(lambda x, y: (bcoo(x) @ bcoo(y)).data, THREE, THREE),
    bcoo_extract=(lambda x: sparse.bcoo_extract(bcoo(THREE), x).data, W),
    bcoo_sort_indices=(lambda x: bcoo(x).sort_indices().data, THREE),
    bcoo_sum_duplicates=(lambda x: bcoo(x).sum_duplicates(nse=3).data, THREE),
    bcoo_transpose=(lambda x: bcoo(x).T.data, THREE),
    bcsr_fromdense=(lambda x: sparse.BCSR.fromdense(x, nse=6).data, A),
    bcsr_todense=(lambda x: bcsr(x).todense(), THREE),
    bcsr_dot_general=(lambda x, y: bcsr(x) @ y, THREE, W),
    bcsr_extract=(lambda x: sparse.bcsr_extract(COLUMNS, ROW_STARTS, x), W),
    coo_fromdense=(lambda x: sparse.COO.fromdense(x, nse=6).data, A),
    coo_todense=(lambda x: coo(x).todense(), THREE),
    coo_matvec=(lambda x, y: coo(x) @ y, THREE, THREE),
    coo_matmat=(lambda x, y: coo(x) @ y, THREE, W),
    csr_fromdense=(lambda x: sparse.CSR.fromdense(x, nse=6).data, A),
    csr_todense=(lambda x: csr(x).todense(), THREE),
    csr_matvec=(lambda x, y: csr(x) @ y, THREE, THREE),
    csr_matmat=(lambda x, y: csr(x) @ y, THREE, W),
    todense=(lambda x: sparse.todense(bcoo(x)), THREE),
    spsolve=(
        lambda x, y: sparse.linalg.spsolve(x, COLUMNS, ROW_STARTS, y), THREE, THREE
    ),
)  # fmt: skip
