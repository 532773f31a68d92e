"""Every difference between JAX versions, and every use of `jax._src`.

The rest of the package sees one JAX: sub-jaxprs as `(jaxpr, consts)` pairs, scan
operands as counts, equations bound by one call. Supported: JAX 0.10, 0.11, 0.12.
"""

import contextlib
import importlib
import itertools
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import source_info_util
from jax.extend.core import Literal, primitives

# What annotations call JAX's objects. Type checkers learn nothing from its classes: an
# `AbstractValue` has no dtype for them, and a closed jaxpr is an open one in JAX 0.12.
Array = Any  # jax.Array, a tracer, or a NumPy array
Arrays = Sequence[Array]
Atom = Any  # jax.extend.core.Var or Literal
Aval = Any  # jax.core.ShapedArray
DType = Any  # numpy.dtype
Params = dict[str, Any]  # of an equation
Eqn = Any  # jax.extend.core.JaxprEqn
Jaxpr = Any  # jax.extend.core.Jaxpr or ClosedJaxpr
Var = Any  # jax.extend.core.Var

# The lines of operations, in profiles and errors, are the user's.
_PACKAGE = os.path.join(os.path.dirname(__file__), "")
source_info_util.register_exclusion(_PACKAGE)

_JAX_FOLDER = os.path.dirname(jax.__file__)


def _private(module: str) -> Any:
    """Returns a module of `jax._src` that no public name leads to."""
    return importlib.import_module(f"jax._src.{module}")


_CORE = _private("core")
# A primitive that no public name has.
ragged_dot_general_p: Any = _private("lax.lax").ragged_dot_general_p


def open_jaxpr(jaxpr: Jaxpr) -> tuple[Jaxpr, Sequence[Array]]:
    """Returns `(jaxpr, consts)` of an open or closed jaxpr.

    Since JAX 0.11 there is one class for both; before, a `ClosedJaxpr` wraps a `Jaxpr`.
    """
    return getattr(jaxpr, "jaxpr", jaxpr), tuple(getattr(jaxpr, "consts", ()))


def source_of(closed: Jaxpr) -> str:
    """Returns the name and the place of a function of JAX that was traced to a jaxpr.

    It is empty for functions outside of JAX.
    """
    info = getattr(open_jaxpr(closed)[0], "debug_info", None)
    source = str(getattr(info, "func_src_info", ""))
    return source if _JAX_FOLDER in source else ""


def has_options(eqn: Eqn) -> bool:
    """Whether a jit has shardings, layouts or other options of its own."""
    names = """in_shardings out_shardings in_layouts out_layouts donated_invars
    compiler_options_kvs""".split()
    given = [x for name in names for x in eqn.params[name]]
    unset = ("NoneType", "UnspecifiedValue")
    return any(x is not False and type(x).__name__ not in unset for x in given)


def scan_counts(eqn: Eqn) -> tuple[int, int]:
    """Returns `(num_consts, num_carry)` of a scan equation."""
    if "num_carry" in eqn.params:
        return eqn.params["num_consts"], eqn.params["num_carry"]
    consts, carry, _ = eqn.params["ft_in"].unpack()  # JAX 0.12
    return len(consts), len(carry)


def scan_options(eqn: Eqn) -> Params:
    """Returns the keyword arguments that rebuild a scan with `jax.lax.scan`."""
    names = ["reverse", "unroll", "_split_transpose"]
    if isinstance(eqn.params["length"], int):  # a symbol stands in the shapes of xs
        names.append("length")
    return {name: eqn.params[name] for name in names if name in eqn.params}


def bind(eqn: Eqn, operands: Sequence[Array], params: Params) -> list[Array]:
    """Binds `eqn.primitive` to other operands and parameters."""
    primitive = eqn.primitive
    if "bwd" in params:  # JAX runs it under the line of the call
        params = {**params, "bwd": params["bwd"].wrap(_with_own_lines, (), None)}
    outs = primitive.bind(*operands, **primitive.get_bind_params(params))
    # The batching rule of `dce_sink` gives a result that the primitive does not have.
    return list(outs)[: len(eqn.outvars)] if primitive.multiple_results else [outs]


def bind_in_context(eqn: Eqn, operands: Arrays) -> Arrays:
    """Binds an equation with its own parameters, scopes and source line."""
    with equation_context(eqn):
        return bind(eqn, operands, eqn.params)


def evaluate(
    closed: Jaxpr,
    operands: Arrays,
    run: Callable[[Eqn, Arrays], Arrays] = bind_in_context,
) -> Arrays:
    """Runs a jaxpr equation by equation; returns its results.

    `run` returns the results of an equation for its operands, by default those that JAX
    computes. Operands are arrays or anything else that `run` takes. Literals and
    constants reach it as they are.
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
        # Outside of `jit` an array takes memory for as long as it is held.
        for v in {*variables(eqn.invars), *eqn.outvars}:
            if last.get(v, i) == i:
                del env[v]
    return read(jaxpr.outvars)


def variables(atoms: Iterable[Atom]) -> list[Var]:
    """Returns those operands or results of an equation that are not literals."""
    return [atom for atom in atoms if not isinstance(atom, Literal)]


def equation_context(eqn: Eqn) -> contextlib.ExitStack:
    """Restores an equation's scopes, source line and JAX context around its bind."""
    stack = source_info_util.current_name_stack() + eqn.source_info.name_stack
    context = source_line(eqn, stack)
    context.enter_context(eqn.ctx.manager)
    return context


def source_line(eqn: Eqn, name_stack: Any = None) -> contextlib.ExitStack:
    """Restores an equation's source line, also in the traceback of a NaN."""
    context = contextlib.ExitStack()
    context.push(_show_line)  # runs after what is entered later
    traceback = eqn.source_info.traceback
    context.enter_context(
        source_info_util.user_context(traceback, name_stack=name_stack)
    )
    return context


@contextlib.contextmanager
def own_lines() -> Iterator[None]:
    """Traces a rule under its own source lines instead of the line of its call."""
    current = _private("source_info_util")._source_info_context
    before = current.context
    current.context = source_info_util.SourceInfo(None, before.name_stack)
    try:
        yield
    finally:
        current.context = before


def _with_own_lines(function: Callable[..., Any], *operands: Any) -> Any:
    with own_lines():
        return function(*operands)


_REWRITTEN = "The last frames are those of the function that flax_amp has rewritten."


def _show_line(kind: Any, error: BaseException | None, traceback: Any) -> None:
    """Ends the traceback of a NaN where the user's function has the operation.

    JAX gives the error a cause with these frames, which `jax.jit` drops. A jit that is
    bound raises an internal one instead.
    """
    if isinstance(error, _private("api_util").InternalFloatingPointError):
        raise FloatingPointError(f"invalid value ({error.ty}) in {error.name}")
    if not isinstance(error, FloatingPointError):
        return
    if _REWRITTEN in getattr(error, "__notes__", ()):
        return  # deeper, and so more precise
    source = error.__cause__
    name = type(source).__name__
    if source is not None and name == "JaxStackTraceBeforeTransformation":
        error.__traceback__ = _behind_package(source.__traceback__)
        error.add_note(_REWRITTEN)


def _behind_package(traceback: Any) -> Any:
    """Returns the part of a traceback below the last frame of this package."""
    last, frame = traceback, traceback
    while frame and frame.tb_next:
        is_own = frame.tb_frame.f_code.co_filename.startswith(_PACKAGE)
        frame = frame.tb_next
        last = frame if is_own else last
    return last


def scope_names(eqn: Eqn) -> tuple[str, ...]:
    """Returns the `jax.named_scope` names around an equation, outermost first.

    Names are relative to the jaxpr that holds the equation. Entries that JAX's own
    transformations add (`jvp`, `transpose`, ...) are not scopes and are left out.
    """
    stack = eqn.source_info.name_stack.stack
    return tuple(entry.name for entry in stack if type(entry).__name__ == "Scope")


def user_frames(eqn: Eqn) -> Iterator[tuple[str, int]]:
    """Yields files and lines of the code outside of JAX that an equation comes from.

    The innermost one comes first. This package is left out, too.
    """
    for frame in getattr(eqn.source_info.traceback, "frames", ()):
        if not frame.file_name.startswith((_JAX_FOLDER, _PACKAGE)):
            yield frame.file_name, frame.line_num


def is_numerics_of_jax(eqn: Eqn) -> bool:
    """Whether an equation stands in code of JAX that chooses its own precision.

    That is linear algebra, and the scaling of images.
    """
    frames = getattr(eqn.source_info.traceback, "frames", ())
    files = (frame.file_name for frame in frames)
    of_jax = itertools.takewhile(lambda file: file.startswith(_JAX_FOLDER), files)
    return any({"linalg", "image"} & set(re.findall(r"\w+", file)) for file in of_jax)


def scopes(eqn: Eqn) -> tuple[Any, ...]:
    """Returns all scopes around an equation within its jaxpr, outermost first."""
    return tuple(eqn.source_info.name_stack.stack)


def opened(eqn: Eqn, call: Eqn, keeps_line: bool) -> Any:
    """Returns an equation in a call as it stands in the place of the call.

    One without a line of the user, as in a function of JAX, gets that of the call.
    """
    has_line = keeps_line or next(user_frames(eqn), None) is not None
    info = (eqn if has_line else call).source_info
    stack = type(info.name_stack)((*scopes(call), *scopes(eqn)))
    return eqn.replace(source_info=info.replace(name_stack=stack))


def struct_of(aval: Aval, dtype: DType) -> jax.ShapeDtypeStruct:
    """Returns the shape of an operand for `jax.make_jaxpr`, with its shard_map axes."""
    return jax.ShapeDtypeStruct(
        aval.shape,
        dtype,
        sharding=getattr(aval, "sharding", None),
        weak_type=False,
        manual_axis_type=getattr(aval, "mat", None),
    )


def varying_axes(aval: Aval) -> frozenset[str]:
    """Returns the axes of a mesh along which a value in a `shard_map` may differ.

    They are known with `check_vma=True` only.
    """
    return aval.mat.varying


def named_axes(eqn: Eqn) -> set[str]:
    """Returns the axes of a mesh along which an equation asks for other devices.

    It may also ask for its own place among them. JAX has an effect for each.
    """
    kind = "NamedAxisEffect"
    return {effect.name for effect in eqn.effects if type(effect).__name__ == kind}


def hoist_consts(closed: Jaxpr) -> tuple[Jaxpr, Sequence[Array]]:
    """Returns a closed jaxpr as an open one that takes its consts as first inputs."""
    jaxpr, consts = open_jaxpr(closed)
    if not consts:
        return jaxpr, ()
    convert = _private("interpreters.partial_eval").convert_constvars_jaxpr
    return convert(jaxpr), consts


def with_weak_type(x: Array, is_weak: bool) -> Array:
    """Returns an array with or without a weak type; JAX has no public cast for it.

    Arrays with a weak type promote as Python numbers do.
    """
    if getattr(jax.typeof(x), "weak_type", False) == is_weak:
        return x
    convert = primitives.convert_element_type_p
    return convert.bind(x, new_dtype=x.dtype, weak_type=is_weak, sharding=None)


def takes_symbolic_zeros() -> bool:
    """Whether a `custom_vjp` may ask for symbolic zeros here.

    An eager `shard_map` refuses it, whether or not there is a derivative. It runs what
    is traced in it, such as the body of a scan, in the same way.
    """
    trace = _CORE.trace_ctx.trace
    while trace is not None and type(trace).__name__ != "ShardMapTrace":
        trace = getattr(trace, "parent_trace", None)
    return trace is None


def name_arrays(
    fun: Callable[..., Any], args: Any, kwargs: Any, arrays: Arrays
) -> list[str]:
    """Returns what JAX's messages call arrays in the arguments, `batch['x']`."""
    names: Any = jax.api_util.debug_info("amp", fun, args, kwargs).arg_names
    # In reverse, since the first one counts if an array is passed twice.
    leaves = reversed(jax.tree.leaves((args, kwargs)))
    by_array = dict(zip(map(id, leaves), reversed(names), strict=False))
    return [by_array.get(id(x), "") for x in arrays]


def traced_as(
    function: Callable[..., Any], fun: Callable[..., Any], names: Sequence[str]
) -> Callable[..., Any]:
    """Returns a function of arrays whose errors are those of the user's function `fun`.

    `names` are what the arrays are called among the arguments of `fun`.
    """
    info: Any = jax.api_util.debug_info("amp", fun, (), {})
    # The attribute by which JAX names functions that it makes from others.
    vars(function)["__fun_debug_info__"] = info._replace(arg_names=tuple(names))
    return function


def atom_of(x: Any) -> Var | np.ndarray | None:
    """Returns what stands for a tracer in the jaxpr that is being, or was, made.

    It is a variable, or the number of a literal such as `jnp.float32(2)`; `None` for
    tracers of another kind, and for what is no tracer.
    """
    atom = getattr(x, "val", None) if isinstance(x, jax.core.Tracer) else None
    if isinstance(atom, Literal):
        return np.asarray(atom.val, jax.numpy.result_type(x))
    return atom if isinstance(atom, jax.extend.core.Var) else None


def is_of_trace(x: Any) -> bool:
    """Whether an object belongs to a trace, and so reaches all that the trace made."""
    of_trace = (_CORE.Trace, _CORE.Jaxpr, _CORE.JaxprEqn)
    module = "jax._src.interpreters.partial_eval"
    return isinstance(x, of_trace) or type(x).__module__ == module
