"""The table of docs/start.md: Linen and NNX take the same lines, and all run."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx

import flax_amp
from _models import CLASSES, FEATURES, cross_entropy, make_batch

pytestmark = pytest.mark.once

PAGE = (Path(__file__).parents[2] / "docs" / "start.md").read_text()
SECTION = PAGE.partition("## Linen and NNX side by side")[2]


def table():
    """Returns each row: its name, and the lines of both columns."""
    for line in SECTION.splitlines():
        name, *cells = line.strip("| ").split(" | ")
        if line.startswith("| ") and "`" in line:
            yield name, *(re.findall("`([^`]+)`", cell) for cell in cells)


def names_of(tmp_path):
    """What both columns begin with."""

    def logits(params, batch):
        return batch["x"] @ params["w"]

    names = {name: getattr(flax_amp, name) for name in flax_amp.__all__}
    names |= {"flax_amp": flax_amp, "nnx": nnx, "optax": optax, "jax": jax}
    (code,) = re.findall("```python\n(.*?)```", SECTION, re.DOTALL)
    exec(code, names)
    return names | {
        "tx": optax.adam(0.1),
        "batch": make_batch(),
        "params": {"w": jnp.ones((FEATURES, CLASSES))},
        "loss_fn": lambda p, b: cross_entropy(logits(p, b), b["y"]),
        "predict": lambda p, b: logits(p, b).argmax(-1),
        "model": nnx.Linear(FEATURES, CLASSES, rngs=nnx.Rngs(0)),
        "nnx_loss": lambda m, b: cross_entropy(m(b["x"]), b["y"]),
        "nnx_predict": lambda m, b: m(b["x"]).argmax(-1),
        "manager": flax_amp.checkpoint.manager(tmp_path / "run"),
        "run": tmp_path / "run",
        "orbax": ocp.StandardCheckpointer(),
        "folder": tmp_path / "orbax",
    }


@pytest.mark.parametrize("side", [0, 1], ids=["linen", "nnx"])
def test_each_line_runs(side, tmp_path):
    names, train = names_of(tmp_path), ""

    def now():
        """The parameters, in memory that no step takes."""
        of_linen = lambda: names["state"].params["w"]  # noqa: E731
        return jnp.copy(names["model"].kernel[...] if side else of_linen())

    for name, *columns in table():
        lines = columns[side]
        for line in lines:
            exec(line, names)
            if "orbax.save" in line:
                names["orbax"].wait_until_finished()
            if "checkpoint.save" in line:
                names["manager"].close()
        train = lines[0] if name == "train" else train
        if train:  # what was made last trains
            before = now()
            exec(train, names)
            assert names["metrics"]["grads_finite"], name
    assert int(names["metrics"]["skipped_total"]) == 0
    held = names["state"] if side == 0 else names["optimizer"]
    ema = held.ema["w"] if side == 0 else held.ema.kernel[...]
    assert (ema != now()).any() and (ema != before).any()  # between the two


def test_no_column_is_longer():
    rows = [*table()]
    assert len(rows) == 16
    for name, linen, of_nnx in rows:
        assert len(linen) == 1 and len(of_nnx) - len(linen) <= 1, name
