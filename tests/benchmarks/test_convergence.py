"""Runs that train to the end: each task makes steps, and the rule of their table."""

import math

import jax
import jax.numpy as jnp
import pytest

from benchmarks.convergence import page, run
from benchmarks.convergence.others import TASKS
from benchmarks.convergence.run import Results
from benchmarks.convergence.task import WAYS, Task

pytestmark = pytest.mark.once


@pytest.fixture(autouse=True)
def _as_users_write():
    """Lets models broadcast as in the benchmarks, which are no part of the package."""
    with jax.numpy_rank_promotion("allow"):
        yield


def task(**options):
    return Task("a model", "a metric", lambda way, steps: None, 20, **options)


LOW, HIGH, EQUAL = [1.0, 1.1, 0.9], dict(better="higher"), dict(resolution=0.01)


@pytest.mark.parametrize(
    ("options", "ends", "holds", "fails"),
    [
        ({}, LOW, [0.1, 1.29], [1.31, math.nan, math.inf]),  # of 1.0 and 0.1
        (HIGH, LOW, [9.0, 0.71], [0.69, math.nan, -math.inf]),
        (HIGH | EQUAL, [0.5, 0.5], [0.491], [0.489]),  # the least margin
    ],
)
def test_a_run_is_in_if_it_is_not_worse_by_three_deviations(
    options, ends, holds, fails
):
    spread = run.spread(task(**options), ends)
    assert all(map(spread.holds, holds)) and not any(map(spread.holds, fails))


def test_the_end_is_the_mean_of_the_last_evaluations():
    assert run.final([9.0, 9.0, 1.0, 2.0, 3.0, 4.0, 5.0]) == 3.0


def test_the_page_tells_what_is_out(tmp_path):
    results = Results.open(tmp_path / "convergence.json")
    ends = {"float32": (1.0, 1.1, 0.9), "float16": (1.0, 2.0)}
    for way, found in ends.items():
        for seed, end in enumerate(found):
            told = {"every": 1, "skipped": [seed], "scale": [8.0], "seconds": 0.1}
            results.put("lstm", way, seed, {"curve": [end] * 5, **told})
    results.put_share("lstm", "float16", [1.0])
    again = Results.open(tmp_path / "convergence.json")
    assert again == results
    assert again.has("lstm", "float16", 1) and not again.has("lstm", "float16", 2)
    assert page.outside(again) == ["lstm float16 1"]
    text = page.page(again)
    assert "1 in, 1 out: lstm float16 1." in text
    row = "| lstm | float16 | 1, **2** | 1.5 | 1.05 | 1 of 2 | 0, 1 | 8, 8 | 1.00 |  |"
    assert row in text


@pytest.mark.slow
@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize("way", ["bfloat16", "float16"])
def test_a_step_of_each_task_keeps_the_carry(name, way):
    program, key = TASKS[name].build(WAYS[way]), jax.random.key(0)
    carry = jax.eval_shape(program.start, key)
    after = jax.eval_shape(program.step, carry, program.data, key)
    assert jax.tree.map(type_of, after) == jax.tree.map(type_of, carry)
    metric = jax.eval_shape(program.evaluate, after, program.data)
    assert type_of(metric) == ((), jnp.float32)
    shares = run.low_share(program)
    assert len(shares) == len(program.losses)
    assert all(share > 0.9 for share in shares)


def type_of(x):
    return x.shape, x.dtype


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_two_steps(way):
    ((seed, told),) = run.train(TASKS["neural_ode"], WAYS[way], [7], steps=2)
    assert seed == 7
    assert len(told["curve"]) == 2 and told["every"] == 1
    assert all(map(math.isfinite, told["curve"]))
    assert told["skipped"] == [0]
    assert told["scale"] == [2.0**15 if way == "float16" else 1.0]
