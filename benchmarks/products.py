"""Products of half-precision arrays whose sums are in float32, rounded once.

XLA adds some of these products in bfloat16 on some processors, depending on the layout
of their operands. Accelerators add in float32.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

_HALF = (jnp.bfloat16, jnp.float16)


def sums_in_float32(function: Callable[..., Any]) -> Callable[..., Any]:
    """Makes the products of a function, gradients included, add in float32.

    All else is as it was, and so are the dtypes of all values: a product is rounded to
    its own, behind a barrier over which XLA does not move the rounding.
    """

    def changed(*args: Any) -> Any:
        closed, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
        results = _run(closed, *jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    return changed


def _run(jaxpr: Any, *args: Any) -> list[Any]:
    """Runs a jaxpr, equation by equation."""
    opened = getattr(jaxpr, "jaxpr", jaxpr)  # before JAX 0.12 a closed one wraps it
    values = dict(zip(opened.constvars, getattr(jaxpr, "consts", ()), strict=True))
    values |= zip(opened.invars, args, strict=True)

    def read(atoms: Any) -> list[Any]:
        return [atom.val if hasattr(atom, "val") else values[atom] for atom in atoms]

    for equation in opened.eqns:
        primitive, operands = equation.primitive, read(equation.invars)
        params = {name: _changed(value) for name, value in equation.params.items()}
        dtype = equation.outvars[0].aval.dtype if equation.outvars else None
        wide = "preferred_element_type" in params and dtype in _HALF
        if wide:
            operands = [
                x.astype(jnp.float32) if x.dtype in _HALF else x for x in operands
            ]
            params["preferred_element_type"] = jnp.dtype(jnp.float32)
        results = primitive.bind(*operands, **primitive.get_bind_params(params))
        if wide:
            results = jax.lax.optimization_barrier(results).astype(dtype)
        if not primitive.multiple_results:
            results = [results]
        values |= zip(equation.outvars, results, strict=True)
    return read(opened.outvars)


def _changed(value: Any) -> Any:
    """Changes the jaxprs among the parameters of an equation."""
    if isinstance(value, (tuple, list)):
        return (
            type(value)(map(_changed, value)) if type(value) in (tuple, list) else value
        )
    if not hasattr(getattr(value, "jaxpr", value), "eqns"):
        return value
    made = jax.make_jaxpr(functools.partial(_run, value))(*_inputs(value))
    return made if hasattr(value, "consts") else getattr(made, "jaxpr", made)


def _inputs(jaxpr: Any) -> list[Any]:
    return [var.aval for var in getattr(jaxpr, "jaxpr", jaxpr).invars]
