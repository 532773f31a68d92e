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


def product(
    eqn: Any,
    params: Any,
    dtype: Any,
    factors: Sequence[Any],
    wide: Sequence[bool],
) -> Any:
    """Returns a product in low precision, of which factors have float32 gradients.

    Differentiable in reverse mode only.

    Args:
      eqn: the equation of a matrix product or convolution.
      params: its parameters, result dtype included.
      dtype: the compute dtype.
      factors: the two factors; those that are wide in float32.
      wide: which of them are weights, with float32 gradients.
    """

    def bind(*factors: Any) -> Any:
        return _compat.bind(eqn, [x.astype(dtype) for x in factors], params)[0]

    @jax.custom_vjp
    def low_product(*factors: Any) -> Any:
        return bind(*factors)

    def forward(*factors: Any) -> Any:
        return low_product(*factors), factors

    def backward(factors: Any, g: Any) -> Any:
        a, b = (x.astype(dtype) for x in factors)
        transposes = (
            jax.linear_transpose(lambda a: bind(a, b), a),
            jax.linear_transpose(lambda b: bind(a, b), b),
        )
        return tuple(
            _in_float32(transpose, g) if is_wide else transpose(g)[0]
            for transpose, is_wide in zip(transposes, wide, strict=True)
        )

    low_product.defvjp(forward, backward)
    return low_product(*factors)


def _in_float32(transpose: Callable[[Any], Any], g: Any) -> Any:
    """Calls a transpose: one product and data movement; the result is float32."""
    closed = jax.make_jaxpr(transpose)(g)
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
