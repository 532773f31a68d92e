"""The page: it stands alone, survives any text, and works in a browser."""

import builtins
import html
import json
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
                x = x / jnp.sum(x * x, -1, keepdims=True)
    return jnp.dot(x, w, precision="highest").sum()


@pytest.fixture(scope="module")
def page():
    return explain(deep)(W, X).to_html()


def data_in(page):
    return json.loads(re.search(r'id="data">(.*?)</script>', page, re.DOTALL)[1])


def test_it_needs_nothing_else(page):
    assert not re.search(r"(src|href)=|https?:|@import|fetch\(|url\(", page)
    assert "prefers-color-scheme: dark" in page and "{{" not in page
    assert data_in(page) == json.loads(json.dumps(explain(deep)(W, X).to_dict()))


def test_text_of_users_ends_no_tag():
    def fun(x):
        with jax.named_scope("</script><b>{{data}}"):
            return x * 2

    fun.__name__ = "</title><i>"
    found = explain(fun)(X)
    page = found.to_html()
    assert page.count("</script>") == 2 and "<i>" not in page and "<b>{{" not in page
    assert data_in(page) == json.loads(json.dumps(found.to_dict()))


def test_a_notebook_gets_the_page_in_a_frame():
    found = explain(deep)(W, X)
    source = re.fullmatch(
        r'<iframe srcdoc="(.*?)" .*</iframe>', found._repr_html_(), 16
    )
    assert html.unescape(source[1]) == found.to_html()


def test_a_notebook_prints_the_report_too(monkeypatch):
    """rich takes this class of the name `get_ipython` for a notebook."""
    report = str(explain(deep)(W, X))
    shell = type("ZMQInteractiveShell", (), {})
    monkeypatch.setattr(builtins, "get_ipython", shell, raising=False)
    assert Console().is_jupyter
    assert str(explain(deep)(W, X)) == report != ""


def chromium():
    names = ("chromium", "chromium-browser", "google-chrome")
    return next(filter(None, map(shutil.which, names)), None)


# The texts of cells that have less room than they need.
CLIPPED = """() => [...document.querySelectorAll("#tree .row > *, #legend span")]
    .filter((x) => x.scrollWidth > x.clientWidth + 1).map((x) => x.textContent)"""


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1360, 390])
def test_in_a_browser(page, scheme, width, tmp_path):
    """It takes `pip install playwright`, and Chromium from `apt-get`."""
    playwright = pytest.importorskip("playwright.sync_api")
    if chromium() is None:
        pytest.skip("needs Chromium")
    path = tmp_path / "page.html"
    path.write_text(page)
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=chromium())
        size = {"width": width, "height": 844}
        tab = browser.new_page(color_scheme=scheme, viewport=size)
        errors = []
        tab.on("pageerror", lambda error: errors.append(str(error)))
        tab.on("console", lambda m: m.type == "error" and errors.append(m.text))
        tab.goto(path.as_uri())
        rows = tab.locator("#tree .row")
        # It opens on the modules, the costliest first, and on no equation.
        names = tab.locator("#tree .name").all_text_contents()
        assert names[:2] == ["deep", "Layer_3"] and names[-1] == "itself: 2 equations"
        assert tab.locator("#tree .equation").count() == 0
        cards = tab.text_content("#totals")
        assert "stored for the backward pass" in cards and "in float32" in cards
        assert all(sign in tab.text_content("#legend") for sign in "⇒→↓↑")
        tab.click("#fold")
        assert rows.count() == 1
        tab.click("#unfold")
        # 6 layers with a norm in each, and the rows for what modules do themselves.
        assert rows.count() == len(data_in(page)["modules"]["children"]) * 3 + 2 + len(
            explain(deep)(W, X).equations
        )
        assert tab.evaluate(CLIPPED) == []
        tab.fill("input", "reduce_sum")
        assert "7 equations match" in tab.text_content("#found")
        tab.fill("input", "")
        tab.click("#fold")
        tab.click("#tree .row >> nth=0")
        tab.select_option("select", "casts")
        cells = tab.locator("#tree .row .n:nth-child(4)").all_text_contents()
        casts = [sum(map(int, text.split("/"))) for text in cells if text]
        assert casts == sorted(casts, reverse=True) and len({*casts}) > 2
        # No part of it stands beyond the screen.
        assert tab.evaluate("document.documentElement.scrollWidth") <= width
        assert errors == []
        browser.close()


# --- the command line ----------------------------------------------------------------


def to_explain():
    return deep, (W, jax.ShapeDtypeStruct((4, 8), jnp.float32))


def sound():
    return jnp.sin, (X,)


def run(capsys, *arguments):
    code = __main__.main(["explain", *arguments])
    return code, capsys.readouterr()


def test_command(capsys, tmp_path):
    path = tmp_path / "page.html"
    code, printed = run(capsys, "debug/test_page", "--html", str(path))
    assert code == 1 and printed.out.startswith("deep") and "Layer_" in printed.out
    assert data_in(path.read_text())["name"] == "deep"
    code, printed = run(capsys, "debug.test_page:sound", "--dtype", "bfloat16")
    assert code == 0 and "in bfloat16" in printed.out
    code, printed = run(capsys, "debug/test_page.py", "--only", "problems")
    assert "Layer_" not in printed.out.split("1 problem")[0]


def test_command_for_a_state(capsys):
    code, printed = run(capsys, "./examples/digits", "--depth", "1")
    assert code == 0 and "ConvNet" in printed.out and "Conv_0" not in printed.out


def wrong():
    return deep, W


@pytest.mark.parametrize("target", ["no.such", "debug/test_page:nothing"])
def test_command_without_a_function(capsys, target):
    code, printed = run(capsys, target)
    assert code == 2 and printed.err.startswith(f"error: {target}: ")


def test_command_with_a_wrong_function(capsys):
    code, printed = run(capsys, "debug/test_page:wrong")
    assert code == 2 and "returned a tuple; expected (loss_fn, args)" in printed.err


def raising():
    raise KeyError("no data")


@pytest.mark.parametrize(
    "arguments, message",
    [
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
