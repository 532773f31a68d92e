"""What an equation is for the rule of `amp`: by the policy, then by its primitive."""

import dataclasses
import enum
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from flax_amp import _compat
from flax_amp._compat import DType, Eqn
from flax_amp._rewriter.primitives import Kind, bodies, kind_by_shape, kind_of, walk
from flax_amp.policy import (
    Decision,
    InDtype,
    Origin,
    Policy,
    use_compute_precision,
    use_fp8,
    use_original_precision,
)


class Role(enum.Enum):
    """What an equation is for the rule."""

    PRODUCT = "a product in half precision"
    HALF = "in half precision by a key of the policy"
    ORIGINAL = "in its own dtypes"
    CALLED = "by a user's precision function, or in a third dtype"
    MOVE = "a move"
    ARITHMETIC = "arithmetic"
    SUM = "a sum"
    PRECISE = "linear algebra, or a product in its own dtypes"
    STRUCTURED = "a loop, a branch, a call"
    OTHER = "anything else"


class Context(NamedTuple):
    """Where a jaxpr stands."""

    scopes: tuple[str, ...] = ()  # the names of those around it, outermost first
    forced: Decision | None = None  # of a key that holds for all that is inside


class Choice(NamedTuple):
    """How an equation runs, and why."""

    role: Role
    reason: str  # the policy's key or the fact of its primitive that decided
    decision: Decision
    body_context: Context = Context()  # of a structured primitive: where its bodies are
    # What became of its first result, such as "rounded: a matmul reads it later". Empty
    # before it is emitted, and if that is no float32 one.
    result: str = ""


_BY_KIND = {
    Kind.MOVE: Role.MOVE,
    Kind.ARITHMETIC: Role.ARITHMETIC,
    Kind.SUM: Role.SUM,
    Kind.LINEAR_ALGEBRA: Role.PRECISE,
    Kind.OTHER: Role.OTHER,
}


@dataclasses.dataclass(frozen=True)
class Chooser:
    """Says of each equation what it is for the rule."""

    policy: Policy
    half: DType  # of products

    def __call__(self, eqn: Eqn, context: Context) -> Choice:
        scopes = context.scopes + _compat.scope_names(eqn)
        decision = context.forced or self.policy.decide(eqn.primitive, scopes)
        if kind_of(eqn) is Kind.STRUCTURED:
            return self._structured(eqn, decision, scopes)
        role, reason = self._role(eqn, decision)
        return Choice(role, reason or _reason(decision), decision)

    def _structured(
        self, eqn: Eqn, decision: Decision, scopes: tuple[str, ...]
    ) -> Choice:
        if decision.is_chosen and decision.function is use_original_precision:
            context = Context(scopes, decision)
            return Choice(Role.ORIGINAL, _reason(decision), decision, context)
        if decision.origin is Origin.PRIMITIVE:
            raise TypeError(
                f"amp_policy: key {decision.key!r} is a structured primitive, and its "
                f"value is {decision.function!r}; expected "
                "flax_amp.use_original_precision, which leaves it untouched. To set "
                "the precision of what is inside, use the primitives inside or a scope "
                "as keys."
            )
        if reason := untraceable(eqn):
            return Choice(Role.ORIGINAL, reason, decision)
        if decision.is_chosen and eqn.primitive.name == "jit" and _draws(eqn):
            # Rounded, a uniform number just below 1 is 1, and log(1 - u) infinite.
            return Choice(Role.ORIGINAL, "it draws random numbers", decision)
        # Without a key that spans several scopes, equal bodies in different scopes have
        # one context, and so one plan.
        around = scopes if self.policy.spans_scopes else ()
        context = Context(around, decision if decision.is_chosen else None)
        return Choice(Role.STRUCTURED, "it has bodies", decision, context)

    def _role(self, eqn: Eqn, decision: Decision) -> tuple[Role, str]:
        """Returns the role of an equation without bodies, and why if no key says it."""
        kind, function = kind_of(eqn), decision.function
        if eqn.primitive.name == "scatter" and eqn.params.get("update_jaxpr"):
            return Role.ORIGINAL, "its update function is a float32 one"
        if function in (use_original_precision, InDtype(jnp.float32)):
            if kind is Kind.PRODUCT or kind is Kind.LINEAR_ALGEBRA:
                return Role.PRECISE, "" if decision.is_chosen else kind.value
            if decision.is_chosen:
                return Role.ORIGINAL, ""
            return _BY_KIND[kind], kind.value
        is_fp8 = isinstance(function, use_fp8)
        if is_fp8 and kind is not Kind.PRODUCT:
            return _BY_KIND[kind], kind.value
        if is_fp8 or function in (use_compute_precision, InDtype(self.half)):
            return self._in_half(eqn, kind, decision)
        if isinstance(function, InDtype) and not _is_castable(eqn):
            return Role.ORIGINAL, f"{eqn.primitive.name} runs in its own dtypes only"
        return Role.CALLED, ""

    def _in_half(self, eqn: Eqn, kind: Kind, decision: Decision) -> tuple[Role, str]:
        """Returns the role of an equation that the policy wants in half precision."""
        if obstacle := self._obstacle(eqn):
            is_product = kind is Kind.PRODUCT or kind is Kind.LINEAR_ALGEBRA
            return (Role.PRECISE if is_product else Role.ORIGINAL), obstacle
        if kind is not Kind.PRODUCT:
            return Role.HALF, ""
        # A dtype for a scope lowers all that is inside, inner and outer products too.
        is_fp8 = isinstance(decision.function, use_fp8)
        if decision.origin is Origin.SCOPE and not is_fp8:
            return Role.PRODUCT, ""
        match kind_by_shape(eqn):
            case Kind.ARITHMETIC:
                return Role.ARITHMETIC, "it adds nothing up: a multiplication"
            case Kind.SUM:
                return Role.SUM, "an inner product is a sum"
        return Role.PRODUCT, ""

    def _obstacle(self, eqn: Eqn) -> str:
        """Says why an equation cannot run in half precision, if it cannot."""
        if not _is_castable(eqn):
            return f"{eqn.primitive.name} runs in its own dtypes only"
        dtypes: list[Any] = [getattr(v.aval, "dtype", None) for v in eqn.invars]
        for dtype in dtypes:
            # float64, complex and the other half are what the user asked for.
            is_inexact = dtype is not None and jnp.issubdtype(dtype, jnp.inexact)
            if is_inexact and dtype not in (jnp.float32, self.half):
                return f"{dtype} operand"
        if kind_of(eqn) is Kind.PRODUCT:
            # A quantized weight has a range of its own, which a half may not have.
            for dtype in dtypes[:2]:
                if not jnp.issubdtype(dtype, jnp.floating):
                    return f"{dtype} operand"
        if not _is_default_precision(eqn.params.get("precision")):
            return f"it asks for precision: precision={eqn.params['precision']}"
        preferred = eqn.params.get("preferred_element_type")
        if preferred not in (None, jnp.float32, self.half):
            return f"preferred_element_type={preferred}"
        return ""


def _draws(eqn: Eqn) -> bool:
    """Whether an equation draws random numbers, and has no product."""
    names = {visit.eqn.primitive.name for visit in walk(bodies(eqn)[0])}
    draws = not names.isdisjoint(("random_bits", "threefry2x32", "rng_bit_generator"))
    return draws and not any(kind_of(name) is Kind.PRODUCT for name in names)


def untraceable(eqn: Eqn) -> str:
    """Says why the rule of an equation cannot be traced by itself, if it cannot.

    Such an equation runs as it is written.
    """
    name, params = eqn.primitive.name, eqn.params
    if name in ("custom_vmap_call", "linear_call"):
        return f"the rule of a {name} runs as written"
    if name not in ("custom_jvp_call", "custom_vjp_call"):
        return ""
    if params["symbolic_zeros"]:
        return "its rule asks which operands are perturbed"
    if any(isinstance(v.aval, jax.ref.AbstractRef) for v in eqn.invars):
        return "its rule takes a ref"
    return ""


def _is_castable(eqn: Eqn) -> bool:
    """Whether an equation can run in half precision, if a policy says so."""
    kinds = (Kind.PRODUCT, Kind.MOVE, Kind.ARITHMETIC, Kind.SUM)
    if eqn.primitive.name == "bitcast_convert_type" or eqn.params.get("update_jaxpr"):
        return False
    return kind_of(eqn) in kinds


def _reason(decision: Decision) -> str:
    return f"{decision.origin.value} {decision.key}"


def _is_default_precision(precision: Any) -> bool:
    parts = precision if isinstance(precision, tuple) else (precision,)
    defaults = (None, jax.lax.Precision.DEFAULT, jax.lax.DotAlgorithmPreset.DEFAULT)
    return all(part in defaults for part in parts)
