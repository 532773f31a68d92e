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
from jax.extend.core import jaxprs_in_params

from benchmarks.products import PRODUCTS, in_float32, is_float, with_products
from flax_amp import _compat


def cast_products(fun: Callable[..., Any], dtype: Any) -> Callable[..., Any]:
    """Returns a function of arrays with its products in half precision.

    Cast is each product of float32 operands for which the program asks no precision.
    Inner products are sums, and outer products multiplications: they stay in float32.

    Args:
      fun: the function, in float32.
      dtype: the half precision.
    """
    return with_products(fun, functools.partial(_cast, dtype=dtype))


def count_cast(closed: Any) -> int:
    """Returns how many products of a jaxpr are cast, each time that they run."""
    count = 0
    for eqn in _compat.open_jaxpr(closed)[0].eqns:
        count += eqn.primitive.name in PRODUCTS and _is_cast(eqn)
        params = {} if eqn.primitive.name == "pallas_call" else eqn.params
        times = eqn.params["length"] if eqn.primitive.name == "scan" else 1
        count += times * sum(map(count_cast, jaxprs_in_params(params)))
    return count


def _cast(eqn: Any, operands: Sequence[Any], dtype: Any) -> Any:
    if not _is_cast(eqn):
        return None
    low = [_rounded(x, dtype) if is_float(x) else x for x in operands]
    return _rounded(in_float32(eqn, low), dtype).astype(jnp.float32)


def _rounded(x: Any, dtype: Any) -> Any:
    """Returns a float32 array in half; its cotangent is in half as well.

    The barrier keeps XLA from skipping the rounding.
    """
    return lax.optimization_barrier(x.astype(dtype))


def _is_cast(eqn: Any) -> bool:
    default = lax.Precision.DEFAULT
    floats = (*eqn.invars[:2], *eqn.outvars)
    return (
        all(v.aval.dtype == jnp.float32 for v in floats)
        and eqn.params["precision"] in (None, default, (default, default))
        and _is_matrix_product(eqn)
    )


def _is_matrix_product(eqn: Any) -> bool:
    """Whether it is neither a sum nor a multiplication."""
    if eqn.primitive.name != "dot_general":
        return True
    (contracted, _), (batch, _) = eqn.params["dimension_numbers"]
    shapes = [v.aval.shape for v in eqn.invars]
    has_terms = any(shapes[0][axis] > 1 for axis in contracted)
    return has_terms and max(map(len, shapes)) > len(contracted) + len(batch)
