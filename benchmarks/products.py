"""Programs with other products: what `exact` and `twin` have in common.

It evaluates the jaxpr of a function, and the jaxprs in it, with another function in the
place of each product. All else is bound as it is. Custom derivatives keep the user's
rules; the products in these are replaced, too. It knows nothing of `amp`.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero

from flax_amp import _compat
from flax_amp._compat import evaluate

PRODUCTS = ("dot_general", "conv_general_dilated", "ragged_dot_general")
# What is entered; a kernel, for example, is not.
_ENTERED = """
    jit closed_call core_call eval_jaxpr checkpoint remat2 scan while cond
    custom_linear_solve custom_vmap_call
""".split()

# From a product and its operands to its result, or to `None` to leave it as it is.
Product = Callable[[Any, Sequence[Any]], Any]


def with_products(fun: Callable[..., Any], product: Product) -> Callable[..., Any]:
    """Returns a function of arrays with other products.

    Derivatives of it are those of the other products; all transformations of JAX work.
    """
    replaced = _Replaced(product)

    def with_others(*args: Any) -> Any:
        closed, shape = jax.make_jaxpr(fun, return_shape=True)(*args)
        outs = replaced.run(closed, jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(shape), outs)

    return with_others


def in_float32(eqn: Any, operands: Sequence[Any]) -> Any:
    """Returns a product in float32 of operands in half precision.

    Its terms are exact: float32 has more than twice the digits of either half. XLA for
    the CPU adds up some products of bfloat16 in bfloat16.
    """
    wide = [x.astype(jnp.float32) if is_float(x) else x for x in operands]
    params = {
        "precision": (lax.Precision.HIGHEST,) * 2,
        "preferred_element_type": jnp.dtype(jnp.float32),
    }
    return _compat.bind(eqn, wide, eqn.params | params)[0]


@dataclasses.dataclass(frozen=True)
class _Replaced:
    """Evaluates jaxprs with other products."""

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
            if name == "custom_jvp_call":
                return self._custom_jvp(eqn)(*operands)
            if name == "custom_vjp_call":
                return self._custom_vjp(eqn)(*operands)
            if name in _ENTERED:
                params = {key: self._entered(value) for key, value in params.items()}
            return _compat.bind(eqn, operands, params)

    def _entered(self, value: Any) -> Any:
        """Returns a parameter with other products in the jaxprs in it."""
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
            self.bodies[id(body)] = made, body  # which is alive as long as its id
        return self.bodies[id(body)][0]

    def _custom_jvp(self, eqn: Any) -> Callable[..., Any]:
        mask, out_mask = _floats(eqn.invars), _floats(eqn.outvars)
        function = jax.custom_jvp(_body_of(self, eqn))

        @functools.partial(with_products, product=self.product)
        def derivative(primals: Any, tangents: Any) -> Any:
            original, floats = _of_floats(eqn, primals, mask, out_mask)
            return jax.jvp(original, floats, tangents, has_aux=True)

        def rule(primals: Any, tangents: Any) -> Any:
            outs, out_tangents, rest = derivative(primals, _pick(tangents, mask))
            return (
                _merge(out_mask, outs, rest),
                _merge(out_mask, out_tangents, map(_no_tangent, rest)),
            )

        function.defjvp(rule)
        return function

    def _custom_vjp(self, eqn: Any) -> Callable[..., Any]:
        out_mask = _floats(eqn.outvars)
        function = jax.custom_vjp(_body_of(self, eqn))

        def rule(*operands: Any) -> Any:
            # A rule may refuse derivatives by what nobody differentiates by.
            mask = [x.perturbed and is_float(x.value) for x in operands]

            @functools.partial(with_products, product=self.product)
            def forward(*operands: Any) -> Any:
                original, floats = _of_floats(eqn, operands, mask, out_mask)
                outs, backward, rest = jax.vjp(original, *floats, has_aux=True)
                return _merge(out_mask, outs, rest), backward

            def pull(backward: Any, cotangents: Any) -> Any:
                call = with_products(lambda f, cts: f(cts), self.product)
                found = call(backward, tuple(map(_array, _pick(cotangents, out_mask))))
                return _merge(mask, found, [None] * mask.count(False))

            outs, backward = forward(*(x.value for x in operands))
            return outs, jax.tree_util.Partial(pull, backward)

        function.defvjp(rule, lambda pull, cts: pull(cts), symbolic_zeros=True)
        return function


def _body_of(replaced: _Replaced, eqn: Any) -> Callable[..., Any]:
    return lambda *xs: tuple(replaced.run(eqn.params["call_jaxpr"], xs))


def _of_floats(eqn: Any, operands: Any, mask: Any, out_mask: Any) -> Any:
    """Returns the call as a function of its floats, to its floats and to the rest."""
    rest = _pick(operands, [not x for x in mask])

    def original(*floats: Any) -> Any:
        outs = _compat.bind(eqn, _merge(mask, floats, rest), eqn.params)
        return _pick(outs, out_mask), _pick(outs, [not x for x in out_mask])

    return original, _pick(operands, mask)


def _pick(items: Any, mask: Any) -> tuple[Any, ...]:
    return tuple(itertools.compress(items, mask))


def _merge(mask: Any, chosen: Any, others: Any) -> tuple[Any, ...]:
    chosen, others = iter(chosen), iter(others)
    return tuple(next(chosen) if x else next(others) for x in mask)


def _floats(variables: Any) -> list[bool]:
    return [is_float(v.aval) for v in variables]


def is_float(x: Any) -> bool:
    """Whether something has a derivative."""
    return jnp.issubdtype(x.dtype, jnp.inexact)


def _array(cotangent: Any) -> Any:
    is_zero = isinstance(cotangent, SymbolicZero)
    return jnp.zeros(cotangent.shape, cotangent.dtype) if is_zero else cotangent


def _no_tangent(x: Any) -> Any:
    return np.zeros(x.shape, jax.dtypes.float0)


def _struct(variable: Any) -> jax.ShapeDtypeStruct:
    aval = variable.aval
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=_is_weak(variable))


def _is_weak(variable: Any) -> bool:
    return getattr(variable.aval, "weak_type", False)
