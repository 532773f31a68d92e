"""`casts`: every cast that `amp` leaves in a forward pass, and why it is there."""

import jax
import jax.numpy as jnp

from benchmarks.casts import Cast, Total, casts
from benchmarks.problem import problem
from benchmarks.request import Request
from benchmarks.show import markdown_table

MODELS = ("vit_s16", "gpt_scan", "resnet50")
_HEADER = "where,cast,made by,read by,rule,why,count,MB".split(",")
_TITLE = """# The casts that remain

Made by `python -m benchmarks casts` from the plan of the rewriter: every cast between
float32 and bfloat16 in the forward pass of the loss, with the rule that puts it there.
The backward pass has the transpose of each. `count` is per step, `MB` are the bytes of
the float32 side; XLA fuses nearly all of them into what makes or reads them, so that
they move no bytes of their own."""


def run(asked: Request) -> None:
    """Writes casts.md into the folder of results.

    Args:
      asked: models, size and folder of the request; all variants are `amp_bf16`.
    """
    parts = [_TITLE]
    for model in asked.models or MODELS:
        found = forward_casts(model, asked.size)
        down = sum(total.count for cast, total in found.items() if cast.down)
        up = sum(total.count for cast, total in found.items() if not cast.down)
        rows = [_row(cast, total) for cast, total in found.items()]
        parts += [
            f"## {model}",
            f"{down} casts down, {up} up.",
            markdown_table(_HEADER, rows, words=6),
        ]
    path = asked.folder / "casts.md"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n\n".join(parts) + "\n")
    print(f"wrote {path}")


def forward_casts(model: str, size: str = "full") -> dict[Cast, Total]:
    """Returns the casts of a model in bfloat16; nothing is computed."""
    task = problem(model, size)
    key = jax.random.key(0)
    others = dict(jax.eval_shape(task.init, key))
    params, batch = others.pop("params"), jax.eval_shape(task.batch, key)
    return casts(task.loss, params, others, batch, compute_dtype=jnp.bfloat16)


def _row(cast: Cast, total: Total) -> list[str]:
    return [
        f"`{cast.scope or 'loss'}`",
        "down" if cast.down else "up",
        cast.operand,
        cast.reader,
        cast.rule,
        cast.because,
        str(total.count),
        f"{total.bytes / 1e6:.1f}",
    ]
