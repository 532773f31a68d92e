"""Programs with other matmuls: what `exact` and `twin` have in common.

It evaluates the jaxpr of a function, and the jaxprs in it, with another function in the
place of each matmul. All else is bound as it is. It knows nothing of `amp`.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from flax_amp import _compat
from flax_amp._compat import evaluate

PRODUCTS = ("dot_general", "conv_general_dilated", "ragged_dot_general")
_CUSTOM = ("custom_jvp_call", "custom_vjp_call")
# What is entered; a kernel, for example, is not.
_ENTERED = """
    jit closed_call core_call eval_jaxpr checkpoint remat2 scan while cond
    custom_linear_solve custom_vmap_call
""".split()

# From a matmul and its operands to its result, or to `None` to leave it as it is.
Product = Callable[[Any, Sequence[Any]], Any]


def with_products(fun: Callable[..., Any], product: Product) -> Callable[..., Any]:
    """Returns a function of arrays with other matmuls.

    Rules for derivatives are lost: `fun` itself is what is differentiated.
    """
    replaced = _Replaced(product)

    def with_others(*args: Any) -> Any:
        closed, shape = jax.make_jaxpr(fun, return_shape=True)(*args)
        outs = replaced.run(closed, jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(shape), outs)

    return with_others


def in_float32(eqn: Any, operands: Sequence[Any]) -> Any:
    """Returns a matmul in float32 of operands in half precision.

    Its terms are exact: float32 has more than twice the digits of either half. XLA for
    the CPU adds up some matmuls of bfloat16 in bfloat16.
    """
    wide = [x.astype(jnp.float32) if is_float(x) else x for x in operands]
    params = {
        "precision": (lax.Precision.HIGHEST,) * 2,
        "preferred_element_type": jnp.dtype(jnp.float32),
    }
    return _compat.bind(eqn, wide, eqn.params | params)[0]


def is_float(x: Any) -> bool:
    """Whether something has a derivative."""
    return jnp.issubdtype(x.dtype, jnp.inexact)


@dataclasses.dataclass(frozen=True)
class _Replaced:
    """Evaluates jaxprs with other matmuls."""

    product: Product
    bodies: dict[int, Any] = dataclasses.field(default_factory=dict)

    def run(self, closed: Any, operands: Sequence[Any]) -> Sequence[Any]:
        return evaluate(closed, operands, self._equation)

    def _equation(self, eqn: Any, operands: Sequence[Any]) -> Sequence[Any]:
        with _compat.equation_context(eqn):
            name, params = eqn.primitive.name, eqn.params
            if name in PRODUCTS:
                out = self.product(eqn, operands)
                return _compat.bind(eqn, operands, params) if out is None else [out]
            if name in _CUSTOM:
                return self.run(params["call_jaxpr"], operands)
            if name in _ENTERED:
                params = {key: self._entered(value) for key, value in params.items()}
            return _compat.bind(eqn, operands, params)

    def _entered(self, value: Any) -> Any:
        """Returns a parameter with other matmuls in the jaxprs in it."""
        if _compat.is_jaxpr(value):
            return self._body(value)
        if isinstance(value, tuple):
            items = map(self._entered, value)
            return value._make(items) if hasattr(value, "_make") else tuple(items)
        return value

    def _body(self, body: Any) -> Any:
        if id(body) not in self.bodies:
            jaxpr, _ = _compat.open_jaxpr(body)

            def run(*operands: Any) -> list[Any]:
                pairs = zip(self.run(body, operands), jaxpr.outvars, strict=True)
                return [_compat.with_weak_type(x, _is_weak(v)) for x, v in pairs]

            made = jax.make_jaxpr(run)(*map(_struct, jaxpr.invars))
            made = made if hasattr(body, "consts") else made.jaxpr
            self.bodies[id(body)] = made, body  # kept, so that no other has its id
        return self.bodies[id(body)][0]


def _struct(variable: Any) -> jax.ShapeDtypeStruct:
    aval = variable.aval
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=_is_weak(variable))


def _is_weak(variable: Any) -> bool:
    return getattr(variable.aval, "weak_type", False)
