"""Matrix products whose weights get their gradients in float32.

The gradient of a weight is a matrix product of low-precision factors, which the
hardware adds up in float32. By default its result is rounded to the compute dtype, as
in a model with hand-set dtypes. Where a batch is sharded, each device computes a part
of the sum, and the parts travel and are added in that dtype. Here the result stays
float32 from the accumulator on, and so does the reduction over devices:

    dw:bf16 = dot x:bf16 g:bf16                                  by default
    dw:f32 = dot[preferred_element_type=float32] x:bf16 g:bf16   here

`preferred_element_type` on the forward product would not do: the products of the
backward pass would get float32 factors.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from flax_amp import _compat
from flax_amp._compat import Array, Arrays, DType, Eqn
from flax_amp._jaxpr.evaluate import evaluate
from flax_amp._jaxpr.traits import Kind, kind_of


def product(
    eqn: Eqn,
    params: dict[str, Any],
    dtype: DType,
    factors: Arrays,
    wide: Sequence[bool],
) -> Array:
    """Returns a product in low precision whose weights have float32 gradients.

    Differentiable in reverse mode only.

    Args:
      eqn: the equation of a matrix product or convolution.
      params: its parameters, result dtype included.
      dtype: the compute dtype.
      factors: the two factors; those whose gradient is wide are in float32.
      wide: which of them are weights, whose gradient is float32.
    """

    def bind(*factors: Array) -> Array:
        return _compat.bind(eqn, [x.astype(dtype) for x in factors], params)[0]

    # JAX's own transpose would round each gradient to the dtype of its factor.
    @jax.custom_vjp
    def low_product(*factors: Array) -> Array:
        return bind(*factors)

    def forward(*factors: Array) -> Any:
        return low_product(*factors), factors

    def backward(factors: Any, g: Any) -> Any:
        # Weights were stored in float32, in which they are in memory anyway.
        a, b = (x.astype(dtype) for x in factors)
        # Linear in each factor by itself, not in both together.
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


def _in_float32(transpose: Callable[[Array], Any], g: Array) -> Array:
    """Calls a transpose, which is one product and data movement, in float32."""
    closed = jax.make_jaxpr(transpose)(g)
    (out,) = evaluate(closed, [g], _bind_wide)
    return out.astype(jnp.float32)


def _bind_wide(eqn: Eqn, operands: Arrays) -> Arrays:
    if kind_of(eqn) is not Kind.PRODUCT:
        return _compat.bind(eqn, operands, eqn.params)
    params = {**eqn.params, "preferred_element_type": jnp.dtype(jnp.float32)}

    def bind(*operands: Array) -> Array:
        return _compat.bind(eqn, operands, params)[0]

    def bind_full(*operands: Any) -> Array:
        return bind(*[x.astype(jnp.float32) for x in operands])

    # The CPU has no products of half-precision factors with a float32 result.
    return [jax.lax.platform_dependent(*operands, cpu=bind_full, default=bind)]
