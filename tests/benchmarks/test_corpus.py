"""What the corpus measures of a program, and how its page tells a shortfall."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.corpus import draws, table
from benchmarks.corpus.measure import measure
from benchmarks.corpus.program import Case

pytestmark = pytest.mark.once


def loss(w, x):
    return jnp.mean(jnp.tanh(x @ w) ** 2)


def measured(loss=loss, hand=None):
    return measure(Case(loss, jnp.ones((4, 2)) / 3, (jnp.ones((3, 4)),), hand))


def test_a_program_at_its_best():
    found = measured(hand=lambda dtype: loss)
    assert found["problems"] == []
    assert found["share"] == 1.0
    assert found["twin"] == "hand-set"
    assert 0 < found["fp16_error"] < found["bf16_error"] < 1e-2
    assert found["bf16_twin"] == 0


@pytest.mark.filterwarnings("ignore::flax_amp.PolicyWarning")
def test_a_product_that_stays_in_float32_has_a_reason():
    found = measured(lambda w, x: jnp.mean(jnp.matmul(x, w, precision="highest") ** 2))
    assert found["share"] == 0
    assert any("precision=HIGHEST" in reason for reason in found["wide_products"])
    assert table.shortfalls(found) == ""  # the program asks for it
    page = table.page({"of/this": found}, ["of/that"])
    assert "1 programs, 1 ran in both dtypes, 0 with a problem" in page
    assert "Not run this time: of/that." in page
    assert "| of/this | 0.00 | " in page
    assert "1 products in float32" in table.shortfalls(found | {"low_in_twin": 1})


def test_a_program_that_is_not_finite_by_itself():
    found = measured(lambda w, x: jnp.sqrt(-jnp.sum(w)))
    assert found["problems"] == ["not finite without amp"]


def test_a_twin_that_fails_is_no_problem_of_amp():
    def wrong(w, x):
        raise ValueError("its authors never tried")

    found = measured(hand=lambda dtype: wrong)
    assert found["problems"] == []
    assert found["bf16_twin"] is None
    assert found["bf16_ratio"] == 1


def far(w, x):
    """A later region reads a rounded number, of which its twin keeps all digits."""
    t = jax.nn.sigmoid(x @ w + 6)
    return -jnp.log(1.0001 - t * (1 + 1e-6 * (t @ w.T).mean())).mean()


def test_a_ratio_above_its_twin():
    found = measured(far)
    assert found["bf16_ratio"] > 2
    assert found["bf16_draws"] == draws.STEP
    assert found["bf16_by_hand"] > 2
    assert "bf16 error" in table.shortfalls(found)
    page = table.page({"of/far": found})
    assert f"bf16 {found['bf16_by_hand']:.2f} by hand" in page
    assert "Not explained: of/far." in page
    assert "0 are at their best" in page


def test_a_ratio_that_one_draw_makes_is_no_shortfall():
    ours = [0.5, *[1e-3] * 7]
    found = draws.compared(ours, [1e-3] * 8)
    assert found.ratio > draws.WORSE
    assert not found.is_worse
    assert not found.is_known


def test_further_draws_keep_signs_and_integers():
    call = (np.float32([[1, -2]]), np.arange(3), jnp.float32(3))
    floats, integers, scalar = draws.drawn(call, 1)
    assert (np.sign(floats) == [[1, -1]]).all()
    assert (integers == [0, 1, 2]).all()
    assert floats.dtype == scalar.dtype == jnp.float32
    assert 0 < abs(floats[0, 0] - 1) < 1


def test_an_optimizer_stands_outside_of_amp():
    seen = []

    def around(fn):
        def steps(w, x):
            gradient = jax.grad(fn)(w, x)
            seen.append((gradient * 1e-7).dtype)
            return fn(w - gradient * 1e-7 / 1e-7, x)

        return steps

    case = Case(loss, jnp.ones((4, 2)) / 3, (jnp.ones((3, 4)),), around=around)
    found = measure(case)
    assert found["problems"] == []
    assert found["fp16_ratio"] < 2
    assert set(seen) == {jnp.dtype(jnp.float32)}
