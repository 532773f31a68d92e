"""What a person has to act on, found in the equations of a walk.

Each finding has a kind and a message. Findings with the same message are one problem:
twelve layers whose products ask for `precision=HIGHEST` are one line, not twelve.
"""

import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

import jax.numpy as jnp
from jax.extend.core import jaxprs_in_params

from flax_amp import _compat
from flax_amp._compat import Eqn
from flax_amp._jaxpr.evaluate import evaluate
from flax_amp._jaxpr.traits import (
    Kind,
    ProductKind,
    Trait,
    has,
    is_matrix_product,
    kind_of,
    product_kind,
)
from flax_amp._jaxpr.walk import walk
from flax_amp._rewriter.plan import (
    Mode,
    Paint,
    Plan,
    Reason,
    ReasonKind,
    has_paint,
)
from flax_amp._training.arguments import first_of
from flax_amp.debug._model import Equation, Problem, float_factors, is_half, short
from flax_amp.debug._shadowed import shadowed_keys
from flax_amp.debug._walk import Visit
from flax_amp.policy import Origin, Policy

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

# Beyond these, what a float16 number is multiplied by leaves half of its range unused.
_TINY, _LARGE = 1e-3, 1e3

# A sum in a carry of half precision is named beyond so many steps. Residual streams of
# layers are such sums as well, but shorter ones.
_STEPS = 100

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
        found |= shadowed_keys(visits, policy, compute_dtype)
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
    yield from _of_factor(visit)
    if row.primitive in ("scan", "while") and visit.step.mode is Mode.RULE:
        yield from _of_carry(visit)
        yield from _of_sum_in_carry(visit)


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
        what = f"has factors in {names}" if len(floats) > 1 else f"runs in {names}"
        yield (
            "own dtype",
            f"{what} without amp: its author set a dtype. Leave out dtype= or the cast "
            "to let the policy decide.",
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
    row, length = visit.row, _terms(visit.eqn)
    dtype = row.after.operands[0]
    # From this number of equal terms on, one more does not change their sum.
    limit = round(1 / float(jnp.finfo(dtype).eps)) if is_half(dtype) else 0
    if limit and isinstance(length, int) and length >= limit:
        yield (
            "risk",
            f"{row.primitive} adds {length} numbers in {dtype} ({row.reason}). From "
            f"{limit} on, small terms get lost; run it in float32.",
        )


def _terms(eqn: Eqn) -> Any:
    """Returns how many numbers go into a result of a sum; 1 if that is not known."""
    name, params = eqn.primitive.name, eqn.params
    shape = eqn.invars[0].aval.shape
    if product_kind(eqn) is ProductKind.SUM:
        (contracted, _), _ = params["dimension_numbers"]
        return math.prod(shape[axis] for axis in contracted)
    if not has(eqn, Trait.ADDS_UP) and not (
        name in ("reduce", "reduce_window") and _adds_up(params)
    ):
        return 1
    if "window_dimensions" in params:
        return math.prod(params["window_dimensions"])
    if name.startswith("scatter"):  # some result gets as many as there are on average
        size, updates = (math.prod(eqn.invars[i].aval.shape) for i in (0, 2))
        return updates // size if isinstance(size, int) and size else 1
    axes = params.get("axes", params.get("dimensions", (params.get("axis"),)))
    return math.prod(shape[axis] for axis in axes if isinstance(axis, int))


def _adds_up(params: dict[str, Any]) -> bool:
    """Whether the body of a reduction is an addition."""
    visits = (visit for body in jaxprs_in_params(params) for visit in walk(body))
    return [visit.eqn.primitive.name for visit in visits] == ["add"]


def _of_range(row: Equation) -> Iterator[Finding]:
    if "float16" in row.after.operands and has(row.primitive, Trait.WIDE_RANGE):
        yield (
            "risk",
            f"{row.primitive} runs in float16 ({row.reason}), which ends at 65504 and "
            "begins at 6e-8; run it in float32.",
        )


def _of_factor(visit: Visit) -> Iterator[Finding]:
    row = visit.row
    if row.kept != "float16" or row.primitive not in ("mul", "div"):
        return
    for position, value in enumerate(visit.values):
        constant = None if value is None else value.constant
        if not constant or (row.primitive == "div" and position == 0):
            continue
        size = abs(constant) if row.primitive == "mul" else 1 / abs(constant)
        if size < _TINY or size > _LARGE:
            limit = "become 0 below 6e-8" if size < 1 else "overflow at 65504"
            yield (
                "risk",
                f"{row.primitive} by {constant:g}, kept in float16: results, or "
                f"gradients, {limit}. Move the factor into the loss or into float32.",
            )


def _of_sum_in_carry(visit: Visit) -> Iterator[Finding]:
    """Finds a carry that `amp` keeps in half and to which each step adds."""
    row, eqn, body = visit.row, visit.eqn, visit.step.detail.body
    length = eqn.params.get("length")
    is_known = isinstance(length, int)
    if is_known and length <= _STEPS:
        return
    steps = str(length) if is_known else "an unknown number of"
    first, _ = _carry(eqn)
    for i, value in enumerate(visit.step.detail.carry):
        old, new = body.jaxpr.invars[first + i], body.jaxpr.outvars[i]
        if has_paint(value, Paint.LOW) and old is not new and _adds(body, first, i):
            yield (
                "risk",
                f"the carry of a {row.primitive} adds up over {steps} steps in half. "
                f"From about {_STEPS} on, small terms get lost; put flax_amp.amp_stop "
                "around the sum.",
            )


def _adds(body: Plan, first: int, i: int) -> bool:
    """Whether a carry of a loop becomes itself, or a sum of itself and other terms.

    Args:
      body: the plan of its body.
      first: the index of the input that is the first carry.
      i: the number of the carry.
    """
    old = object()

    def run(eqn: Eqn, terms: Sequence[Any]) -> list[Any]:
        name = eqn.primitive.name
        if name in ("sub", "convert_element_type"):
            terms = terms[:1]
        elif name not in ("add", "add_any"):
            terms = ()
        found = old if any(term is old for term in terms) else None
        return [found] * len(eqn.outvars)

    inputs = range(len(body.jaxpr.invars))
    operands = [old if n == first + i else None for n in inputs]
    return evaluate(body, operands, run)[i] is old


def _carry(eqn: Eqn) -> tuple[int, int]:
    """Returns the index of the first carry in the body of a loop, and their number."""
    if eqn.primitive.name == "scan":
        return _compat.scan_counts(eqn)
    return eqn.params["body_nconsts"], len(eqn.outvars)


def _of_carry(visit: Visit) -> Iterator[Finding]:
    eqn, row = visit.eqn, visit.row
    first, count = _carry(eqn)
    first += eqn.params.get("cond_nconsts", 0)  # of a `while`
    halves = set(filter(is_half, row.before.operands[first : first + count]))
    if halves:
        yield (
            "risk",
            f"the carry of a {row.primitive} is in {', '.join(sorted(halves))} without "
            "amp: what adds up over its steps gets rounded at each one.",
        )
