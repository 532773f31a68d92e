"""Convergence, the corpus and the soak: what they check is seen to fail."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import pytest

import flax_amp
from benchmarks.commands.soak import Checks
from benchmarks.convergence import page as convergence
from benchmarks.convergence.task import WAYS
from benchmarks.convergence.tasks import TASKS
from benchmarks.corpus import page
from benchmarks.corpus.measure import measure
from benchmarks.corpus.programs import Program
from benchmarks.results import Results
from benchmarks.soak import fault
from flax_amp.debug import TrainedPrecision, TrainingComparison
from flax_amp.debug._gap import judge
from helpers import dtypes_of

pytestmark = pytest.mark.once


@pytest.fixture(autouse=True)
def _as_users_write():
    with jax.numpy_rank_promotion("allow"):
        yield


def test_the_page_tells_what_is_outside(tmp_path):
    results = Results.open(tmp_path, "convergence", "cpu")
    trained = dict(curves=((),), step_ms=1.0, temp_mb=1.0)
    ends = (-0.9, -0.8, -1.0)
    float32 = TrainedPrecision(
        "32-true", ends, skipped=(0,) * 3, scales=(1.0,) * 3, **trained
    )
    worse = tuple(x + 0.5 for x in ends)
    found = TrainingComparison(
        name="loss_fn",
        steps=20,
        seeds=3,
        measure="evaluate",
        device="cpu",
        steps_of_parts=(20,),
        reference=float32,
        precisions=(
            dataclasses.replace(
                float32,
                name="float16",
                ends=worse,
                skipped=(0, 1, 0),
                scales=(8.0,) * 3,
                gap=judge(ends, [math.nan] * 3, worse),
            ),
        ),
    )
    for way, told in convergence.figures(found).items():
        results.put("vit", way, told)
    text = convergence.page(Results.read(results.path))
    assert "**0 of 1 are inside, 1 outside: vit float16.**" in text
    row = "| vit | float16 | 0.4, 0.3, 0.5 | 0.5 | 0.1 | 0.1 | **outside** | 0, 1, 0 |"
    assert row in text
    assert "| ViT, digits | test accuracy | 20 | 3 | 0.9 | 0.1 |" in text
    assert convergence.outside(results) == ["vit float16"]


# Compiling `diffusion` and `char_moe` takes two thirds of the time of all six tasks.
@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(TASKS.keys() - {"diffusion", "char_moe"}))
def test_two_steps_of_a_task(name):
    found = TASKS[name].compare(["float16"], seeds=2, steps=2)
    (float16,) = found.precisions
    assert len(float16.curves[0]) == 2 and {*float16.scales} == {2.0**15}
    ends = [*found.reference.ends, *float16.ends]
    assert all(map(math.isfinite, ends))


@pytest.mark.parametrize("name", TASKS)
def test_a_task_trains_in_the_precision_of_its_way(name):
    """Most matmuls of a step."""
    way = WAYS["bfloat16"]
    program = TASKS[name].make(way, 10)
    step = flax_amp.make_train_step(program.loss_fn, has_aux=True, jit=False)
    state = jax.eval_shape(lambda: program.make(0))
    found = dtypes_of(step, state, next(program.batches(0)))
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
