"""Matmuls of halves that take float32 weights and give float32 gradients of weights.

    y = x @ w        x and y in bfloat16, w in float32
    dx = g @ w.T     in bfloat16, as x is
    dw = x.T @ g     the float32 sum, of halves: nothing is rounded behind the matmul

Where the batch is sharded, the partitioner puts the sum over devices right behind the
matmul that gives `dw`, and adds up in the dtype of the matmul's result. With a cast of
`w` before the matmul, this dtype is bfloat16, even if a cast to float32 follows.

To JAX such a matmul is a primitive, bilinear as `dot_general` is. The primitive reads
its factors rounded to half precision, and gives a result in the dtype of its parameter
`dtype`. The derivative by a factor is a matmul of the same kind in the dtype of this
factor. So derivatives of any order and mode are matmuls of halves, with the axes that
JAX gives the derivatives of the plain matmul. A `dot_general` of halves with a float32
result would do for the first derivative. But in the second derivative JAX multiplies
the float32 cotangent of this `dot_general` by the halves, in float32.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from flax_amp import _compat, _jaxprs
from flax_amp._compat import Array, Arrays, Aval, DType, Eqn, Params
from flax_amp._rewriter.casts import rounded, to_float32, to_half

weight_matmul_p = Primitive("flax_amp_weight_matmul")


def weight_matmul(eqn: Eqn, operands: Arrays, half: DType, dtype: DType) -> Array:
    """Returns the result of a matmul of halves in a dtype.

    The factors are the first two operands, in half precision or in float32. The
    gradient of a factor has the dtype of the factor.
    """
    dtypes = dict(half=jnp.dtype(half), dtype=jnp.dtype(dtype))
    params = eqn.params | {"preferred_element_type": None}
    return weight_matmul_p.bind(*operands, of=eqn.primitive, **dtypes, **params)


@dataclasses.dataclass(frozen=True)
class PolicyOfWeightMatmuls:
    """A policy of `jax.checkpoint` that sees each weight matmul as a plain matmul."""

    policy: Callable[..., Any]

    def __call__(self, primitive: Primitive, *avals: Any, **params: Any) -> Any:
        if primitive is weight_matmul_p:
            primitive = params["of"]
            avals, params = _plain(*avals, **params)
        return self.policy(primitive, *avals, **params)


def _plain(
    *avals: Aval, of: Primitive, half: DType, dtype: DType, **params: Any
) -> tuple[tuple[Aval, ...], Params]:
    """Returns the operands and parameters of the plain matmul of halves."""
    factors = [x.update(dtype=half, weak_type=False) for x in avals[:2]]
    return (*factors, *avals[2:]), params | {"preferred_element_type": dtype}


def _matmul(
    *operands: Array, of: Primitive, half: DType, dtype: DType, **params: Any
) -> Array:
    factors = [to_half(x, half) for x in operands[:2]]
    params["preferred_element_type"] = dtype
    return of.bind(*factors, *operands[2:], **params)


def _matmul_on_cpu(
    *operands: Array, of: Primitive, half: DType, dtype: DType, **params: Any
) -> Array:
    """Returns the result of `_matmul`, from a float32 matmul of the rounded factors.

    The product of two halves is exact in float32. On the CPU, XLA has no matmul of
    halves with a float32 result and batch dimensions: the compiled program fails at run
    time. Some matmuls that give halves would add up in half precision there
    (`row_matmuls.py`).
    """
    factors = [to_float32(rounded(to_half(x, half)), half) for x in operands[:2]]
    float32 = jnp.dtype(jnp.float32)
    y = _matmul(*factors, *operands[2:], of=of, half=float32, dtype=float32, **params)
    return jax.lax.convert_element_type(y, dtype)


def _impl(*operands: Array, **params: Any) -> Array:
    # Under `jit`, JAX uses the lowering for the device.
    return jax.jit(functools.partial(weight_matmul_p.bind, **params))(*operands)


def _abstract_eval(*avals: Aval, of: Any, **params: Any) -> Any:
    plain, params = _plain(*avals, of=of, **params)
    return of.abstract_eval(*plain, **params)


def _with_weight_matmul(
    fn: Callable[..., Array], *operands: Array, **dtypes: DType
) -> Array:
    """Evaluates a function of a plain matmul, with a `weight_matmul` in its place."""

    def run(eqn: Eqn, values: Arrays) -> Arrays:
        if "preferred_element_type" in eqn.params:
            return [weight_matmul(eqn, values, **dtypes)]
        return _compat.bind(eqn, values, eqn.params)

    avals = map(jax.typeof, operands)
    structs = [
        _jaxprs.struct_of(x, jnp.float32 if _is_float(x) else x.dtype) for x in avals
    ]
    (out,) = _jaxprs.evaluate(jax.make_jaxpr(fn)(*structs), operands, run)
    return out


def _is_float(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)


def _transpose(
    g: Array, *operands: Any, of: Primitive, half: DType, dtype: DType, **params: Any
) -> Sequence[Array | None]:
    """Returns the cotangent of the factor that is differentiated, in its dtype."""
    (i,) = (i for i in (0, 1) if ad.is_undefined_primal(operands[i]))
    aval = operands[i].aval
    factor = _jaxprs.struct_of(aval, jnp.float32)

    def of_plain(g: Array, *others: Array) -> Array:
        def matmul(x: Array) -> Array:
            return of.bind(*others[:i], x, *others[i:], **params)

        return jax.linear_transpose(matmul, factor)(g)[0]

    others = *operands[:i], *operands[i + 1 :]
    cotangent = _with_weight_matmul(of_plain, g, *others, half=half, dtype=aval.dtype)
    return [cotangent if k == i else None for k in range(len(operands))]


def _jvp(primals: Arrays, tangents: Arrays, **params: Any) -> tuple[Array, Any]:
    zero: Any = ad.Zero
    terms = [
        weight_matmul_p.bind(*primals[:i], t, *primals[i + 1 :], **params)
        for i, t in enumerate(tangents[:2])
        if not isinstance(t, zero)
    ]
    y = weight_matmul_p.bind(*primals, **params)
    if not terms:
        return y, zero.from_primal_value(y)
    return y, functools.reduce(ad.add_tangents, terms)


def _batch(
    operands: Arrays,
    dims: Sequence[Any],
    *,
    of: Primitive,
    half: DType,
    dtype: DType,
    **params: Any,
) -> tuple[Array, int]:
    def matmul(*operands: Array) -> Array:
        return of.bind(*operands, **params)

    mapped = jax.vmap(matmul, tuple(dims))
    return _with_weight_matmul(mapped, *operands, half=half, dtype=dtype), 0


weight_matmul_p.def_impl(_impl)
weight_matmul_p.def_effectful_abstract_eval(_abstract_eval)
ad.primitive_jvps[weight_matmul_p] = _jvp
ad.primitive_transposes[weight_matmul_p] = _transpose
batching.primitive_batchers[weight_matmul_p] = _batch
mlir.register_lowering(weight_matmul_p, mlir.lower_fun(_matmul, multiple_results=False))
mlir.register_lowering(
    weight_matmul_p,
    mlir.lower_fun(_matmul_on_cpu, multiple_results=False),
    platform="cpu",
)
