"""`casts`: every cast that `amp` leaves in a forward pass, and why it is there.

`flax_amp.explain` finds them, with the module and the dtypes of each.
"""

import re
from collections import Counter

import flax_amp
from benchmarks.models import problem
from benchmarks.request import Request
from benchmarks.show import markdown_table, write_page
from flax_amp.debug import Explanation

_MODELS = ("vit_s16", "gpt_scan", "resnet50")
_HEADER = "where,down,up".split(",")
_TITLE = """# The casts that remain

Made by `python -m benchmarks casts` with `flax_amp.explain`: every cast between float32
and bfloat16 in the forward pass of the loss, by module: `down` and `up` are the numbers
of casts in a step, to bfloat16 and to float32. The backward pass has the transpose of
each; XLA fuses nearly all of them into what makes or reads them, so that they move no
bytes of their own."""


def run(asked: Request) -> None:
    """Writes casts.md into the folder of results; all variants are `amp_bf16`."""
    parts = [_TITLE]
    for model in asked.models or _MODELS:
        found = explained(model, asked.size)
        down: Counter[str] = Counter()
        up: Counter[str] = Counter()
        for row in found.added:
            where = re.sub(r"\d+", "*", row.path) or found.name  # of all layers
            down[where] += row.casts_down
            up[where] += row.casts_up
        rows = [
            [f"`{where}`", str(down[where] or ""), str(up[where] or "")]
            for where, count in (down + up).most_common()
            if count
        ]
        text = f"{found.totals.casts_down} casts down, {found.totals.casts_up} up."
        parts += [f"## {model}", text, markdown_table(_HEADER, rows, words=1)]
    write_page(asked.folder / "casts.md", "\n\n".join(parts) + "\n")


def explained(model: str, size: str = "full") -> Explanation:
    """Returns the explanation of a model in bfloat16; nothing is computed."""
    task = problem(model, size)
    explain = flax_amp.explain(task.loss, compute_dtype="bfloat16", backward=False)
    return explain(*task.shapes())
