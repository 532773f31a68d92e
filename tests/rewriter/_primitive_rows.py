"""One row for each primitive that computes or moves numbers.

`_structured_rows.py` has those with functions inside, effects, devices; and which have
no row. `test_primitives.py` reads both. Why a primitive is in its class is said in
`flax_amp/_rewriter/primitives.py`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import sparse
from jax.lax import linalg

MATMUL, ARITHMETIC, SUM, MOVE = "matmul", "arithmetic", "sum", "move"
STRUCTURED, OPAQUE = "structured", "opaque"

# The classes whose results may be in half precision between matmuls. All others run in
# float32.
MAY_BE_HALF = (MATMUL, MOVE)


class Row(NamedTuple):
    """A primitive, and what `amp` makes of it."""

    family: str  # its class
    call: Callable[..., Any]  # a public function that gives the primitive
    args: tuple[Any, ...]  # every number of them is exact in bfloat16


ROWS: dict[str, Row] = {}


def rows(family: str, **calls: Any) -> None:
    """Adds rows of one class: `name=(call, *args)`."""
    for name, (call, *args) in calls.items():
        assert name not in ROWS, name
        ROWS[name] = Row(family, call, tuple(args))


def of_lax(family: str, names: str, *args: Any) -> None:
    """Adds rows of functions that have the names of their primitives."""
    for name in names.split():
        rows(family, **{name: (getattr(lax, name), *args)})


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
IMAGE = np.arange(16, dtype=np.float32).reshape(1, 4, 4, 1)[:, ::-1] / 8
KERNEL = array([0.5, -1], [0.25, 2]).reshape(2, 2, 1, 1)
KEY = jax.random.key(0)

# --- matmuls ------------------------------------------------------------------------

rows(
    MATMUL,
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

of_lax(
    ARITHMETIC,
    "exp exp2 expm1 log log1p square rsqrt sinh cosh tan asin acos asinh atanh erf_inv "
    "lgamma digamma bessel_i0e bessel_i1e",
    A,
)
of_lax(ARITHMETIC, "pow igamma igammac igamma_grad_a", A, B)
rows(
    ARITHMETIC,
    log2=(jnp.log2, A),
    integer_pow=(lambda x: lax.integer_pow(x, 3), A),
    acosh=(lax.acosh, ABOVE_1),
    polygamma=(lambda x: lax.polygamma(lax.full_like(x, 1), x), A),
    zeta=(lax.zeta, ABOVE_1 + 1, B),
    regularized_incomplete_beta=(lax.betainc, A, B, A),
    polynomial=(lambda x: jnp.polyval(np.ones(3, x.dtype), x), A),
)
rows(
    SUM,
    reduce_sum=(lambda x: x.sum(0), A),
    reduce_prod=(lambda x: x.prod(0), A),
    reduce_window_sum=(
        lambda x: lax.reduce_window(x, 0.0, lax.add, (1, 2), (1, 1), "VALID"),
        A,
    ),
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
of_lax(SUM, "cumsum cumprod cumlogsumexp", A)


def max_pool(x):
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 1, 1, 1), "VALID")


of_lax(ARITHMETIC, "tanh logistic erf erfc sin cos atan sqrt cbrt", A)
of_lax(ARITHMETIC, "floor ceil round", SIGNED)
of_lax(ARITHMETIC, "add sub mul div atan2", A, B)
rows(
    ARITHMETIC,
    rem=(lax.rem, B, A),
    one_minus_square=(lambda x: jax.vjp(jnp.tanh, x)[1](x), A),
    add_any=(lambda x: jax.vjp(lambda x: jnp.sin(x) * x, x)[1](x), A),
    select_and_scatter_add=(lambda x: jax.vjp(max_pool, x)[1](x[:, 1:, 1:]), IMAGE),
    select_and_gather_add=(lambda x: jax.jvp(max_pool, (x,), (x,))[1], IMAGE),
    **{
        "scatter-add": (lambda x, y: x.at[0].add(y[1]), A, B),
        "scatter-sub": (lambda x, y: x.at[0].subtract(y[1]), A, B),
        "scatter-mul": (lambda x, y: x.at[0].multiply(y[1]), A, B),
    },
)

# --- moves ---------------------------------------------------------------------------


def reduce_window(operation, init):
    return lambda x: lax.reduce_window(x, init, operation, (1, 2), (1, 1), "VALID")


of_lax(MOVE, "unstack stop_gradient optimization_barrier sort", A)
rows(
    MOVE,
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
    tile=(lambda x: lax.tile(x, (2, 1)), A),
    copy=(lambda x: jnp.array(x, copy=True), A),
    concatenate=(lambda x, y: jnp.concatenate([x, y]), A, B),
    pad=(lambda x: jnp.pad(x, 1), A),
    stack=(lambda x, y: lax.stack([x, y]), A, B),
    select_n=(jnp.where, BOOLS, A, B),
    name=(lambda x: jax.ad_checkpoint.checkpoint_name(x, "x"), A),
    device_put=(lambda x: jax.device_put(x, jax.devices()[0]), A),
    top_k=(lambda x: lax.top_k(x, 2)[0], B),
    approx_top_k=(lambda x: lax.approx_max_k(x, 2)[0], B),
    reduce_max=(lambda x: x.max(1), B),
    reduce_min=(lambda x: x.min(1), B),
    reduce_window_max=(reduce_window(lax.max, -np.inf), B),
    reduce_window_min=(reduce_window(lax.min, np.inf), B),
    argmax=(lambda x: jnp.argmax(x, 1), B),
    argmin=(lambda x: jnp.argmin(x, 1), B),
    clamp=(lax.clamp, A * 0.25, B, A + 0.125),
    **{
        "scatter-max": (lambda x, y: x.at[0].max(y[1]), A, B),
        "scatter-min": (lambda x, y: x.at[0].min(y[1]), A, B),
    },
)
of_lax(MOVE, "cummax cummin neg is_finite", B)
of_lax(MOVE, "abs sign", SIGNED)
of_lax(MOVE, "eq ne lt le gt ge max min", A, B)

# --- opaque: numbers -----------------------------------------------------------------

of_lax(
    OPAQUE,
    "shift_left shift_right_arithmetic shift_right_logical",
    INTEGERS,
    INTEGERS,
)


def bcoo(x):
    diagonal = np.array([[0, 0], [1, 1], [2, 2]], np.int32)
    return sparse.BCOO((x, diagonal), shape=(3, 3))


rows(
    OPAQUE,
    convert_element_type=(lambda x: x.astype(np.int32), A),
    bitcast_convert_type=(lambda x: lax.bitcast_convert_type(x, np.int32), A),
    reduce_precision=(lambda x: lax.reduce_precision(x, 5, 3), A),
    real=(lax.real, COMPLEX),
    imag=(lax.imag, COMPLEX),
    iota=(lambda x: jnp.arange(300.0, dtype=x.dtype), A),
    reduce_and=(lambda x: lax.reduce_and(x, (0,)), INTEGERS),
    reduce_or=(lambda x: lax.reduce_or(x, (0,)), INTEGERS),
    **{
        "and": (lax.bitwise_and, INTEGERS, INTEGERS),
        "or": (lax.bitwise_or, INTEGERS, INTEGERS),
        "xor": (lax.bitwise_xor, INTEGERS, INTEGERS),
        "not": (lax.bitwise_not, INTEGERS),
    },
    # The rewriter has no row for these: one of each kind.
    reduce=(lambda x: lax.reduce(x, x[0, 0], lambda a, b: a * b + a, (1,)), A),
    complex=(lax.complex, A, B),
    random_bits=(jax.random.bits, KEY),
    random_gamma=(lambda a: jax.random.gamma(KEY, a, dtype=a.dtype), A),
    bcoo_dot_general=(lambda x, y: bcoo(x) @ y, LINE[:3], W),
)
