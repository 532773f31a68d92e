"""The page and the command: it stands alone, survives any text, works in a browser."""

import builtins
import html
import re
import shutil

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


def test_it_has_everything_and_needs_nothing_else(found):
    page = found.to_html()
    assert not re.search(r"(src|href)=|https?:|@import|fetch\(|url\(", page)
    assert "color-scheme: light dark" in page and "{{" not in page
    text = html.unescape(page)
    (problem,) = found.problems
    for words in (problem.message, problem.source, "without amp", *found.notes):
        assert words in text, words
    # A row for each module and for each equation, with its figures and its reasons.
    assert text.count("<summary") == 2 + 5 * 6  # with those of what is in itself
    assert text.count('class="row equation') == len(found.equations)
    for row in found.equations:
        facts = " · ".join(filter(None, (row.reason, row.result, row.source)))
        assert facts in text and f"data-flops={row.flops}" in text
    assert f"data-bytes={found.totals.stored.total()}" in text


def test_text_of_users_ends_no_tag():
    def fun(x):
        with jax.named_scope("</script><b>{{notes}}"):
            return x * 2

    fun.__name__ = "</title><i>"
    page = explain(fun)(X).to_html()
    assert page.count("</script>") == 1 and "<i>" not in page and "<b>{{" not in page
    assert "script&gt;&lt;b&gt;{{notes}}" in page


def test_a_notebook_gets_the_page_in_a_frame(found, monkeypatch):
    source = re.fullmatch(
        r'<iframe srcdoc="(.*?)" .*</iframe>', found._repr_html_(), re.DOTALL
    )
    assert html.unescape(source[1]) == found.to_html()
    report = str(found)
    # rich takes this class of the name `get_ipython` for a notebook.
    shell = type("ZMQInteractiveShell", (), {})
    monkeypatch.setattr(builtins, "get_ipython", shell, raising=False)
    assert Console().is_jupyter
    assert str(found) == report != ""


def chromium():
    names = ("chromium", "chromium-browser", "google-chrome")
    return next(filter(None, map(shutil.which, names)), None)


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_in_a_browser(found, scheme, tmp_path):
    """It takes `pip install playwright`, and Chromium from `apt-get`."""
    playwright = pytest.importorskip("playwright.sync_api")
    if chromium() is None:
        pytest.skip("needs Chromium")
    path = tmp_path / "page.html"
    path.write_text(found.to_html())
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(
            executable_path=chromium(), args=["--no-sandbox"]
        )
        tab = browser.new_page(color_scheme=scheme)
        errors = []
        tab.on("pageerror", lambda error: errors.append(str(error)))
        tab.on("console", lambda m: m.type == "error" and errors.append(m.text))
        tab.goto(path.as_uri())
        rows = tab.locator("#tree .row:not(.head):visible")

        def names():
            every = [row.strip() for row in rows.locator(".name").all_inner_texts()]
            return [name.lstrip("▸▾ ") for name in every]

        # It opens on the modules, the costliest first, and on no equation.
        assert names()[:2] == ["deep", "Layer_3"] and names()[-1].startswith("itself: ")
        assert "norm" in names() and "total" not in names()
        assert tab.locator(".equation:visible").count() == 0
        tab.click("#fold")
        assert names() == ["deep"]
        tab.click("#unfold")
        assert rows.count() == 32 + len(found.equations)
        tab.fill("input", "reduce_sum")
        assert "7 equations match" in tab.text_content("#found")
        assert tab.locator(".equation:visible").count() == 7
        tab.fill("input", "")
        tab.select_option("select", "casts")
        casts = tab.eval_on_selector_all(
            "#tree > details > details", "rows => rows.map((x) => +x.dataset.casts)"
        )
        assert casts == sorted(casts, reverse=True) and len({*casts}) > 2
        tab.select_option("select", "")
        assert names()[1] == "Layer_0"
        assert errors == []
        browser.close()


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
