"""Keys of a policy that match equations, but decide none of them."""

from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp

from flax_amp.debug._model import Equation
from flax_amp.debug._walk import Visit
from flax_amp.policy import (
    Decision,
    Origin,
    Policy,
    use_compute_precision,
    use_original_precision,
    use_precision,
)

_DEFAULT = Policy(None)


def shadowed_keys(
    visits: Iterable[Visit], policy: Policy, compute_dtype: Any
) -> dict[tuple[str, str], list[Equation]]:
    """Finds the keys that match equations, but decide none of them.

    A key is no problem if what decides instead means the same, or if the default policy
    has it, too.
    """
    deciding: set[Decision] = set()
    lost: dict[Decision, list[tuple[Decision, Visit]]] = {}
    for visit in visits:
        first, *others = _matching(visit, policy)
        deciding.add(first)
        for other in others:
            lost.setdefault(other, []).append((first, visit))
    found = {}
    for loser, pairs in lost.items():
        winners = list(dict.fromkeys(winner for winner, _ in pairs))
        meanings = [_meaning(decision, compute_dtype) for decision in (loser, *winners)]
        if loser not in deciding and any(x != meanings[0] for x in meanings):
            keys = ", ".join(dict.fromkeys(repr(winner.key) for winner in winners))
            message = (
                f"{loser.key!r} loses to {keys} wherever it matches. The outermost "
                "scope wins, then a method, then what the policy has first, then a "
                f"primitive. Narrow {keys}, or leave {loser.key!r} out."
            )
            found["shadowed policy key", message] = [visit.row for _, visit in pairs]
    return found


def _matching(visit: Visit, policy: Policy) -> list[Decision]:
    """Returns the decision for an equation, and those that a user's keys lost."""
    primitive = visit.eqn.primitive
    first, *others = policy.matching(primitive, visit.scopes)
    decided = visit.step.reason.decision
    if decided and decided.origin is Origin.PRIMITIVE and decided is not first:
        others.insert(0, first)  # it stands inside of that primitive
        first = decided
    usual = _DEFAULT.decide(primitive, ()).function
    return [first] + [
        other
        for other in others
        if other.origin is Origin.SCOPE
        or (other.origin is Origin.PRIMITIVE and other.function is not usual)
    ]


def _meaning(decision: Decision, compute_dtype: Any) -> Any:
    """Returns a precision function, the same for two that do the same."""
    if decision.function == use_precision(jnp.float32):
        return use_original_precision
    if decision.function == use_precision(compute_dtype):
        return use_compute_precision
    return decision.function
