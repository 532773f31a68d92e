"""Programs with other matmuls: with exact sums, or with nothing else in half.

The jaxpr of a function, and the jaxprs in it, are evaluated with something else in the
place of each matmul and convolution; the rest is bound as it is. Nothing here is shared
with `amp`. Rules for derivatives are lost: apply it to all that runs,
`exact_matmuls(jax.grad(loss))`, and jit the result.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import jaxprs_in_params

from flax_amp import _compat, _source, _tree
from flax_amp._jaxprs import evaluate

MATMULS = ("dot_general", "conv_general_dilated", "ragged_dot_general")
_CUSTOM = ("custom_jvp_call", "custom_vjp_call")
# What is entered; a kernel, for example, is not.
_ENTERED = """
    jit closed_call core_call eval_jaxpr checkpoint remat2 scan while cond
    custom_linear_solve custom_vmap_call
""".split()

# From a matmul and its operands to its result, or to `None` to leave it as it is.
Matmul = Callable[[Any, Sequence[Any]], Any]


def exact_matmuls(fun: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function whose half-precision matmuls are added up in float32.

    The result of each is rounded once, to the dtype that it has. XLA for the CPU adds
    up some matmuls of bfloat16 in bfloat16.
    """
    return _replace(fun, _exact)


def cast_matmuls(fun: Callable[..., Any], dtype: Any) -> Callable[..., Any]:
    """Returns a function with its matmuls, and nothing else, in half precision.

    Cast is each matmul of float32 operands for which the program asks no precision: its
    operands are rounded, their terms added up in float32, and the sum is rounded.
    Inner products are sums, and stay in float32.
    """
    return _replace(fun, functools.partial(_cast, dtype=dtype))


def count_cast(closed: Any) -> int:
    """Returns how many matmuls of a jaxpr are cast, outer products left out.

    The body of a scan counts as often as it runs, that of a `while` once, and all
    branches of a `cond` are added up.
    """
    count = 0
    for eqn in _compat.open_jaxpr(closed)[0].eqns:
        if eqn.primitive.name in MATMULS:
            count += _is_cast(eqn) and _has_terms(eqn)
        params = {} if eqn.primitive.name == "pallas_call" else eqn.params
        times = eqn.params["length"] if eqn.primitive.name == "scan" else 1
        count += times * sum(map(count_cast, jaxprs_in_params(params)))
    return count


def _replace(fun: Callable[..., Any], matmul: Matmul) -> Callable[..., Any]:
    """Returns a function of arrays with other matmuls."""
    replaced = _Replaced(matmul)

    def with_others(*args: Any) -> Any:
        closed, shape = jax.make_jaxpr(fun, return_shape=True)(*args)
        outs = replaced.run(closed, jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(shape), outs)

    return with_others


# --- matmuls -------------------------------------------------------------------------


def _exact(eqn: Any, operands: Sequence[Any]) -> Any:
    if not all(v.aval.dtype in (jnp.bfloat16, jnp.float16) for v in eqn.invars[:2]):
        return None
    # The barriers keep XLA from skipping a rounding.
    wide = _in_float32(eqn, lax.optimization_barrier(tuple(operands)))
    return lax.optimization_barrier(wide.astype(eqn.outvars[0].aval.dtype))


def _cast(eqn: Any, operands: Sequence[Any], dtype: Any) -> Any:
    if not _is_cast(eqn):
        return None

    def rounded(x: Any) -> Any:
        return lax.optimization_barrier(x.astype(dtype)) if _is_float(x) else x

    return rounded(_in_float32(eqn, map(rounded, operands))).astype(jnp.float32)


def _in_float32(eqn: Any, operands: Any) -> Any:
    """Returns a matmul in float32 of operands in half precision.

    Its terms are exact: float32 has more than twice the digits of either half.
    """
    wide = [x.astype(jnp.float32) if _is_float(x) else x for x in operands]
    params = {
        "precision": (lax.Precision.HIGHEST,) * 2,
        "preferred_element_type": jnp.dtype(jnp.float32),
    }
    return _compat.bind(eqn, wide, eqn.params | params)[0]


def _is_float(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact)


def _is_cast(eqn: Any) -> bool:
    default = lax.Precision.DEFAULT
    floats = (*eqn.invars[:2], *eqn.outvars)
    return (
        all(v.aval.dtype == jnp.float32 for v in floats)
        and eqn.params["precision"] in (None, default, (default, default))
        and not _is_sum(eqn)
    )


def _is_sum(eqn: Any) -> bool:
    """Whether it is an inner product, or a multiplication of one array by numbers.

    An outer product is neither: in a derivative it is that of a matrix times a vector.
    """
    if eqn.primitive.name != "dot_general":
        return False
    (contracted, _), (batch, _) = eqn.params["dimension_numbers"]
    ranks = [len(v.aval.shape) - len(contracted) - len(batch) for v in eqn.invars]
    return not (any(ranks) if _has_terms(eqn) else all(ranks))


def _has_terms(eqn: Any) -> bool:
    """Whether a matmul adds anything up."""
    if eqn.primitive.name != "dot_general":
        return True
    (contracted, _), _ = eqn.params["dimension_numbers"]
    return any(eqn.invars[0].aval.shape[axis] > 1 for axis in contracted)


# --- jaxprs --------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Replaced:
    """Evaluates jaxprs with other matmuls."""

    matmul: Matmul
    bodies: dict[int, Any] = dataclasses.field(default_factory=dict)

    def run(self, closed: Any, operands: Sequence[Any]) -> Sequence[Any]:
        return evaluate(closed, operands, self._equation)

    def _equation(self, eqn: Any, operands: Sequence[Any]) -> Sequence[Any]:
        with _source.equation_context(eqn):
            name, params = eqn.primitive.name, eqn.params
            if name in MATMULS:
                out = self.matmul(eqn, operands)
                return _compat.bind(eqn, operands, params) if out is None else [out]
            if name in _CUSTOM:
                return self.run(params["call_jaxpr"], operands)
            if name in _ENTERED:
                params = jax.tree.map(self._entered, dict(params))
            return _compat.bind(eqn, operands, params)

    def _entered(self, value: Any) -> Any:
        """Returns a jaxpr with other matmuls, and any other parameter as it is."""
        if not hasattr(getattr(value, "jaxpr", value), "eqns"):  # open or closed
            return value
        if id(value) not in self.bodies:
            jaxpr, _ = _compat.open_jaxpr(value)

            def run(*operands: Any) -> list[Any]:
                pairs = zip(self.run(value, operands), jaxpr.outvars, strict=True)
                return [_tree.with_weak_type(x, v.aval.weak_type) for x, v in pairs]

            made = jax.make_jaxpr(run)(*map(_struct, jaxpr.invars))
            made = made if hasattr(value, "consts") else made.jaxpr
            self.bodies[id(value)] = made, value  # stored: ids are of what lives
        return self.bodies[id(value)][0]


def _struct(variable: Any) -> jax.ShapeDtypeStruct:
    aval = variable.aval
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)
