"""`fp8_dot`: a matrix product whose factors are 8-bit floats.

Each factor is divided by a power of two, which is exact, such that its largest
magnitude comes close to the largest number of the format, and is rounded to the format.
The result of the product is multiplied by the two powers:

    q:f8_e4m3fn = x / 2**d       where max |x| / 2**d is between 224 and 448
    r:f8_e4m3fn = w / 2**e
    y:bf16 = dot q r * 2**(d + e)

The exponents are those of the numbers at hand ("current scaling" in TransformerEngine),
so there is no state. Factors of the forward pass are `float8_e4m3fn`, with four digits,
cotangents are `float8_e5m2`, with three digits and a wider range (Micikevicius et al.,
"FP8 Formats for Deep Learning", 2022).

To JAX it is a bilinear primitive, as `dot_general` is: derivatives of any order and
mode are such products again. The backward pass stores the factors, the weight in
float32 and the other one in half precision, and not their 8-bit copies. In straight
code XLA finds that both passes make the same copies, and stores these instead.
"""

import dataclasses
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
_SMALLEST_EXPONENT = 1 - _BIAS  # of a number with all its digits

fp8_dot_p = Primitive("flax_amp_fp8_dot")


def fp8_dot(
    eqn: Eqn, recipe: use_fp8, weight: int, dtype: DType, factors: Arrays, wide: bool
) -> Array:
    """Returns the product of a `dot_general`, computed from 8-bit floats.

    Args:
      eqn: the equation of a `dot_general`.
      recipe: how it runs.
      weight: which factor is the weight. It is rounded from float32.
      dtype: that of the other factor and of the result, float16 or bfloat16.
      factors: the factors.
      wide: whether the gradient of the weight is float32, and not rounded to `dtype`.
    """
    return fp8_dot_p.bind(
        *[x if i == weight else x.astype(dtype) for i, x in enumerate(factors)],
        dimension_numbers=eqn.params["dimension_numbers"],
        formats=(FORWARD, FORWARD),
        dtype=dtype,
        recipe=recipe,
        weight=weight,
        wide=wide,
    )


@dataclasses.dataclass(frozen=True)
class PolicyOfPlainProducts:
    """A policy of `jax.checkpoint` that sees each fp8 product as a `dot_general`.

    Policies such as `jax.checkpoint_policies.checkpoint_dots` ask for that primitive.
    """

    policy: Callable[..., Any]

    def __call__(self, primitive: Primitive, *avals: Any, **params: Any) -> Any:
        if primitive is fp8_dot_p:
            avals = tuple(_plain_avals(*avals, **params))
            primitive, params = lax.dot_general_p, plain_params(**params)
        return self.policy(primitive, *avals, **params)


# --- numbers -------------------------------------------------------------------------


def scale_exponent(x: Array, format_: DType, axes: Sequence[int]) -> Array:
    """Returns the least `e` for which `x / 2**e` is in the range of a format.

    It is at least -126. Numbers that are not finite do not count. All is done on the
    bits of the numbers: as integers, magnitudes have the order of the numbers, and
    integers need no masks, which XLA would write to memory.

    Args:
      x: an array in float32 or bfloat16.
      format_: an 8-bit format.
      axes: those along which there is one exponent.

    Returns:
      An int32 array of the shape of `x`, with length one along `axes`.
    """
    info = ml_dtypes.finfo(x.dtype)
    word = np.dtype(f"uint{info.bits}").type
    exponent_bit = word(1 << info.nmant)  # the lowest one
    magnitude_mask = word(2 ** (info.bits - 1) - 1)
    bits = lax.bitcast_convert_type(x, word) & magnitude_mask
    # Infinities and NaNs have the largest exponent. One more wraps it to the least: in
    # bfloat16, an infinity is 0x7f80, and (0x7f80 + 0x80) & 0x7fff = 0.
    bits = (bits + exponent_bit) & magnitude_mask
    # With `initial`, an array without a finite number looks like zeros.
    bits = jnp.max(bits, axes, keepdims=True, initial=exponent_bit) - exponent_bit
    # The largest number of a format is 1.75 * 2**n. What is larger than 1.75 times a
    # power of two is rounded up to the next exponent.
    up_from_1_75 = (1 << (info.nmant - 2)) - 1
    of_largest = ((bits.astype(jnp.int32) + up_from_1_75) >> info.nmant) - _BIAS
    of_format = math.frexp(float(ml_dtypes.finfo(format_).max))[1] - 1
    return jnp.maximum(of_largest - of_format, _SMALLEST_EXPONENT)


def power_of_two(e: Array, dtype: DType) -> Array:
    """Returns `2**e` in float32 or bfloat16: zero below its range, infinity above."""
    info = ml_dtypes.finfo(dtype)
    bits = jnp.clip(e + _BIAS, 0, 2 * _BIAS + 1) << info.nmant
    word = np.dtype(f"uint{info.bits}")
    return lax.bitcast_convert_type(bits.astype(word), dtype)


def quantize(x: Array, e: Array, format_: DType) -> Array:
    """Returns `x / 2**e`, rounded to an 8-bit format, in whose range it is.

    What is not finite becomes a NaN. `float8_e4m3fn` has no infinity, and a compiler
    may round one to 448.
    """
    not_finite = x - x  # 0, or NaN
    return (x * power_of_two(-e, x.dtype) + not_finite).astype(format_)


def _product(
    *factors: Array,
    dimension_numbers: Any,
    formats: Sequence[DType],
    dtype: DType,
    recipe: use_fp8,
    weight: int | None,
    wide: bool,
    constrain_layout: bool = False,
) -> Array:
    contracting, batch = dimension_numbers
    copies, exponents = [], []
    for i, x in enumerate(factors):
        axes = contracting[i], batch[i]
        copy, e = _quantized_factor(x, formats[i], *axes, recipe)
        if constrain_layout and i == weight:
            # A GPU may want the weight transposed. The constraint makes it transpose
            # the 8-bit copy. Without it, XLA transposes all float32 weights of a loop
            # at once, which is a second copy of them.
            copy = with_layout_constraint(copy, Layout(tuple(range(copy.ndim))))
        copies.append(copy.astype(jnp.float32) if recipe.emulate else copy)
        exponents.append(e)
    # The powers of two can follow the rounding to bfloat16, because they change no
    # digit. Devices that add up a sharded product then exchange bfloat16.
    rounds_first = dtype == jnp.bfloat16 and not recipe.emulate
    lhs, rhs = copies
    y = lax.dot_general(
        lhs,
        rhs,
        dimension_numbers,
        # Hopper has faster products in fp8, which add up in fewer digits. They are good
        # enough for the forward pass.
        precision="highest" if BACKWARD in formats and not recipe.emulate else None,
        preferred_element_type=dtype if rounds_first else jnp.float32,
    )
    e = _sum_of_exponents(exponents[0], exponents[1], len(batch[0]))
    # In two steps, since `2**e` itself may be out of range where its product is not.
    for part in (e >> 1, e - (e >> 1)):
        y = y * power_of_two(part, y.dtype)
    return y.astype(dtype)


def _quantized_factor(
    x: Array,
    format_: DType,
    contracting: Sequence[int],
    batch: Sequence[int],
    recipe: use_fp8,
) -> tuple[Array, Array]:
    """Returns a factor in 8 bits, and its exponents with the axes `(*batch, *free)`."""
    if x.dtype == jnp.float16:
        x = x.astype(jnp.float32)  # which has the range of the powers
    free = _free_axes(x.ndim, contracting, batch)
    # Each product of a batch, such as one for each expert, has exponents of its own.
    axes = contracting if recipe.scaling == "row" else (*contracting, *free)
    # In order, so that both passes make the same copy: to XLA, a maximum over the axes
    # (1, 0) is another one than that over (0, 1).
    e = scale_exponent(x, format_, sorted(axes))
    in_order = jnp.transpose(e, [*batch, *free, *contracting])
    shape = in_order.shape[: x.ndim - len(contracting)]
    return quantize(x, e, format_), in_order.reshape(shape)


def _sum_of_exponents(lhs: Array, rhs: Array, n_batch: int) -> Array:
    """Returns the sums of the exponents of both factors, as the product needs them.

    Both have the axes of the batch first, then the free ones of a factor. The result
    has the axes of a `dot_general`, some of length one:

        lhs (8, 1), rhs (8, 64), one axis of a batch    ->    (8, 1, 64)
    """
    batch, free = rhs.shape[:n_batch], rhs.shape[n_batch:]
    lhs_shape = (*lhs.shape, *[1] * len(free))
    rhs_shape = (*batch, *[1] * (lhs.ndim - n_batch), *free)
    return lhs.reshape(lhs_shape) + rhs.reshape(rhs_shape)


def _free_axes(ndim: int, contracting: Sequence[int], batch: Sequence[int]) -> Any:
    return [axis for axis in range(ndim) if axis not in (*contracting, *batch)]


# --- the rules of the primitive ------------------------------------------------------


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
    x, y, is_weight = factors[i].aval, factors[1 - i], i == params["weight"]
    results: Any = [None, None]
    if isinstance(g, ad.Zero):
        results[i] = ad.Zero(x)
        return results
    contracting, batch = dimension_numbers
    of_x, of_y = contracting[i], contracting[1 - i]
    batch_x, batch_y = batch[i], batch[1 - i]
    free_x = _free_axes(len(x.shape), of_x, batch_x)
    free_y = _free_axes(y.ndim, of_y, batch_y)
    # `g` has the axes of the batch, then the free ones of both factors.
    n = len(batch_x)
    start = n + len(free_x) if i == 0 else n
    dims = (
        (tuple(range(start, start + len(free_y))), tuple(free_y)),
        (tuple(range(n)), tuple(batch_y)),
    )
    dtype = jnp.dtype(jnp.float32) if is_weight and params["wide"] else g.dtype
    if is_weight and params["recipe"].weight_gradients == "half":
        out = lax.dot_general(g, y.astype(g.dtype), dims, preferred_element_type=dtype)
    else:
        # In the gradient of a weight, neither factor is one.
        weight = None if is_weight or params["weight"] is None else 1
        options = params | {"dtype": dtype, "weight": weight}
        formats = BACKWARD, formats[1 - i]
        out = fp8_dot_p.bind(g, y, dimension_numbers=dims, formats=formats, **options)
    # It has the axes of the batch, the free ones of `x`, and the contracted ones in the
    # order in which `y` has them.
    contracted = [of_x[k] for k in np.argsort(of_y)]
    order = np.argsort([*batch_x, *free_x, *contracted])
    results[i] = lax.transpose(out, [int(k) for k in order]).astype(x.dtype)
    return results


def _batch(
    factors: Arrays, dims: Sequence[Any], *, dimension_numbers: Any, **params: Any
) -> Any:
    contracting, batch = dimension_numbers
    operands, numbers = [], []
    for x, d, *axes in zip(factors, dims, contracting, batch, strict=True):
        is_mapped = d is not None
        operands.append(jnp.moveaxis(x, d, 0) if is_mapped else x)
        numbers.append([tuple(k + is_mapped for k in ks) for ks in axes])
    # Of one factor alone, the new axis is its first free one.
    at = len(batch[0])
    if dims[0] is None:
        at += factors[0].ndim - len(contracting[0]) - len(batch[0])
    if None not in dims:
        at, numbers = 0, [[ks, (0, *ns)] for ks, ns in numbers]
    new = tuple(zip(*numbers, strict=True))
    return fp8_dot_p.bind(*operands, dimension_numbers=new, **params), at


def plain_params(*, dimension_numbers: Any, dtype: DType, **_: Any) -> dict[str, Any]:
    """Returns the parameters of the same product as a `dot_general`."""
    return dict(
        dimension_numbers=dimension_numbers,
        precision=None,
        preferred_element_type=dtype,
        out_sharding=None,
    )


def _plain_avals(*factors: Any, dtype: DType, **_: Any) -> list[Any]:
    return [x.update(dtype=dtype, weak_type=False) for x in factors]


def _abstract_eval(*factors: Any, **params: Any) -> Any:
    avals = _plain_avals(*factors, **params)
    return lax.dot_general_p.abstract_eval(*avals, **plain_params(**params))


def _jet_rule(primals: Arrays, series: Arrays, **params: Any) -> Any:
    def plain_product(*factors: Array) -> Array:
        halves = [x.astype(params["dtype"]) for x in factors]
        return lax.dot_general_p.bind(*halves, **plain_params(**params))

    return jet.jet(plain_product, primals, series, factorial_scaled=False)


def _lower_for_gpu(context: Any, *factors: Any, **params: Any) -> Any:
    # A layout is a custom call, which `jax.export` would refuse.
    is_exported = context.module_context.lowering_parameters.for_export
    product = functools.partial(_product, constrain_layout=not is_exported)
    return mlir.lower_fun(product, multiple_results=False)(context, *factors, **params)


fp8_dot_p.def_impl(_product)
fp8_dot_p.def_effectful_abstract_eval(_abstract_eval)
ad.defjvp(fp8_dot_p, _tangent(0), _tangent(1))
ad.primitive_transposes[fp8_dot_p] = _transpose
batching.primitive_batchers[fp8_dot_p] = _batch
jet.jet_rules[fp8_dot_p] = _jet_rule  # type: ignore[assignment]
mlir.register_lowering(fp8_dot_p, mlir.lower_fun(_product, multiple_results=False))
for _platform in ("cuda", "rocm"):
    mlir.register_lowering(fp8_dot_p, _lower_for_gpu, platform=_platform)
