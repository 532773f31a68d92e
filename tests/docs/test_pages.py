"""The code of the documentation runs: the blocks of a page one after the other."""

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
PAGES = {path.stem: path for path in sorted(DOCS.glob("*.md"))}
# In one page, blocks use what those before them have defined.
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("page", PAGES)
def test_code_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": page}
    text = PAGES[page].read_text()
    for block in BLOCK.finditer(text):
        # The line of an error is that in the page.
        before = "\n" * text.count("\n", 0, block.start(1))
        exec(compile(before + block[1], PAGES[page], "exec"), namespace)
