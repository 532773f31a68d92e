"""Custom derivatives with matmuls inside: rebuilt, and never inlined.

The user's rule is traced through `jax.jvp` or `jax.vjp` of the original equation, and
the jaxpr of the rule is rewritten as every other jaxpr is. To inline the function
instead would silently drop the rule: a gradient that a `custom_vjp` clips would not be
clipped any more.

    before                            after, in bfloat16
    y:f32 = custom_vjp_call[          y:bf16 = custom_vjp_call[
      call_jaxpr={f:f32 -> f32}         call_jaxpr={f:bf16 -> bf16}
      bwd=rule                          bwd=rule, traced for f32, rewritten
    ] x                               ] x:bf16

Calls whose rules see more than arrays stay as they are written (`roles.py`). The
residuals of a rule are the user's choice: in a rule, nothing is computed again.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero

from flax_amp import _compat, _jaxprs
from flax_amp._compat import Array, Arrays, Eqn, Jaxpr, Var
from flax_amp._rewriter.emit import Emitter
from flax_amp._rewriter.flow import Flags
from flax_amp._rewriter.origins import Origin
from flax_amp._rewriter.primitives import bodies
from flax_amp._rewriter.roles import Context
from flax_amp._rewriter.rule import Signature
from flax_amp._tree import fill, is_array, pick, split_list


def custom_jvp(
    emitter: Emitter, eqn: Eqn, operands: Arrays, signature: Signature
) -> Arrays:
    """The user's jvp rule is rewritten and attached again."""
    call, operands = _prepare(emitter, eqn, operands, signature)
    rebuilt = jax.custom_jvp(call)
    rebuilt.defjvp(functools.partial(_emit_jvp, call), symbolic_zeros=call.is_closure)
    return rebuilt(*operands)


def custom_vjp(
    emitter: Emitter, eqn: Eqn, operands: Arrays, signature: Signature
) -> Arrays:
    """The user's forward and backward functions are rewritten and attached again."""
    call, operands = _prepare(emitter, eqn, operands, signature)
    rebuilt = jax.custom_vjp(call)
    symbolic = call.is_closure and _compat.takes_symbolic_zeros()
    rebuilt.defvjp(
        functools.partial(_emit_forward, call, symbolic),
        lambda residuals, cotangents: residuals(cotangents),
        symbolic_zeros=symbolic,
    )
    return rebuilt(*operands)


def _prepare(
    emitter: Emitter, eqn: Eqn, operands: Arrays, signature: Signature
) -> tuple["_Call", Arrays]:
    """Returns the call for operands of these types, and the operands of the call."""
    emitter = emitter.replace(recompute=False)  # the user's rule chooses the residuals
    captured = eqn.params.get("captured", ())
    count = len(captured)
    known = emitter.cast_as(operands[:count], eqn.invars[:count], (False,) * count)
    operands = operands[count:]
    params = {name: eqn.params[name] for name in eqn.params if name != "captured"}
    eqn = eqn.replace(invars=eqn.invars[count:], params=params)
    signature = signature.without(count)
    body = emitter.rewrite_body(bodies(eqn)[0], operands, signature)
    results = _compat.open_jaxpr(body)[0].outvars
    in_halves = tuple(jax.typeof(x).dtype == emitter.half for x in operands)
    out_halves = tuple(v.aval.dtype == emitter.half for v in results)
    context = signature.context
    call = _Call(emitter, eqn, context, body, in_halves, out_halves, captured)
    return call, [*known, *operands]


# No repr: JAX writes the repr of functions into its debug information.
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class _Call:
    """A call of a function with a user's rule, with all facts to rebuild the call."""

    emitter: Emitter
    eqn: Eqn
    context: Context  # of the body
    body: Jaxpr  # rewritten
    in_halves: Flags  # which operands are half in the rewritten program
    out_halves: Flags  # which results of the rewritten body are half
    # The variables that the rule closes over. Their arrays are the first operands of
    # the call, before the operands of the equation.
    captured: Sequence[Var]
    # The operands with respect to which the rule is differentiated.
    mask: Flags = ()
    arrays: Arrays = ()  # the arrays of the captured variables
    # The captured variables with respect to which the user differentiates.
    differentiated: frozenset[Var] = frozenset()

    def __call__(self, *operands: Array) -> tuple[Array, ...]:
        operands = operands[len(self.captured) :]
        return tuple(_jaxprs.evaluate(self.body, operands))

    @property
    def is_closure(self) -> bool:
        """Whether function or rule close over arrays, which are the first operands."""
        return bool(self.eqn.params["num_consts"] or self.captured)

    def with_mask(
        self, operands: Arrays, perturbed: Sequence[bool]
    ) -> tuple["_Call", Arrays]:
        """Returns the call with its mask, and the operands without captured arrays.

        The rule is differentiated with respect to the inexact operands. The user's rule
        gives no derivative for the constants that the function closes over. So a
        constant is in the mask only if it is perturbed, and JAX then raises an error.
        """
        counts = len(self.captured), self.eqn.params["num_consts"]
        of_captured, of_consts, others = split_list(perturbed, *counts)
        asked = (*of_consts, *(True,) * len(others))
        mask = tuple(
            is_asked and jnp.issubdtype(v.aval.dtype, jnp.inexact)
            for v, is_asked in zip(self.eqn.invars, asked, strict=True)
        )
        arrays, operands = split_list(operands, counts[0])
        differentiated = frozenset(pick(self.captured, of_captured))
        call = dataclasses.replace(
            self, mask=mask, arrays=arrays, differentiated=differentiated
        )
        return call, operands

    def original(self, operands: Arrays) -> Callable[..., Arrays]:
        """Returns the original call as a function of the operands in the mask."""

        def call(*chosen: Array) -> tuple[Array, ...]:
            full = fill(chosen, self.mask, operands)
            return tuple(_compat.bind(self.eqn, full, self.eqn.params))

        return call

    def structs(self, operands: Arrays) -> list[jax.ShapeDtypeStruct]:
        """Returns the types of operands, in the dtypes of the original program."""
        return [
            _jaxprs.struct_of(jax.typeof(x), v.aval.dtype)
            for x, v in zip(operands, self.eqn.invars, strict=True)
        ]

    def emit_rule(
        self, closed: Jaxpr, operands: Arrays, gradients: Flags = ()
    ) -> list[Array]:
        """Evaluates a traced function of the rule."""
        jaxpr, consts = _compat.hoist_consts(closed)
        operands = [*map(self._value_of, consts), *operands]
        return _emitted(self.emitter, self.context, jaxpr, operands, gradients)

    def _value_of(self, const: Any) -> Any:
        """Returns the array of a dead tracer, and every other constant unchanged."""
        atom = _jaxprs.atom_of(const)
        if isinstance(atom, np.ndarray):
            return atom
        if atom in self.differentiated:
            raise TypeError(
                "amp: the rule of a custom derivative closes over a value that is "
                "differentiated, and has no derivative for this value. Pass the value "
                "as an argument, or wrap it in jax.lax.stop_gradient."
            )
        arrays = dict(zip(self.captured, self.arrays, strict=True))
        return arrays.get(atom, const)


def _emitted(
    emitter: Emitter,
    context: Context,
    jaxpr: Jaxpr,
    operands: Arrays,
    gradients: Flags,
) -> list[Array]:
    """Evaluates an open jaxpr of a rule, whose operands may come after a matmul.

    `gradients` are the results that are gradients in float32.
    """
    origins = [Origin(after_matmul=True)] * len(jaxpr.invars)
    halves = emitter.halves_of(operands, jaxpr.invars)
    known = Signature.in_float32(context, len(jaxpr.outvars), origins, halves)
    if emitter.reduce_in_float32:
        known = known._replace(gradients=gradients)
    return emitter.replace(in_rule=True).emit(jaxpr, operands, known)


def _trace(function: Any, *structs: Any) -> tuple[Jaxpr, Any]:
    """Returns the jaxpr of a function of a rule, and its results as shapes."""
    # The equations keep the lines of the user's rule, not the line of the call.
    with _compat.own_lines():
        return jax.make_jaxpr(function, return_shape=True)(*structs)


@_compat.ordinary_primitives()
def _emit_jvp(call: _Call, primals: Arrays, tangents: Arrays) -> Any:
    """Returns results and their tangents: `lambda x dx. jvp(f, x, dx)`, rewritten."""
    perturbed = [not isinstance(t, SymbolicZero) for t in tangents]
    # Some primals may be Python numbers.
    call, primals = call.with_mask(list(map(jnp.asarray, primals)), perturbed)
    tangents = tangents[len(call.captured) :]
    given = [jnp.asarray(_instantiated(t)) for t in pick(tangents, call.mask)]

    def rule(primals: Arrays, tangents: Arrays) -> Any:
        chosen = tuple(pick(primals, call.mask))
        return jax.jvp(call.original(primals), chosen, tuple(tangents))

    structs = call.structs(primals)
    closed, (outs, _) = _trace(rule, structs, pick(structs, call.mask))
    results = call.emit_rule(closed, [*primals, *given])
    return tuple(
        # `cast_as` skips the tangents of integers, whose dtype is float0.
        tuple(call.emitter.cast_as(part, call.eqn.outvars, call.out_halves))
        for part in split_list(results, len(outs))
    )


def _instantiated(x: Any) -> Any:
    """Returns a tangent or a cotangent as an array."""
    return jnp.zeros(x.shape, x.dtype) if isinstance(x, SymbolicZero) else x


@_compat.ordinary_primitives()
def _emit_forward(call: _Call, symbolic: bool, *given: Any) -> Any:
    """Returns the results, and the backward function as a pytree of residuals.

    For `y = f x w` the two functions that are traced and rewritten are

        forward:  lambda x w. vjp(f, x, w)            -> y, residuals
        backward: lambda residuals dy. vjp function   -> dx, dw
    """
    perturbed = [symbolic and x.perturbed for x in given]
    values = [x.value for x in given] if symbolic else list(given)
    call, operands = call.with_mask(values, perturbed)
    treedef: Any = None

    def forward(*xs: Array) -> tuple[Arrays, Arrays]:
        nonlocal treedef
        outs, vjp = jax.vjp(call.original(xs), *pick(xs, call.mask))
        # The backward function that JAX returns is a pytree. Its leaves are the arrays
        # that the backward pass reads: results of the forward jaxpr, and operands of
        # the backward jaxpr.
        residuals, treedef = jax.tree.flatten(vjp)
        return outs, residuals

    closed, (outs, residuals) = _trace(forward, *call.structs(operands))
    results = call.emit_rule(closed, operands)
    primals_out, stored = split_list(results, len(outs))
    plain = dataclasses.replace(call, arrays=())
    backward = functools.partial(_emit_backward, plain, treedef, outs, residuals)
    cast = call.emitter.cast_as(primals_out, call.eqn.outvars, call.out_halves)
    return tuple(cast), jax.tree_util.Partial(backward, list(stored), list(call.arrays))


@_compat.ordinary_primitives()
def _emit_backward(
    call: _Call,
    treedef: Any,
    outs: Sequence[Any],
    structs: Sequence[Any],
    residuals: Arrays,
    arrays: Arrays,
    cotangents: Arrays,
) -> Any:
    """Returns the cotangents of all operands; `None` for operands without cotangent."""
    call = dataclasses.replace(call, arrays=arrays)
    # The cotangent of an integer has the dtype float0, and is no operand of the jaxpr.
    has_one = [jnp.issubdtype(out.dtype, jnp.inexact) for out in outs]
    zeros = [np.zeros(out.shape, jax.dtypes.float0) for out in outs]

    def backward(residuals: Arrays, cotangents: Arrays) -> Arrays:
        vjp = jax.tree.unflatten(treedef, residuals)
        return vjp(tuple(fill(cotangents, has_one, zeros)))

    closed, _ = _trace(backward, list(structs), pick(outs, has_one))
    given = map(_instantiated, pick(cotangents, has_one))
    variables = pick(call.eqn.invars, call.mask)
    halves = pick(call.in_halves, call.mask)
    gradients = tuple(not is_half for is_half in halves)
    grads = call.emit_rule(closed, [*residuals, *given], gradients)
    cast = call.emitter.cast_as(grads, variables, halves)
    grads = fill(cast, call.mask, [None] * len(call.mask))
    return (*[None] * len(call.captured), *grads)


# --- tangents of a custom_vjp --------------------------------------------------------


def custom_lin(
    emitter: Emitter, eqn: Eqn, operands: Arrays, signature: Signature
) -> Arrays:
    """The tangents of a `custom_vjp`, in a rule that calls its `jax.jvp`.

    The transpose of the tangents calls the user's backward function. The backward
    function is rewritten when JAX transposes.
    """
    emitter = emitter.replace(recompute=False)
    bwd = _compat.wrap_rule(
        eqn.params["bwd"], _emit_transpose, emitter, signature.context
    )
    operands = emitter.cast_as(operands, eqn.invars, (False,) * len(operands))
    return _compat.bind(eqn, operands, eqn.params | {"bwd": bwd})


@_compat.ordinary_primitives()
def _emit_transpose(
    function: Callable[..., Any], emitter: Emitter, context: Context, *operands: Any
) -> Any:
    """Returns the results of a rewritten backward function; its floats are float32."""
    is_traced = list(map(is_array, operands))  # a symbolic zero is not traced
    arrays = pick(operands, is_traced)
    treedef: Any = None
    static: list[Any] = []

    def of_arrays(*arrays: Array) -> Arrays:
        nonlocal treedef, static
        leaves, treedef = jax.tree.flatten(function(*fill(arrays, is_traced, operands)))
        static = [None if is_array(x) else x for x in leaves]
        return [x for x in leaves if is_array(x)]

    closed, _ = _trace(of_arrays, *arrays)
    jaxpr, consts = _compat.hoist_consts(closed)
    gradients = (True,) * len(jaxpr.outvars)
    outs = _emitted(emitter, context, jaxpr, [*consts, *arrays], gradients)
    cast = emitter.cast_as(outs, jaxpr.outvars, (False,) * len(outs))
    is_found = [x is None for x in static]
    return jax.tree.unflatten(treedef, fill(cast, is_found, static))
