"""What a person has to act on, found in the rows of `explain`.

Findings with the same message are one problem: twelve layers whose matmuls ask for
`precision=HIGHEST` are one line, not twelve.
"""

import dataclasses
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import jax.numpy as jnp
from jax.extend.core import jaxprs_in_params

from flax_amp import _compat
from flax_amp._compat import Eqn, Jaxpr
from flax_amp._rewriter.primitives import (
    TRAITS,
    Kind,
    is_matrix_product,
    kind_of,
    walk,
)
from flax_amp._rewriter.roles import asked_precision
from flax_amp._training.arguments import first_of
from flax_amp.debug._place import is_derivative
from flax_amp.debug._record import Equation, Visit, float_factors
from flax_amp.debug._report import is_half, short
from flax_amp.policy import Origin

# The most important first.
KINDS = (
    "policy",
    "float32 product",
    "complex product",
    "own dtype",
    "unknown primitive",
    "second derivative",
)
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
_OF_LOSS = ("float32: no matmul reads it", "float32: a scalar")  # results on its way


@dataclasses.dataclass(frozen=True)
class Problem:
    """Something that a person has to act on, or to know."""

    kind: str  #: a short name, such as `float32 product`
    message: str  #: what was found, and what can be done
    paths: tuple[
        str, ...
    ] = ()  #: the modules; of more than three, with `*` for numbers
    source: str = ""  #: the line of the first equation
    times: int = 0  #: how often the equations run that it concerns
    flops: int = 0  #: of the matmuls among them

    def title(self, flops: int) -> str:
        """Its kind, how often it is met, and its share of so many FLOPs."""
        title = self.kind + (f" x{self.times}" if self.times else "")
        if not self.flops or not flops:
            return title
        part = self.flops / flops
        return f"{title}, {f'{part:.0%}' if part >= 0.01 else '<1%'} of FLOPs"

    @property
    def where(self) -> str:
        """Its modules and its line as words; empty for a policy."""
        modules = _modules(self.paths)
        inside = "in " if modules and self.paths != ("",) else ""
        return ", ".join(filter(None, (f"{inside}{modules}", self.source)))


def _modules(paths: Sequence[str]) -> str:
    return first_of([path or "outside of any module" for path in paths])


def without_numbers(path: str) -> str:
    """Returns a path without the numbers of layers: `GPT/Block_*`."""
    return re.sub(r"\d+", "*", path)


def find_problems(
    visits: Sequence[Visit], warnings: Sequence[str], half: Any
) -> list[Problem]:
    """Returns the problems, the most important first.

    Args:
      visits: the equations.
      warnings: the messages that `amp` gives for this function.
      half: the compute dtype.
    """
    found: dict[tuple[str, str], list[Equation]] = defaultdict(list)
    for visit in visits if half != jnp.float32 else ():
        for kind_and_message in _findings(visit, half.name):
            found[kind_and_message].append(visit.row)
    problems = [Problem("policy", x.removeprefix("amp_policy: ")) for x in warnings]
    for (kind, message), rows in found.items():
        paths = dict.fromkeys(row.path for row in rows)
        if len(paths) > 3:
            paths = dict.fromkeys(map(without_numbers, paths))
        times, flops = sum(row.times for row in rows), sum(row.flops for row in rows)
        place = tuple(paths), rows[0].source
        problems.append(Problem(kind, message, *place, times, flops))
    return sorted(problems, key=lambda p: (KINDS.index(p.kind), -p.flops, -p.times))


def _findings(visit: Visit, half: str) -> Iterator[tuple[str, str]]:
    """Yields the kind and the message of what is wrong with an equation."""
    row, is_product = visit.row, is_matrix_product(visit.eqn)
    floats = list(dict.fromkeys(float_factors(row.before.operands)))
    names = " and ".join(map(short, floats))
    if is_product and row.is_low and is_derivative(visit.eqn):
        yield "second derivative", _SECOND
    if kind_of(row.primitive) is not Kind.PRODUCT:
        if _is_unknown(visit):
            yield "unknown primitive", _UNKNOWN.format(row.primitive)
    elif is_product and any("complex" in dtype for dtype in floats):
        yield "complex product", _COMPLEX.format(names, half)
    elif any(map(is_half, floats)):
        yield "own dtype", _OWN.format(names)
    elif is_product and floats and not (row.is_low or _is_chosen(visit)):
        yield "float32 product", f"stays in {floats[0]}: {_why(visit, half)}"


def _is_chosen(visit: Visit) -> bool:
    """Whether the user, or JAX for its own numerics, has chosen a product's dtype."""
    decision = visit.why.decision
    if visit.row.reason == f"{decision.origin.value} {decision.key}":
        # The policy that is the default lets all products run in half.
        return decision.key == "amp_stop" or decision.origin is not Origin.DEFAULT
    is_of_jax = asked_precision(visit.eqn) and _compat.is_numerics_of_jax(visit.eqn)
    return bool(is_of_jax) or visit.row.is_in_fp8


def _is_unknown(visit: Visit) -> bool:
    row = visit.row
    return (
        row.primitive not in TRAITS
        and visit.whole is None
        and visit.why.decision.origin is Origin.DEFAULT
        and "float32" in row.before.results
        and not _AS_WRITTEN.match(row.primitive)
    )


def _why(visit: Visit, half: str) -> str:
    """Says why a product stays in float32."""
    if asked := asked_precision(visit.eqn):
        return f"it asks for precision={asked}. Leave that out to run it in {half}."
    if visit.whole is not None:
        name = visit.whole.primitive.name
        return f"it stands inside of {name}, which runs as a whole."
    if visit.why.decision.origin is Origin.DEFAULT:
        return f"no key of the policy names {visit.row.primitive}."
    return f"{visit.row.reason}."


def loss_reads(visits: Sequence[Visit], closed: Jaxpr) -> tuple[str, ...]:
    """Returns which half-precision results the arithmetic of a scalar loss reads."""
    is_loss = [getattr(x, "shape", None) for x in closed.out_avals[:1]] == [()]
    if not is_loss or not any(visit.row.is_low for visit in visits):
        return ()
    rows: dict[Any, tuple[Equation, bool]] = {}
    levels: dict[Any, int] = {}  # how many matmuls stand before a result
    found: dict[str, None] = {}
    for row, eqn, *_ in visits:
        operands = [v for v in _compat.variables(eqn.invars) if v in rows]
        level = max((levels[v] for v in operands), default=0)
        for v in operands if row.result.startswith(_OF_LOSS) else ():
            made, has_matmul = rows[v]
            is_older = made.result.startswith("rounded") and levels[v] < level
            if is_older or has_matmul or made.result == "half precision":
                of = f" of {made.path}" if made.path else ""
                found[f"{made.primitive}{of}, {made.source}"] = None
        # What a loop or a call gives is computed from what its matmuls round.
        has_matmul = _has_matmul(eqn)
        rows |= dict.fromkeys(eqn.outvars, (row, has_matmul))
        level += has_matmul or kind_of(eqn) is Kind.PRODUCT
        levels |= dict.fromkeys(eqn.outvars, level)
    return tuple(found)


def _has_matmul(eqn: Eqn) -> bool:
    """Whether a matmul stands in the bodies of an equation."""
    inside = chain.from_iterable(map(walk, jaxprs_in_params(eqn.params)))
    return any(is_matrix_product(visit.eqn) for visit in inside)
