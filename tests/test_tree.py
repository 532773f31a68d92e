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
