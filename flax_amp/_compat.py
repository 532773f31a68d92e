"""Every difference between JAX versions, and every use of `jax._src`.

The rest of the package sees one JAX: sub-jaxprs as `(jaxpr, consts)` pairs, scan
operands as counts, equations bound by one call. Supported: JAX 0.10, 0.11, 0.12.
"""

import contextlib
import functools
import importlib
import os
import types
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from jax.extend import source_info_util
from jax.extend.core import Primitive, Var
from jax.extend.core import primitives as _public_primitives

# `jax.extend.core.primitives` leaves out a few collectives and linear-algebra
# primitives that a policy has to name.
_PRIVATE_PRIMITIVE_MODULES = (
    "jax._src.lax.lax",
    "jax._src.lax.parallel",
    "jax._src.lax.linalg",
    "jax._src.lax.slicing",
    "jax._src.pjit",
)

_JAX_FOLDER = os.path.dirname(jax.__file__)
# What decides how the objects of some private classes of JAX behave; see `parts`.
_PARTS = {
    "jax._src.linear_util.WrappedFun": ("f", "transforms", "params", "in_type"),
    "jax._src.linear_util.Store": (),
    "jax._src.linear_util.EqualStore": (),
    "jax._src.linear_util.DebugInfo": (),
    "jax._src.util.Unhashable": ("val",),
    "jax._src.custom_batching.ClosedRule": ("rule",),
}


@functools.cache
def primitives() -> dict[str, Primitive]:
    """Returns every primitive that this JAX names, by `Primitive.name`."""
    modules = [importlib.import_module(name) for name in _PRIVATE_PRIMITIVE_MODULES]
    found = {}
    for module in (*modules, jax.lax, _public_primitives):
        for attribute in dir(module):
            value = getattr(module, attribute) if attribute.endswith("_p") else None
            if isinstance(value, Primitive):
                found[value.name] = value
    return found


def open_jaxpr(jaxpr: Any) -> tuple[Any, Sequence[Any]]:
    """Returns `(jaxpr, consts)` of an open or closed jaxpr.

    JAX 0.12 has one class for both; before, a `ClosedJaxpr` wraps a `Jaxpr`.
    """
    return getattr(jaxpr, "jaxpr", jaxpr), tuple(getattr(jaxpr, "consts", ()))


def is_jaxpr(value: Any) -> bool:
    """Whether something is an open or closed jaxpr."""
    return hasattr(getattr(value, "jaxpr", value), "eqns")


def parts(value: Any) -> Sequence[Any] | None:
    """Returns what decides how an object that JAX made for itself behaves.

    The rule of a custom derivative, for one, reaches its equation in a memoized thunk
    around a wrapped function with its transformations, all of them new at each call.
    Names for people, caches, and what functions leave behind when they are traced
    decide nothing.

    Returns:
      The parts; `None` if they are not known.
    """
    if isinstance(value, types.FunctionType):
        code = value.__code__
        if code is not _memoized_code():
            return None
        cells = dict(zip(code.co_freevars, value.__closure__ or (), strict=True))
        return [cells["fn"].cell_contents]
    kind = type(value)
    names = _PARTS.get(f"{kind.__module__}.{kind.__qualname__}")
    if names is not None:
        return [kind, *(getattr(value, name) for name in names)]
    if isinstance(value, jax.core.Trace):
        return kind, value.requires_low
    if isinstance(value, jax.tree_util.PyTreeDef):
        of_node, data = value.node_data() or (None, None)
        data = tuple(data) if isinstance(data, list) else data
        return value.num_leaves, of_node, data, *value.children()
    return None


@functools.cache
def _memoized_code() -> Any:
    partial_eval = importlib.import_module("jax._src.interpreters.partial_eval")
    return partial_eval._memoize(len).__code__


def scan_counts(eqn: Any) -> tuple[int, int]:
    """Returns `(num_consts, num_carry)` of a scan equation."""
    if "num_carry" in eqn.params:
        return eqn.params["num_consts"], eqn.params["num_carry"]
    consts, carry, _ = eqn.params["ft_in"].unpack()  # JAX 0.12
    return len(consts), len(carry)


def scan_options(eqn: Any) -> dict[str, Any]:
    """Returns the keyword arguments that rebuild a scan with `jax.lax.scan`."""
    names = ["reverse", "unroll", "_split_transpose"]
    if isinstance(eqn.params["length"], int):  # a symbol stands in the shapes of xs
        names.append("length")
    return {name: eqn.params[name] for name in names if name in eqn.params}


def bind(eqn: Any, operands: Sequence[Any], params: dict[str, Any]) -> list[Any]:
    """Binds `eqn.primitive` to other operands and parameters."""
    primitive = eqn.primitive
    bind_params = primitive.get_bind_params(params)
    subfuns: Sequence[Any] = ()
    if isinstance(bind_params, tuple):  # JAX before 0.9.2
        subfuns, bind_params = bind_params
    outs = primitive.bind(*subfuns, *operands, **bind_params)
    return list(outs) if primitive.multiple_results else [outs]


@contextlib.contextmanager
def equation_context(eqn: Any) -> Iterator[None]:
    """Restores an equation's scopes, source line and JAX context around its bind."""
    stack = source_info_util.current_name_stack() + eqn.source_info.name_stack
    traceback = eqn.source_info.traceback
    with (
        source_info_util.user_context(traceback, name_stack=stack),
        eqn.ctx.manager,
    ):
        yield


def scope_names(eqn: Any) -> tuple[str, ...]:
    """Returns the `jax.named_scope` names around an equation, outermost first.

    Names are relative to the jaxpr that holds the equation. Entries that JAX's own
    transformations add (`jvp`, `transpose`, ...) are not scopes and are left out.
    """
    stack = eqn.source_info.name_stack.stack
    return tuple(entry.name for entry in stack if type(entry).__name__ == "Scope")


def user_file(eqn: Any) -> str:
    """Returns the file of the code outside of JAX that an equation comes from."""
    frames = getattr(eqn.source_info.traceback, "frames", ())
    files = (frame.file_name for frame in frames)
    return next((f for f in files if not f.startswith(_JAX_FOLDER)), "")


def scopes(eqn: Any) -> tuple[Any, ...]:
    """Returns all scopes around an equation within its jaxpr, outermost first."""
    return tuple(eqn.source_info.name_stack.stack)


def with_scopes(eqn: Any, scopes: Sequence[Any]) -> Any:
    """Returns an equation with other scopes around it."""
    info = eqn.source_info
    name_stack = type(info.name_stack)(tuple(scopes))
    return eqn.replace(source_info=info.replace(name_stack=name_stack))


def struct_of(aval: Any, dtype: Any) -> jax.ShapeDtypeStruct:
    """Returns what `jax.make_jaxpr` needs to trace an operand like `aval`.

    Keeps the sharding type and the manual (`shard_map`) axes of `aval`.
    """
    return jax.ShapeDtypeStruct(
        aval.shape,
        dtype,
        sharding=getattr(aval, "sharding", None),
        weak_type=False,
        manual_axis_type=getattr(aval, "mat", None),
    )


def hoist_consts(closed: Any) -> tuple[Any, Sequence[Any]]:
    """Returns a closed jaxpr as an open one that takes its consts as first inputs."""
    jaxpr, consts = open_jaxpr(closed)
    if not consts:
        return jaxpr, ()
    partial_eval = importlib.import_module("jax._src.interpreters.partial_eval")
    return partial_eval.convert_constvars_jaxpr(jaxpr), consts


def weakly_typed(x: jax.Array) -> jax.Array:
    """Returns an array that promotes as Python numbers do; JAX has no public cast."""
    convert = _public_primitives.convert_element_type_p
    return convert.bind(x, new_dtype=x.dtype, weak_type=True, sharding=None)


def variable_of(x: Any) -> Any:
    """Returns the variable of a tracer of a jaxpr that is being, or was, made.

    `None` for everything else.
    """
    variable = getattr(x, "val", None) if isinstance(x, jax.core.Tracer) else None
    return variable if isinstance(variable, Var) else None


def call_vmap_rule(
    eqn: Any, axis_size: int, in_batched: Sequence[bool], operands: Sequence[Any]
) -> tuple[list[Any], list[bool]]:
    """Calls the rule of a `custom_vmap`; returns results, and which are batched."""
    in_tree = eqn.params["in_tree"]
    args = jax.tree.unflatten(in_tree, operands)
    flags = jax.tree.unflatten(in_tree, in_batched)
    outs, out_batched = eqn.params["rule"](axis_size, list(flags), *args)
    leaves, tree = jax.tree.flatten(outs)
    flags_tree, expected = jax.tree.structure(out_batched), eqn.params["out_tree"]
    if (tree, flags_tree) != (expected, expected):
        raise ValueError(
            f"custom_vmap: the batching rule gave results of structure {tree} with "
            f"flags of structure {flags_tree}; expected {expected} for both, as the "
            "function gives it."
        )
    return leaves, jax.tree.leaves(out_batched)


def takes_symbolic_zeros(operands: Sequence[Any]) -> bool:
    """Whether a `custom_vjp` may ask for symbolic zeros here.

    An eager `shard_map` refuses it, whether or not there is a derivative.
    """
    return not any(type(x).__name__ == "ShardMapTracer" for x in operands)


def is_of_trace(x: Any) -> bool:
    """Whether an object belongs to the machinery of a trace, and reaches all of it."""
    return isinstance(x, _TRACE) or type(x).__module__ == _TRACING


_CORE = importlib.import_module("jax._src.core")
_TRACE = (_CORE.Trace, _CORE.Jaxpr, _CORE.JaxprEqn)
_TRACING = "jax._src.interpreters.partial_eval"
