"""The commands, and the page: it stands alone, and survives any text."""

import builtins
import html
import importlib
import re
import tomllib
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from rich.console import Console

import flax_amp
from flax_amp import __main__, explain

pytestmark = pytest.mark.once

W, X = jnp.ones((8, 8)), jnp.ones((4, 8))
THIS = "debug.test_commands"


def deep(w, x):
    for i in range(6):
        with jax.named_scope(f"Layer_{i}"):
            x = jnp.tanh(x @ w @ w if i == 3 else x @ w)
            with jax.named_scope("norm"):
                x = x / jnp.sum(x * x, -1, keepdims=True)
    with jax.named_scope("head"):
        return jnp.dot(x, w, precision="highest").sum()


@pytest.fixture(scope="module")
def found():
    return explain(deep)(W, X)


def test_the_page_has_everything_and_needs_nothing_else(found, monkeypatch):
    page = found.to_html()
    assert page == found._repr_html_()
    assert not re.search(r"(src|href)=|https?:|@import|script|url\(", page)
    text = html.unescape(page)
    (problem,) = found.problems
    for words in (problem.message, problem.source, *found.notes):
        assert words in text, words
    # A row for each module and for each equation, with its figures and its reasons.
    assert text.count("<summary") == text.count("</details>") == 4
    for name in ("Layer_*  x6", "norm  x6", "head"):
        assert f"<b>{name}</b>" in text
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
    return lambda w, x: jnp.tanh(x @ w).mean(), (W, X)


def overflows():
    def loss(w, x):
        with jax.named_scope("net"):
            y = jnp.tanh((x * 1e5) @ w)
        with jax.named_scope("head"):
            return (y @ w).mean()

    return loss, (W, X)


def of_a_pair():
    model = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    return (model, optimizer), lambda model, x: (model(x) ** 2).mean(), X


def wrong():
    return deep, W


def raising():
    raise KeyError("no data")


def exits():
    raise SystemExit(3)


def run(capsys, *arguments):
    code = __main__.main(arguments)
    return code, capsys.readouterr()


def test_explain(capsys, tmp_path):
    path = tmp_path / "page.html"
    target = THIS.replace(".", "/")
    code, printed = run(capsys, "explain", target, "--html", str(path))
    assert code == 1 and printed.out.startswith("deep") and "  Layer_*" in printed.out
    assert path.read_text() == explain(deep)(*to_explain()[1]).to_html()
    code, printed = run(capsys, "explain", f"{THIS}:sound", "--precision", "bf16")
    assert code == 0 and "in bfloat16" in printed.out
    code, printed = run(capsys, "explain", f"{target}.py", "--only", "problems")
    assert "  Layer_*" not in printed.out
    code, printed = run(capsys, "explain", "./examples/digits", "--depth", "1")
    assert code == 0 and "  ConvNet" in printed.out and "    Conv_" not in printed.out


def test_nonfinite(capsys):
    code, printed = run(capsys, "nonfinite", f"{THIS}:overflows", "--precision", "fp16")
    assert code == 1 and '{"net": jnp.float32}' in printed.out
    code, printed = run(capsys, "nonfinite", f"{THIS}:of_a_pair", "--scale", "8")
    assert code == 0 and "scale 8: nothing" in printed.out


def test_compare(capsys):
    code, printed = run(capsys, "compare", f"{THIS}:of_a_pair", "--remedies", "0")
    assert code == 0 and "as exact as usual" in printed.out
    code, printed = run(capsys, "compare", f"{THIS}:overflows", "--precision", "fp16")
    assert code == 1 and "net in float32" in printed.out


@pytest.mark.parametrize("name", ["explain", "nonfinite", "compare", "measure"])
def test_help_says_what_the_function_returns(capsys, name):
    with pytest.raises(SystemExit) as ended:
        __main__.main([name, "--help"])
    printed = capsys.readouterr().out
    assert ended.value.code == 0 and f"usage: flax_amp {name}" in printed
    for form in ("(loss_fn, args)", "(state, loss_fn, ba", "((model, optimizer), lo"):
        assert form in printed
    assert "FUNCTION, by default to_explain, takes nothing" in printed
    with pytest.raises(SystemExit) as ended:
        __main__.main([name, "module", "--colour"])
    printed = capsys.readouterr().err
    assert ended.value.code == 2 and f"usage: flax_amp {name}" in printed
    assert "unrecognized arguments: --colour" in printed


@pytest.mark.parametrize("name", ["explain", "nonfinite", "compare", "measure"])
@pytest.mark.parametrize(
    "target, message",
    [
        ("no.such", "error: no.such: "),
        (f"{THIS}:nothing", f"nothing is missing in {THIS}; expected a function"),
        (f"{THIS}:wrong", "returned a tuple; expected a function"),
        (f"{THIS}:W", "W is a ArrayImpl in "),
        (f"{THIS}:raising", "KeyError: 'no data'"),
        (f"{THIS}:exits", "SystemExit: 3: it ends when it is imported; expected"),
        (":sound", "Empty module name"),
        ("../elsewhere.py:sound", "it is outside of "),
    ],
)
def test_errors_are_one_line(capsys, name, target, message):
    code, printed = run(capsys, name, target)
    assert code == 2 and not printed.out
    (line,) = printed.err.splitlines()
    assert line.startswith("error: ") and message in line


@pytest.mark.parametrize(
    "options, message",
    [
        (("--html", "/no/such/page.html"), "No such file"),
        (("--depth", "-1"), "got depth=-1"),
    ],
)
def test_wrong_options_are_one_line(capsys, options, message):
    code, printed = run(capsys, "explain", f"{THIS}:sound", *options)
    assert code == 2 and message in printed.err and not printed.out


def test_the_console_script():
    root = Path(flax_amp.__file__).parents[1]
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    module, _, name = project["scripts"]["flax_amp"].partition(":")
    assert getattr(importlib.import_module(module), name) is __main__.main
