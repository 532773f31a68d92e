"""What the corpus measures of a program, and how its page tells a shortfall."""

import jax.numpy as jnp
import pytest

from benchmarks.corpus import table
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


def test_a_product_that_stays_in_float32_has_a_reason():
    found = measured(lambda w, x: jnp.mean(jnp.matmul(x, w, precision="highest") ** 2))
    assert found["share"] == 0
    assert any("precision=HIGHEST" in reason for reason in found["wide_products"])
    assert table.shortfalls(found) == "products low 0.00"
    page = table.page({"of/this": found}, ["of/that"])
    assert "1 programs, 1 ran in both dtypes, 0 with a problem" in page
    assert "Not run this time: of/that." in page
    assert "| of/this | products low 0.00 | " in page


def test_a_program_that_is_not_finite_by_itself():
    found = measured(lambda w, x: jnp.sqrt(-jnp.sum(w)))
    assert found["problems"] == ["not finite without amp"]


def test_a_twin_that_fails_is_no_problem_of_amp():
    def wrong(w, x):
        raise ValueError("its authors never tried")

    found = measured(hand=lambda dtype: wrong)
    assert found["problems"] == []
    assert found["bf16_twin"] is None


def test_a_ratio_above_its_twin():
    row = {"problems": [], "share": 1.0, "bf16_error": 0.03, "bf16_twin": 0.02}
    assert table.shortfalls(row) == "bf16 error 1.50 of its twin's"
    row["bf16_error"] = 0.021
    assert table.shortfalls(row) == ""
