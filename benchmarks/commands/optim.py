"""`optim`: how far a learning rate that is an array is from plain optax, and its cost.

That the optimizers pass through every transformation is shown by tests/optim.
"""

import contextlib
import sys
import warnings

import jax
import optax

from benchmarks.optimizers import cases, overhead
from benchmarks.request import Request
from benchmarks.show import made_by, markdown_table, write_page


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
    compared = [name for name in overhead.OPTIMIZERS if not only or name in names]
    times = [[f"`{n}`", *overhead.row(n, rounds)] for n in compared if rounds]
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

{overhead.MEANING}

{markdown_table(overhead.HEADER, times, words=1)}
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
