"""Casts between float32 and the compute dtype, and functions with rounded results."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax
from jax.experimental import jet
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from flax_amp._compat import Array, Arrays, DType


def finfo(dtype: DType) -> Any:
    """Returns the float limits of `dtype`, bfloat16 included."""
    return ml_dtypes.finfo(dtype)


def cast_constant(value: Any, dtype: DType, headroom: bool = False) -> np.ndarray:
    """Casts a scalar constant; a finite value out of range becomes the limit.

    A mask of `-1e9` or `finfo(float32).min` stays a finite, very negative number, so
    that a fully masked softmax row gives no NaN. True infinities stay infinite.

    Args:
      value: the number.
      dtype: float16, bfloat16 or float32.
      headroom: saturate at half the limit, so that what is added to a mask does not
        push it over the limit.
    """
    constant = np.asarray(value, np.float64)
    largest, limit = _limits(dtype, headroom)
    if np.isfinite(constant) and abs(constant) > largest:
        constant = np.copysign(limit, constant)
    return constant.astype(dtype)


def is_exact(constant: float, dtype: DType) -> bool:
    """Whether a dtype has this very number."""
    return float(cast_constant(constant, dtype)) == constant


def saturating_cast(x: Array, dtype: DType, headroom: bool = False) -> Array:
    """Casts a float32 array down; finite values out of range become the limit.

    The derivative is that of the plain cast: the backward pass stores no mask, and the
    rule is linear. Arguments as in `cast_constant`.
    """
    return saturate_p.bind(x, dtype=jnp.dtype(dtype), headroom=headroom, rounds=True)


def clamped(x: Array, constant: float | None, dtype: DType) -> Array:
    """Returns a float32 operand of a sum within half of the range of `dtype`.

    Args:
      x: the operand.
      constant: the number that all its elements have, if known.
      dtype: the dtype to which the sum is rounded.
    """
    if constant is None:
        return saturate_p.bind(x, dtype=jnp.dtype(dtype), headroom=True, rounds=False)
    largest, limit = _limits(dtype, headroom=True)
    if not np.isfinite(constant) or abs(constant) <= largest:
        return x
    return jnp.full_like(x, np.copysign(limit, constant))


def rounded(x: Array) -> Array:
    """Returns `x` with no more digits than its dtype has.

    XLA drops a cast to half precision that is cast up again at once, such as behind a
    product (`--xla_allow_excess_precision`, which is on), so that those who read an
    array may see other numbers than those who read it from memory.
    """
    if not jnp.issubdtype(x.dtype, jnp.floating) or x.dtype.itemsize >= 4:
        return x
    limits = finfo(x.dtype)
    return lax.reduce_precision(x, limits.nexp, limits.nmant)


# The tangents of functions whose derivative can be written in their result `y`, such
# that the backward pass reads `y` itself, not a float32 array that was made of it.
DERIVATIVES: dict[str, Callable[[Array, Array], Array]] = {
    "exp": lambda t, y: t * y,
    "tanh": lambda t, y: t - (t * y) * y,
    "logistic": lambda t, y: t * y - (t * y) * y,
}


def rounded_function(name: str, x: Array, dtype: DType) -> Array:
    """Returns a function of `DERIVATIVES`, computed in float32 and rounded to `dtype`.

    The derivative reads the rounded result, so that the float32 one need not be stored
    for the backward pass.
    """
    return rounded_function_p.bind(x, name=name, dtype=jnp.dtype(dtype))


def _limits(dtype: DType, headroom: bool) -> tuple[float, float]:
    largest = float(finfo(dtype).max)
    return largest, largest / 2 if headroom else largest


# This is a primitive, because it stands at every use of every bias, and JAX takes much
# longer to trace a function with a custom derivative.
saturate_p = Primitive("flax_amp_saturate")


@functools.partial(jax.jit, static_argnames=("dtype", "headroom", "rounds"))
def _saturate(x: Array, *, dtype: DType, headroom: bool, rounds: bool) -> Array:
    # Each function of `jax.numpy` would be one more jit to trace and to lower.
    largest, limit = map(x.dtype.type, _limits(dtype, headroom))
    size = lax.abs(x)
    is_over = lax.bitwise_and(lax.gt(size, largest), lax.ne(size, x.dtype.type(np.inf)))
    saturated = lax.select(is_over, lax.mul(lax.sign(x), limit), x)
    return lax.convert_element_type(saturated, dtype) if rounds else saturated


def _saturate_tangent(
    t: Array, x: Array, *, dtype: DType, headroom: bool, rounds: bool
) -> Array:
    return lax.convert_element_type(t, dtype) if rounds else t


def _saturate_transpose(t: Array, x: Array, **_: Any) -> Arrays:
    """Returns the cotangent in the dtype of the operand: as a derivative, a cast."""
    return [lax.convert_element_type(t, x.aval.dtype)]


def _saturate_series(primals: Arrays, series: Arrays, **params: Any) -> Any:
    terms = [_saturate_tangent(t, *primals, **params) for t in series[0]]
    return saturate_p.bind(*primals, **params), terms


saturate_p.def_impl(_saturate)
saturate_p.def_abstract_eval(
    lambda x, *, dtype, headroom, rounds: x.update(
        dtype=dtype if rounds else x.dtype, weak_type=False
    )
)
ad.deflinear2(saturate_p, _saturate_transpose)  # `jax.linear_transpose` asks for it
ad.defjvp(saturate_p, _saturate_tangent)
batching.defvectorized(saturate_p)
jet.jet_rules[saturate_p] = _saturate_series  # type: ignore[assignment]
mlir.register_lowering(saturate_p, mlir.lower_fun(_saturate, multiple_results=False))


rounded_function_p = Primitive("flax_amp_rounded_function")


def _round_function(x: Array, *, name: str, dtype: DType) -> Array:
    y = getattr(lax, name)(lax.convert_element_type(x, jnp.float32))
    y = lax.convert_element_type(y, dtype)
    # Of a half-precision operand, what is stored is the result. XLA would store the
    # float32 one, and go on with that.
    return rounded(y) if x.dtype == dtype else y


def _tangent_of_function(
    t: Array, y: Array, x: Array, *, name: str, dtype: DType
) -> Array:
    t, y = (lax.convert_element_type(a, jnp.float32) for a in (t, y))
    return lax.convert_element_type(DERIVATIVES[name](t, y), dtype)


def _series_of_function(primals: Arrays, series: Arrays, **params: Any) -> Any:
    function = functools.partial(_round_function, **params)
    # Rules get the terms of the series without their factorials.
    return jet.jet(function, primals, series, factorial_scaled=False)


rounded_function_p.def_impl(_round_function)
rounded_function_p.def_abstract_eval(
    lambda x, *, name, dtype: x.update(dtype=dtype, weak_type=False)
)
ad.defjvp2(rounded_function_p, _tangent_of_function)
batching.defvectorized(rounded_function_p)
jet.jet_rules[rounded_function_p] = _series_of_function  # type: ignore[assignment]
mlir.register_lowering(
    rounded_function_p, mlir.lower_fun(_round_function, multiple_results=False)
)
