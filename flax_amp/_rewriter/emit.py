"""Emits a plan: the equations of the user's program, with casts at their borders.

The dtype of an array tells whether its variable is rounded: a float32 variable whose
array is bfloat16 has been rounded. A half that arithmetic reads is cast up, once for
each region of a piece, so that the cotangents of its readers there add up in float32.
"""

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Literal

from flax_amp import _compat, _jaxprs, _source
from flax_amp._compat import Array, Arrays, Atom, DType, Eqn, Jaxpr, Var
from flax_amp._rewriter.casts import cast_number, copies, spread, to_float32, to_half
from flax_amp._rewriter.flow import Flags, Node, Read
from flax_amp._rewriter.fp8 import fp8_dot, fp8_matmul
from flax_amp._rewriter.memory import Memory, Piece, memory_of
from flax_amp._rewriter.origins import Origin
from flax_amp._rewriter.primitives import Kind, is_float32, is_same_dtype, traits_of
from flax_amp._rewriter.roles import Choice, call_precision_function
from flax_amp._rewriter.row_matmuls import bind_matmul
from flax_amp._rewriter.rule import Form, Plan, Planner, Signature, Way
from flax_amp._rewriter.stored import NOWHERE, is_saved, mark_maximum, mark_stored
from flax_amp._rewriter.weight_matmuls import weight_matmul
from flax_amp._tree import split_list
from flax_amp.policy import use_fp8, with_result_dtype

_IN_FP8 = "in fp8"

# From this many readers on, a half is copied for its readers. Queries, keys and values
# are three readers. With copies for three readers, the sum of their cotangents is no
# longer a part of the matmuls on a GPU: a ViT-S/16 on an H200 then reads and writes
# 24.99 GB, and 24.51 GB with copies from four readers on.
_MANY = 4
# The hook of `debug/`, called once for each equation of the user's program, with the
# equations around this equation: `record(eqn, around, operands, results, choice)`.
Record = Callable[[Eqn, tuple[Eqn, ...], Arrays, Arrays, Choice], None]


# No repr: JAX writes the repr of functions into its debug information.
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Emitter:
    """Emits the plans of one call of the user's function."""

    planner: Planner
    half: DType  # of matmuls
    recompute: bool  # whether the backward pass computes regions again
    # Whether matmuls give the gradients of weights in float32.
    reduce_in_float32: bool = False
    in_loop: bool = False  # whether the equations stand in the body of a loop
    # Whether the equations are in the rule of a custom derivative. The origins of the
    # operands of a rule are not known.
    in_rule: bool = False
    record: Record | None = None  # is called for each equation
    # The outer equations in whose bodies the emitted equations stand, outermost first.
    around: tuple[Eqn, ...] = ()
    cache: dict[Any, Any] = dataclasses.field(default_factory=dict)  # rewritten bodies
    # Counts the matmuls that a key wants in fp8, by the reason why they stay in half
    # precision. The reason is "" for matmuls in fp8.
    fp8: Counter[str] = dataclasses.field(default_factory=Counter)

    def replace(self, **changes: Any) -> "Emitter":
        """Returns an emitter with some fields changed."""
        return dataclasses.replace(self, **changes)

    def emit(
        self, closed: Jaxpr, operands: Arrays, signature: Signature
    ) -> list[Array]:
        """Evaluates a jaxpr; returns its results.

        Operands and results whose variables are float32 may be half, as the plan for
        `signature` says.
        """
        plan, memory = self.planned(closed, signature)
        program = plan.flow.program
        known = program.consts | dict(zip(program.invars, operands, strict=True))
        arrays = {Read(v, False): x for v, x in known.items()}
        run = _Run(self, plan, memory, False, arrays)
        for piece in memory.pieces:
            # A piece reads each of its inputs once. An equation that stands apart reads
            # each of its operands, which may be the same array several times.
            if piece.is_apart:
                run.readers.update(plan.readings(piece.nodes))
            else:
                run.readers.update(piece.ins)
        run.readers.update(read for read in plan.results if read is not None)
        for piece in memory.pieces:
            if piece.is_apart:
                run.equation(piece.nodes[0])
            else:
                self._piece(piece, run)
        return [
            v.val if read is None else run.take(read)
            for v, read in zip(program.outvars, plan.results, strict=True)
        ]

    def planned(self, closed: Jaxpr, signature: Signature) -> tuple[Plan, Memory]:
        """Returns the plan of a jaxpr, and its `Memory`: stored values and pieces."""
        plan = self.planner.plan(closed, signature)
        key = "memory", id(plan)
        if key not in self.cache:
            self.cache[key] = memory_of(plan)
        return plan, self.cache[key]

    def rewrite_body(
        self, closed: Jaxpr, operands: Arrays, signature: Signature
    ) -> Jaxpr:
        """Returns the rewritten closed jaxpr for operands of these types.

        A block that is called 24 times is rewritten once, and JAX lowers the block
        once. Equal layers that are written out do not become calls of a shared body.
        Such calls would save 1.2 s of tracing at 24 layers, and a user can save this
        time with `nn.scan`.
        """
        types = tuple(map(jax.typeof, operands))
        key = (closed, signature, types, self.in_loop, self.in_rule, self.recompute)
        # With `record`, no cached body is used, so that each call is recorded.
        if key not in self.cache or self.record is not None:
            function = functools.partial(self.emit, closed, signature=signature)
            self.cache[key] = jax.make_jaxpr(function)(list(operands))
        return self.cache[key]

    def _piece(self, piece: Piece, run: "_Run") -> None:
        """Emits the equations of a piece under one `jax.checkpoint`."""

        def emit(*arrays: Array) -> list[Array]:
            known = dict(zip(piece.ins, arrays, strict=True))
            inner = _Run(self, run.plan, run.memory, self.recompute, known)
            inner.readers.update(run.plan.readings(piece.nodes))
            inner.readers.update(piece.outs)
            for node in piece.nodes:
                inner.equation(node)
            return list(map(inner.take, piece.outs))

        function = emit
        if self.recompute:
            function = jax.checkpoint(emit, policy=is_saved, prevent_cse=False)
        arrays = list(map(run.take, piece.ins))
        with _source.restored_line(piece.nodes[-1].eqn):
            outs = function(*arrays)
        run.arrays.update(zip(piece.outs, outs, strict=True))

    def halves_of(self, arrays: Arrays, variables: Sequence[Atom]) -> Flags:
        """Returns which arrays are half although their variables are float32."""
        pairs = zip(arrays, variables, strict=True)
        return tuple(
            is_float32(v) and jnp.result_type(x) == self.half for x, v in pairs
        )

    def cast_as(
        self, arrays: Arrays, variables: Sequence[Atom], halves: Sequence[bool]
    ) -> list[Array]:
        """Returns the arrays of variables in half precision, or as the jaxpr says.

        `halves` tells which arrays of float32 variables become half.
        """
        found = []
        for x, v, becomes_half in zip(arrays, variables, halves, strict=True):
            if not hasattr(x, "dtype"):
                x = jnp.asarray(x)
            if not is_float32(v):
                found.append(x)
            elif becomes_half:
                found.append(to_half(x, self.half))
            else:
                found.append(to_float32(x, self.half))
        return found


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class _Run:
    """A run through the equations of a plan, or of a piece of the plan."""

    emitter: Emitter
    plan: Plan
    memory: Memory
    recompute: bool  # whether `jax.checkpoint` holds the equations
    arrays: dict[Read, Array]  # the arrays that have been computed
    # How often each array is read. A region that casts a half up reads the half once.
    readers: Counter[Read] = dataclasses.field(default_factory=Counter)
    copies: dict[Read, list[Array]] = dataclasses.field(default_factory=dict)
    # The arrays that regions have cast up, by the level of the region.
    cast_up: dict[tuple[Read, int], Array] = dataclasses.field(default_factory=dict)

    def take(self, read: Read) -> Array:
        """Returns an array for a reader of the array.

        The cotangents of many readers of a half add up in float32 (`casts.copies`).
        """
        x = self.arrays[read]
        count = self.readers[read]
        if count < _MANY or not self.plan.reads_half(read):
            return x
        if read not in self.copies:
            self.copies[read] = copies(x, count)
        left = self.copies[read]
        # A stored relu reads a half a second time, beside its region. `readers` counts
        # the two reads as a single reader, so the last copy may be read twice.
        return left.pop() if len(left) > 1 else left[0]

    def equation(self, node: Node) -> None:
        """Emits an equation, and writes its results."""
        record = self.emitter.record
        with _source.equation_context(node.eqn):
            # Few frames, because calls may be nested deeply.
            emit = _EMIT[node.way]
            operands, emitted, reason = emit(self, node)
            results = self._write(node, emitted)
        if record is not None:
            why = node.choice._replace(
                reason=reason,
                result=_what_became(node, self.plan, emitted, results),
                plan=self.plan,
                is_in_fp8=_is_in_fp8(node, reason),
            )
            record(node.eqn, self.emitter.around, operands, results, why)

    # --- ways ---

    def in_half(self, node: Node) -> tuple[Arrays, Arrays, str]:
        """Emits a matmul, a move of halves, or a sum of halves and biases."""
        eqn = node.eqn
        role, reason, decision, *_ = node.choice
        if role is Kind.MATMUL and isinstance(decision.function, use_fp8):
            in_fp8 = self._in_fp8(node)
            if not isinstance(in_fp8, str):
                self.emitter.fp8[""] += 1
                operands = self._operands(node)
                half = self.emitter.half
                return operands, [fp8_dot(eqn, *in_fp8, half, operands)], _IN_FP8
            self.emitter.fp8[in_fp8] += 1
            reason = f"not in fp8: {in_fp8}"
        if any(weights := self._are_weights(node)):
            return *self._by_weights(node, weights, self.emitter.half), reason
        is_addition = role is Kind.ARITHMETIC
        shape = eqn.outvars[0].aval.shape if is_addition else None
        operands = self._half_operands(node, shape)
        params = eqn.params
        if any(map(is_float32, eqn.invars)):
            params = with_result_dtype(params, self.emitter.half)
        if role is Kind.MATMUL:
            results: Arrays = [bind_matmul(eqn, operands, params)]
        else:
            results = _jaxprs.bind_in_dtype(eqn, operands, params)
        # A cast, or an iota, has its dtype among its parameters.
        halves = [True] * len(results)
        return operands, self.emitter.cast_as(results, eqn.outvars, halves), reason

    def with_float32_result(self, node: Node) -> tuple[Arrays, Arrays, str]:
        """Emits a matmul of halves that gives its float32 sum.

        The matmuls of the backward pass are the same as for a matmul that gives half
        precision.
        """
        if self.emitter.reduce_in_float32:
            weights = self._are_weights(node)
            float32 = jnp.dtype(jnp.float32)
            return *self._by_weights(node, weights, float32), node.choice.reason
        operands = self._half_operands(node)
        result = float32_result(node.eqn, operands, self.emitter.half)
        return operands, [result], node.choice.reason

    def spread(self, node: Node) -> tuple[Arrays, Arrays, str]:
        """Emits a broadcast to half precision."""
        operands = self._float32_operands(node)
        params = node.eqn.params
        shape = params["shape"]
        onto = params["broadcast_dimensions"]
        result = spread(operands[0], shape, onto, self.emitter.half)
        return operands, [result], node.choice.reason

    def in_float32_then_rounded(self, node: Node) -> tuple[Arrays, Arrays, str]:
        """Emits a move in float32, and rounds its results."""
        operands, results, reason = self.in_float32(node)
        return operands, [to_half(x, self.emitter.half) for x in results], reason

    def in_float32(self, node: Node) -> tuple[Arrays, Arrays, str]:
        """Emits an equation of a region."""
        eqn = node.eqn
        reason = node.choice.reason
        if self.emitter.half == jnp.float32:
            operands = self._operands(node)
            return operands, _compat.bind(eqn, operands, eqn.params), reason
        if is_same_dtype(eqn):  # a cast from float32 to float32 hands its operand on
            operands = self._operands(node)
            return operands, operands, reason
        (v, *_) = eqn.outvars or [None]
        if v in self.memory.relu_results and self._is_marked(v):
            return *self._stored_relu(node), reason
        operands = self._float32_operands(node)
        results = _compat.bind(eqn, operands, eqn.params)
        if self.recompute and v in self.memory.maxima:
            results = [mark_maximum(results[0], operands[0], eqn)]
        return operands, results, reason

    def called(self, node: Node) -> tuple[Arrays, Arrays, str]:
        """Emits an equation as a user's precision function says."""
        eqn = node.eqn
        half = self.emitter.half
        # A number of the program has no methods of an array.
        given = self._operands(node)
        for i, v in enumerate(eqn.invars):
            if not hasattr(given[i], "astype"):
                given[i] = jnp.asarray(given[i], v.aval.dtype)
        bound, outs = call_precision_function(eqn, node.choice.decision, half, given)
        for i, v in enumerate(eqn.outvars):
            if self._is_other_dtype(v, outs[i]):
                outs[i] = jnp.asarray(outs[i], jnp.float32)
        return bound, outs, node.choice.reason

    def _is_other_dtype(self, v: Var, x: Array) -> bool:
        """Whether a result has a third dtype, or is half and planned as float32."""
        form = self.plan.forms.get(v)
        if form is None:
            return False
        if x.dtype == self.emitter.half:
            return not form.is_half
        return bool(x.dtype != jnp.float32)

    def bodies(self, node: Node) -> tuple[Arrays, Arrays, str]:
        """Emits an equation with matmuls in its bodies."""
        eqn = node.eqn
        emitter = self.emitter
        plan = self.plan
        halves = tuple(map(plan.reads_half, node.reads))
        signature = emitter.planner.signature_of_bodies(node, plan.origins, halves)
        operands = self._operands(node)
        inside = emitter.replace(around=(*emitter.around, eqn))
        results = traits_of(eqn).rewriting.emit(inside, eqn, operands, signature)
        return operands, results, node.choice.reason

    def _in_fp8(self, node: Node) -> tuple[use_fp8, int] | str:
        """Returns how a matmul runs in fp8, or why the matmul stays in half."""
        factors = [self.plan.origins.read(v) for v in node.eqn.invars[:2]]
        are_arguments = [o.is_argument for o in factors]
        are_computed = list(map(self._is_computed, factors))
        is_read = node.eqn.outvars[0] in self.plan.flow.for_matmuls
        decision = node.choice.decision
        return fp8_matmul(node.eqn, are_arguments, are_computed, is_read, decision)

    def _is_computed(self, origin: Origin) -> bool:
        """Whether a factor of a matmul may depend on a matmul, or on the step before.

        In a loop, a factor that is no argument may come from the step before.
        """
        is_carried = self.emitter.in_loop and not origin.is_argument
        return origin.after_matmul or is_carried

    def _are_weights(self, node: Node) -> Flags:
        """Returns which operands of a matmul get their gradient in float32.

        A weight is computed from arguments alone. In the rule of a custom derivative,
        whose arguments may be anything, each float32 operand is a weight.
        """
        if not self.emitter.reduce_in_float32 or node.choice.role is not Kind.MATMUL:
            return ()
        origins = self.plan.origins
        numbers = self.plan.numbers
        return tuple(
            is_float32(v)
            and read is not None
            and v not in numbers
            and not self.plan.reads_half(read)
            and (self.emitter.in_rule or not self._is_computed(origins.read(v)))
            for v, read in zip(node.eqn.invars, node.reads, strict=True)
        )

    def _by_weights(
        self, node: Node, weights: Flags, dtype: DType
    ) -> tuple[Arrays, Arrays]:
        """Emits a matmul that gives the gradients of its weights in float32."""
        eqn = node.eqn
        half = self.emitter.half
        given = self._half_operands(node, kept=weights)
        # The matmul rounds its weights, so the record shows the weights as halves.
        read = [
            jax.ShapeDtypeStruct(x.shape, half) if is_weight else x
            for x, is_weight in zip(given, weights, strict=True)
        ]
        return read, [weight_matmul(eqn, given, half, dtype)]

    def _stored_relu(self, node: Node) -> tuple[Arrays, Arrays]:
        """Emits a relu whose derivative reads its stored result."""
        operands = self._half_operands(node)
        mark = functools.partial(self._mark, node.eqn.outvars[0])
        return operands, [_stored_relu(operands[0], mark)]

    # --- operands ---

    def _operands(self, node: Node) -> list[Array]:
        """Returns the operands without a cast."""
        return [
            v.val if read is None else self.take(read)
            for v, read in zip(node.eqn.invars, node.reads, strict=True)
        ]

    def _float32_operands(self, node: Node) -> list[Array]:
        """Returns the operands in float32; a region casts each once."""
        operands = []
        for v, read in zip(node.eqn.invars, node.reads, strict=True):
            if read is None:
                operands.append(v.val)
            elif not self.plan.reads_half(read):
                operands.append(self.take(read))
            else:
                key = read, node.level
                if key not in self.cast_up:
                    self.cast_up[key] = to_float32(self.take(read), self.emitter.half)
                operands.append(self.cast_up[key])
        return operands

    def _half_operands(
        self, node: Node, shape: tuple[Any, ...] | None = None, kept: Flags = ()
    ) -> list[Array]:
        """Returns the operands in half precision; `kept` operands are not cast.

        `shape` is the shape of the result of an addition. A smaller operand is
        broadcast by `spread`, so that its derivative adds up in float32.
        """
        half = self.emitter.half
        numbers = self.plan.numbers
        operands = self._operands(node)
        for i, v in enumerate(node.eqn.invars):
            x = operands[i]
            if not is_float32(v) or (kept and kept[i]):
                continue
            if not isinstance(v, Literal) and v in numbers and x.dtype != half:
                number = cast_number(numbers[v], half)
                operands[i] = jax.lax.full_like(x, number, dtype=half)
            elif shape is None or (x.dtype == half and x.shape == shape):
                operands[i] = to_half(x, half)
            else:
                wide = to_float32(x, half)
                operands[i] = spread(wide, shape, range(len(shape)), half)
        return operands

    # --- results ---

    def _write(self, node: Node, results: Arrays) -> list[Array]:
        """Writes results of an equation; returns them as later regions read them."""
        half = self.emitter.half
        forms = self.plan.forms
        found = []
        for v, x in zip(node.eqn.outvars, results, strict=True):
            form = forms.get(v)
            if form is not None and v in self.plan.border:
                if form.has_float32_too:
                    self.arrays[Read(v, True)] = x
                x = to_half(x, half)
            # A stored relu has its mark already.
            if not (v in self.memory.relu_results and self._is_marked(v)):
                x = self._mark(v, x)
            self._check(node, form, x)
            self.arrays[Read(v, False)] = x
            found.append(x)
        return found

    def _check(self, node: Node, form: Form | None, x: Array) -> None:
        """Asserts that a result has the dtype of the plan."""
        if form is None:
            return
        planned = self.emitter.half if form.is_half else jnp.dtype(jnp.float32)
        assert jnp.result_type(x) == planned, (
            f"amp: {node.eqn.primitive.name} ({node.way}) gave {jnp.result_type(x)}; "
            f"expected {planned}, {form}. This is an error of flax_amp; please report "
            "it with the function that it rewrote."
        )

    def _mark(self, v: Var, x: Array) -> Array:
        """Returns a result, marked if the result is stored for the backward pass."""
        if not self._is_marked(v):
            return x
        stored = self.memory.stored[v]
        platforms = NOWHERE if self.emitter.in_loop else stored.barrier_platforms
        return mark_stored(x, platforms, stored.is_rounded)

    def _is_marked(self, v: Var) -> bool:
        if not self.recompute or v not in self.memory.stored:
            return False
        return self.memory.stored[v].in_loops or not self.emitter.in_loop


_EMIT: dict[Way, Callable[[_Run, Node], tuple[Arrays, Arrays, str]]] = {
    Way.HALF: _Run.in_half,
    Way.FLOAT32_RESULT: _Run.with_float32_result,
    Way.SPREAD: _Run.spread,
    Way.ROUNDED: _Run.in_float32_then_rounded,
    Way.FLOAT32: _Run.in_float32,
    Way.CALLED: _Run.called,
    Way.BODIES: _Run.bodies,
}


def float32_result(eqn: Eqn, factors: Arrays, half: DType) -> Array:
    """Returns a matmul of halves with a float32 result.

    Its tangents are computed by the same matmul with a result in half precision. JAX's
    own derivative would multiply a float32 cotangent by the halves, and the backward
    pass would run in float32.
    """

    def product(dtype: DType, *factors: Array) -> Array:
        params = with_result_dtype(eqn.params, dtype)
        params |= {"preferred_element_type": jnp.dtype(dtype)}
        return bind_matmul(eqn, factors, params)

    @jax.custom_jvp
    def matmul(*factors: Array) -> Array:
        return product(jnp.dtype(jnp.float32), *factors)

    @functools.partial(matmul.defjvp, symbolic_zeros=True)
    def _(primals: Any, tangents: Any) -> Any:
        terms = [
            product(half, *primals[:i], t, *primals[i + 1 :])
            for i, t in enumerate(tangents)
            if not isinstance(t, SymbolicZero) and t.dtype == half
        ]
        result = matmul(*primals)
        if not terms:
            return result, jnp.zeros_like(result)
        return result, sum(to_float32(term, half) for term in terms)

    return matmul(*factors)


def _stored_relu(x: Array, mark: Callable[[Array], Array]) -> Array:
    """Returns a relu whose derivative reads its stored result, and no other array.

    JAX's derivative of `relu` reads the operand. A ResNet-50 takes 1,660 MB on an H200
    with JAX's derivative, and 1,371 MB with this derivative.
    """

    @jax.custom_jvp
    def relu(x: Array) -> Array:
        return jnp.maximum(x, 0)

    @relu.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        # The mark stands in the rule, because `jax.checkpoint` sees no mark inside of
        # the call.
        y = mark(relu(*primals))
        return y, jnp.where(y > 0, tangents[0], 0)

    return relu(x)


def _is_in_fp8(node: Node, reason: str) -> bool | None:
    """Whether a matmul runs in fp8; `None` if no key asks for fp8."""
    role, _, decision, *_ = node.choice
    is_asked = role is Kind.MATMUL and isinstance(decision.function, use_fp8)
    if not is_asked:
        return None
    return reason == _IN_FP8


def _what_became(node: Node, plan: Plan, emitted: Arrays, results: Arrays) -> str:
    """Says in which dtype the first result of an equation is, and why.

    Of a scan with matmuls, the text has the dtypes of all results as the scan emits
    them: a float32 carry stays float32 in the loop, also if a matmul behind the loop
    reads the last carry rounded.
    """
    eqn = node.eqn
    if eqn.primitive.name == "scan" and node.has_matmul:
        _, count = _compat.scan_counts(eqn)
        dtypes = [str(x.dtype) for x in emitted]
        carried, stacked = (
            ", ".join(dict.fromkeys(x)) for x in split_list(dtypes, count)
        )
        return f"carries {carried or 'nothing'}, stacks {stacked or 'nothing'}"
    if not eqn.outvars or eqn.outvars[0] not in plan.forms:
        return ""
    form = plan.forms[eqn.outvars[0]]
    if not form.is_half or results[0].dtype == jnp.float32:
        # For an equation that runs as written, the reader of a report asks why the
        # equation runs so, not why its result is float32.
        is_own = node.choice.role in (Kind.ORIGINAL, Kind.CALLED)
        reason = node.choice.reason if is_own else form.reason
        return f"float32: {reason}" if reason else "float32"
    if form.reason:
        return f"rounded: {form.reason}"
    return "half precision"
