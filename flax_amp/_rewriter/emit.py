"""Emits a plan: the equations of the user's program, with casts at their borders.

An array's own dtype says what it is: a float32 variable whose array is bfloat16 has
been rounded. What arithmetic reads is cast up, once for each region, so that the
cotangents of all its readers add up in float32.
"""

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax.extend.core import Literal

from flax_amp import _compat
from flax_amp._compat import Array, Arrays, Atom, DType, Eqn, Jaxpr, Var
from flax_amp._rewriter.casts import (
    cast_number,
    down,
    is_exact,
    spread,
    up,
)
from flax_amp._rewriter.fp8 import fp8_dot, fp8_product
from flax_amp._rewriter.plan import (
    HALF_ROLES,
    Ask,
    Piece,
    Plan,
    Planner,
    Read,
    is_float32,
    is_same_dtype,
)
from flax_amp._rewriter.precision_call import call_precision_function
from flax_amp._rewriter.primitives import Trait, has, is_relu, literal, repeats
from flax_amp._rewriter.roles import Choice, Role
from flax_amp._rewriter.stored import (
    NOWHERE,
    ON_GPU,
    ON_GPU_AND_TPU,
    is_saved,
    mark_stored,
)
from flax_amp.policy import Decision, use_fp8, with_result_dtype


class Place(NamedTuple):
    """Where an equation stands.

    Attributes:
      scopes: the names of the scopes around its jaxpr, outermost first.
      around: the equations in whose bodies it stands, outermost first.
    """

    scopes: tuple[str, ...] = ()
    around: tuple[Eqn, ...] = ()

    def inside(self, eqn: Eqn) -> "Place":
        """Returns the place of the bodies of an equation here."""
        return Place(self.scopes + _compat.scope_names(eqn), (*self.around, eqn))


class Why(NamedTuple):
    """Why an equation runs as it does.

    Attributes:
      role: what it is for the rule.
      reason: the policy's key or the fact of its primitive that decided.
      decision: the decision of the policy.
      result: what became of its first result, such as "rounded: a matmul reads it
        later"; empty if that is no float32 one.
    """

    role: Role
    reason: str
    decision: Decision
    result: str


class Record(Protocol):
    """What is told of each equation of the user's program as it is emitted."""

    def __call__(
        self, eqn: Eqn, place: Place, operands: Arrays, results: Arrays, why: Why
    ) -> None: ...


# How to emit an equation with bodies: `rule(emitter, eqn, operands, ask)`.
Rule = Callable[..., Arrays]


# No repr: JAX writes that of functions into its debug information.
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Emitter:
    """Emits the plans of one call of the user's function.

    Args:
      planner: plans jaxprs.
      half: the dtype of products.
      rules: how equations with bodies are emitted, by their primitive.
      recompute: whether the backward pass computes regions again.
      is_straight: whether the equations run once, and not as the body of a loop.
      record: is told of each equation.
      place: where the equations stand.
      cache: bodies that were rewritten.
      fp8: why products stay in half precision, or "" for those in fp8, counted.
    """

    planner: Planner
    half: DType
    rules: dict[str, Rule]
    recompute: bool
    is_straight: bool = True
    record: Record | None = None
    place: Place = Place()
    cache: dict[Any, Any] = dataclasses.field(default_factory=dict)
    fp8: Counter[str] = dataclasses.field(default_factory=Counter)

    def replace(self, **changes: Any) -> "Emitter":
        """Returns an emitter that differs in some of these."""
        return dataclasses.replace(self, **changes)

    def inside(self, eqn: Eqn) -> "Emitter":
        """Returns the emitter of the bodies of an equation."""
        return self.replace(place=self.place.inside(eqn))

    def emit(self, closed: Jaxpr, operands: Arrays, ask: Ask) -> list[Array]:
        """Evaluates a jaxpr.

        Args:
          closed: the jaxpr.
          operands: one for each input; what is float32 in the jaxpr may be half.
          ask: what is known of it from outside.

        Returns:
          The results; what is float32 in the jaxpr may be half.
        """
        plan = self.planner.plan(closed, ask)
        program = plan.flow.program
        values = _Values(self, plan, False)
        values.set(program.consts, program.consts.values())
        values.set(program.invars, operands)
        for piece in plan.pieces:
            if piece.is_apart:
                (i,) = piece.indices
                self._equation(i, plan, values)
            else:
                self._piece(piece, plan, values)
        return [
            v.val if read is None else values.get(read)
            for v, read in zip(program.outvars, plan.results, strict=True)
        ]

    def rewrite_body(self, closed: Jaxpr, operands: Arrays, ask: Ask) -> Jaxpr:
        """Returns the rewritten closed jaxpr for operands of these types.

        A block that is called 24 times is rewritten once, and JAX lowers it once.
        """
        types = tuple(map(jax.typeof, operands))
        key = (closed, ask, types, self.is_straight, self.recompute)
        # Each equation is told of, however often it runs.
        if key not in self.cache or self.record is not None:
            # Few frames, because calls may be nested deeply.
            function = functools.partial(self.emit, closed, ask=ask)
            self.cache[key] = jax.make_jaxpr(function)(list(operands))
        return self.cache[key]

    def _piece(self, piece: Piece, plan: Plan, values: "_Values") -> None:
        flow = plan.flow
        recompute = self.recompute and any(
            flow.choices[i].role in HALF_ROLES or _is_curved(flow.program.eqns[i])
            for i in piece.indices
        )

        def run(*arrays: Array) -> list[Array]:
            inner = _Values(self, plan, recompute)
            inner.arrays.update(zip(piece.ins, arrays, strict=True))
            for i in piece.indices:
                self._equation(i, plan, inner)
            return [inner.get(read) for read in piece.outs]

        function = run
        if recompute:
            function = jax.checkpoint(run, policy=is_saved, prevent_cse=False)
        arrays = [values.get(read) for read in piece.ins]
        last = flow.program.eqns[piece.indices[-1]]
        with _compat.source_line(last):
            outs = _compat.call_or_locate_nan(
                lambda: function(*arrays), lambda: run(*arrays)
            )
        values.arrays.update(zip(piece.outs, outs, strict=True))

    def _equation(self, i: int, plan: Plan, values: "_Values") -> None:
        """Emits an equation, and writes what it gives."""
        eqn, choice = plan.flow.program.eqns[i], plan.flow.choices[i]
        with _compat.equation_context(eqn):
            operands, results, reason = self._results(i, eqn, choice, plan, values)
            results = values.write(eqn, results)
            values.forget(plan.dead.get(i, ()))
        if self.record is not None:
            result = _result(eqn, choice.role, plan, results)
            why = Why(choice.role, reason, choice.decision, result)
            self.record(eqn, self.place, operands, results, why)

    def _results(
        self, i: int, eqn: Eqn, choice: Choice, plan: Plan, values: "_Values"
    ) -> tuple[Arrays, Arrays, str]:
        """Returns what an equation was bound to, what it gives, and why."""
        reads, role, reason = plan.reads(i), choice.role, choice.reason
        pairs = list(zip(eqn.invars, reads, strict=True))
        if plan.flow.has_product[i]:
            operands = [values.natural(*pair) for pair in pairs]
            ask = self._ask(i, eqn, choice, plan)
            emitter = self.inside(eqn)
            return (
                operands,
                self.rules[eqn.primitive.name](emitter, eqn, operands, ask),
                reason,
            )
        if role is Role.PRODUCT and isinstance(choice.decision.function, use_fp8):
            in_fp8 = self._fp8(eqn, choice, plan)
            self.fp8[in_fp8 if isinstance(in_fp8, str) else ""] += 1
            if not isinstance(in_fp8, str):
                operands = [values.natural(*pair) for pair in pairs]
                out = fp8_dot(eqn, *in_fp8, self.half, operands)
                return operands, [out], "in fp8"
            reason = f"not in fp8: {in_fp8}"
        if role in HALF_ROLES:
            operands = [values.low(*pair) for pair in pairs]
            params = eqn.params
            if any(is_float32(v) for v in eqn.invars):
                params = with_result_dtype(params, self.half)
            return operands, _compat.bind(eqn, operands, params), reason
        if role is Role.CALLED:
            operands = [values.natural(*pair) for pair in pairs]
            outs = call_precision_function(eqn, choice.decision, self.half, operands)
            return operands, list(map(self._back, outs, eqn.outvars)), reason
        if values.is_stored_relu(eqn):
            operands = [values.low(*pair) for pair in pairs]
            mark = functools.partial(values.mark, eqn, eqn.outvars[0])
            return operands, [_stored_relu(operands[0], mark)], reason
        level = plan.flow.levels[i]
        if self.half != jnp.float32 and is_same_dtype(eqn):  # from float32 to float32
            operands = [values.natural(*pair) for pair in pairs]
            return operands, operands, reason
        is_low = role in (Role.MOVE, Role.ARITHMETIC) and self._is_low(
            eqn, role, pairs, plan, values
        )
        if is_low:
            if repeats(eqn):  # its derivative adds up
                operands = [values.wide(*pair, level) for pair in pairs]
                if eqn.primitive.name == "broadcast_in_dim" and len(operands) == 1:
                    shape, dims = (
                        eqn.params[name] for name in ("shape", "broadcast_dimensions")
                    )
                    out = spread(operands[0], shape, dims, self.half)
                else:
                    (wide,) = _compat.bind(eqn, operands, eqn.params)
                    out = down(wide, self.half)
                return operands, [out], reason
            shape = eqn.outvars[0].aval.shape if role is Role.ARITHMETIC else None
            operands = [values.low(*pair, shape) for pair in pairs]
        else:
            operands = [values.wide(*pair, level) for pair in pairs]
        return operands, _compat.bind(eqn, operands, eqn.params), reason

    def _is_low(
        self,
        eqn: Eqn,
        role: Role,
        pairs: Sequence[tuple[Atom, Read | None]],
        plan: Plan,
        values: "_Values",
    ) -> bool:
        """Whether a move, a sum of two or a bias stays in half precision."""
        is_half = [values.is_half(*pair) for pair in pairs]
        if not any(is_half):
            return False
        others = [
            v
            for (v, _), half in zip(pairs, is_half, strict=True)
            if is_float32(v) and not half
        ]
        leads = any(v in plan.flow.leads for v in eqn.outvars)
        name = eqn.primitive.name
        if role is Role.MOVE:
            if has(eqn, Trait.RANKS) or has(eqn, Trait.ILL_CONDITIONED):
                return False
            fits = all(self._fits(v, eqn, plan) for v in others)
            return fits and (leads or name == "gather")
        are_biases = all(
            not isinstance(v, Literal) and v in plan.weights and v.aval.shape
            for v in others
        )
        is_sum = name == "add" or (name == "add_any" and not others)
        return leads and is_sum and are_biases

    def _fits(self, v: Atom, eqn: Eqn, plan: Plan) -> bool:
        """Whether a move may read a float32 operand rounded beside one that is half."""
        number = literal(v) if isinstance(v, Literal) else plan.numbers.get(v)
        if number is None:
            is_joined = eqn.primitive.name == "concatenate"
            return is_joined and not isinstance(v, Literal) and v in plan.weights
        return not has(eqn, Trait.BOUND) or is_exact(number, self.half)

    def _fp8(self, eqn: Eqn, choice: Choice, plan: Plan) -> tuple[use_fp8, int] | str:
        """Returns how a product runs in fp8, or why it does not."""
        factors = eqn.invars[:2]
        known = [not isinstance(v, Literal) for v in factors]
        weights = [k and v in plan.weights for k, v in zip(known, factors, strict=True)]
        # In a loop, what is no weight is computed by the step before, as far as known.
        computed = [
            k and (v in plan.computed or not (self.is_straight or v in plan.weights))
            for k, v in zip(known, factors, strict=True)
        ]
        leads = eqn.outvars[0] in plan.flow.leads
        return fp8_product(eqn, weights, computed, leads, choice.decision)

    def _ask(self, i: int, eqn: Eqn, choice: Choice, plan: Plan) -> Ask:
        """Returns what the bodies of an equation are asked."""
        known = [not isinstance(v, Literal) for v in eqn.invars]
        flags = [
            tuple(k and v in which for k, v in zip(known, eqn.invars, strict=True))
            for which in (plan.weights, plan.computed)
        ]
        outs = plan.flow.outs[i]
        assert outs is not None
        return Ask(choice.inside, outs, *flags)

    def _back(self, x: Array, v: Var) -> Array:
        """Returns a result of a user's function; a third dtype returns to float32."""
        dtype = getattr(x, "dtype", None)
        if is_float32(v) and dtype not in (self.half, jnp.float32):
            return jnp.asarray(x, jnp.float32)
        return x

    def cast_like(
        self, arrays: Arrays, variables: Sequence[Atom], halves: Sequence[bool]
    ) -> list[Array]:
        """Returns arrays of fixed dtypes: half precision, or what the jaxpr says.

        Args:
          arrays: the arrays of some variables.
          variables: the variables.
          halves: which of those that are float32 become half.
        """
        return [
            (down(x, self.half) if half else up(x, self.half)) if is_float32(v) else x
            for x, v, half in zip(arrays, variables, halves, strict=True)
        ]


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class _Values:
    """The arrays of variables while a plan, or a piece of it, is emitted.

    Attributes:
      emitter: the emitter.
      plan: the plan.
      recompute: whether `jax.checkpoint` holds the equations.
      arrays: by variable, and whether it is the array before the border.
      wides: what regions have cast up, by variable and level of the region.
    """

    emitter: Emitter
    plan: Plan
    recompute: bool
    arrays: dict[Read, Array] = dataclasses.field(default_factory=dict)
    wides: dict[Read, dict[int, Array]] = dataclasses.field(default_factory=dict)

    def set(self, variables: Any, arrays: Any) -> None:
        """Writes arrays that come from outside."""
        reads = (Read(v, False) for v in variables)
        self.arrays.update(zip(reads, arrays, strict=True))

    def get(self, read: Read) -> Array:
        return self.arrays[read]

    def forget(self, reads: Iterable[Read]) -> None:
        """Drops arrays that nothing reads any more."""
        for read in reads:
            self.arrays.pop(read, None)
            self.wides.pop(read, None)

    def natural(self, v: Atom, read: Read | None) -> Array:
        """Returns an operand as it is."""
        return v.val if read is None else self.arrays[read]

    def is_half(self, v: Atom, read: Read | None) -> bool:
        """Whether an operand that is float32 in the program is half here."""
        half = self.emitter.half
        x = self.natural(v, read)
        is_array = read is not None and half != jnp.float32 and is_float32(v)
        return is_array and x.dtype == half

    def wide(self, v: Atom, read: Read | None, level: int) -> Array:
        """Returns an operand in float32; a region casts it once."""
        if read is None or not is_float32(v):
            return self.natural(v, read)
        of_levels = self.wides.setdefault(read, {})
        if level not in of_levels:
            of_levels[level] = up(self.arrays[read], self.emitter.half)
        return of_levels[level]

    def low(
        self, v: Atom, read: Read | None, shape: tuple[Any, ...] | None = None
    ) -> Array:
        """Returns an operand in half precision.

        Args:
          v: the operand.
          read: how it is read.
          shape: that of the sum, if it is added to something. What is smaller is
            broadcast in float32, so that its derivative adds up in float32.
        """
        x, half = self.natural(v, read), self.emitter.half
        if not is_float32(v):
            return x
        if read is not None and v in self.plan.numbers and x.dtype != half:
            number = cast_number(self.plan.numbers[v], half)
            return jax.lax.full_like(x, number, dtype=half)
        if shape is None or x.dtype == half and x.shape == shape:
            return down(x, half)
        return spread(up(x, half), shape, range(len(shape)), half)

    def is_stored_relu(self, eqn: Eqn) -> bool:
        """Whether an equation is a relu whose derivative can read what is stored."""
        v = eqn.outvars[0] if eqn.outvars else None
        return (
            v in self.plan.border
            and v not in self.plan.flow.exact
            and self._is_marked(v)
            and is_relu(eqn)
        )

    def write(self, eqn: Eqn, results: Arrays) -> list[Array]:
        """Writes the results of an equation; returns them as others read them."""
        half, plan = self.emitter.half, self.plan
        found = []
        for v, x in zip(eqn.outvars, results, strict=True):
            exact = x
            if v in plan.border and half != jnp.float32:
                x = down(x, half)
            if not self.is_stored_relu(eqn):  # it is marked already
                x = self.mark(eqn, v, x)
            self.arrays[Read(v, False)] = x
            if v in plan.twofold:
                # Of what is half anyway, all read what is stored.
                is_half = getattr(exact, "dtype", None) == half
                self.arrays[Read(v, True)] = x if is_half else exact
            found.append(x)
        return found

    def mark(self, eqn: Eqn, v: Var, x: Array) -> Array:
        """Returns a result, marked if the backward pass stores it."""
        if not self._is_marked(v):
            return x
        stored, where = self.plan.stored[v], NOWHERE
        if stored.has_barrier and self.emitter.is_straight:
            where = ON_GPU_AND_TPU if stored.also_on_tpu else ON_GPU
        return mark_stored(x, where, stored.is_rounded)

    def _is_marked(self, v: Var | None) -> bool:
        if not self.recompute or v not in self.plan.stored:
            return False
        # In a loop, what nothing but products reads is computed again.
        is_border = v in self.plan.border
        return self.emitter.is_straight or not is_border or v in self.plan.later


def _is_curved(eqn: Eqn) -> bool:
    """Whether the derivative of an equation reads something."""
    return not has(eqn, Trait.LINEAR)


def _stored_relu(x: Array, mark: Callable[[Array], Array]) -> Array:
    """Returns a relu whose derivative reads its stored result, and nothing else."""

    @jax.custom_jvp
    def relu(x: Array) -> Array:
        return mark(jnp.maximum(x, 0))

    @relu.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        y = relu(*primals)
        return y, jnp.where(y > 0, tangents[0], 0)

    return relu(x)


def _result(eqn: Eqn, role: Role, plan: Plan, results: Arrays) -> str:
    """Says what became of the first result of an equation."""
    if not eqn.outvars or not is_float32(eqn.outvars[0]):
        return ""
    v, flow = eqn.outvars[0], plan.flow
    is_half = results[0].dtype != jnp.float32
    if v in plan.border and is_half:
        return "rounded: a matmul reads it later"
    if is_half:
        return "half precision"
    if not v.aval.shape:
        return "float32: a scalar"
    if v not in flow.leads:
        return "float32: no matmul reads it later"
    if v not in plan.computed:
        return "float32: computed from arguments alone"
    if role is Role.SUM or has(eqn, Trait.ILL_CONDITIONED | Trait.STORED):
        return "float32: a sum or a maximum"
    return "float32: only its own region reads it"
