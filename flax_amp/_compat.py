"""Every difference between JAX versions, and every use of `jax._src`.

The rest of the package sees the same JAX in all versions: sub-jaxprs as `(jaxpr,
consts)` pairs, scan operands as counts, and equations that a single call binds. JAX
0.10, 0.11 and 0.12 are supported.
"""

import contextlib
import importlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax.extend import source_info_util

# The names of JAX's objects in annotations. Type checkers learn nothing from JAX's own
# classes: an `AbstractValue` has no dtype for a type checker, and a closed jaxpr is an
# open jaxpr in JAX 0.12.
Array = Any  # jax.Array, a tracer, or a NumPy array
Arrays = Sequence[Array]
Atom = Any  # jax.extend.core.Var or Literal
Aval = Any  # jax.core.ShapedArray
DType = Any  # numpy.dtype
Params = dict[str, Any]  # of an equation
Eqn = Any  # jax.extend.core.JaxprEqn
Jaxpr = Any  # jax.extend.core.Jaxpr or ClosedJaxpr
Var = Any  # jax.extend.core.Var


def _private(module: str) -> Any:
    """Returns a module of `jax._src` that no public name leads to."""
    return importlib.import_module(f"jax._src.{module}")


_CORE = _private("core")
# No public name leads to this primitive, or to the error that a bound jit raises.
ragged_dot_general_p: Any = _private("lax.lax").ragged_dot_general_p
InternalFloatingPointError: Any = _private("api_util").InternalFloatingPointError


def open_jaxpr(jaxpr: Jaxpr) -> tuple[Jaxpr, Sequence[Array]]:
    """Returns `(jaxpr, consts)` of an open or closed jaxpr.

    Since JAX 0.11, open and closed jaxprs have the same class. Before, a `ClosedJaxpr`
    wraps a `Jaxpr`.
    """
    return getattr(jaxpr, "jaxpr", jaxpr), tuple(getattr(jaxpr, "consts", ()))


def scan_counts(eqn: Eqn) -> tuple[int, int]:
    """Returns `(num_consts, num_carry)` of a scan equation."""
    if "num_carry" in eqn.params:
        return eqn.params["num_consts"], eqn.params["num_carry"]
    consts, carry, _ = eqn.params["ft_in"].unpack()  # JAX 0.12
    return len(consts), len(carry)


def scan_options(eqn: Eqn) -> Params:
    """Returns the keyword arguments that rebuild a scan with `jax.lax.scan`."""
    names = ["reverse", "unroll", "_split_transpose"]
    # `jax.lax.scan` takes a symbolic length from the shapes of `xs`.
    if isinstance(eqn.params["length"], int):
        names.append("length")
    return {name: eqn.params[name] for name in names if name in eqn.params}


def bind(eqn: Eqn, operands: Sequence[Array], params: Params) -> list[Array]:
    """Binds `eqn.primitive` to the given operands and parameters."""
    primitive = eqn.primitive
    if "bwd" in params:  # JAX would run the backward rule under the line of the call
        params = {**params, "bwd": wrap_rule(params["bwd"], _with_own_lines)}
    outs = primitive.bind(*operands, **primitive.get_bind_params(params))
    if not primitive.multiple_results:
        return [outs]
    # The batching rule of `dce_sink` gives a result that the primitive does not have.
    return list(outs)[: len(eqn.outvars)]


# --- hi-primitives -------------------------------------------------------------------

# A hi-primitive is an object that has rules, and no jaxpr among the parameters of its
# equation. Under the flags below, JAX makes a hi-primitive of each `checkpoint`, custom
# derivative and loop. The flags are off by default in JAX 0.12.
_CONFIG = _private("config")
_NAMES = ("remat3", "custom_vjp3", "custom_jvp3", "scan3")
_FLAGS = [getattr(_CONFIG, name) for name in _NAMES if hasattr(_CONFIG, name)]


def makes_hi_primitives() -> bool:
    """Whether a flag is on under which JAX makes hi-primitives."""
    return any(flag.value for flag in _FLAGS)


@contextlib.contextmanager
def ordinary_primitives() -> Iterator[None]:
    """Turns the flags for hi-primitives off in a block or a decorated function.

    JAX traces a function again that was traced with a flag on, because the flags belong
    to the keys of JAX's caches.
    """
    on = [flag for flag in _FLAGS if flag.value]
    with contextlib.ExitStack() as stack:
        for flag in on:
            stack.enter_context(flag(False))
        try:
            yield
        except NotImplementedError as error:
            names = [flag.name for flag in on if flag.name in str(error)]
            if names:
                note = f"amp turns {names[0]} off. The function needs `defvjp` here."
                error.add_note(note)
            raise


# --- rules of custom derivatives -----------------------------------------------------


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


def wrap_rule(rule: Any, around: Callable[..., Any], *args: Any) -> Any:
    """Returns a backward rule in JAX's own form that runs `around` around `rule`.

    JAX calls the returned rule with operands, and the returned rule calls
    `around(rule, *args, *operands)`.
    """
    return rule.wrap(around, args, None)


def _with_own_lines(function: Callable[..., Any], *operands: Any) -> Any:
    with own_lines():
        return function(*operands)


def hoist_consts(closed: Jaxpr) -> tuple[Jaxpr, Sequence[Array]]:
    """Returns an open jaxpr that takes the consts as first inputs, and the consts."""
    jaxpr, consts = open_jaxpr(closed)
    if not consts:
        return jaxpr, ()
    convert = _private("interpreters.partial_eval").convert_constvars_jaxpr
    return convert(jaxpr), consts


def default_device() -> Any:
    """Returns the device on which JAX runs by default, here and now."""
    config: Any = jax.config
    device = config.jax_default_device or jax.devices()[0]
    if isinstance(device, str):
        return jax.devices(device)[0]
    return device


def is_in_mesh() -> bool:
    """Whether the code runs in the context of a mesh of several devices.

    The types of arrays do not tell of such a context.
    """
    mesh = _private("mesh").thread_resources.env.physical_mesh
    return not mesh.empty and mesh.size > 1


def takes_symbolic_zeros() -> bool:
    """Whether a `custom_vjp` may ask for symbolic zeros here.

    An eager `shard_map` refuses symbolic zeros, whether or not there is a derivative. A
    trace inside of the `shard_map`, such as the trace of the body of a scan, is run in
    the same way. So the search looks at all outer traces.
    """
    trace = _CORE.trace_ctx.trace
    while trace is not None and type(trace).__name__ != "ShardMapTrace":
        trace = getattr(trace, "parent_trace", None)
    return trace is None


def is_of_trace(x: Any) -> bool:
    """Whether an object belongs to a trace, and so refers to all objects of a trace."""
    of_trace = (_CORE.Trace, _CORE.Jaxpr, _CORE.JaxprEqn)
    module = "jax._src.interpreters.partial_eval"
    return isinstance(x, of_trace) or type(x).__module__ == module
