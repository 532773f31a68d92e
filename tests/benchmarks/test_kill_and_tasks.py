"""Convergence, the corpus and the soak: what they check is seen to fail."""

import json
import math

import jax
import jax.numpy as jnp
import pytest

from benchmarks import fp8
from benchmarks.convergence import page, run
from benchmarks.convergence.run import Results
from benchmarks.convergence.task import WAYS, Task
from benchmarks.convergence.tasks import TASKS
from benchmarks.corpus import table
from benchmarks.corpus.case import Case
from benchmarks.corpus.measure import measure
from benchmarks.soak.history import History, Scale
from benchmarks.soak.worker import FIRST_SCALE, PATIENCE, fault
from helpers import dtypes_of

pytestmark = pytest.mark.once


@pytest.fixture(autouse=True)
def _as_users_write():
    with jax.numpy_rank_promotion("allow"):
        yield


LOW, HIGH, EQUAL = [1.0, 1.1, 0.9], dict(higher=True), dict(resolution=0.01)


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
    task = Task("a model", "a metric", lambda *_: None, 20, **options)
    assert all(run.is_in(task, ends, end) for end in holds)
    assert not any(run.is_in(task, ends, end) for end in fails)


def test_the_page_tells_what_is_out(tmp_path):
    results = Results.open(tmp_path / "convergence.json")
    ends = {"float32": (1.0, 1.1, 0.9), "float16": (1.0, 2.0)}
    for way, found in ends.items():
        for seed, end in enumerate(found):
            told = {"every": 1, "skipped": [seed], "scale": [8.0], "seconds": 0.1}
            results.put("lstm", way, seed, {"curve": [end] * 5, **told})
    again = Results.open(tmp_path / "convergence.json")
    assert again == results
    assert again.has("lstm", "float16", 1) and not again.has("lstm", "float16", 2)
    text = page.page(again)
    assert "1 of 2 runs are in, 1 out: lstm float16 1." in text
    row = "| lstm | float16 | 1, **2** | 1.5 | 1.05 | 1 of 2 | 0, 1 | 8, 8 |"
    assert row in text


@pytest.mark.slow
@pytest.mark.parametrize("name", TASKS)
def test_two_steps_of_each_task(name):
    ((seed, told),) = run.train(TASKS[name], WAYS["float16"], [7], steps=2)
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


def test_matmuls_of_a_task_run_in_fp8():
    program, key = TASKS["char_moe"].make(WAYS["fp8"], 10), jax.random.key(0)
    carry = jax.eval_shape(program.start, key)
    assert fp8.products(program.step, carry, program.data, key)["fp8_products"] > 9


def loss(w, x):
    return jnp.mean(jnp.tanh(x @ w) ** 2)


def measured(loss=loss, hand=None):
    return measure(Case(loss, jnp.ones((4, 2)) / 3, (jnp.ones((3, 4)),), hand))


def test_a_program_at_its_best():
    found = measured(hand=lambda dtype: loss)
    assert found["problems"] == []
    assert found["share"] == 1.0 and found["twin"] == "hand-set"
    assert 0 < found["fp16_error"] < found["bf16_error"] < 1e-2
    assert found["bf16_twin"] == 0


@pytest.mark.filterwarnings("ignore::flax_amp.PolicyWarning")
def test_a_matmul_that_stays_in_float32_is_told():
    found = measured(lambda w, x: jnp.mean(jnp.matmul(x, w, precision="highest") ** 2))
    assert found["share"] == 0 and table.shortfalls(found) == ""  # it is asked for
    assert "1 matmuls in float32" in table.shortfalls(found | {"low_in_twin": 1})
    assert "1 programs, 1 ran in both dtypes,\n0 with" in table.page({"a/b": found})


def test_a_ratio_above_its_twin():
    """A later region reads a rounded number, of which its twin keeps all digits."""

    def far(w, x):
        t = jax.nn.sigmoid(x @ w + 6)
        return -jnp.log(1.0001 - t * (1 + 1e-6 * (t @ w.T).mean())).mean()

    found = measured(far)
    assert found["bf16_ratio"] > 2 and "bf16 error" in table.shortfalls(found)


def test_a_program_that_is_not_finite_by_itself():
    found = measured(lambda w, x: jnp.sqrt(-jnp.sum(w)))
    assert found["problems"] == ["not finite without amp"]


def record(path, steps, restored=0, told=(), **changed):
    """Writes what a process says that skips its bad batches; returns the file."""
    rule = Scale()
    lines = [{"restored": restored, "digest": [restored], "told": list(told)}]
    digest = 0
    for n in range(steps):
        bad = fault(0, n)[0] is not None
        finite = not bad and n != 3
        rule = rule.after(True, finite)
        digest = n + 1 if finite else digest
        seen = dict(scale=rule.scale, count=rule.count, skipped=rule.skipped)
        row = dict(n=n, loss=1.0, finite=finite, step=n + 1, digest=[digest])
        lines.append(row | seen | (changed if n == steps - 1 else {}))
    lines[1:] = lines[1 + restored :]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_the_rule_of_the_scale():
    rule = Scale()
    for _ in range(PATIENCE + 1):
        rule = rule.after(True, True)
    assert rule == Scale(2 * FIRST_SCALE, 0, 0)
    assert rule.after(True, False) == Scale(FIRST_SCALE, 0, 1)
    assert Scale(count=7).after(False, False) == Scale(count=7, skipped=1)


@pytest.mark.parametrize(
    ("name", "changed"), [("scale", dict(scale=1.0)), ("skips", dict(digest=[9]))]
)
def test_the_soak_sees_what_is_wrong(tmp_path, name, changed):
    good, wrong = History(0), History(0)
    good.add(record(tmp_path / "a", 10), 0, damaged=False)
    assert not good.problems
    wrong.add(record(tmp_path / "b", 10, **changed), 0, damaged=False)
    assert [*wrong.problems] == [name]


def test_the_soak_sees_lost_steps_and_other_bits(tmp_path):
    for newest, damaged, told, problems in (
        (6, False, (), []),
        (8, True, ("step 8 is damaged",), []),
        (8, True, (), ["restarts"]),
        (8, False, ("step 8 is damaged",), ["restarts"]),
    ):
        history = History(0)
        history.add(record(tmp_path / "a", 10), 0, damaged=False)
        history.add(record(tmp_path / "b", 10, 6, told), newest, damaged)
        assert [*history.problems] == problems
    history.add(record(tmp_path / "c", 10, 6, loss=2.0), 6, damaged=False)
    assert "repeated" in history.problems


def test_the_soak_sees_memory_that_grows(tmp_path):
    marks = [{"saved": n, "megabytes": n, "arrays": 5} for n in range(90)]
    lines = [{"restored": 0, "digest": [0], "told": []}, *marks]
    (tmp_path / "a").write_text("".join(json.dumps(line) + "\n" for line in lines))
    history = History(0)
    history.add(tmp_path / "a", 0, damaged=False)
    assert [*history.problems] == ["memory"] and history.slopes[0] > 0.9
