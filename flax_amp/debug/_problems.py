"""What a person has to act on, found in the equations of a walk.

Each finding has a kind and a message. Findings with the same message are one problem:
twelve layers whose products ask for `precision=HIGHEST` are one line, not twelve.
"""

import re
from collections.abc import Iterator, Sequence
from typing import Any

import jax.numpy as jnp

from flax_amp import _compat
from flax_amp._compat import Eqn
from flax_amp._jaxpr.traits import (
    Kind,
    ProductKind,
    Trait,
    has,
    is_matrix_product,
    kind_of,
    product_kind,
)
from flax_amp._rewriter.plan import Reason, ReasonKind
from flax_amp._training.arguments import first_of
from flax_amp.debug._model import Equation, Problem, float_factors, is_half, short
from flax_amp.debug._place import known_size
from flax_amp.debug._walk import Visit
from flax_amp.policy import Decision, Origin, Policy

# The most important first.
KINDS = (
    "policy",
    "shadowed policy key",
    "float32 product",
    "own dtype",
    "unknown primitive",
    "risk",
)
_CHOICE = "choice"  # a product that the user, or JAX, keeps in float32: no problem

# Random numbers and callbacks: `amp` leaves them alone, and there is nothing to do.
_AS_WRITTEN = re.compile("random_|rng_|.*_callback$")

Finding = tuple[str, str]  # kind, message


def find_problems(
    visits: Sequence[Visit],
    warnings: Sequence[str],
    policy: Policy,
    compute_dtype: Any,
) -> tuple[list[Problem], list[str]]:
    """Returns the problems, the most important first, and notes of what was chosen.

    Args:
      visits: the equations of the walk.
      warnings: the messages of the warnings that `amp` gives for this function.
      policy: the policy that the walk follows.
      compute_dtype: the dtype of low-precision values.
    """
    found: dict[Finding, list[Equation]] = {
        ("policy", text.removeprefix("amp_policy: ")): [] for text in warnings
    }
    if compute_dtype != jnp.float32:
        found |= _shadowed_keys(visits, policy)
        for visit in visits:
            choice = _choice(visit)
            findings = _findings(visit, compute_dtype.name)
            for finding in [(_CHOICE, choice)] if choice else findings:
                found.setdefault(finding, []).append(visit.row)
    every = [_problem(finding, rows) for finding, rows in found.items()]
    problems = [problem for problem in every if problem.kind != _CHOICE]
    problems.sort(key=lambda p: (KINDS.index(p.kind), -p.flops, -p.count))
    return problems, [_note(problem) for problem in every if problem not in problems]


def _note(chosen: Problem) -> str:
    count = chosen.count
    products = "1 product is" if count == 1 else f"{count} products are"
    return f"{products} kept in float32 {chosen.message}: {where(chosen)}"


def where(problem: Problem) -> str:
    """Returns the places of a problem as words."""
    return first_of([path or "outside of any module" for path in problem.paths])


def fold(path: str) -> str:
    """Returns a path without the numbers of layers: `GPT/Block_*`."""
    return re.sub(r"\d+", "*", path)


def _problem(finding: Finding, rows: Sequence[Equation]) -> Problem:
    kind, message = finding
    paths = dict.fromkeys(row.path for row in rows)
    if len(paths) > 3:
        paths = dict.fromkeys(map(fold, paths))
    return Problem(
        kind,
        message,
        paths=tuple(paths),
        source=rows[0].source if rows else "",
        count=sum(row.times for row in rows),
        flops=sum(row.flops for row in rows),
    )


def _shadowed_keys(
    visits: Sequence[Visit], policy: Policy
) -> dict[Finding, list[Equation]]:
    """Finds the keys of scopes that match equations, but decide none of them."""
    deciding = set()
    lost: dict[Decision, list[tuple[Decision, Equation]]] = {}
    for visit in visits:
        first, *others = policy.matching(visit.eqn.primitive, visit.scopes)
        deciding.add(first)
        for other in others:
            if other.origin is Origin.SCOPE:
                lost.setdefault(other, []).append((first, visit.row))
    found = {}
    for loser, pairs in lost.items():
        winners = dict.fromkeys(winner for winner, _ in pairs)
        functions = {id(decision.function) for decision in (loser, *winners)}
        if loser not in deciding and len(functions) > 1:
            keys = ", ".join(repr(winner.key) for winner in winners)
            message = (
                f"{loser.key!r} loses to {keys} wherever it matches. The outermost "
                "scope wins, then a method, then what the policy has first. Narrow "
                f"{keys}, or leave {loser.key!r} out."
            )
            found["shadowed policy key", message] = [row for _, row in pairs]
    return found


def _findings(visit: Visit, compute_dtype: str) -> Iterator[Finding]:
    row, reason = visit.row, visit.step.reason
    if kind_of(row.primitive) is Kind.PRODUCT:
        yield from _of_product(visit, compute_dtype)
    elif (
        _is_by_default(reason)
        and "float32" in row.before.results
        and not _AS_WRITTEN.match(row.primitive)
    ):
        yield (
            "unknown primitive",
            f"the policy says nothing about {row.primitive}, so it stays as written. "
            "If it is safe in half precision, add it to amp_policy.",
        )
    elif row.is_low:
        yield from _of_reduction(visit)
        yield from _of_range(visit.row)


def _is_by_default(reason: Reason) -> bool:
    """Whether no key of the policy names the primitive of an equation."""
    decision = reason.decision
    is_default = decision is not None and decision.origin is Origin.DEFAULT
    return is_default and not reason.inside


def _choice(visit: Visit) -> str:
    """Returns who chose to keep a product in float32; empty if nobody did."""
    row = visit.row
    if (
        not is_matrix_product(visit.eqn)
        or row.is_low
        or not float_factors(row.before.operands)
    ):
        return ""
    reason = visit.step.reason
    if reason.kind is ReasonKind.PRECISION and _compat.is_numerics_of_jax(visit.eqn):
        return "by JAX's own numerics"
    decision = reason.decision
    if decision is None or decision.origin is Origin.DEFAULT:
        return ""
    if decision.key == "amp_stop":
        return "by flax_amp.amp_stop"
    # The policy that is the default lets all products run in half.
    return f"by your policy key {decision.key!r}"


def _of_product(visit: Visit, compute_dtype: str) -> Iterator[Finding]:
    row = visit.row
    floats = dict.fromkeys(float_factors(row.before.operands))
    if not floats:  # in integer dtypes, or of complex numbers
        return
    if any(map(is_half, floats)):
        names = " and ".join(map(short, floats))
        yield (
            "own dtype",
            f"has factors in {names} without amp: its author set a dtype. Leave out "
            "dtype= or the cast to let the policy decide.",
        )
    elif row.is_low:
        yield from _of_reduction(visit)
    elif is_matrix_product(visit.eqn):
        why = _why(visit, compute_dtype)
        yield "float32 product", f"stays in {next(iter(floats))}: {why}"


def _why(visit: Visit, compute_dtype: str) -> str:
    reason = visit.step.reason
    if reason.inside:
        return f"it stands {reason}, and amp does not rewrite what is there."
    if reason.kind is ReasonKind.PRECISION:
        parts = reason.value if type(reason.value) is tuple else (reason.value,)
        asked = "/".join(dict.fromkeys(getattr(p, "name", str(p)) for p in parts))
        return (
            f"it asks for precision={asked}. Leave that out to run it in "
            f"{compute_dtype}."
        )
    if _is_by_default(reason):
        return f"no key of the policy names {visit.row.primitive}."
    return f"{reason}."


def _of_reduction(visit: Visit) -> Iterator[Finding]:
    row, count = visit.row, _terms(visit.eqn)
    dtype = row.after.operands[0]
    # From this number of equal terms on, one more does not change their sum.
    limit = round(1 / float(jnp.finfo(dtype).eps)) if is_half(dtype) else 0
    if limit and count >= limit:
        yield (
            "risk",
            f"{row.primitive} adds {count} numbers in {dtype} ({row.reason}). From "
            f"{limit} on, small terms get lost; run it in float32.",
        )


def _terms(eqn: Eqn) -> int:
    """Returns how many numbers go into each result of a sum, on average, or 0."""
    if product_kind(eqn) is not ProductKind.SUM and not has(eqn, Trait.ADDS_UP):
        return 0
    terms = eqn.invars[2 if eqn.primitive.name.startswith("scatter") else 0]
    results = known_size(eqn.outvars[0].aval.size)
    return known_size(terms.aval.size) // results if results else 0


def _of_range(row: Equation) -> Iterator[Finding]:
    if "float16" in row.after.operands and has(row.primitive, Trait.WIDE_RANGE):
        yield (
            "risk",
            f"{row.primitive} runs in float16 ({row.reason}), which ends at 65504 and "
            "begins at 6e-8; run it in float32.",
        )
