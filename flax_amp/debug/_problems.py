"""What a person has to act on, found in the rows of `explain`.

Each finding has a kind and a message. Findings with the same message are one problem:
twelve layers whose products ask for `precision=HIGHEST` are one line, not twelve.
"""

import re
from collections.abc import Iterator, Sequence
from typing import Any

import jax.numpy as jnp

from flax_amp import _compat
from flax_amp._compat import Eqn
from flax_amp._rewriter.primitives import (
    TRAITS,
    Kind,
    ProductKind,
    is_matrix_product,
    kind_of,
    product_kind,
)
from flax_amp.debug._model import (
    Equation,
    Problem,
    float_factors,
    is_half,
    short,
    without_numbers,
)
from flax_amp.debug._place import is_derivative, known_size
from flax_amp.debug._rows import Visit
from flax_amp.policy import Decision, Origin, Policy

# The most important first.
KINDS = (
    "policy",
    "shadowed policy key",
    "float32 product",
    "complex product",
    "own dtype",
    "unknown primitive",
    "second derivative",
    "risk",
)
_CHOICE = "choice"  # a product that the user, or JAX, keeps in float32: no problem

# Random numbers, callbacks and solvers: there is nothing to do about them.
_AS_WRITTEN = re.compile("random_|rng_|flax_amp_|.*_callback$")
# What leaves the range of float16 first.
_WIDE_RANGE = frozenset(
    """exp exp2 expm1 sinh cosh pow tan square integer_pow log log1p log2 rsqrt asin
    acos asinh acosh atanh erf_inv""".split()
)

Finding = tuple[str, str]  # kind, message


def find_problems(
    visits: Sequence[Visit],
    warnings: Sequence[str],
    policy: Policy,
    compute_dtype: Any,
) -> tuple[list[Problem], list[str]]:
    """Returns the problems, the most important first, and notes of what was chosen.

    `warnings` are the messages that `amp` gives for this function.
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
    return f"{products} kept in float32 {chosen.message}: {chosen.where}"


def _problem(finding: Finding, rows: Sequence[Equation]) -> Problem:
    kind, message = finding
    paths = dict.fromkeys(row.path for row in rows)
    if len(paths) > 3:
        paths = dict.fromkeys(map(without_numbers, paths))
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


def _choice(visit: Visit) -> str:
    """Returns who chose to keep a product in float32; empty if nobody did."""
    row, decision = visit.row, visit.why.decision
    floats = float_factors(row.before.operands)
    if not is_matrix_product(visit.eqn) or row.is_low or not floats:
        return ""
    is_key = row.reason == f"{decision.origin.value} {decision.key}"
    if is_key and decision.origin is not Origin.DEFAULT:
        # The policy that is the default lets all products run in half.
        is_stop = decision.key == "amp_stop"
        key = f"your policy key {decision.key!r}"
        return f"by {'flax_amp.amp_stop' if is_stop else key}"
    is_of_jax = _asked(visit.eqn) and _compat.is_numerics_of_jax(visit.eqn)
    return "by JAX's own numerics" if is_of_jax else ""


def _asked(eqn: Eqn) -> str:
    """Returns the precision that a product asks for; empty if it asks for none."""
    precision = eqn.params.get("precision")
    # An algorithm is a tuple as well, of its own type.
    parts = precision if type(precision) is tuple else (precision,)
    names = [getattr(part, "name", str(part)) for part in parts]
    is_default = {*names} <= {"None", "DEFAULT"}
    return "" if is_default else "/".join(dict.fromkeys(names))


def _findings(visit: Visit, compute_dtype: str) -> Iterator[Finding]:
    row, decision = visit.row, visit.why.decision
    if is_derivative(visit.eqn) and is_matrix_product(visit.eqn) and row.is_low:
        yield (
            "second derivative",
            "belongs to a gradient that your function takes, as for forces. The loss "
            "differentiates it again, which makes its roundings larger: see what "
            "flax_amp.compare_precision tells, or put flax_amp.amp_stop around it.",
        )
    if kind_of(row.primitive) is Kind.PRODUCT:
        yield from _of_product(visit, compute_dtype)
    elif (
        row.primitive not in TRAITS
        and visit.whole is None
        and decision.origin is Origin.DEFAULT
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
        if "float16" in row.after.operands and row.primitive in _WIDE_RANGE:
            yield (
                "risk",
                f"{row.primitive} runs in float16 ({row.reason}), which ends at 65504 "
                "and begins at 6e-8; run it in float32.",
            )


def _of_product(visit: Visit, compute_dtype: str) -> Iterator[Finding]:
    row = visit.row
    floats = list(dict.fromkeys(float_factors(row.before.operands)))
    if any("complex" in dtype for dtype in floats):
        if is_matrix_product(visit.eqn):
            names = " and ".join(map(short, floats))
            yield (
                "complex product",
                f"has factors in {names}: no half precision has complex numbers. "
                "Multiply real and imaginary parts apart to run it in "
                f"{compute_dtype}.",
            )
    elif any(map(is_half, floats)):
        names = " and ".join(map(short, floats))
        yield (
            "own dtype",
            f"has factors in {names} without amp: its author set a dtype. Leave out "
            "dtype= or the cast to let the policy decide.",
        )
    elif row.is_low:
        yield from _of_reduction(visit)
    elif floats and is_matrix_product(visit.eqn):
        why = _why(visit, compute_dtype)
        yield "float32 product", f"stays in {floats[0]}: {why}"


def _why(visit: Visit, compute_dtype: str) -> str:
    if asked := _asked(visit.eqn):
        return (
            f"it asks for precision={asked}. Leave that out to run it in "
            f"{compute_dtype}."
        )
    if visit.whole is not None:
        name = visit.whole.primitive.name
        return f"it stands inside of {name}, which runs as a whole."
    if visit.why.decision.origin is Origin.DEFAULT:
        return f"no key of the policy names {visit.row.primitive}."
    return f"{visit.row.reason}."


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
    name = eqn.primitive.name
    is_scatter = name.startswith("scatter-") and name[8:] in ("add", "sub", "mul")
    is_sum = kind_of(eqn) is Kind.SUM or product_kind(eqn) is ProductKind.SUM
    if not is_sum and not is_scatter:
        return 0
    terms = eqn.invars[2 if is_scatter else 0]
    results = known_size(eqn.outvars[0].aval.size)
    return known_size(terms.aval.size) // results if results else 0
