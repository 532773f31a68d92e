"""Convergence, the corpus and the soak: what they check is seen to fail."""

import math

import jax
import jax.numpy as jnp
import pytest

from benchmarks.commands.convergence import train
from benchmarks.commands.soak import Checks
from benchmarks.convergence import page as ends
from benchmarks.convergence.task import WAYS, Task
from benchmarks.convergence.tasks import TASKS
from benchmarks.corpus import page
from benchmarks.corpus.measure import measure
from benchmarks.corpus.programs import Program
from benchmarks.results import Results
from benchmarks.soak import fault
from helpers import dtypes_of

pytestmark = pytest.mark.once


@pytest.fixture(autouse=True)
def _as_users_write():
    with jax.numpy_rank_promotion("allow"):
        yield


LOW, HIGH, EQUAL = [1.0, 1.1, 0.9], dict(higher=True), dict(resolution=0.01)


@pytest.mark.parametrize(
    ("options", "float32", "holds", "fails"),
    [
        ({}, LOW, [0.1, 1.29], [1.31, math.nan, math.inf]),  # of 1.0 and 0.1
        (HIGH, LOW, [9.0, 0.71], [0.69, math.nan, -math.inf]),
        (HIGH | EQUAL, [0.5, 0.5], [0.491], [0.489]),  # the least margin
    ],
)
def test_a_run_is_in_if_it_is_not_worse_by_three_deviations(
    options, float32, holds, fails
):
    task = Task("a model", "a metric", lambda *_: None, 20, **options)
    assert all(ends.is_in(task, float32, end) for end in holds)
    assert not any(ends.is_in(task, float32, end) for end in fails)


def test_the_page_tells_what_is_out(tmp_path):
    results = Results.open(tmp_path, "convergence", "cpu")
    for way, found in {"float32": LOW, "float16": (1.0, 2.0)}.items():
        for seed, end in enumerate(found):
            told = {"every": 1, "skipped": [seed], "scale": [8.0], "seconds": 0.1}
            results.put(f"lstm {way}", str(seed), {"curve": [end] * 5, **told})
    text = ends.page(results)
    assert "1 of 2 runs are in, 1 out: lstm float16 1." in text
    row = "| lstm | float16 | 1, **2** | 1.5 | 1.05 | 1 of 2 | 0, 1 | 8, 8 |"
    assert row in text


@pytest.mark.slow
@pytest.mark.parametrize("name", TASKS)
def test_two_steps_of_each_task(name):
    ((seed, told),) = train(TASKS[name], WAYS["float16"], [7], steps=2)
    assert seed == 7 and told["every"] == 1
    assert all(map(math.isfinite, told["curve"])) and len(told["curve"]) == 2
    assert {*told["scale"]} == {2.0**15}


@pytest.mark.parametrize("name", TASKS)
def test_a_task_trains_in_the_precision_of_its_way(name):
    """Most matmuls of a step; those of the fakes of a GAN are of another model."""
    program = TASKS[name].make(WAYS["bfloat16"], 10)
    key = jax.random.key(0)
    carry = jax.eval_shape(program.start, key)
    found = dtypes_of(program.step, carry, program.data, key)
    low = [dtypes for dtypes in found if set(dtypes) == {"bfloat16"}]
    assert len(low) > 0.9 * len(found)


def loss(w, x):
    return jnp.mean(jnp.tanh(x @ w) ** 2)


def measured(loss=loss, hand=None):
    return measure(Program(loss, jnp.ones((4, 2)) / 3, (jnp.ones((3, 4)),), hand))


def test_a_program_at_its_best():
    found = measured(hand=lambda dtype: loss)
    assert found["problems"] == []
    assert found["share"] == 1.0 and found["by_hand"]
    assert 0 < found["fp16_error"] < found["bf16_error"] < 1e-2
    assert found["bf16_reference"] == 0


@pytest.mark.filterwarnings("ignore::flax_amp.PolicyWarning")
def test_a_matmul_that_stays_in_float32_is_told():
    found = measured(lambda w, x: jnp.mean(jnp.matmul(x, w, precision="highest") ** 2))
    assert found["share"] == 0 and page.shortfalls(found) == ""  # it is asked for
    assert "1 matmuls in float32" in page.shortfalls(found | {"could_be_low": 1})
    assert "1 programs, 1 ran in both dtypes,\n0 with" in page.page({"a/b": found})


def test_a_ratio_above_its_reference():
    """A later region reads a rounded number; a cast of the matmuls rounds none."""

    def far(w, x):
        t = jax.nn.sigmoid(x @ w + 6)
        return -jnp.log(1.0001 - t * (1 + 1e-6 * (t @ w.T).mean())).mean()

    found = measured(far)
    assert found["bf16_ratio"] > 2 and "bf16 error" in page.shortfalls(found)


def test_a_program_that_is_not_finite_by_itself():
    found = measured(lambda w, x: jnp.sqrt(-jnp.sum(w)))
    assert found["problems"] == ["not finite without amp"]


BAD = next(n for n in range(999) if not math.isfinite(fault(0, n)[0] or 0.0))


def lines(steps=BAD + 5, restored=0, told=(), skips=(BAD,)):
    """What a process says whose step `BAD` has a bad batch."""
    found, digest = [], 0
    for step in range(steps + 1):
        digest = digest if step - 1 in skips else step
        skipped = sum(n < step for n in skips)
        found.append(dict(step=step, scale=8.0, skipped=skipped, digest=digest))
    found = found[restored:]
    found[0] |= {"told": list(told)}
    return found


def test_the_soak_sees_what_is_wrong_with_a_skip():
    assert not Checks(lines(), 0).problems
    wrong = lines()
    wrong[BAD + 1] |= {"digest": -1}  # skipped, but not as it was
    assert [*Checks(wrong, 0).problems] == ["skips"]
    assert [*Checks(lines(skips=()), 0).problems] == ["bad batches"]


@pytest.mark.parametrize(
    ("newest", "damage", "told", "problems"),
    [
        (6, "", (), []),
        (8, "flipped", ("step 8 is damaged",), []),
        (8, "flipped", (), ["restarts"]),
        (8, "", ("step 8 is damaged",), ["restarts"]),
    ],
)
def test_the_soak_sees_lost_steps(newest, damage, told, problems):
    checks = Checks(lines(), 0)
    checks.process(lines(10, 6, told), newest, damage)
    assert [*checks.problems] == problems


def test_the_soak_sees_other_bits_and_arrays_that_stay():
    checks = Checks(lines(), 0)
    other = lines(10)
    other[7] |= {"scale": 4.0}
    checks.process(other, 0)
    assert [*checks.problems] == ["bits"]
    marks = [{"arrays": n} for n in (4, 5, 5, 6)]
    assert [*Checks(lines() + marks, 0).problems] == ["memory"]
    assert not Checks(lines() + marks[:3], 0).problems  # at first, it may grow
