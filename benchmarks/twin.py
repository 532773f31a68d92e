"""The twin of a program: what a cast of its matmuls alone does to it.

It is what an expert would write by hand, and is compared with `amp`. The operands of
each matmul are rounded to half precision, their product is added up in float32 and
rounded once; all else is float32, as the program has it. So are the derivatives.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import jaxprs_in_params

from benchmarks.products import PRODUCTS, in_float32, is_float, with_products
from flax_amp import _compat, _tree


def cast_products(fun: Callable[..., Any], dtype: Any) -> Callable[..., Any]:
    """Returns a function of arrays with its matmuls in half precision.

    Cast is each matmul of float32 operands for which the program asks no precision.
    Inner products are sums, and outer products multiplications: they stay in float32.
    In the derivative an outer product is cast, too: it is that of a matrix times a
    vector. So are matmuls in rules of JAX, such as that of a QR decomposition.

    Args:
      fun: the function, in float32, to floats.
      dtype: the half precision.
    """

    def twin(*args: Any) -> Any:
        leaves, tree = jax.tree.flatten(args)
        flat = lambda *leaves: fun(*jax.tree.unflatten(tree, leaves))  # noqa: E731
        return _with_derivative(flat, dtype)(*leaves)

    return twin


def count_cast(closed: Any) -> int:
    """Returns how many matmuls of a jaxpr are cast.

    The body of a scan counts as often as it runs, that of a `while` once, and all
    branches of a `cond` are added up.
    """
    count = 0
    for eqn in _compat.open_jaxpr(closed)[0].eqns:
        count += eqn.primitive.name in PRODUCTS and _is_cast(eqn)
        params = {} if eqn.primitive.name == "pallas_call" else eqn.params
        times = eqn.params["length"] if eqn.primitive.name == "scan" else 1
        count += times * sum(map(count_cast, jaxprs_in_params(params)))
    return count


def _with_derivative(fun: Callable[..., Any], dtype: Any) -> Callable[..., Any]:
    """Casts the matmuls of a function of arrays, and those of its derivative."""
    cast = functools.partial(_cast, dtype=dtype)
    cast_outer = functools.partial(cast, outer=True)
    function = jax.custom_vjp(with_products(fun, cast))

    def forward(*leaves: Any) -> Any:
        # Differentiate only by what is perturbed: a rule may refuse the rest.
        mask = [x.perturbed and is_float(x.value) for x in leaves]
        values = [x.value for x in leaves]
        of_some = lambda *some: fun(*_tree.fill(some, mask, values))  # noqa: E731
        vjp = with_products(functools.partial(jax.vjp, of_some), cast)
        outs, pull = vjp(*_tree.pick(values, mask))

        def backward(pull: Any, cotangents: Any) -> Any:
            cotangents = jax.tree.map(_array, cotangents)
            found = with_products(lambda f, cts: f(cts), cast_outer)(pull, cotangents)
            return tuple(_tree.fill(found, mask, [None] * len(mask)))

        return outs, jax.tree_util.Partial(backward, pull)

    function.defvjp(forward, lambda pull, cts: pull(cts), symbolic_zeros=True)
    return function


def _array(cotangent: Any) -> Any:
    is_zero = isinstance(cotangent, SymbolicZero)
    return jnp.zeros(cotangent.shape, cotangent.dtype) if is_zero else cotangent


def _cast(eqn: Any, operands: Sequence[Any], dtype: Any, outer: bool = False) -> Any:
    if not _is_cast(eqn, outer):
        return None
    low = [_rounded(x, dtype) if is_float(x) else x for x in operands]
    return _rounded(in_float32(eqn, low), dtype).astype(jnp.float32)


def _rounded(x: Any, dtype: Any) -> Any:
    """Returns a float32 array in half; the barrier keeps XLA from skipping that."""
    return lax.optimization_barrier(x.astype(dtype))


def _is_cast(eqn: Any, outer: bool = False) -> bool:
    default = lax.Precision.DEFAULT
    floats = (*eqn.invars[:2], *eqn.outvars)
    return (
        all(v.aval.dtype == jnp.float32 for v in floats)
        and eqn.params["precision"] in (None, default, (default, default))
        and _is_matrix_product(eqn, outer)
    )


def _is_matrix_product(eqn: Any, outer: bool) -> bool:
    """Whether it is neither a sum nor a multiplication, unless that is asked for."""
    if eqn.primitive.name != "dot_general":
        return True
    (contracted, _), (batch, _) = eqn.params["dimension_numbers"]
    shapes = [v.aval.shape for v in eqn.invars]
    has_terms = any(shapes[0][axis] > 1 for axis in contracted)
    free = [len(shape) > len(contracted) + len(batch) for shape in shapes]
    return any(free) if has_terms else outer and all(free)
