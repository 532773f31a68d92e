"""The code of README.md runs as it is printed, each block alone."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
# Each with the heading above it. A diff is two programs.
BLOCKS = re.findall(r"```(python|diff)\n(.*?)```", README, flags=re.DOTALL)
HEADINGS = "Linen NNX nonfinite resume".split()


def programs():
    for heading, (kind, code) in zip(HEADINGS, BLOCKS, strict=True):
        if kind == "python":
            yield pytest.param(code, id=heading)
            continue
        for sign, name in (("-", "before"), ("+", "after")):
            lines = [x[1:] for x in code.splitlines() if x[:1] in (" ", sign, "")]
            yield pytest.param("\n".join(lines), id=f"{heading}-{name}")


@pytest.mark.parametrize("code", [*programs()])
def test_a_block_runs_alone(code, tmp_path, monkeypatch, capsys, request):
    monkeypatch.chdir(tmp_path)  # one saves to "run"
    names = {"__name__": "readme"}
    exec(compile(code, "readme.py", "exec"), names)
    printed = capsys.readouterr().out
    block = request.node.callspec.id
    if block.endswith("after"):
        assert names["metrics"]["grads_finite"]
    if block == "nonfinite":
        # What the page prints below, except for the name of the file.
        shown = re.search(r"```\n(loss_fn in bfloat16.*?)```", README, re.DOTALL)[1]
        lines = shown.replace("train.py", "readme.py").split("  ...")[0]
        assert lines.strip() in printed


def test_the_site_shows_the_first_of_them():
    index = (ROOT / "docs" / "index.md").read_text()
    assert re.findall(r"```diff\n(.*?)```", index, flags=re.DOTALL) == [BLOCKS[0][1]]
