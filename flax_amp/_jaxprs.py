"""Runs jaxprs equation by equation, and reads facts of equations and of their types.

Nothing here depends on the version of JAX. `_compat.py` has the code that depends on
the version.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import Literal, jaxprs_in_params

from flax_amp._compat import (
    Array,
    Arrays,
    Atom,
    Aval,
    DType,
    Eqn,
    Jaxpr,
    Params,
    Var,
    bind,
    open_jaxpr,
)
from flax_amp._source import equation_context


def bind_in_context(eqn: Eqn, operands: Arrays) -> Arrays:
    """Binds an equation with its own parameters, scopes and source line."""
    with equation_context(eqn):
        return bind(eqn, operands, eqn.params)


# The parameters of these primitives hold a function for a fixed dtype, such as the
# addition of two numbers. So an equation in another dtype is made anew.
_SCATTERS = {
    "scatter-add": jax.lax.scatter_add,
    "scatter-sub": jax.lax.scatter_sub,
    "scatter-mul": jax.lax.scatter_mul,
    "scatter-min": jax.lax.scatter_min,
    "scatter-max": jax.lax.scatter_max,
}


def bind_in_dtype(eqn: Eqn, operands: Arrays, params: Params) -> Arrays:
    """Binds an equation to operands in a new dtype, which all float operands share."""
    name = eqn.primitive.name
    if name not in _SCATTERS:
        return bind(eqn, operands, params)
    options = "dimension_numbers indices_are_sorted unique_indices mode".split()
    kept = {option: params[option] for option in options}
    return [_SCATTERS[name](*operands, **kept)]


def evaluate(
    closed: Jaxpr,
    operands: Arrays,
    run: Callable[[Eqn, Arrays], Arrays] = bind_in_context,
) -> Arrays:
    """Runs a jaxpr equation by equation, and returns the results of the jaxpr.

    `run` takes an equation and its operands, and returns the results of the equation.
    By default JAX computes the results. Operands are arrays, or any objects that `run`
    takes. Literals and constants reach `run` as they are.
    """
    jaxpr, consts = open_jaxpr(closed)
    env = dict(zip(jaxpr.constvars, consts, strict=True))
    env |= zip(jaxpr.invars, operands, strict=True)

    def read(atoms: Sequence[Atom]) -> Arrays:
        return [x.val if isinstance(x, Literal) else env[x] for x in atoms]

    last = {v: i for i, eqn in enumerate(jaxpr.eqns) for v in variables(eqn.invars)}
    last |= dict.fromkeys(variables(jaxpr.outvars), len(jaxpr.eqns))
    for i, eqn in enumerate(jaxpr.eqns):
        env |= zip(eqn.outvars, run(eqn, read(eqn.invars)), strict=True)
        # Outside of `jit` an array takes memory for as long as `env` holds the array.
        for v in {*variables(eqn.invars), *eqn.outvars}:
            if last.get(v, i) == i:
                del env[v]
    return read(jaxpr.outvars)


def variables(atoms: Iterable[Atom]) -> list[Var]:
    """Returns the operands or results of an equation that are not literals."""
    return [atom for atom in atoms if not isinstance(atom, Literal)]


def has_options(eqn: Eqn) -> bool:
    """Whether a jit has shardings, layouts or other options of its own."""
    names = """in_shardings out_shardings in_layouts out_layouts donated_invars
    compiler_options_kvs""".split()
    given = [x for name in names for x in eqn.params[name]]
    unset = ("NoneType", "UnspecifiedValue")
    return any(x is not False and type(x).__name__ not in unset for x in given)


def named_axes(eqn: Eqn) -> set[str]:
    """Returns the axes of a mesh along which an equation depends on the device.

    Along an axis, the equation communicates with further devices, or reads the place of
    its own device. JAX gives the equation an effect for each axis.
    """
    kind = "NamedAxisEffect"
    return {effect.name for effect in eqn.effects if type(effect).__name__ == kind}


def varying_axes(aval: Aval) -> frozenset[str]:
    """Returns the axes of a mesh along which a value in a `shard_map` may differ.

    The axes are known with `check_vma=True` only.
    """
    return aval.mat.varying


def struct_of(aval: Aval, dtype: DType) -> jax.ShapeDtypeStruct:
    """Returns the shape of an operand for `jax.make_jaxpr`, with its shard_map axes."""
    return jax.ShapeDtypeStruct(
        aval.shape,
        dtype,
        sharding=getattr(aval, "sharding", None),
        weak_type=False,
        manual_axis_type=getattr(aval, "mat", None),
    )


def atom_of(x: Any) -> Var | np.ndarray | None:
    """Returns the variable or the number that stands for a tracer in its jaxpr.

    The jaxpr is being made, or was made before. A number stands for the tracer of a
    literal, such as `jnp.float32(2)`. Tracers of another kind, and objects that are no
    tracers, give `None`.
    """
    if not isinstance(x, jax.core.Tracer):
        return None
    atom = getattr(x, "val", None)
    if isinstance(atom, Literal):
        return np.asarray(atom.val, jax.numpy.result_type(x))
    return atom if isinstance(atom, jax.extend.core.Var) else None


# --- hi-primitives -------------------------------------------------------------------

# The attribute that keeps the jaxpr of a hi-primitive. So a hi-primitive is traced only
# once.
_RUNS = "_flax_amp_runs"


def hi_name(eqn: Eqn) -> str:
    """Returns the name of a hi-primitive; empty for ordinary primitives.

    A hi-primitive is an object that has rules, and no jaxpr among the parameters of its
    equation.
    """
    if eqn.primitive.name != "call_hi_primitive":
        return ""
    return type(eqn.params["_prim"]).__name__


def is_of_flags(eqn: Eqn) -> bool:
    """Whether JAX made a hi-primitive because of `jax_remat3` or a similar flag."""
    names = ("RematTraced", "CustomVJPTraced", "CustomJVPTraced", "Scan3")
    return hi_name(eqn) in names


def inner_jaxprs(eqn: Eqn) -> list[Jaxpr]:
    """Returns all jaxprs in an equation, or the jaxpr that a hi-primitive runs."""
    if not hi_name(eqn):
        return list(jaxprs_in_params(eqn.params))
    hi = eqn.params["_prim"]
    # Values of another kind than arrays have no dtype.
    if not all(hasattr(v.aval, "dtype") for v in (*eqn.invars, *eqn.outvars)):
        return []
    if _RUNS not in vars(hi):
        structs = [struct_of(v.aval, v.aval.dtype) for v in eqn.invars]

        def run(*xs: Array) -> Any:
            return hi.expand(*jax.tree.unflatten(hi.in_tree, xs))

        try:
            vars(hi)[_RUNS] = [jax.make_jaxpr(run)(*structs)]
        except NameError:  # an axis of a mesh has no name outside of its `shard_map`
            vars(hi)[_RUNS] = []
    return vars(hi)[_RUNS]
