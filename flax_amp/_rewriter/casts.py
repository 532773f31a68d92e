"""Casts between float32 and half precision."""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from ml_dtypes import finfo

from flax_amp._compat import Array, Arrays, DType


def cast_number(value: Any, dtype: DType) -> np.ndarray:
    """Casts a number, or an array of numbers; finite numbers stay finite.

    A mask of `-1e9` or `finfo(float32).min` becomes half of the lowest number. So the
    sum of mask and logits is no infinity, and a fully masked softmax row has no NaN.
    With the lowest number itself, a logit below -16 made an infinity in float16. True
    infinities stay infinite.
    """
    number = np.asarray(value, np.float64)  # exact for float32 numbers
    largest = float(finfo(dtype).max)
    is_out = np.isfinite(number) & (np.abs(number) > largest)
    return np.where(is_out, np.sign(number) * largest / 2, number).astype(dtype)


def rounded(x: Array) -> Array:
    """Returns `x` with no more digits than its dtype has.

    XLA drops a cast to half precision that is cast up again at once, such as behind a
    matmul (`--xla_allow_excess_precision`, which is on): the forward pass may see more
    digits than the backward pass reads from memory.
    """
    # Only floats of less than four bytes can get more digits than their dtype has.
    if not jnp.issubdtype(x.dtype, jnp.floating) or x.dtype.itemsize >= 4:
        return x
    limits = finfo(x.dtype)
    return lax.reduce_precision(x, limits.nexp, limits.nmant)


def to_float32(x: Array, half: DType) -> Array:
    """Returns an array of half precision in float32, and any other array unchanged."""
    is_half = getattr(x, "dtype", None) == half
    return lax.convert_element_type(x, jnp.float32) if is_half else x


def to_half(x: Array, half: DType) -> Array:
    """Returns a float32 array, or a literal of the program, in half precision."""
    if isinstance(x, jax.Array):
        return x if x.dtype == half else lax.convert_element_type(x, half)
    return cast_number(x, half)


# --- broadcasts ----------------------------------------------------------------------

# The derivative of a broadcast is a sum over all copies, which takes float32:
#
#     y = spread b          cotangent of b:  collect c = sum(c in float32)
#
# The gradient of a bias was a sum in half before: four convolutions with GroupNorm had
# 0.999 of the error by hand, and have 0.335 with a float32 sum. On a GPU, XLA would
# drop the cast that rounds `c` to half precision before the cast to float32 (the
# docstring of `rounded` says why), and write the float32 array beside `c`: 7 % of the
# bytes of a ViT on an H200. So `c` is widened there by its bits, at a cost of 2 % of
# the bytes. XLA splits a sum of more than 4,096 terms into parts, and fuses the parts
# with the equation that makes `c`. For a shorter sum, XLA would write the widened
# array. So a shorter sum is split here, into a part for each example of a batch, if
# there are at least 16 examples with at least 32 terms each (`_has_parts`). A barrier
# keeps XLA from merging the parts: a Conformer on an H200 reads and writes 6.61 GB
# without parts, and 6.07 GB with parts. On a TPU, a sum of halves adds up in float32
# without a cast. A sum of widened numbers would not be fused there with the equation
# that makes `c`: 10 % of the time of a DiT.
#
# The platform decides which sum is made, so a lowering has to make the sum. A shift of
# bits has no derivative. For these two reasons, `spread` and `collect` are primitives.
spread_p = Primitive("flax_amp_spread")
collect_p = Primitive("flax_amp_collect")


def spread(x: Array, shape: Sequence[int], onto: Sequence[int], half: DType) -> Array:
    """Returns a float32 array broadcast `onto` some axes of a shape, in half precision.

    Finite numbers stay finite, as in `cast_number`: an argument that is added to scores
    may be a mask of `-1e9`, which float16 lacks. Tangents and cotangents are only cast.
    """
    # Axes of length one that grow are dropped from the operand, so that the derivative
    # sums over these axes.
    pairs = zip(x.shape, onto, strict=True)
    sizes = {axis: size for size, axis in pairs if size == shape[axis]}
    params = dict(shape=tuple(shape), onto=tuple(sizes), half=jnp.dtype(half))
    return spread_p.bind(
        lax.reshape(x, list(sizes.values())), is_limited=True, **params
    )


def _spread(
    x: Array, *, shape: Sequence[int], onto: Any, half: DType, is_limited: bool
) -> Array:
    if is_limited:
        largest = x.dtype.type(finfo(half).max)
        size = lax.abs(x)
        is_finite = lax.ne(size, x.dtype.type(np.inf))
        is_out = lax.bitwise_and(lax.gt(size, largest), is_finite)
        x = lax.select(is_out, lax.mul(lax.sign(x), largest / 2), x)
    return lax.broadcast_in_dim(lax.convert_element_type(x, half), shape, onto)


def _collect(c: Array, *, axes: Sequence[int]) -> Array:
    return lax.reduce_sum(lax.convert_element_type(c, jnp.float32), axes)


def _collect_by_bits(c: Array, *, axes: Sequence[int]) -> Array:
    if c.dtype != jnp.bfloat16:  # bfloat16 is the upper half of float32
        return _collect(c, axes=axes)
    bits = lax.convert_element_type(lax.bitcast_convert_type(c, np.uint16), np.uint32)
    wide = lax.bitcast_convert_type(lax.shift_left(bits, np.uint32(16)), np.float32)
    if axes and axes[0] == 0 and _has_parts([c.shape[axis] for axis in axes]):
        parts = lax.optimization_barrier(lax.reduce_sum(wide, axes[1:]))
        return lax.reduce_sum(parts, [0])
    return lax.reduce_sum(wide, axes)


def _has_parts(sizes: Sequence[Any]) -> bool:
    """Whether a sum over axes of these sizes is made of a part for each example.

    XLA splits a sum of more than 4,096 terms itself. With fewer than 16 examples, or
    fewer than 32 terms in a part, XLA does not fuse all parts with the equation that
    makes `c`. The table has the bytes of the sum and of this equation, which reads two
    arrays and writes `c`, compiled for an H200, as multiples of the bytes of `c`:

        examples x terms     64x128  64x64  64x32  64x16  16x128  8x128  4x1024
        without parts          3.03   7.00   7.00   7.00    7.00   7.00    7.00
        with parts             3.03   3.06   3.13   4.25    3.03   4.03    7.00
    """
    if not all(isinstance(size, int) for size in sizes):  # in `jax.export`
        return False
    return sizes[0] >= 16 and math.prod(sizes[1:]) >= 32 and math.prod(sizes) <= 4096


def _collect_halves(c: Array, *, axes: Sequence[int]) -> Array:
    # In the program, the sum is rounded to half precision once, before the cast.
    return lax.convert_element_type(lax.reduce_sum(c, axes), jnp.float32)


def _transpose_spread(c: Array, x: Any, *, onto: Any, **_: Any) -> Arrays:
    axes = tuple(k for k in range(c.ndim) if k not in onto)
    return [collect_p.bind(c, axes=axes)]


def _transpose_collect(t: Array, c: Any, *, axes: Sequence[int]) -> Arrays:
    shape = c.aval.shape
    half = c.aval.dtype
    onto = tuple(k for k in range(len(shape)) if k not in axes)
    params = dict(shape=shape, onto=onto, half=half)
    return [spread_p.bind(t, is_limited=False, **params)]


def _jvp_spread(primals: Arrays, tangents: Arrays, **params: Any) -> Any:
    (x,) = primals
    (t,) = tangents
    y = spread_p.bind(x, **params)
    zero: Any = ad.Zero
    if isinstance(t, zero):
        return y, zero.from_primal_value(y)
    return y, spread_p.bind(t, **params | {"is_limited": False})


def _batch_spread(
    args: Arrays, batched: Any, *, shape: Any, onto: Any, **params: Any
) -> Any:
    x = jnp.moveaxis(args[0], batched[0], 0)
    shape = (x.shape[0], *shape)
    onto = (0, *(k + 1 for k in onto))
    return spread_p.bind(x, shape=shape, onto=onto, **params), 0


def _batch_collect(args: Arrays, batched: Any, *, axes: Sequence[int]) -> Any:
    c = jnp.moveaxis(args[0], batched[0], 0)
    return collect_p.bind(c, axes=tuple(k + 1 for k in axes)), 0


def _spread_aval(x: Any, *, shape: Any, onto: Any, half: DType, **_: Any) -> Any:
    params = dict(shape=shape, broadcast_dimensions=onto, sharding=None)
    aval, effects = lax.broadcast_in_dim_p.abstract_eval(x, **params)
    return aval.update(dtype=half, weak_type=False), effects


def _collect_aval(c: Any, *, axes: Sequence[int]) -> Any:
    params = dict(axes=axes, out_sharding=None)
    aval, effects = lax.reduce_sum_p.abstract_eval(c, **params)
    return aval.update(dtype=jnp.dtype(jnp.float32), weak_type=False), effects


spread_p.def_impl(_spread)
spread_p.def_effectful_abstract_eval(_spread_aval)
ad.primitive_jvps[spread_p] = _jvp_spread
ad.primitive_transposes[spread_p] = _transpose_spread
batching.primitive_batchers[spread_p] = _batch_spread
mlir.register_lowering(spread_p, mlir.lower_fun(_spread, multiple_results=False))
collect_p.def_impl(_collect)
collect_p.def_effectful_abstract_eval(_collect_aval)
ad.deflinear2(collect_p, _transpose_collect)
batching.primitive_batchers[collect_p] = _batch_collect
mlir.register_lowering(collect_p, mlir.lower_fun(_collect, multiple_results=False))
for _platform, _how in (
    *(("cuda", _collect_by_bits), ("rocm", _collect_by_bits)),
    ("tpu", _collect_halves),
):
    _rule = mlir.lower_fun(_how, multiple_results=False)
    mlir.register_lowering(collect_p, _rule, platform=_platform)


# --- copies --------------------------------------------------------------------------

# The derivative of an array that many equations read is a sum, which takes float32:
#
#     y0, y1, y2 = copies h      cotangent of h:  add_copies c0 c1 c2
#
# JAX adds halves in sequence, and rounds after each addition: where 16 matmuls read the
# same array, its gradient had 1.5 times the error of a float32 sum. Two cotangents are
# added and rounded once with or without a copy; three cotangents are rounded twice
# (`_MANY` in `emit.py` says why an array with three readers is not copied).
copies_p = Primitive("flax_amp_copies")
add_copies_p = Primitive("flax_amp_add_copies")
copies_p.multiple_results = True


def copies(x: Array, count: int) -> list[Array]:
    """Returns `count` copies of an array of half precision, one for each reader."""
    return copies_p.bind(x, count=count)


def _copies(x: Array, *, count: int) -> list[Array]:
    return [x] * count


def _add_copies(*cotangents: Array) -> Array:
    wide = [lax.convert_element_type(c, jnp.float32) for c in cotangents]
    return lax.convert_element_type(
        functools.reduce(lax.add, wide), cotangents[0].dtype
    )


def _transpose_copies(cotangents: Arrays, x: Any, **_: Any) -> Arrays:
    zero: Any = ad.Zero
    given = [c for c in cotangents if not isinstance(c, zero)]
    if len(given) < 2:
        return given or [zero(x.aval)]
    return [add_copies_p.bind(*given)]


def _jvp_copies(primals: Arrays, tangents: Arrays, *, count: int) -> Any:
    (t,) = tangents
    results = copies_p.bind(*primals, count=count)
    zero: Any = ad.Zero
    if isinstance(t, zero):
        return results, [zero.from_primal_value(x) for x in results]
    return results, copies_p.bind(t, count=count)


def _transpose_add_copies(c: Array, *xs: Any) -> Arrays:
    return copies_p.bind(c, count=len(xs))


def _batch_copies(args: Arrays, dims: Any, *, count: int) -> Any:
    return copies_p.bind(*args, count=count), [dims[0]] * count


def _batch_add_copies(args: Arrays, dims: Any) -> Any:
    sizes = (x.shape[d] for x, d in zip(args, dims, strict=True) if d is not None)
    size = next(sizes)
    return add_copies_p.bind(
        *(batching.bdim_at_front(x, d, size) for x, d in zip(args, dims, strict=True))
    ), 0


def _add_copies_aval(*xs: Any) -> Any:
    aval = xs[0]
    for x in xs[1:]:
        aval, _ = lax.add_p.abstract_eval(aval, x)
    return aval, set()


copies_p.def_impl(_copies)
copies_p.def_abstract_eval(_copies)
ad.primitive_jvps[copies_p] = _jvp_copies
ad.primitive_transposes[copies_p] = _transpose_copies
batching.primitive_batchers[copies_p] = _batch_copies
mlir.register_lowering(copies_p, mlir.lower_fun(_copies, multiple_results=True))
add_copies_p.def_impl(_add_copies)
add_copies_p.def_effectful_abstract_eval(_add_copies_aval)
ad.deflinear2(add_copies_p, _transpose_add_copies)
batching.primitive_batchers[add_copies_p] = _batch_add_copies
mlir.register_lowering(
    add_copies_p, mlir.lower_fun(_add_copies, multiple_results=False)
)
