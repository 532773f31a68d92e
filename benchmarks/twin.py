"""The twin of a program: what a cast of its products alone does to it.

It is what an expert would write by hand, and is compared with `amp`. The operands of
each product are rounded to half precision, their product is added up in float32 and
rounded once; all else is float32, as the program has it. So are the derivatives.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from benchmarks.products import in_float32, is_float, with_products


def cast_products(fun: Callable[..., Any], dtype: Any) -> Callable[..., Any]:
    """Returns a function of arrays with its products in half precision.

    Cast is each product of float32 operands for which the program asks no precision.
    Inner products are sums, and outer products multiplications: they stay in float32.

    Args:
      fun: the function, in float32.
      dtype: the half precision.
    """
    return with_products(fun, functools.partial(_cast, dtype=dtype))


def _cast(eqn: Any, operands: Sequence[Any], dtype: Any) -> Any:
    if not (_is_default(eqn) and _is_product(eqn)):
        return None
    low = [_rounded(x, dtype) if is_float(x) else x for x in operands]
    return _rounded(in_float32(eqn, low), dtype).astype(jnp.float32)


def _rounded(x: Any, dtype: Any) -> Any:
    """Returns a float32 array in half; its cotangent is in half as well.

    The barrier keeps XLA from skipping the rounding.
    """
    return lax.optimization_barrier(x.astype(dtype))


def _is_default(eqn: Any) -> bool:
    default = lax.Precision.DEFAULT
    floats = (*eqn.invars[:2], *eqn.outvars)
    return all(v.aval.dtype == jnp.float32 for v in floats) and eqn.params[
        "precision"
    ] in (None, default, (default, default))


def _is_product(eqn: Any) -> bool:
    """Whether it is neither a sum nor a multiplication."""
    if eqn.primitive.name != "dot_general":
        return True
    (contracted, _), (batch, _) = eqn.params["dimension_numbers"]
    shapes = [v.aval.shape for v in eqn.invars]
    has_terms = any(shapes[0][axis] > 1 for axis in contracted)
    return has_terms and max(map(len, shapes)) > len(contracted) + len(batch)
