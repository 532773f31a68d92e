"""`docs/precisions.md`: what each equation of some programs computes in."""

import inspect
import os
from pathlib import Path

import jax
import pytest
from _precision_programs import PROGRAMS

import flax_amp

PAGE = Path(__file__).parents[2] / "docs" / "precisions.md"
HEAD = """# Equation by equation

What the rule of [policies](policies.md) makes of six programs in bfloat16, as \
`flax_amp.explain(f)(*args)` tells it. Equations of integers and of arguments alone are\
 left out.
"""
WRITE = "FLAX_AMP_WRITE_PAGES"


def page() -> str:
    """Returns the page; the programs are written as users write them."""
    with jax.numpy_rank_promotion("allow"):
        return _page()


def _page() -> str:
    return "\n".join([HEAD, *(_section(*program) for program in PROGRAMS)])


def _section(function, helpers, args) -> str:
    code = "\n".join(map(inspect.getsource, (*helpers, function)))
    rows = [
        f"| `{row.primitive}` | {row.shape} | {row.computes_in} | {row.result} |"
        for row in flax_amp.explain(function)(*args).root.walk()
        if row.kept_by and "arguments and constants" not in row.kept_by
    ]
    table = "\n".join(
        [
            "| equation | shape | computes in | result |",
            "| --- | --- | --- | --- |",
            *rows,
        ]
    )
    return f"## `{function.__name__}`\n\n```python\n{code}```\n\n{table}\n"


@pytest.mark.skipif(jax.__version__ >= "0.11", reason="jaxprs differ between versions")
def test_the_page_is_what_explain_says():
    if os.environ.get(WRITE):
        PAGE.write_text(page())
    assert PAGE.read_text() == page(), f"{WRITE}=1 pytest {__file__} writes the page"
