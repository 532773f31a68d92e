"""The public surface: listed, importable, documented; one version number.

The examples in docstrings are run by pytest itself (`--doctest-modules`).
"""

import ast
import inspect
import re
import types
import typing
from pathlib import Path

import pytest

import flax_amp
from flax_amp import __main__

pytestmark = pytest.mark.once

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "flax_amp").rglob("*.py"))
PUBLIC = [name for name in flax_amp.__all__ if not name.startswith("__")]
PAGES = [ROOT / f"{name}.md" for name in ("README", "ARCHITECTURE", "CONTRIBUTING")]
PAGES += [*(ROOT / "docs").rglob("*.md"), *(ROOT / "flax_amp").rglob("*.md")]


def test_all_is_complete():
    public = {
        name
        for name, value in vars(flax_amp).items()
        if not name.startswith("_")
        # a submodule is an attribute of its package merely by being imported
        and not isinstance(value, types.ModuleType)
    }
    missing = public - set(flax_amp.__all__)
    assert not missing, f"importable but not in flax_amp.__all__: {sorted(missing)}"
    assert len(flax_amp.__all__) == len(set(flax_amp.__all__))


def has_comment(name):
    """True if the value `name` is assigned right below a comment, or above a string."""
    for path in SOURCES:
        lines = path.read_text().splitlines()
        body = ast.parse("\n".join(lines)).body
        for node, after in zip(body, [*body[1:], None], strict=True):
            targets = getattr(node, "targets", [getattr(node, "target", None)])
            if any(isinstance(t, ast.Name) and t.id == name for t in targets):
                above = lines[node.lineno - 2] if node.lineno > 1 else ""
                below = after.value if isinstance(after, ast.Expr) else None
                return above.startswith("#") or isinstance(below, ast.Constant)
    return False


def test_public_names_are_documented():
    for name in PUBLIC:
        value = getattr(flax_amp, name)
        is_alias = typing.get_origin(value) is not None  # of a type: has no docstring
        if not is_alias and callable(value) or isinstance(value, types.ModuleType):
            words = (inspect.getdoc(value) or "").split()
            assert len(words) >= 5, f"flax_amp.{name} has no docstring worth the name"
        else:
            assert has_comment(name), f"nothing says what flax_amp.{name} is"


def test_the_api_reference_has_every_public_name():
    """All but the factories of `optim`, which are those of optax."""
    pages = (ROOT / "docs" / "api").glob("*.md")
    page = "\n".join(path.read_text() for path in pages)
    rooms = (flax_amp.checkpoint, flax_amp.debug, flax_amp.metrics)
    names = {name for room in rooms for name in dir(room) if name[0] != "_"}
    listed = set(
        re.findall(r"^\.\. auto\w+:: .*?(\w+)$|^\.\. data:: (\w+)$", page, re.M)
    )
    listed = {name for pair in listed for name in pair}
    assert {*PUBLIC, *names} - listed <= {"checkpoint", "debug", "metrics", "optim"}


def test_every_module_says_what_it_is_for():
    silent = [p for p in SOURCES if not ast.get_docstring(ast.parse(p.read_text()))]
    assert not silent


def test_one_version_number():
    declared = re.search(
        r'(?m)^version = "(.+)"', (ROOT / "pyproject.toml").read_text()
    )
    assert declared is not None
    assert flax_amp.__version__ == declared.group(1)
    cited = (ROOT / "CITATION.cff").read_text().splitlines()
    assert f"version: {flax_amp.__version__}" in cited


def test_the_command_prints_the_version(capsys):
    with pytest.raises(SystemExit) as ended:
        __main__.main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"flax_amp {flax_amp.__version__}\n"


def test_public_names_are_in_the_readme_or_the_changelog():
    files = [ROOT / "README.md", ROOT / "CHANGELOG.md"]
    text = "".join(path.read_text() for path in files if path.exists())
    unnamed = {name for name in PUBLIC if name not in text}
    assert not unnamed, f"neither README.md nor CHANGELOG.md names {sorted(unnamed)}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_a_page_names_exists(page):
    """Links and their headings, files of the project, and targets of make."""
    text = page.read_text()
    for link, heading in re.findall(r"\]\((?!http)([^)#]*)#?([\w-]*)\)", text):
        if "_repository/" in link:  # copies, which `make docs` makes
            link = Path("..", *Path(link).parts[1:])
        target = page.parent / link if link else page
        assert target.exists(), link
        if heading:
            titles = re.findall(r"(?m)^#+ (.+)$", target.read_text())
            slugs = [
                re.sub(r"[^\w -]", "", t).lower().replace(" ", "-") for t in titles
            ]
            assert heading in slugs, f"{link} has no heading {heading}"
    for path in re.findall(r"`((?:flax_amp|tests|\.ci)/[\w./]+)`", text):
        assert (ROOT / path).exists(), path
    targets = re.findall(r"(?m)^([a-z-]+):", (ROOT / "Makefile").read_text())
    assert {*re.findall(r"(?m)(?:^|`)make ([a-z-]+)", text)} <= {*targets}
