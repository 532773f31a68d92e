"""`fp8_dot`: a matrix product whose factors are 8-bit floats.

A factor is scaled by a power of two, which is exact, such that its largest magnitude
comes close to the largest number of the format, and is rounded to the format. The
product adds up in float32, and its result is divided by the two scales:

    s = 2 ** floor(log2(448 / max |x|));  q:f8_e4m3fn = x * s       and t, r of w
    y:f32 = dot q r;  y / (s * t)

The scale is that of the numbers at hand ("current scaling" in TransformerEngine), so
there is no state. Factors of the forward pass are `float8_e4m3fn`, with four digits,
cotangents are `float8_e5m2`, with three digits and a wider range (Micikevicius et al.,
"FP8 Formats for Deep Learning", 2022).

To JAX it is a bilinear primitive of half-precision factors, as `dot_general` is: its
derivatives are such products themselves, in any mode and to any order. What the
backward pass stores are the factors, in half precision, and not their 8-bit copies. In
straight code XLA finds that both passes make the same copies and stores these instead.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax
from jax.experimental import jet
from jax.experimental.layout import Layout, with_layout_constraint
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from flax_amp._compat import Array, Arrays, DType, Eqn
from flax_amp.policy import use_fp8

FORWARD, BACKWARD = jnp.dtype(jnp.float8_e4m3fn), jnp.dtype(jnp.float8_e5m2)
_BIAS = 127  # of the exponents of float32 and bfloat16
_LEAST = -100  # exponent of a largest magnitude: below, all is as good as zero

fp8_dot_p = Primitive("flax_amp_fp8_dot")


def fp8_dot(
    eqn: Eqn, recipe: use_fp8, dtype: DType, factors: Arrays, wide: bool
) -> Array:
    """Returns the product of a `dot_general`, computed from 8-bit floats.

    Args:
      eqn: the equation of a `dot_general`.
      recipe: how it runs.
      dtype: that of the result, float16 or bfloat16.
      factors: its factors; a weight is one in float32.
      wide: whether the gradients of weights are float32, and not rounded to `dtype`.
    """
    return fp8_dot_p.bind(
        *factors,
        dimension_numbers=eqn.params["dimension_numbers"],
        formats=(FORWARD, FORWARD),
        dtype=dtype,
        recipe=recipe,
        wide=wide,
    )


def saves_as_before(policy: Callable[..., Any] | None) -> Callable[..., Any] | None:
    """Returns a policy of `jax.checkpoint` that takes an fp8 product for a plain one.

    Policies such as `jax.checkpoint_policies.checkpoint_dots` ask for `dot_general`.
    """
    if policy is None:
        return None

    @functools.wraps(policy)
    def saves(primitive: Primitive, *avals: Any, **params: Any) -> Any:
        if primitive is fp8_dot_p:
            avals = tuple(_half_avals(*avals, **params))
            primitive, params = lax.dot_general_p, _half_params(**params)
        return policy(primitive, *avals, **params)

    return saves


def exponent(x: Array, format_: DType, axes: Sequence[int]) -> Array:
    """Returns the least `e` for which `x / 2**e` is in the range of a format.

    Numbers that are not finite do not count. All is done on the bits of the numbers: as
    integers, magnitudes have the order of the numbers, and integers need no masks,
    which XLA would write to memory.

    Args:
      x: an array in float32 or bfloat16.
      format_: an 8-bit format.
      axes: those along which there is one exponent.

    Returns:
      An int32 array of the shape of `x`, with length one along `axes`.
    """
    info = ml_dtypes.finfo(x.dtype)
    word = np.dtype(f"uint{info.bits}").type
    lowest = word(1 << info.nmant)  # bit of the exponent
    no_sign = word(2 ** (info.bits - 1) - 1)
    bits = lax.bitcast_convert_type(x, word) & no_sign
    # What is not finite has the largest exponent. One more, and it is among the least.
    bits = (bits + lowest) & no_sign
    largest = jnp.max(bits, axes, keepdims=True, initial=lowest) - lowest
    # The largest number of a format is 1.75 * 2**n. What is larger than 1.75 times a
    # power of two gets the next exponent.
    carry = (1 << (info.nmant - 2)) - 1
    found = (largest.astype(jnp.int32) + carry) >> info.nmant
    n = math.frexp(float(ml_dtypes.finfo(format_).max))[1] - 1
    return jnp.maximum(found - _BIAS, _LEAST) - n


def power_of_two(e: Array, dtype: DType) -> Array:
    """Returns `2**e` in float32 or bfloat16: zero or infinity where it is no number."""
    info = ml_dtypes.finfo(dtype)
    bits = jnp.clip(e + _BIAS, 0, 2 * _BIAS + 1) << info.nmant
    word = np.dtype(f"uint{info.bits}")
    return lax.bitcast_convert_type(bits.astype(word), dtype)


def quantized(x: Array, e: Array, format_: DType) -> Array:
    """Returns `x / 2**e`, rounded to an 8-bit format, in whose range it is.

    What is not finite becomes a NaN: `float8_e4m3fn` has no infinity, and a compiler
    may make its largest number of one.
    """
    return (x * power_of_two(-e, x.dtype) + (x - x)).astype(format_)


def _free(ndim: int, *taken: Sequence[int]) -> list[int]:
    """Returns the axes that are neither contracted nor those of a batch."""
    return [axis for axis in range(ndim) if not any(axis in axes for axes in taken)]


def _product(
    *factors: Array,
    dimension_numbers: Any,
    formats: Sequence[DType],
    dtype: DType,
    recipe: use_fp8,
    wide: bool,
    on_gpu: bool = False,
) -> Array:
    contracted, batch = dimension_numbers
    copies, exponents = [], []
    for x, format_, *taken in zip(factors, formats, contracted, batch, strict=True):
        if x.dtype == jnp.float16:
            x = x.astype(jnp.float32)  # which has the range of the powers
        free = _free(x.ndim, *taken)
        # Each product of a batch, such as one for each expert, has its own exponent.
        axes = taken[0] if recipe.scaling == "row" else (*taken[0], *free)
        e = exponent(x, format_, axes)
        copy = quantized(x, e, format_)
        if on_gpu and x.dtype == jnp.float32:
            # A GPU may want the transposed weight. It is to transpose the copy, not all
            # the float32 weights of a loop, which takes as much memory again.
            copy = with_layout_constraint(copy, Layout(tuple(range(copy.ndim))))
        copies.append(copy.astype(jnp.float32) if recipe.emulate else copy)
        e = jnp.transpose(e, [*taken[1], *free, *taken[0]])
        exponents.append(e.reshape(e.shape[: x.ndim - len(taken[0])]))
    # A power of two changes no digit of a bfloat16 number either. Devices that add up a
    # sharded product then exchange half of the bytes.
    rounds_first = dtype == jnp.bfloat16 and not recipe.emulate
    left, right = copies
    y = lax.dot_general(
        left,
        right,
        dimension_numbers,
        # Some GPUs have faster products in fp8, which add up in fewer digits. They are
        # good enough for the forward pass.
        precision="highest" if BACKWARD in formats else None,
        preferred_element_type=dtype if rounds_first else jnp.float32,
    )
    e = _of_products(exponents[0], exponents[1], len(batch[0]))
    return (y * power_of_two(e, y.dtype)).astype(dtype)


def _of_products(left: Array, right: Array, n_batch: int) -> Array:
    """Returns the exponents of products, of those of their factors.

    Both have the axes of the batch first, then the free ones of a factor. The result
    has the axes of a `dot_general`, some of length one:

        left (8, 1), right (8, 64), one axis of a batch    ->    (8, 1, 64)
    """
    batch, free = left.shape[:n_batch], right.shape[n_batch:]
    ones = [1] * (left.ndim - n_batch)
    return left.reshape(*left.shape, *[1] * len(free)) + right.reshape(
        *batch, *ones, *free
    )


def _tangent(i: int) -> Any:
    """Returns the derivative with respect to factor `i`."""

    def tangent(t: Array, *factors: Array, formats: Any, **params: Any) -> Array:
        operands, formats = list(factors), list(formats)
        operands[i], formats[i] = t, BACKWARD
        return fp8_dot_p.bind(*operands, formats=tuple(formats), **params)

    return tangent


def _transpose(
    g: Array, *factors: Any, dimension_numbers: Any, formats: Any, **params: Any
) -> Arrays:
    i = 0 if ad.is_undefined_primal(factors[0]) else 1
    x, y = factors[i].aval, factors[1 - i]
    if isinstance(g, ad.Zero):
        zero = [ad.Zero(x)]
        return [*zero, None] if i == 0 else [None, *zero]
    contracted, batch = dimension_numbers
    of_x, of_y = (contracted[i], batch[i]), (contracted[1 - i], batch[1 - i])
    free_x, free_y = _free(len(x.shape), *of_x), _free(y.ndim, *of_y)
    # The axes of `g`: those of the batch, the free ones of the left and of the right
    # factor.
    n = len(batch[0])
    start = n + len(free_x) if i == 0 else n
    g_axes = range(start, start + len(free_y))
    dims = ((tuple(g_axes), tuple(free_y)), (tuple(range(n)), tuple(of_y[1])))
    is_weight = x.dtype == jnp.float32
    dtype = jnp.dtype(jnp.float32 if is_weight and params["wide"] else g.dtype)
    if is_weight and params["recipe"].weight_gradients == "half":
        y = y.astype(g.dtype)
        out = lax.dot_general(g, y, dims, preferred_element_type=dtype)
    else:
        options = params | {"dtype": dtype, "formats": (BACKWARD, formats[1 - i])}
        out = fp8_dot_p.bind(g, y, dimension_numbers=dims, **options)
    # Its axes: those of the batch, the free ones of x, and the contracted ones in the
    # order in which `y` has them.
    x_contracted = [of_x[0][k] for k in np.argsort(of_y[0])]
    order = np.argsort([*of_x[1], *free_x, *x_contracted])
    out = lax.transpose(out, [int(k) for k in order]).astype(x.dtype)
    return [out, None] if i == 0 else [None, out]


def _batch(
    factors: Arrays, dims: Sequence[Any], *, dimension_numbers: Any, **params: Any
) -> Any:
    contracted, batch = dimension_numbers
    is_batched = [d is not None for d in dims]
    operands, numbers = [], []
    for x, d, *axes in zip(factors, dims, contracted, batch, strict=True):
        mapped = d is not None
        operands.append(jnp.moveaxis(x, d, 0) if mapped else x)
        numbers.append([tuple(k + mapped for k in ks) for ks in axes])
    if all(is_batched):
        numbers = [[ks, (0, *ns)] for ks, ns in numbers]
        at = 0
    else:
        # A free axis, the first one of its factor.
        at = len(batch[0])
        if is_batched[1]:
            at += factors[0].ndim - len(contracted[0]) - len(batch[0])
    new = tuple(zip(*numbers, strict=True))
    return fp8_dot_p.bind(*operands, dimension_numbers=new, **params), at


def _half_product(*factors: Array, **params: Any) -> Array:
    halves = [x.astype(params["dtype"]) for x in factors]
    return lax.dot_general_p.bind(*halves, **_half_params(**params))


def _series(primals: Arrays, series: Arrays, **params: Any) -> Any:
    function = functools.partial(_half_product, **params)
    return jet.jet(function, primals, series, factorial_scaled=False)


def _half_params(*, dimension_numbers: Any, dtype: DType, **_: Any) -> dict[str, Any]:
    """Returns the parameters of the same product in half precision."""
    return dict(
        dimension_numbers=dimension_numbers,
        precision=None,
        preferred_element_type=dtype,
        out_sharding=None,
    )


def _half_avals(*factors: Any, dtype: DType, **_: Any) -> list[Any]:
    return [x.update(dtype=dtype, weak_type=False) for x in factors]


def _abstract_eval(*factors: Any, **params: Any) -> Any:
    avals = _half_avals(*factors, **params)
    return lax.dot_general_p.abstract_eval(*avals, **_half_params(**params))


fp8_dot_p.def_impl(_product)
fp8_dot_p.def_effectful_abstract_eval(_abstract_eval)
ad.defjvp(fp8_dot_p, _tangent(0), _tangent(1))
ad.primitive_transposes[fp8_dot_p] = _transpose
batching.primitive_batchers[fp8_dot_p] = _batch
jet.jet_rules[fp8_dot_p] = _series  # type: ignore[assignment]
mlir.register_lowering(fp8_dot_p, mlir.lower_fun(_product, multiple_results=False))
for _platform in ("cuda", "rocm"):
    _on_gpu = mlir.lower_fun(
        functools.partial(_product, on_gpu=True), multiple_results=False
    )
    mlir.register_lowering(fp8_dot_p, _on_gpu, platform=_platform)
