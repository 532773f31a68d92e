"""`casts`: every cast that `amp` leaves in a forward pass, and why it is there.

The casts are read from the rewritten program. The rule behind each follows from what
makes and what reads it (see the families of primitives in `flax_amp.policy`).
"""

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Literal

import flax_amp
from benchmarks.models import problem
from benchmarks.request import Request
from benchmarks.show import markdown_table
from flax_amp.policy import ACCUMULATION_OPS, LOW_OPS, MOVE_OPS, RANGE_OPS

_MODELS = ("vit_s16", "gpt_scan", "resnet50")
_HEADER = "where,cast,made by,read by,why,count,MB".split(",")
_TITLE = """# The casts that remain

Made by `python -m benchmarks casts` from the rewritten program: every cast between
float32 and bfloat16 in the forward pass of the loss, with the rule that puts it there.
The backward pass has the transpose of each. `count` is per step, `MB` are the bytes of
the float32 side; XLA fuses nearly all of them into what makes or reads them, so that
they move no bytes of their own."""
# What the program does not compute itself
_OUTSIDE = ("parameter", "input", "constant", "carry")


class Cast(NamedTuple):
    """A kind of cast; `made_by` and `read_by` are primitives, or say what is outside.

    `down` means from float32 to bfloat16, and `scope` has no numbers of layers.
    """

    scope: str
    down: bool
    made_by: str
    read_by: str

    @property
    def why(self) -> str:
        """The rule behind the cast."""
        if self.down and self.made_by in _OUTSIDE:
            if self.read_by in LOW_OPS:
                return "products read the compute dtype; a weight is cast at each use"
            return "what comes from outside follows low-precision data (leaf rule)"
        if self.down:
            if self.made_by == "exp":
                return "largest array, between 0 and 1: computed in float32, stored low"
            return "a float32 result returns to the compute dtype (exit rule)"
        if self.read_by in RANGE_OPS or self.read_by in ACCUMULATION_OPS:
            return "the policy runs it in float32: a sum, a power, an exponential"
        return "only read in float32, or joins a float32 statistic (backward demand)"


class Totals(NamedTuple):
    """How often each cast is run in a step, and the bytes of its float32 side."""

    times: Counter[Cast]
    bytes: Counter[Cast]


def run(asked: Request) -> None:
    """Writes casts.md into the folder of results; all variants are `amp_bf16`."""
    parts = [_TITLE]
    for model in asked.models or _MODELS:
        found = casts(model, asked.size)
        up = sum(n for cast, n in found.times.items() if not cast.down)
        rows = [
            [
                f"`{cast.scope or 'loss'}`",
                "down" if cast.down else "up",
                cast.made_by,
                cast.read_by,
                cast.why,
                str(found.times[cast]),
                f"{size / 1e6:.1f}",
            ]
            for cast, size in found.bytes.most_common()
        ]
        table = markdown_table(_HEADER, rows, words=5)
        text = f"{found.times.total() - up} casts down, {up} up."
        parts += [f"## {model}", text, table]
    path = asked.folder / "casts.md"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n\n".join(parts) + "\n")
    print(f"wrote {path}")


def casts(model: str, size: str = "full") -> Totals:
    """Returns the casts of a model in bfloat16; nothing is computed."""
    task, key = problem(model, size), jax.random.key(0)
    others = dict(jax.eval_shape(task.init, key))
    params, batch = others.pop("params"), jax.eval_shape(task.batch, key)
    # Nothing marked for the backward pass stands between a cast and its reader then.
    loss = flax_amp.amp(task.loss, compute_dtype=jnp.bfloat16, recompute="never")
    jaxpr = jax.make_jaxpr(loss)(params, others, batch).jaxpr
    count = len(jax.tree.leaves(params))
    origins = ["parameter"] * count + ["input"] * (len(jaxpr.invars) - count)
    totals = Totals(Counter(), Counter())
    _walk(jaxpr, origins, (), 1, totals)
    return totals


def _walk(
    jaxpr: Any, origins: Sequence[str], scopes: Any, times: int, totals: Totals
) -> list[str]:
    """Notes the casts of a jaxpr that is run several times; returns its makers."""
    made = dict(zip(jaxpr.invars, origins, strict=True))
    readers: dict[Any, str] = {}  # the first of each variable
    for eqn in jaxpr.eqns:
        for v in eqn.invars:
            if not isinstance(v, Literal):
                readers.setdefault(v, eqn.primitive.name)

    def maker(v: Any) -> str:
        return "constant" if isinstance(v, Literal) else made.get(v, "constant")

    for eqn in jaxpr.eqns:
        name, operands = eqn.primitive.name, [maker(v) for v in eqn.invars]
        stack = eqn.source_info.name_stack.stack
        here = (*scopes, *(s.name for s in stack if type(s).__name__ == "Scope"))
        results = [name] * len(eqn.outvars)
        params = (getattr(p, "jaxpr", p) for p in eqn.params.values())
        inner = next((p for p in params if hasattr(p, "eqns")), None)
        dtypes = [str(v.aval.dtype) for v in (*eqn.invars, *eqn.outvars)]
        if name in ("convert_element_type", "flax_amp_saturate"):
            results = operands[:1]
            if {*dtypes} == {"float32", "bfloat16"}:
                scope = re.sub(r"\d+", "*", "/".join(here))
                reader = readers.get(eqn.outvars[0], "result")
                cast = Cast(scope, dtypes[0] == "float32", results[0], reader)
                totals.times[cast] += times
                totals.bytes[cast] += times * eqn.outvars[0].aval.size * 4
        elif inner is not None and len(inner.invars) == len(operands):
            turns = 1
            if name == "scan":
                turns, start = eqn.params["length"], eqn.params["num_consts"]
                stop = start + eqn.params["num_carry"]
                operands[start:stop] = ["carry"] * (stop - start)
            results = _walk(inner, operands, here, times * turns, totals)
        elif name in MOVE_OPS and len(operands) == 1:
            results = operands
        made |= zip(eqn.outvars, results, strict=True)
    return [maker(v) for v in jaxpr.outvars]
