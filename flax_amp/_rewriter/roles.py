"""The role of an equation in the rule of `amp`: by the policy, then the primitive."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from flax_amp import _jaxprs, _source
from flax_amp._compat import Array, Arrays, DType, Eqn
from flax_amp._rewriter.primitives import Kind, inside, kind_by_shape, kind_of
from flax_amp.policy import (
    Decision,
    InDtype,
    KeyKind,
    Policy,
    use_compute_precision,
    use_compute_precision_behind_matmuls,
    use_float32_result,
    use_fp8,
    use_original_precision,
)


class Context(NamedTuple):
    """Where a jaxpr stands."""

    scopes: tuple[str, ...] = ()  # the names of the scopes around, outermost first
    forced: Decision | None = None  # by a key that holds for the whole jaxpr


class Choice(NamedTuple):
    """How an equation runs, and why."""

    role: Kind
    reason: str  # the policy's key or the fact of its primitive that decided
    decision: Decision
    body_context: Context = Context()  # where the bodies of the equation stand
    # The outcome for the first result, such as "float32: a sum or a maximum". Empty
    # before the equation is emitted, and if the user's program has another dtype than
    # float32 there.
    result: str = ""
    plan: Any = None  # the `Plan` of the program, once the equation is emitted
    is_in_fp8: bool | None = None  # `None`: no key wants fp8 here

    @property
    def is_by_key(self) -> bool:
        """Whether the policy's key decided, and no fact of the equation."""
        return self.reason == _reason(self.decision)


@dataclasses.dataclass(frozen=True)
class Chooser:
    """Chooses the role of each equation, and says why."""

    policy: Policy
    half: DType  # the compute dtype

    def __call__(self, eqn: Eqn, context: Context) -> Choice:
        scopes = context.scopes + _source.scope_names(eqn)
        decision = context.forced or self.policy.decide(eqn.primitive, scopes)
        if kind_of(eqn) is Kind.STRUCTURED:
            return self._structured(eqn, decision, scopes)
        role, reason = self._role(eqn, decision)
        if not decision.is_chosen:
            reason = why_as_written(eqn) or reason
        return Choice(role, reason or _reason(decision), decision)

    def _structured(
        self, eqn: Eqn, decision: Decision, scopes: tuple[str, ...]
    ) -> Choice:
        if decision.is_chosen and decision.function is use_original_precision:
            context = Context(scopes, decision)
            return Choice(Kind.ORIGINAL, _reason(decision), decision, context)
        if decision.key_kind is KeyKind.PRIMITIVE:
            raise TypeError(
                f"amp_policy: key {decision.key!r} is a structured primitive, and its "
                f"value is {decision.function!r}; expected "
                "flax_amp.use_original_precision, which leaves the primitive "
                "untouched. To set the precision of the equations inside, use their "
                "primitives or a scope as keys."
            )
        if reason := why_as_written(eqn):
            return Choice(Kind.ORIGINAL, reason, decision)
        if decision.is_chosen and eqn.primitive.name == "jit" and _draws(eqn):
            # A uniform `u` just below 1 would be rounded to 1, `log(1 - u)` infinite.
            return Choice(Kind.ORIGINAL, "it draws random numbers", decision)
        # Without a key that spans several scopes, equal bodies in different scopes have
        # the same context, and so the same plan.
        around = scopes if self.policy.spans_scopes else ()
        forced = decision if decision.is_chosen else None
        context = Context(around, forced)
        return Choice(Kind.STRUCTURED, "it has bodies", decision, context)

    def _role(self, eqn: Eqn, decision: Decision) -> tuple[Kind, str]:
        """Returns the role of an equation without bodies, and the reason.

        The reason is "" if a key of the policy decided.
        """
        kind = kind_of(eqn)
        function = decision.function
        if eqn.primitive.name == "scatter" and eqn.params.get("update_jaxpr"):
            return Kind.ORIGINAL, "its update function is a float32 one"
        is_original = function in (use_original_precision, InDtype(jnp.float32))
        if is_original and decision.is_chosen:
            return Kind.ORIGINAL, ""
        is_of_matmuls = _is_of_matmuls(decision)
        if is_original or (is_of_matmuls and kind is not Kind.MATMUL):
            if kind is Kind.MATMUL or kind is Kind.LINEAR_ALGEBRA:
                return Kind.ORIGINAL, kind.value
            return kind, kind.value
        in_half = (
            use_compute_precision,
            use_compute_precision_behind_matmuls,
            InDtype(self.half),
        )
        if is_of_matmuls or function in in_half:
            return self._in_half(eqn, kind, decision)
        if isinstance(function, InDtype) and not _is_castable(eqn):
            return Kind.ORIGINAL, f"{eqn.primitive.name} runs in its own dtypes only"
        return Kind.CALLED, ""

    def _in_half(self, eqn: Eqn, kind: Kind, decision: Decision) -> tuple[Kind, str]:
        """Returns the role of an equation that the policy wants in half precision."""
        if obstacle := self._obstacle(eqn):
            return Kind.ORIGINAL, obstacle
        if kind is not Kind.MATMUL:
            return Kind.HALF, ""
        # A dtype for a scope lowers the whole scope, inner and outer products too.
        if decision.key_kind is KeyKind.SCOPE and not _is_of_matmuls(decision):
            return Kind.MATMUL, ""
        match kind_by_shape(eqn):
            case Kind.ARITHMETIC:
                return Kind.ARITHMETIC, "it adds nothing up: a multiplication"
            case Kind.SUM:
                return Kind.SUM, "an inner product is a sum"
        return Kind.MATMUL, ""

    def _obstacle(self, eqn: Eqn) -> str:
        """Says why half precision is impossible for an equation; empty if possible."""
        if not _is_castable(eqn):
            return f"{eqn.primitive.name} runs in its own dtypes only"
        dtypes: list[Any] = [getattr(v.aval, "dtype", None) for v in eqn.invars]
        for dtype in dtypes:
            # The user asked for float64, for a complex dtype, or for the half-precision
            # dtype that is not the compute dtype.
            is_inexact = dtype is not None and jnp.issubdtype(dtype, jnp.inexact)
            if is_inexact and dtype not in (jnp.float32, self.half):
                return f"{dtype} operand"
        if kind_of(eqn) is Kind.MATMUL:
            # A quantized weight has its own range, which half precision may not have.
            for dtype in dtypes[:2]:
                if not jnp.issubdtype(dtype, jnp.floating):
                    return f"{dtype} operand"
        if asked := asked_precision(eqn):
            return f"it asks for precision={asked}"
        preferred = eqn.params.get("preferred_element_type")
        if preferred not in (None, jnp.float32, self.half):
            return f"preferred_element_type={preferred}"
        return ""


def _is_of_matmuls(decision: Decision) -> bool:
    """Whether a precision function concerns matmuls only."""
    function = decision.function
    return isinstance(function, use_fp8) or function is use_float32_result


def _draws(eqn: Eqn) -> bool:
    """Whether an equation draws random numbers, and has no matmul."""
    names = {inner.primitive.name for inner in inside(eqn)}
    draws = not names.isdisjoint(("random_bits", "threefry2x32", "rng_bit_generator"))
    return draws and not any(kind_of(name) is Kind.MATMUL for name in names)


def why_as_written(eqn: Eqn) -> str:
    """Says why an equation with bodies must run as written; empty without a reason.

    A reason is, for example, a rule that cannot be traced by itself.
    """
    name = eqn.primitive.name
    params = eqn.params
    if hi_name := _jaxprs.hi_name(eqn):
        return f"the hi-primitive {hi_name} runs as written"
    # A solver in half precision converges to half precision.
    if name in ("custom_vmap_call", "linear_call", "custom_linear_solve"):
        return f"the rule of a {name} runs as written"
    # The compiler for a platform must see the branch of that platform only.
    if params.get("branches_platforms"):
        return "it has a branch for each platform"
    if name not in ("custom_jvp_call", "custom_vjp_call"):
        return ""
    if params["symbolic_zeros"]:
        return "its rule asks which operands are perturbed"
    if any(isinstance(v.aval, jax.ref.AbstractRef) for v in eqn.invars):
        return "its rule takes a ref"
    return ""


def _is_castable(eqn: Eqn) -> bool:
    """Whether an equation can run in half precision, if a policy says so."""
    kinds = (Kind.MATMUL, Kind.MOVE, Kind.ARITHMETIC, Kind.SUM)
    # The update function of a `scatter` is a float32 function. The update functions of
    # `scatter-add` and the like are JAX's own, and are made again for half precision.
    is_own = eqn.primitive.name == "scatter" and eqn.params.get("update_jaxpr")
    if eqn.primitive.name == "bitcast_convert_type" or is_own:
        return False
    return kind_of(eqn) in kinds


def _reason(decision: Decision) -> str:
    return f"{decision.key_kind.value} {decision.key}"


def asked_precision(eqn: Eqn) -> str:
    """Returns the `precision=` of a matmul; empty for the default."""
    precision = eqn.params.get("precision")
    # An algorithm is a tuple as well, of its own type.
    parts = precision if type(precision) is tuple else (precision,)
    names = [getattr(part, "name", str(part)) for part in parts]
    if {*names} <= {"None", "DEFAULT"}:
        return ""
    return "/".join(dict.fromkeys(names))


def call_precision_function(
    eqn: Eqn, decision: Decision, compute_dtype: DType, operands: Arrays
) -> tuple[Arrays, list[Array]]:
    """Binds an equation to the operands and parameters that a user's function gives.

    Returns the bound operands and the results of the equation. An error names the key
    of the function.
    """
    function: Any = decision.function
    dtypes = [v.aval.dtype for v in eqn.invars]
    try:
        invars, params = function(compute_dtype, dtypes, *operands, **eqn.params)
        outs = list(_jaxprs.bind_in_dtype(eqn, invars, params))
        shapes = [x.shape for x in outs]
        expected = [v.aval.shape for v in eqn.outvars]
        # Without the check, an error of JAX would blame the next equation.
        if shapes != expected:
            raise ValueError(f"results of shapes {shapes}; expected {expected}")
    except Exception as error:
        error.add_note(
            f"amp_policy: in the precision function of key {decision.key!r}, called "
            f"for {eqn.primitive.name}. Expected `def f(compute_dtype, "
            "original_dtypes, *invars, **bind_params): return invars, bind_params`, "
            "with operands of the same shapes."
        )
        raise
    return invars, outs
