"""Exact sums of matmuls in half precision, which XLA for the CPU does not give."""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from benchmarks.products import in_float32, with_products


def with_exact_products(fun: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function whose half-precision matmuls are added up in float32.

    The result of each matmul is rounded once, to the dtype that it has. Apply it to
    the whole of what runs, `with_exact_products(jax.grad(loss))`, and jit the result.
    """
    return with_products(fun, _exact)


def _exact(eqn: Any, operands: Sequence[Any]) -> Any:
    if not all(v.aval.dtype in (jnp.bfloat16, jnp.float16) for v in eqn.invars[:2]):
        return None
    # The barriers keep XLA from skipping a rounding.
    wide = in_float32(eqn, lax.optimization_barrier(tuple(operands)))
    dtype = eqn.outvars[0].aval.dtype
    return lax.optimization_barrier(wide.astype(dtype))
