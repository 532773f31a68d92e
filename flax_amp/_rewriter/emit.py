"""Emits a plan: the equations of the user's program, with casts at their borders.

An array's own dtype says what it is: a float32 variable whose array is bfloat16 has
been rounded. What arithmetic reads is cast up, once for each region of a piece, so that
the cotangents of its readers there add up in float32.
"""

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Literal

from flax_amp import _compat
from flax_amp._compat import Array, Arrays, Atom, DType, Eqn, Jaxpr, Var
from flax_amp._rewriter.casts import cast_number, down, spread, up
from flax_amp._rewriter.flow import HALF_ROLES, Node, Outside, Read, among
from flax_amp._rewriter.fp8 import fp8_dot, fp8_matmul
from flax_amp._rewriter.plan import Piece, Plan, Planner
from flax_amp._rewriter.primitives import (
    Kind,
    Trait,
    has,
    is_float32,
    is_relu,
    is_same_dtype,
    literal,
    repeats,
)
from flax_amp._rewriter.roles import Choice
from flax_amp._rewriter.stored import NOWHERE, is_saved, mark_stored
from flax_amp._tree import split_list
from flax_amp.policy import call_precision_function, use_fp8, with_result_dtype

# What is told of each equation of the user's program as it is emitted, with those in
# whose bodies it stands: `record(eqn, around, operands, results, choice)`.
Record = Callable[[Eqn, tuple[Eqn, ...], Arrays, Arrays, Choice], None]


# No repr: JAX writes that of functions into its debug information.
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Emitter:
    """Emits the plans of one call of the user's function."""

    planner: Planner
    half: DType  # of matmuls
    # By the primitive of an equation with matmuls in its bodies: what emits it, as
    # `emit_bodies[...](emitter, eqn, operands, outside)`.
    emit_bodies: dict[str, Callable[..., Arrays]]
    recompute: bool  # whether the backward pass computes regions again
    in_loop: bool = False  # whether the equations run again and again
    record: Record | None = None  # is told of each equation
    around: tuple[Eqn, ...] = ()  # those in whose bodies the equations stand
    cache: dict[Any, Any] = dataclasses.field(default_factory=dict)  # rewritten bodies
    # Why matmuls stay in half precision, or "" for those in fp8, counted.
    fp8: Counter[str] = dataclasses.field(default_factory=Counter)

    def replace(self, **changes: Any) -> "Emitter":
        """Returns an emitter that differs in some of these."""
        return dataclasses.replace(self, **changes)

    def emit(self, closed: Jaxpr, operands: Arrays, outside: Outside) -> list[Array]:
        """Evaluates a jaxpr; returns its results.

        What is float32 in the jaxpr may be half among operands and results.
        """
        plan = self.planner.plan(closed, outside)
        program = plan.flow.program
        known = program.consts | dict(zip(program.invars, operands, strict=True))
        run = _Run(self, plan, False, {Read(v, False): x for v, x in known.items()})
        for piece in plan.pieces:
            if piece.is_apart:
                run.equation(piece.nodes[0])
            else:
                self._piece(piece, plan, run)
        return [
            v.val if read is None else run.arrays[read]
            for v, read in zip(program.outvars, plan.results, strict=True)
        ]

    def rewrite_body(self, closed: Jaxpr, operands: Arrays, outside: Outside) -> Jaxpr:
        """Returns the rewritten closed jaxpr for operands of these types.

        A block that is called 24 times is rewritten once, and JAX lowers it once.
        """
        types = tuple(map(jax.typeof, operands))
        key = (closed, outside, types, self.in_loop, self.recompute)
        # With `record`, no cached body is used, so that each call is recorded.
        if key not in self.cache or self.record is not None:
            function = functools.partial(self.emit, closed, outside=outside)
            self.cache[key] = jax.make_jaxpr(function)(list(operands))
        return self.cache[key]

    def _piece(self, piece: Piece, plan: Plan, run: "_Run") -> None:
        """Emits the equations of a piece under one `jax.checkpoint`."""

        def emit(*arrays: Array) -> list[Array]:
            known = dict(zip(piece.ins, arrays, strict=True))
            inner = _Run(self, plan, self.recompute, known)
            for node in piece.nodes:
                inner.equation(node)
            return [inner.arrays[read] for read in piece.outs]

        function = emit
        if self.recompute:
            function = jax.checkpoint(emit, policy=is_saved, prevent_cse=False)
        arrays = [run.arrays[read] for read in piece.ins]
        with _compat.source_line(piece.nodes[-1].eqn):
            outs = function(*arrays)
        run.arrays.update(zip(piece.outs, outs, strict=True))

    def cast_as(
        self, arrays: Arrays, variables: Sequence[Atom], halves: Sequence[bool]
    ) -> list[Array]:
        """Returns the arrays of variables in half precision, or as the jaxpr says.

        `halves` tells which of those that are float32 become half.
        """
        arrays = [x if hasattr(x, "dtype") else jnp.asarray(x) for x in arrays]
        return [
            (down(x, self.half) if half else up(x, self.half)) if is_float32(v) else x
            for x, v, half in zip(arrays, variables, halves, strict=True)
        ]


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class _Run:
    """One run through the equations of a plan, or of a piece of it."""

    emitter: Emitter
    plan: Plan
    recompute: bool  # whether `jax.checkpoint` holds the equations
    arrays: dict[Read, Array]  # what has been computed
    # What regions have cast up, with the level of the region.
    cast_up: dict[tuple[Read, int], Array] = dataclasses.field(default_factory=dict)

    def equation(self, node: Node) -> None:
        """Emits an equation, and writes what it gives."""
        eqn, plan, record = node.eqn, self.plan, self.emitter.record
        with _compat.equation_context(eqn):
            # Few frames, because calls may be nested deeply.
            emit = self._structured if node.has_matmul else self._plain
            operands, results, reason = emit(node)
            results = self._write(eqn, results)
        if record is not None:
            result = _what_became(node, plan, results)
            why = node.choice._replace(reason=reason, result=result)
            record(eqn, self.emitter.around, operands, results, why)

    def _plain(self, node: Node) -> tuple[Arrays, Arrays, str]:
        """Returns what an equation is bound to, what it gives, and why."""
        eqn, (role, reason, decision, *_) = node.eqn, node.choice
        half = self.emitter.half
        if role is Kind.MATMUL and isinstance(decision.function, use_fp8):
            in_fp8 = self._in_fp8(node)
            self.emitter.fp8[in_fp8 if isinstance(in_fp8, str) else ""] += 1
            if not isinstance(in_fp8, str):
                operands = self._operands(node)
                return operands, [fp8_dot(eqn, *in_fp8, half, operands)], "in fp8"
            reason = f"not in fp8: {in_fp8}"
        if role in HALF_ROLES:
            operands = self._half_operands(node)
            params = eqn.params
            if any(map(is_float32, eqn.invars)):
                params = with_result_dtype(params, half)
            return operands, _compat.bind(eqn, operands, params), reason
        if role is Kind.CALLED:
            given = self._operands(node)
            bound, outs = call_precision_function(eqn, decision, half, given)
            known = (half, jnp.float32)  # A third dtype returns to float32.
            outs = [
                jnp.asarray(x, jnp.float32)
                if is_float32(v) and x.dtype not in known
                else x
                for x, v in zip(outs, eqn.outvars, strict=True)
            ]
            return bound, outs, reason
        return *self._arithmetic(node), reason

    def _structured(self, node: Node) -> tuple[Arrays, Arrays, str]:
        """Emits an equation with matmuls in its bodies."""
        eqn, emitter = node.eqn, self.emitter
        assert node.uses is not None
        arguments = among(eqn.invars, self.plan.arguments)
        after_matmul = among(eqn.invars, self.plan.after_matmul)
        outside = Outside(node.choice.body_context, node.uses, arguments, after_matmul)
        operands = self._operands(node)
        inside = emitter.replace(around=(*emitter.around, eqn))
        emit_bodies = emitter.emit_bodies[eqn.primitive.name]
        results = emit_bodies(inside, eqn, operands, outside)
        return operands, results, node.choice.reason

    def _in_fp8(self, node: Node) -> tuple[use_fp8, int] | str:
        """Returns how a matmul runs in fp8, or why it does not."""
        factors = node.eqn.invars[:2]
        arguments = among(factors, self.plan.arguments)
        after_matmul = among(factors, self.plan.after_matmul)
        if self.emitter.in_loop:
            # A factor that is no weight may come from the step before.
            others = set(_compat.variables(factors)) - self.plan.arguments
            after_matmul = among(factors, self.plan.after_matmul | others)
        is_read = node.eqn.outvars[0] in self.plan.flow.for_matmuls
        decision = node.choice.decision
        return fp8_matmul(node.eqn, arguments, after_matmul, is_read, decision)

    def _arithmetic(self, node: Node) -> tuple[Arrays, Arrays]:
        """Emits an equation of a region."""
        eqn, half, operands = node.eqn, self.emitter.half, self._operands(node)
        if half == jnp.float32:
            return operands, _compat.bind(eqn, operands, eqn.params)
        if is_same_dtype(eqn):  # from float32 to float32
            return operands, operands
        if self._is_stored_relu(eqn):
            operands = self._half_operands(node)
            mark = functools.partial(self._mark, eqn.outvars[0])
            return operands, [_stored_relu(operands[0], mark)]
        stays_half = self._stays_half(node)
        if stays_half and not repeats(eqn):
            is_addition = node.choice.role is Kind.ARITHMETIC
            shape = eqn.outvars[0].aval.shape if is_addition else None
            operands = self._half_operands(node, shape)
            return operands, _compat.bind(eqn, operands, eqn.params)
        operands = self._float32_operands(node)
        is_broadcast = eqn.primitive.name == "broadcast_in_dim" and len(operands) == 1
        if stays_half and is_broadcast:
            shape, onto = eqn.params["shape"], eqn.params["broadcast_dimensions"]
            return operands, [spread(operands[0], shape, onto, half)]
        results = _compat.bind(eqn, operands, eqn.params)
        return operands, [down(x, half) for x in results] if stays_half else results

    def _stays_half(self, node: Node) -> bool:
        """Whether a move, or a sum of halves or of a half and a bias, stays in half."""
        eqn, role, name = node.eqn, node.choice.role, node.eqn.primitive.name
        others, has_half = self._not_half(node)
        is_read = not self.plan.flow.for_matmuls.isdisjoint(eqn.outvars)
        # What a gather reads is the larger array, which is not cast up for it.
        is_kept = is_read or (name == "gather" and not repeats(eqn))
        if not has_half or not is_kept:
            return False
        if role is Kind.MOVE:
            if has(eqn, Trait.RANKS) or has(eqn, Trait.ILL_CONDITIONED):
                return False
            return all(self._fits(v, eqn) for v in others)
        are_biases = all(among(others, self.plan.arguments))
        are_biases &= all(v.aval.shape for v in others)
        is_addition = name == "add" or (name == "add_any" and not others)
        is_inner = self.plan.flow.for_results.isdisjoint(eqn.outvars)
        return role is Kind.ARITHMETIC and is_addition and are_biases and is_inner

    def _not_half(self, node: Node) -> tuple[list[Atom], bool]:
        """Returns the operands that are in float32, and whether another is half."""
        pairs = zip(node.eqn.invars, node.reads, strict=True)
        floats = [(v, read) for v, read in pairs if is_float32(v)]
        half = self.emitter.half
        others = [v for v, x in floats if not (x and self.arrays[x].dtype == half)]
        return others, len(others) < len(floats)

    def _fits(self, v: Atom, eqn: Eqn) -> bool:
        """Whether a move may read a float32 operand rounded beside one that is half."""
        number = literal(v) if isinstance(v, Literal) else self.plan.numbers.get(v)
        if number is None:
            is_joined = eqn.primitive.name == "concatenate"
            return is_joined and all(among([v], self.plan.arguments))
        is_exact = float(cast_number(number, self.emitter.half)) == number
        return is_exact or not has(eqn, Trait.EXACT_LITERAL)

    # --- operands ---

    def _operands(self, node: Node) -> list[Array]:
        """Returns the operands as they are."""
        return [
            v.val if read is None else self.arrays[read]
            for v, read in zip(node.eqn.invars, node.reads, strict=True)
        ]

    def _float32_operands(self, node: Node) -> list[Array]:
        """Returns the operands in float32; a region casts each once."""
        operands = self._operands(node)
        for i, read in enumerate(node.reads):
            if read is not None and is_float32(read.v):
                key = read, node.level
                if key not in self.cast_up:
                    self.cast_up[key] = up(operands[i], self.emitter.half)
                operands[i] = self.cast_up[key]
        return operands

    def _half_operands(
        self, node: Node, shape: tuple[Any, ...] | None = None
    ) -> list[Array]:
        """Returns the operands in half precision.

        `shape` is that of the result of an addition. What is smaller is broadcast in
        float32, so that its derivative adds up in float32.
        """
        half, numbers = self.emitter.half, self.plan.numbers
        operands = self._operands(node)
        for i, v in enumerate(node.eqn.invars):
            x = operands[i]
            if not is_float32(v):
                continue
            if not isinstance(v, Literal) and v in numbers and x.dtype != half:
                number = cast_number(numbers[v], half)
                operands[i] = jax.lax.full_like(x, number, dtype=half)
            elif shape is None or (x.dtype == half and x.shape == shape):
                operands[i] = down(x, half)
            else:
                operands[i] = spread(up(x, half), shape, range(len(shape)), half)
        return operands

    # --- results ---

    def _write(self, eqn: Eqn, results: Arrays) -> list[Array]:
        """Writes the results of an equation; returns them as others read them."""
        half, plan = self.emitter.half, self.plan
        found = []
        was_marked = self._is_stored_relu(eqn)
        for v, x in zip(eqn.outvars, results, strict=True):
            unrounded = x
            if plan.is_border(v) and half != jnp.float32:
                x = down(x, half)
            x = x if was_marked else self._mark(v, x)
            self.arrays[Read(v, False)] = x
            if v in plan.unrounded_inside:
                # If the result is half already, its own region reads what is stored.
                is_half = getattr(unrounded, "dtype", None) == half
                self.arrays[Read(v, True)] = x if is_half else unrounded
            found.append(x)
        return found

    def _mark(self, v: Var, x: Array) -> Array:
        """Returns a result, marked if the backward pass stores it."""
        if not self._is_marked(v):
            return x
        stored = self.plan.stored[v]
        platforms = NOWHERE if self.emitter.in_loop else stored.platforms
        return mark_stored(x, platforms, stored.is_rounded)

    def _is_marked(self, v: Var) -> bool:
        stored = self.plan.stored.get(v) if self.recompute else None
        return stored is not None and (stored.in_loops or not self.emitter.in_loop)

    def _is_stored_relu(self, eqn: Eqn) -> bool:
        """Whether an equation is a relu whose derivative can read what is stored."""
        if not is_relu(eqn):
            return False
        (v,) = eqn.outvars
        is_read = v in self.plan.flow.read_inside
        return self.plan.is_border(v) and not is_read and self._is_marked(v)


def _stored_relu(x: Array, mark: Callable[[Array], Array]) -> Array:
    """Returns a relu whose derivative reads its stored result, and nothing else."""

    @jax.custom_jvp
    def relu(x: Array) -> Array:
        return jnp.maximum(x, 0)

    @relu.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        # `jax.checkpoint` sees no mark inside of a call.
        y = mark(relu(*primals))
        return y, jnp.where(y > 0, tangents[0], 0)

    return relu(x)


def _what_became(node: Node, plan: Plan, results: Arrays) -> str:
    """Says what became of the first result of an equation, of a scan of all."""
    eqn = node.eqn
    if eqn.primitive.name == "scan" and node.has_matmul:
        _, count = _compat.scan_counts(eqn)
        dtypes = [str(x.dtype) for x in results]
        carried, stacked = (
            ", ".join(dict.fromkeys(x)) for x in split_list(dtypes, count)
        )
        return f"carries {carried or 'nothing'}, stacks {stacked or 'nothing'}"
    if not eqn.outvars or not is_float32(eqn.outvars[0]):
        return ""
    v, is_half = eqn.outvars[0], results[0].dtype != jnp.float32
    if is_half and plan.is_border(v):
        return "rounded: a matmul reads it later"
    why = plan.why_float32.get(v)
    return "half precision" if is_half else f"float32: {why}" if why else "float32"
