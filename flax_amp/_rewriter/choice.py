"""What an equation is for the rule of `paint.py`: by the policy, then by its traits.

The function of the policy decides first. Only if it leaves the equation to the rule do
the traits of its primitive count (`flax_amp/_jaxpr/traits.py`).
"""

import dataclasses
import enum
from collections.abc import Collection
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from flax_amp import _compat
from flax_amp._compat import DType, Eqn
from flax_amp._jaxpr.traits import (
    CASTABLE,
    Kind,
    ProductKind,
    has_update,
    kind_of,
    product_kind,
)
from flax_amp._rewriter.plan import (
    ARITHMETIC,
    MOVES,
    MULTIPLICATION,
    SUM,
    Context,
    Reason,
    ReasonKind,
)
from flax_amp.policy import (
    BUILT_IN,
    Decision,
    Origin,
    Policy,
    PrecisionFunction,
    follow_precision,
    use_compute_precision,
    use_fp8,
    use_original_precision,
    use_precision,
    use_widest_precision,
)

FLOAT32_UPDATE = Reason("its update function is a float32 one")


class Role(enum.Enum):
    """What an equation is for the rule."""

    PRODUCT = "a product"
    MOVE = "a move"
    ARITHMETIC = "arithmetic"
    UNROUNDED = "a sum, or what else is never rounded"
    ORIGINAL = "in float32 by the policy"
    PRECISE = "linear algebra, or a product in float32: nothing is rounded for it"
    USER_FUNCTION = "by a user's precision function"
    STRUCTURED = "by the rule of a structured primitive"


class Choice(NamedTuple):
    """How an equation runs, as far as it does not depend on its operands.

    Attributes:
      role: what it is for the rule.
      reason: why.
      decision: the decision of the policy.
      scopes: of a structured primitive: the scopes around its bodies.
    """

    role: Role
    reason: Reason
    decision: Decision
    scopes: tuple[str, ...] = ()

    def inside(self, context: Context) -> Context:
        """Returns the context of the bodies of a structured primitive in a context."""
        # The default decides for each equation anew; a scope or a key that is not the
        # default holds for all that is inside.
        forced = self.decision if self.decision.is_chosen else None
        return dataclasses.replace(context, scopes=self.scopes, forced=forced)


class Chooser:
    """Says of each equation what it is for the rule.

    Args:
      policy: the checked policy.
      compute_dtype: the dtype of products.
      structured: the names of the primitives that have rules of their own.
      emits_all: whether these rules emit structured primitives even where the policy
        stops `amp`, because what is inside closes over values (`captures.py`).
    """

    def __init__(
        self,
        policy: Policy,
        compute_dtype: DType,
        structured: Collection[str],
        emits_all: bool,
    ) -> None:
        self._policy = policy
        self._compute_dtype = compute_dtype
        self._structured = structured
        self._emits_all = emits_all

    def __call__(self, eqn: Eqn, context: Context) -> Choice:
        scopes = context.scopes + _compat.scope_names(eqn)
        decision = context.forced or self._policy.decide(eqn.primitive, scopes)
        stops = decision.is_chosen and decision.function is use_original_precision
        # A scope or a key that stops `amp` leaves a structured primitive untouched.
        # With any other decision, what is inside of it is painted.
        if eqn.primitive.name in self._structured and (not stops or self._emits_all):
            if not stops:
                _check_structured(eqn, decision)
            # Without a key that spans several scopes, equal bodies in different scopes
            # have one context, and so one plan.
            around = scopes if self._policy.spans_scopes else ()
            return Choice(Role.STRUCTURED, Reason("its own rule"), decision, around)
        return Choice(*self._role(eqn, decision), decision)

    def _role(self, eqn: Eqn, decision: Decision) -> tuple[Role, Reason]:
        role, reason = self._role_by_policy(eqn, decision)
        kind = kind_of(eqn)
        is_float32_product = kind is Kind.PRODUCT and role is Role.ORIGINAL
        is_linear_algebra = (
            kind is Kind.LINEAR_ALGEBRA and role is not Role.USER_FUNCTION
        )
        is_precise = is_float32_product or is_linear_algebra
        return (Role.PRECISE, reason) if is_precise else (role, reason)

    def _role_by_policy(self, eqn: Eqn, decision: Decision) -> tuple[Role, Reason]:
        reason = Reason("{0.origin.value} {0.key}", decision)
        function = self._built_in(eqn, decision.function)
        if function is None and not isinstance(decision.function, use_precision):
            return Role.USER_FUNCTION, reason
        if function in (use_original_precision, use_widest_precision):
            if decision.is_chosen:
                return Role.ORIGINAL, reason
            return _role_by_traits(eqn, decision)
        if function is follow_precision:
            return _role_by_traits(eqn, decision)
        # What is left is a key that asks for half precision.
        if has_update(eqn):
            return Role.ORIGINAL, FLOAT32_UPDATE
        if function is None:  # a third dtype
            return Role.USER_FUNCTION, reason
        if obstacle := self._obstacle_to_low(eqn):
            return Role.ORIGINAL, obstacle
        # A scope lowers all that is inside of it, inner and outer products too.
        kind = None if decision.lowers_all_inside else product_kind(eqn)
        if kind is ProductKind.MULTIPLICATION:
            return Role.ARITHMETIC, MULTIPLICATION
        if kind is ProductKind.SUM:
            return Role.UNROUNDED, Reason("an inner product is a sum")
        return Role.PRODUCT, reason

    def _built_in(self, eqn: Eqn, function: PrecisionFunction) -> Any:
        """Returns the function of `policy.py` that a function amounts to, if any.

        `use_precision` with a third dtype, such as float16 under bfloat16, amounts to
        none of them: it is called on the equation, as a user's own function is.
        """
        if isinstance(function, use_fp8):
            # Which of these products run in fp8 is decided in `fp8_rule.py`.
            is_product = kind_of(eqn) is Kind.PRODUCT
            return use_compute_precision if is_product else follow_precision
        if not isinstance(function, use_precision):
            return function if function in BUILT_IN else None
        if function.dtype == self._compute_dtype:
            return use_compute_precision
        is_castable = kind_of(eqn) in CASTABLE
        is_float32 = function.dtype == jnp.float32
        return use_original_precision if is_float32 or not is_castable else None

    def _obstacle_to_low(self, eqn: Eqn) -> Reason | None:
        """Says why an equation cannot run in the compute dtype, if it cannot."""
        if kind_of(eqn) not in CASTABLE:
            return Reason("{} runs in its original dtypes only", eqn.primitive.name)
        dtypes: list[Any] = [getattr(v.aval, "dtype", None) for v in eqn.invars]
        for dtype in dtypes:
            # float64, complex and the other half are what the user asked for.
            is_inexact = dtype is not None and jnp.issubdtype(dtype, jnp.inexact)
            if is_inexact and dtype not in (jnp.float32, self._compute_dtype):
                return Reason("{} operand", dtype)
        if kind_of(eqn) is Kind.PRODUCT:
            # A quantized weight has a range of its own, which a half may not have.
            for dtype in dtypes[:2]:
                if not jnp.issubdtype(dtype, jnp.floating):
                    return Reason("{} operand", dtype)
        if not _is_default_precision(eqn.params.get("precision")):
            return Reason(ReasonKind.PRECISION, eqn.params["precision"])
        preferred = eqn.params.get("preferred_element_type")
        if preferred not in (None, jnp.float32, self._compute_dtype):
            return Reason("preferred_element_type={}", preferred)
        return None


def _role_by_traits(eqn: Eqn, decision: Decision) -> tuple[Role, Reason]:
    """Returns what an equation is that no key of the policy names."""
    reason = Reason("{0.origin.value} {0.key}", decision)
    match kind_of(eqn):
        case Kind.MOVE if has_update(eqn):
            return Role.ORIGINAL, FLOAT32_UPDATE
        case Kind.MOVE:
            return Role.MOVE, MOVES
        case Kind.ARITHMETIC:
            return Role.ARITHMETIC, ARITHMETIC
        case Kind.LINEAR_ALGEBRA:
            return Role.UNROUNDED, Reason("linear algebra")
        case Kind.PRODUCT:  # without a key
            return Role.ORIGINAL, reason
        case Kind.SUM:
            return Role.UNROUNDED, SUM
    # Random numbers, and primitives that are not known here.
    return Role.UNROUNDED, reason


def _is_default_precision(precision: Any) -> bool:
    parts = precision if isinstance(precision, tuple) else (precision,)
    defaults = (None, jax.lax.Precision.DEFAULT, jax.lax.DotAlgorithmPreset.DEFAULT)
    return all(part in defaults for part in parts)


def _check_structured(eqn: Eqn, decision: Decision) -> None:
    """Raises a TypeError if a policy sets the precision of a structured primitive."""
    if decision.origin is Origin.PRIMITIVE:
        raise TypeError(
            f"amp_policy: key {decision.key!r} is a structured primitive, and its "
            f"value is {decision.function!r}; expected "
            "flax_amp.use_original_precision, which leaves it untouched. To set the "
            "precision of what is inside, use the primitives inside or a scope as keys."
        )
