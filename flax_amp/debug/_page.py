"""The page of `explain`: totals, problems, and a tree of modules and equations.

Its rows are made here, and a browser folds them by itself. The script in `page.html`
searches and sorts them.
"""

import re
from collections import Counter
from collections.abc import Iterator
from html import escape
from pathlib import Path

from flax_amp.debug._model import Equation, Explanation, Module, Totals, total
from flax_amp.debug._report import amount, bytes_text
from flax_amp.debug._terminal import (
    as_words,
    by_dtype,
    halves_and_others,
    headline,
    percent,
    totals_of,
)

_TEMPLATE = Path(__file__).with_name("page.html")
_COSTLY = 0.05  # the share of all FLOPs from which on a module is unfolded at first


def page(found: Explanation) -> str:
    """Returns one page that needs nothing else."""
    totals = totals_of(found)
    if found.stored_without_amp is not None:
        totals["without amp"] = f"{by_dtype(found.stored_without_amp)} stored"
    problems = (
        (*as_words(problem, found.totals), problem.message)
        for problem in found.problems
    )
    texts = {
        "title": escape(f"{found.name} in {found.compute_dtype}"),
        "totals": "".join(
            f"<dt>{label}</dt><dd>{escape(text)}</dd>" for label, text in totals.items()
        ),
        "count": headline(found),
        "problems": "".join(
            f"<li><b>{title}</b>: {escape(message)}<br><small>{escape(place)}</small>"
            for title, place, message in problems
        ),
        "rows": _module(found.root, found.totals.flops),
        "notes": escape(" ".join(f"Note: {note}." for note in found.notes)),
    }
    template = _TEMPLATE.read_text(encoding="utf-8")
    return re.sub(r"\{\{(\w+)\}\}", lambda match: texts[match[1]], template)


def _module(module: Module, flops: int) -> str:
    """Returns a module that can be folded; `flops` are those of the whole function."""
    own = list(map(_equation, module.equations))
    if own and module.children:
        # What a module computes itself is folded behind the modules in it.
        name = f"itself: {len(own)} equation{'s' * (len(own) > 1)}"
        own = [_folded(name, total(module.equations), own)]
    children = [_module(child, flops) for child in module.children.values()]
    is_open = not module.path or module.totals.flops > _COSTLY * flops
    is_open = is_open and bool(children)
    return _folded(module.name, module.totals, [*children, *own], is_open=is_open)


def _folded(
    name: str, totals: Totals, inside: list[str], *, is_open: bool = False
) -> str:
    row = "".join(_cells(name, totals, totals.low_flops, ""))
    start = f"<details{' open' * is_open} {_keys(totals)}>"
    return f"{start}<summary class=row>{row}</summary>{''.join(inside)}</details>"


def _equation(row: Equation) -> str:
    before, after = str(row.before), str(row.after)
    dtypes = after if before == after else f"{before} => {after}"
    facts = dtypes, row.reason, row.result, row.source, " / ".join(row.inside)
    times = f" x{row.times}" if row.times > 1 else ""
    name = f"{row.primitive} {row.shape}{times}"
    cells = _cells(name, row, row.low_flops, " · ".join(filter(None, facts)))
    kind = "low" if row.is_low else "dim"
    return f'<div class="row equation {kind}" {_keys(row)}>{"".join(cells)}</div>'


def _keys(row: Equation | Totals) -> str:
    """Returns what a row is sorted by."""
    casts = row.casts_down + row.casts_up
    stored = row.stored.total()
    return f"data-flops={row.flops} data-bytes={stored} data-casts={casts}"


def _cells(
    name: str, row: Equation | Totals, low_flops: int, facts: str
) -> Iterator[str]:
    yield f"<span class=name>{escape(name)}</span>"
    casts = f"{row.casts_down}/{row.casts_up}" if row.casts_down + row.casts_up else ""
    kind = "low" if low_flops == row.flops else "full"
    yield f"<span>{amount(row.flops) if row.flops else ''}</span>"
    yield f"<span class={kind}>{percent(low_flops, row.flops)}</span>"
    yield f"<span>{casts}</span>"
    for stored in halves_and_others(Counter(row.stored)):
        yield f"<span>{bytes_text(stored)}</span>"
    yield f"<span class=facts>{escape(facts)}</span>"
