"""Matrix products whose weights get their gradients in float32.

The gradient of a weight is a matrix product of low-precision factors, which the
hardware adds up in float32. By default its result is rounded to the compute dtype, as
in a model with hand-set dtypes, and where a sharded batch makes several devices
compute a part of the sum each, the parts travel and are added in that dtype. Here the
result stays float32 from the accumulator on, and so does what is reduced over devices.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Literal

from flax_amp import _compat
from flax_amp.policy import LOW_OPS


def product(eqn: Any, params: Any, x: Any, weight: Any, weight_first: bool) -> Any:
    """Returns the product of low-precision data and a float32 weight.

    Differentiable in reverse mode only.

    Args:
      eqn: the equation of a matrix product or convolution.
      params: its parameters, result dtype included.
      x: the data, in the compute dtype.
      weight: the weight, in float32.
      weight_first: whether the weight is the first factor.
    """

    def bind(x: Any, weight: Any) -> Any:
        operands = [weight, x] if weight_first else [x, weight]
        return _compat.bind(eqn, operands, params)[0]

    dtype = x.dtype

    @jax.custom_vjp
    def low_product(x: Any, weight: Any) -> Any:
        return bind(x, weight.astype(dtype))

    def forward(x: Any, weight: Any) -> Any:
        return low_product(x, weight), (x, weight)

    def backward(residuals: Any, g: Any) -> Any:
        x, weight = residuals
        low = weight.astype(dtype)
        of_x = jax.linear_transpose(lambda x: bind(x, low), x)
        of_weight = jax.linear_transpose(lambda w: bind(x, w), low)
        return of_x(g)[0], _in_float32(lambda g: of_weight(g)[0], g)

    low_product.defvjp(forward, backward)
    return low_product(x, weight)


def _in_float32(fun: Callable[[Any], Any], g: Any) -> Any:
    """Calls a function that is one product and data movement; the result is float32."""
    closed = jax.make_jaxpr(fun)(g)
    jaxpr, consts = _compat.open_jaxpr(closed)
    env = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, g), strict=True))
    for eqn in jaxpr.eqns:
        operands = [v.val if isinstance(v, Literal) else env[v] for v in eqn.invars]
        env[eqn.outvars[0]] = _bind_wide(eqn, operands)
    return env[jaxpr.outvars[0]].astype(jnp.float32)


def _bind_wide(eqn: Any, operands: Sequence[Any]) -> Any:
    if eqn.primitive.name == "convert_element_type":
        return operands[0]
    if eqn.primitive.name not in LOW_OPS:
        return _compat.bind(eqn, operands, eqn.params)[0]
    params = {**eqn.params, "preferred_element_type": jnp.dtype(jnp.float32)}

    def bind(*operands: Any) -> Any:
        return _compat.bind(eqn, operands, params)[0]

    def bind_full(*operands: Any) -> Any:
        return bind(*[x.astype(jnp.float32) for x in operands])

    # The CPU has no products of half-precision factors with a float32 result.
    return jax.lax.platform_dependent(*operands, cpu=bind_full, default=bind)
