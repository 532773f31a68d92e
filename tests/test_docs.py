"""The public surface: documented; one version number; what pages name exists.

The examples in docstrings are run by pytest itself (`--doctest-modules`).
"""

import re
from pathlib import Path

import pytest

import flax_amp
from flax_amp import __main__

pytestmark = pytest.mark.once

ROOT = Path(__file__).parents[1]
PUBLIC = [name for name in flax_amp.__all__ if not name.startswith("__")]
PAGES = [ROOT / f"{name}.md" for name in ("README", "ARCHITECTURE", "CONTRIBUTING")]
PAGES += [*(ROOT / "docs").rglob("*.md"), *(ROOT / "flax_amp").rglob("*.md")]


def test_the_api_reference_has_every_public_name():
    """All but the factories of `optim`, which are those of optax."""
    pages = (ROOT / "docs" / "api").glob("*.md")
    page = "\n".join(path.read_text() for path in pages)
    rooms = (flax_amp.checkpoint, flax_amp.debug, flax_amp.metrics)
    names = {name for room in rooms for name in dir(room) if name[0] != "_"}
    listed = {*re.findall(r"^\.\. (?:auto\w+|data):: .*?(\w+)$", page, re.M)}
    assert {*PUBLIC, *names} - listed <= {"checkpoint", "debug", "metrics", "optim"}


def test_one_version_number():
    project = (ROOT / "pyproject.toml").read_text()
    assert [flax_amp.__version__] == re.findall(r'(?m)^version = "(.+)"', project)
    cited = (ROOT / "CITATION.cff").read_text().splitlines()
    assert f"version: {flax_amp.__version__}" in cited


def test_the_command_prints_the_version(capsys):
    with pytest.raises(SystemExit) as ended:
        __main__.main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"flax_amp {flax_amp.__version__}\n"


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
