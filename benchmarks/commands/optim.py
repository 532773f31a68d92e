"""`optim`: every pytree optimizer under every transformation, and what a step costs.

One table says for each optimizer of optax whether the one of `flax_amp.optim` passes a
check, and how far apart the two are; another compares the time that a step takes.
"""

import contextlib
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import absl.logging
import jax
import jax.numpy as jnp
import optax

from benchmarks import environment
from benchmarks.optimizers import cases, checks
from benchmarks.request import Request
from benchmarks.show import markdown_table
from flax_amp import optim

LEAVES = 200
OVERHEAD = ("sgd", "adam", "adamw", "lion", "adafactor")
_FAILED = "FAILED"
_NOT_IN_OPTAX = "–"

PyTree = Any


def run(asked: Request, only: str, rounds: int) -> None:
    """Writes optim.md into the folder of results.

    Args:
      asked: folder of the request.
      only: names of optimizers, separated by semicolons; empty for all.
      rounds: turns of the comparison of time; 0 leaves it out.

    Raises:
      SystemExit: if a check failed.
    """
    with contextlib.suppress(RuntimeError):  # JAX runs already, on the devices it has
        jax.config.update("jax_num_cpu_devices", 8)
    absl.logging.set_verbosity("error")
    names = only.split(";") if only else [*cases.names(), *cases.COMPOSED]
    table, failed = [], []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of optimistic_adam
        for name in names:
            row, problems = _row(name)
            failed += problems
            table.append([f"`{name}`", *row])
            print(f"{name:28} {' '.join(row)}", flush=True)
            for problem in problems:
                print(f"    {problem}", flush=True)
    times = [[f"`{name}`", *overhead(name, rounds)] for name in OVERHEAD if rounds]
    text = f"""# Pytree optimizers

Made by `{environment.command_line()}`, {environment.machine()}, JAX {jax.__version__},
optax {environment.versions()["optax"]}.

## Each optimizer under each transformation

{_meanings()}

{markdown_table(["optimizer", *checks.CHECKS], table, words=1)}

"exact": equal bit for bit. A number: the relative distance (L2, over all parameters),
at most {checks.CLOSE:.0e}, of derivatives 1e-4. With `*` it is larger, and so is
that of plain optax to itself under the same transformation (or, for a trajectory,
under another level of optimization): the algorithm amplifies roundings, or is not
smooth.
"finite": forward mode only. "{_NOT_IN_OPTAX}": plain optax cannot do it either (no
learning rate or no schedule, no derivative, keys that are not pickled, arrays of no
size).
"""
    if times:
        header = [
            "optimizer",
            "optax µs",
            "flax_amp.optim µs",
            "ratio",
            "noise",
            "dispatch",
        ]
        text += f"""
## What a step costs

A compiled step over {LEAVES} parameters of 64 x 64, in turns with plain optax,
medians of {rounds} turns. "ratio": to plain optax; "noise": of plain optax, compiled a
second time, to itself; "dispatch": ratio of the time until the call returns.

{markdown_table(header, times, words=1)}
"""
    path = asked.folder / "optim.md"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    print(f"wrote {path}")
    if failed:
        sys.exit(f"{len(failed)} checks failed: {'; '.join(failed)}")


def _row(name: str) -> tuple[list[str], list[str]]:
    row, problems = [], []
    case = cases.case(name)
    for title, check in checks.CHECKS.items():
        try:
            row.append(check(case))
        except checks.NotInOptax:
            row.append(_NOT_IN_OPTAX)
        except Exception as error:  # one failure must not hide the others
            row.append(_FAILED)
            problems.append(f"{name}, {title}: {type(error).__name__}: {error}")
    jax.clear_caches()
    return row, problems


def _meanings() -> str:
    return "\n".join(
        f"- **{title}**: {(check.__doc__ or '').splitlines()[0]}"
        for title, check in checks.CHECKS.items()
    )


# Time


def overhead(name: str, rounds: int) -> list[str]:
    """Returns the time of a step with plain optax, with ours, and ratios."""
    params = {f"layer_{i:03}": jnp.full((64, 64), i, float) for i in range(LEAVES)}
    grads = jax.tree.map(lambda leaf: leaf / 7, params)
    kind = getattr(optim, name)
    plain, tx = kind.factory(1e-3), kind(1e-3).init(params)

    def plain_step(params: PyTree, state: PyTree) -> Any:
        updates, state = plain.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    def step(params: PyTree, tx: Any) -> Any:
        updates, tx = tx.update(grads, params)
        return optax.apply_updates(params, updates), tx

    ways = [
        _timer(jax.jit(plain_step), params, plain.init(params)),
        _timer(jax.jit(step), params, tx),
        _timer(jax.jit(lambda *args: plain_step(*args)), params, plain.init(params)),
    ]
    for way in ways:
        way()  # compiles
    turns: list[list[tuple[float, float]]] = []
    for turn in range(rounds):
        order = [(turn + i) % len(ways) for i in range(len(ways))]
        measured = {i: ways[i]() for i in order}
        turns.append([measured[i] for i in range(len(ways))])
    (expected, expected_call), (whole, call), (again, _) = (
        [statistics.median(turn[way][part] for turn in turns) for part in (0, 1)]
        for way in range(len(ways))
    )
    return [
        f"{expected * 1e6:.0f}",
        f"{whole * 1e6:.0f}",
        f"{whole / expected:.2f}",
        f"{again / expected:.2f}",
        f"{call / expected_call:.2f}",
    ]


def _timer(step: Any, params: PyTree, state: PyTree) -> Callable[[], Any]:
    def burst(steps: int = 20) -> tuple[float, float]:
        """Returns seconds for a step, and until its call returns."""
        now = params, state
        called = 0.0
        begin = time.perf_counter()
        for _ in range(steps):
            before = time.perf_counter()
            now = step(*now)
            called += time.perf_counter() - before
            jax.block_until_ready(now)
        return (time.perf_counter() - begin) / steps, called / steps

    return burst
