"""Leaf helpers, on every kind of leaf."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from _models import changed
from flax_amp import _tree

LEAVES = {
    "float": jnp.array([-0.0, 1.5]),
    "half": jnp.ones(2, jnp.bfloat16),
    "int": jnp.arange(3),
    "flag": jnp.array(True),
    "key": jax.random.key(0),
    "none": None,
}
OTHERS = LEAVES | {"float": jnp.zeros(2), "key": jax.random.key(1)}


@pytest.mark.parametrize(
    "tree, finite",
    [
        ({}, True),
        (None, True),
        (LEAVES | {"name": "text", "number": 1.5}, True),
        (LEAVES | {"number": float("inf")}, False),
        ([jnp.ones(2), jnp.array([1, jnp.nan])], False),
        ([jnp.ones(2, jnp.bfloat16) * jnp.inf], False),
        ([np.float16("inf")], False),
        ([jnp.complex64(complex(0, np.nan))], False),
    ],
)
def test_all_finite(tree, finite):
    flag = _tree.all_finite(tree)
    assert (flag.dtype, flag.shape, bool(flag)) == (jnp.bool_, (), finite)


def test_select_keeps_every_bit():
    for choose in (_tree.select, jax.jit(_tree.select)):
        assert not changed(choose(True, LEAVES, OTHERS), LEAVES)
        assert not changed(choose(False, LEAVES, OTHERS), OTHERS)
    assert changed(LEAVES, OTHERS) == {"['float']", "['key']"}


def test_partition_and_combine_undo_each_other():
    tree = LEAVES | {"name": "text", "number": 2.0}
    floating, rest = _tree.partition(tree, _tree.is_inexact_array)
    assert {key for key, leaf in floating.items() if leaf is not None} == {
        "float",
        "half",
    }
    assert rest["float"] is None and rest["name"] == "text"
    together = _tree.combine(floating, rest)
    assert all(together[key] is leaf for key, leaf in tree.items())


def test_pick_fill_and_split_list_undo_each_other():
    items, mask = list("abcd"), [True, False, False, True]
    assert _tree.pick(items, mask) == ["a", "d"]
    assert _tree.fill("AD", mask, items) == ["A", "b", "c", "D"]
    assert _tree.split_list(items, 1, 0, 2) == [("a",), (), ("b", "c"), ("d",)]
    with pytest.raises(ValueError):
        _tree.pick(items, mask[1:])
