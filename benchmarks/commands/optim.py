"""`optim`: every pytree optimizer under every transformation, and what a step costs.

One table says for each optimizer of optax whether the one of `flax_amp.optim` passes a
check, and how far apart the two are; another compares the time that a step takes.
"""

import contextlib
import sys
import warnings
from typing import Any

import absl.logging
import jax

from benchmarks import environment
from benchmarks.optimizers import cases, checks, overhead
from benchmarks.request import Request
from benchmarks.show import markdown_table

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
    compared = overhead.OPTIMIZERS if rounds else ()
    times = [[f"`{name}`", *overhead.row(name, rounds)] for name in compared]
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
        text += f"""
## What a step costs

{overhead.MEANING}

{markdown_table(overhead.HEADER, times, words=1)}
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
