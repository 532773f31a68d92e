"""What a person has to act on, found in the rows of `explain`.

Findings with the same message are one problem: twelve layers whose matmuls ask for
`precision=HIGHEST` are one line, not twelve.
"""

import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

from flax_amp import _compat
from flax_amp._compat import Eqn
from flax_amp._rewriter.primitives import (
    TRAITS,
    Kind,
    is_matrix_product,
    kind_of,
)
from flax_amp._training.arguments import first_of
from flax_amp.debug._place import is_derivative
from flax_amp.debug._record import Equation, Visit, float_factors
from flax_amp.debug._report import is_half, plural, short
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
)
_CHOICE = "choice"  # a product that the user, or JAX, keeps in float32: no problem

# Random numbers, callbacks and solvers: there is nothing to do about them.
_AS_WRITTEN = re.compile("random_|rng_|flax_amp_|.*_callback$")
_SECOND = (
    "belongs to a gradient that your function takes, as for forces. The loss "
    "differentiates it again, which makes its roundings larger: see what "
    "flax_amp.compare_precision tells, or put flax_amp.amp_stop around it."
)
_UNKNOWN = (
    "the policy says nothing about {0}, so it stays as written. If it is safe in half "
    "precision, add it to amp_policy."
)
_COMPLEX = (
    "has factors in {0}: no half precision has complex numbers. Multiply real and "
    "imaginary parts apart to run it in {1}."
)
_OWN = (
    "has factors in {0} without amp: its author set a dtype. Leave out dtype= or the "
    "cast to let the policy decide."
)
_SHADOWED = (
    "{0!r} loses to {1} wherever it matches. The outermost scope wins, then a method, "
    "then what the policy has first. Narrow {1}, or leave {0!r} out."
)

Finding = tuple[str, str]  # kind, message


class Problem(NamedTuple):
    """Something that a person has to act on, or to know."""

    kind: str  # a short name, such as `float32 product`
    message: str  # what was found, and what can be done
    paths: tuple[str, ...] = ()  # the modules; of more than three, with `*` for numbers
    source: str = ""  # the line of the first equation
    times: int = 0  # how often the equations run that it concerns
    flops: int = 0  # of the matmuls among them

    @property
    def where(self) -> str:
        """Its modules as words."""
        return first_of([path or "outside of any module" for path in self.paths])


def without_numbers(path: str) -> str:
    """Returns a path without the numbers of layers: `GPT/Block_*`."""
    return re.sub(r"\d+", "*", path)


def find_problems(
    visits: Sequence[Visit], warnings: Sequence[str], policy: Policy, half: Any
) -> tuple[list[Problem], list[str]]:
    """Returns the problems, the most important first, and notes of what was chosen.

    Args:
      visits: the equations.
      warnings: the messages that `amp` gives for this function.
      policy: the policy.
      half: the compute dtype.
    """
    found: dict[Finding, list[Equation]] = {
        ("policy", text.removeprefix("amp_policy: ")): [] for text in warnings
    }
    if half != jnp.float32:
        found |= _shadowed_keys(visits, policy)
        for visit in visits:
            choice = _choice(visit)
            findings = [(_CHOICE, choice)] if choice else _findings(visit, half.name)
            for finding in findings:
                found.setdefault(finding, []).append(visit.row)
    every = [_problem(*finding, rows) for finding, rows in found.items()]
    problems = [problem for problem in every if problem.kind != _CHOICE]
    problems.sort(key=lambda p: (KINDS.index(p.kind), -p.flops, -p.times))
    notes = []
    for chosen in (problem for problem in every if problem.kind == _CHOICE):
        products = (
            f"{plural(chosen.times, 'product')} {'is' if chosen.times == 1 else 'are'}"
        )
        notes.append(f"{products} kept in float32 {chosen.message}: {chosen.where}")
    return problems, notes


def _problem(kind: str, message: str, rows: Sequence[Equation]) -> Problem:
    paths = dict.fromkeys(row.path for row in rows)
    paths = dict.fromkeys(map(without_numbers, paths)) if len(paths) > 3 else paths
    source = rows[0].source if rows else ""
    times, flops = sum(row.times for row in rows), sum(row.flops for row in rows)
    return Problem(kind, message, tuple(paths), source, times, flops)


def _shadowed_keys(
    visits: Sequence[Visit], policy: Policy
) -> dict[Finding, list[Equation]]:
    """Finds the keys of scopes that match equations, but decide none of them."""
    deciding = set()
    lost: dict[Decision, list[tuple[Decision, Equation]]] = {}
    for visit in visits:
        first, *others = policy.matching(visit.eqn.primitive, visit.scopes)
        deciding.add(first)
        for other in (other for other in others if other.origin is Origin.SCOPE):
            lost.setdefault(other, []).append((first, visit.row))
    found = {}
    for loser, pairs in lost.items():
        winners = dict.fromkeys(winner for winner, _ in pairs)
        functions = {id(decision.function) for decision in (loser, *winners)}
        if loser not in deciding and len(functions) > 1:
            keys = ", ".join(repr(winner.key) for winner in winners)
            message = _SHADOWED.format(loser.key, keys)
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


def _findings(visit: Visit, half: str) -> Iterator[Finding]:
    row, decision = visit.row, visit.why.decision
    is_product = is_matrix_product(visit.eqn)
    if is_product and row.is_low and is_derivative(visit.eqn):
        yield "second derivative", _SECOND
    if kind_of(row.primitive) is Kind.PRODUCT:
        floats = list(dict.fromkeys(float_factors(row.before.operands)))
        names = " and ".join(map(short, floats))
        if any("complex" in dtype for dtype in floats):
            if is_product:
                yield "complex product", _COMPLEX.format(names, half)
            return
        if any(map(is_half, floats)):
            yield "own dtype", _OWN.format(names)
            return
        if floats and is_product and not row.is_low:
            yield "float32 product", f"stays in {floats[0]}: {_why(visit, half)}"
    elif (
        row.primitive not in TRAITS
        and visit.whole is None
        and decision.origin is Origin.DEFAULT
        and "float32" in row.before.results
        and not _AS_WRITTEN.match(row.primitive)
    ):
        yield "unknown primitive", _UNKNOWN.format(row.primitive)


def _why(visit: Visit, half: str) -> str:
    """Says why a product stays in float32."""
    if asked := _asked(visit.eqn):
        return f"it asks for precision={asked}. Leave that out to run it in {half}."
    if visit.whole is not None:
        name = visit.whole.primitive.name
        return f"it stands inside of {name}, which runs as a whole."
    if visit.why.decision.origin is Origin.DEFAULT:
        return f"no key of the policy names {visit.row.primitive}."
    return f"{visit.row.reason}."
