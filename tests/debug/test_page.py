"""The page and the commands: it stands alone, and survives any text."""

import builtins
import html
import re

import jax
import jax.numpy as jnp
import pytest
from rich.console import Console

from flax_amp import __main__, explain

pytestmark = pytest.mark.once

W, X = jnp.ones((8, 8)), jnp.ones((4, 8))


def deep(w, x):
    for i in range(6):
        with jax.named_scope(f"Layer_{i}"):
            x = jnp.tanh(x @ w @ w if i == 3 else x @ w)
            with jax.named_scope("norm"):
                with jax.named_scope("total"):
                    total = jnp.sum(x * x, -1, keepdims=True)
                x = x / total
    return jnp.dot(x, w, precision="highest").sum()


@pytest.fixture(scope="module")
def found():
    return explain(deep)(W, X)


def test_it_has_everything_and_needs_nothing_else(found, monkeypatch):
    page = found.to_html()
    assert page == found._repr_html_()
    assert not re.search(r"(src|href)=|https?:|@import|script|url\(", page)
    text = html.unescape(page)
    (problem,) = found.problems
    for words in (problem.message, problem.source, *found.notes):
        assert words in text, words
    # A row for each module and for each equation, with its figures and its reasons.
    assert text.count("<summary") == 1 + 3 * 6
    for row in found.equations:
        facts = " · ".join(filter(None, (row.reason, row.result, row.source)))
        assert facts in text and f"{row.primitive} {row.shape}" in text
    report = str(found)
    # rich takes this class of the name `get_ipython` for a notebook.
    shell = type("ZMQInteractiveShell", (), {})
    monkeypatch.setattr(builtins, "get_ipython", shell, raising=False)
    assert Console().is_jupyter
    assert str(found) == report != ""


def test_text_of_users_ends_no_tag():
    def fun(x):
        with jax.named_scope("</details><b>{notes}"):
            return x * 2

    fun.__name__ = "</title><i>"
    page = explain(fun)(X).to_html()
    assert "<i>" not in page and "<b>{" not in page
    assert page.count("</details>") == page.count("<details") == 3


# --- the command line ----------------------------------------------------------------


def to_explain():
    return deep, (W, jax.ShapeDtypeStruct((4, 8), jnp.float32))


def sound():
    return jnp.sin, (X,)


def wrong():
    return deep, W


def raising():
    raise KeyError("no data")


def run(capsys, *arguments):
    code = __main__.main(["explain", *arguments])
    return code, capsys.readouterr()


def test_command(capsys, tmp_path):
    path = tmp_path / "page.html"
    code, printed = run(capsys, "debug/test_page", "--html", str(path))
    assert code == 1 and printed.out.startswith("deep") and "Layer_" in printed.out
    assert path.read_text() == explain(deep)(*to_explain()[1]).to_html()
    code, printed = run(capsys, "debug.test_page:sound", "--dtype", "bfloat16")
    assert code == 0 and "in bfloat16" in printed.out
    code, printed = run(capsys, "debug/test_page.py", "--only", "problems")
    assert "Layer_" not in printed.out.split("1 problem")[0]
    code, printed = run(capsys, "./examples/digits", "--depth", "1")  # of a state
    assert code == 0 and "ConvNet" in printed.out and "Conv_0" not in printed.out


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("no.such",), "error: no.such: "),
        (("debug/test_page:nothing",), "error: debug/test_page:nothing: "),
        (("debug/test_page:wrong",), "returned a tuple; expected (loss_fn, args)"),
        (("debug/test_page:W",), "expected a function"),
        (("debug/test_page:raising",), "KeyError: 'no data'"),
        (("debug/test_page:sound", "--html", "/no/such/page.html"), "No such file"),
        (("debug/test_page:sound", "--depth", "-1"), "got depth=-1"),
        ((":sound",), "Empty module name"),
        (("../elsewhere.py:sound",), "it is outside of "),
    ],
)
def test_command_errors_are_one_line(capsys, arguments, message):
    code, printed = run(capsys, *arguments)
    assert code == 2 and not printed.out
    (line,) = printed.err.splitlines()
    assert line.startswith("error: ") and message in line
