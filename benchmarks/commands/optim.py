"""`optim`: how far a learning rate that is an array is from plain optax, and its cost.

That the optimizers pass through every transformation is shown by tests/optim.
"""

import contextlib
import functools
import re
import statistics
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from benchmarks.optimizers import cases
from benchmarks.request import Request
from benchmarks.show import made_by, markdown_table, write_page
from benchmarks.timing import in_turns
from flax_amp import optim

PyTree = Any

LEAVES = 200
OPTIMIZERS = ("sgd", "adam", "adamw", "lion", "adafactor")
_HEADER = [
    "optimizer",
    "optax µs",
    "step: optax again",
    "step: traced rate",
    "step: flax_amp.optim",
    "compile: traced rate",
    "compile: flax_amp.optim",
    "instructions",
]
_MEANING = f"""A compiled step over {LEAVES} parameters of 64 x 64, processor time, as
ratios to plain optax with a constant as learning rate: of a step (medians of the turns;
"optax again" is the noise), and of tracing, lowering and compiling (the least of
three). "traced rate" is plain optax with a learning rate that is an argument of the
step, which any learning rate that can change without compiling again must be: what a
pytree optimizer costs is its distance to that. "instructions": of the compiled step
more than there are with that, by name; "the same" if none."""


def run(asked: Request, only: str, rounds: int) -> None:
    """Writes optim.md into the folder of results.

    Args:
      asked: folder of the request.
      only: names of optimizers, separated by semicolons; empty for all.
      rounds: turns of the comparison of time; 0 leaves it out.

    Raises:
      SystemExit: if an optimizer failed.
    """
    names = only.split(";") if only else [*cases.names(), *cases.COMPOSED]
    table, failed = [], []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what is deprecated is in the table too
        for name in names:
            try:
                cells = _differences(cases.case(name))
            except Exception as error:  # one failure must not hide the others
                cells = ["FAILED", ""]
                failed.append(f"{name}: {type(error).__name__}: {error}")
            table.append([f"`{name}`", *cells])
            print(f"{name:28} {' '.join(cells)}", flush=True)
            jax.clear_caches()
    compared = [name for name in OPTIMIZERS if not only or name in names]
    times = [[f"`{n}`", *_costs(n, rounds)] for n in compared if rounds]
    text = f"""# Pytree optimizers

{made_by()}, optax {optax.__version__}.

## Trajectories

Parameters after 50 steps: the relative distance (L2) to plain optax with a number as
learning rate, which is an array in `flax_amp.optim` and in `optax.inject_hyperparams`.
"exact": equal bit for bit. "–": it has no learning rate, or is not injected.

{markdown_table(["optimizer", "flax_amp.optim", "inject_hyperparams"], table, words=1)}
"""
    if times:
        text += f"""
## What a step costs

{_MEANING}

{markdown_table(_HEADER, times, words=1)}
"""
    write_page(asked.folder / "optim.md", text)
    if failed:
        sys.exit(f"{len(failed)} failed: {'; '.join(failed)}")


def _differences(case: cases.Case) -> list[str]:
    expected, _ = cases.run(cases.in_optax(case, cases.RATE), 50)
    found, _ = cases.run(cases.ours(case, cases.RATE), 50)
    injected = "–"
    if case.rate:

        def factory(learning_rate: float) -> optax.GradientTransformation:
            return case.plain(learning_rate)

        same = case._replace(plain=optax.inject_hyperparams(factory))
        with contextlib.suppress(Exception):  # optax has one that it cannot inject
            params, _ = cases.run(cases.in_optax(same, cases.RATE), 50)
            injected = _shown(cases.distance(params, expected))
    return [_shown(cases.distance(found, expected)), injected]


def _shown(apart: float) -> str:
    return f"{apart:.0e}" if apart else "exact"


class _Way(NamedTuple):
    step: Callable[[PyTree, Any], Any]
    params: PyTree
    state: Any


def _costs(name: str, rounds: int) -> list[str]:
    """Returns the cells of an optimizer after its name; parameters are gradients."""
    params = {f"layer_{i:03}": jnp.full((64, 64), i, float) for i in range(LEAVES)}
    make = getattr(optim, name)
    plain = make.wrapped_factory
    constant = plain(1e-3)

    def applied(tx: Any, params: PyTree, state: PyTree) -> Any:
        updates, state = tx.update(params, state, params)
        return optax.apply_updates(params, updates), state

    def constant_step(params: PyTree, state: PyTree) -> Any:
        return applied(constant, params, state)

    def traced_step(params: PyTree, rate_and_state: Any) -> Any:
        rate, state = rate_and_state
        params, state = applied(plain(rate), params, state)
        return params, (rate, state)

    def step(params: PyTree, tx: Any) -> Any:
        updates, tx = tx.update(params, params)
        return optax.apply_updates(params, updates), tx

    state = constant.init(params)
    theirs = _Way(constant_step, params, state)
    traced = _Way(traced_step, params, (jnp.float32(1e-3), state))
    ours = _Way(step, params, make(1e-3).init(params))
    expected, *times = _times([theirs, theirs, traced, ours], rounds)
    built = [_compiled(way) for way in (theirs, traced, ours)]
    ratios = [found / expected for found in times]
    ratios += [seconds / built[0][0] for seconds, _ in built[1:]]
    more = built[2][1] - built[1][1]
    shown = ", ".join(f"{count} {name}" for name, count in more.items())
    return [
        f"{expected * 1e6:.0f}",
        *(f"{ratio:.2f}" for ratio in ratios),
        shown or "the same",
    ]


def _compiled(way: _Way) -> tuple[float, Counter[str]]:
    """Returns seconds to compile a step, the least of three, and its instructions."""
    times = []
    for _ in range(3):
        jitted = jax.jit(lambda *args: way.step(*args))
        begin = time.process_time()
        compiled = jitted.lower(way.params, way.state).compile()
        times.append(time.process_time() - begin)
    return min(times), Counter(
        re.findall(r"= \S+ ([a-z-]+)\(", compiled.as_text() or "")
    )


def _times(ways: list[_Way], rounds: int) -> list[float]:
    """Returns seconds for a step of each, medians of the turns."""
    steps = [jax.jit(lambda *args, way=way: way.step(*args)) for way in ways]
    bursts = [
        functools.partial(_burst, step, way)
        for step, way in zip(steps, ways, strict=True)
    ]
    return [*map(statistics.median, in_turns(bursts, rounds))]


def _burst(step: Any, way: _Way, steps: int = 20) -> float:
    now = way.params, way.state
    begin = time.process_time()
    for _ in range(steps):
        now = step(*now)
        jax.block_until_ready(now)
    return (time.process_time() - begin) / steps
