"""The select in place of `optax.apply_if_finite`'s branch."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from flax_amp.finite import apply_if_finite
from helpers import assert_same_avals

PARAMS = {"w": jnp.ones(3), "b": jnp.ones((), jnp.bfloat16)}
GOOD = {"w": jnp.arange(3.0), "b": jnp.ones((), jnp.bfloat16)}
BAD = {"w": jnp.array([0.0, jnp.nan, 1.0]), "b": jnp.ones((), jnp.bfloat16)}


@pytest.mark.parametrize("limit", [0, 1, 2**31 - 1])
def test_gives_what_optax_gives(limit):
    """Updates and states, through skips, and where it gives up."""
    mine, theirs = (
        wrap(optax.adam(0.1), max_consecutive_errors=limit)
        for wrap in (apply_if_finite, optax.apply_if_finite)
    )
    state, state_ = mine.init(PARAMS), theirs.init(PARAMS)
    for grads in (GOOD, BAD, GOOD, BAD, BAD, GOOD):
        updates, state = mine.update(grads, state, PARAMS)
        updates_, state_ = theirs.update(grads, state_, PARAMS)
        assert_same_avals((updates, state), (updates_, state_))
        for x, y in zip(
            *map(jax.tree.leaves, ((updates, state), (updates_, state_))), strict=True
        ):
            np.testing.assert_allclose(
                np.asarray(x, np.float32), np.asarray(y, np.float32), rtol=1e-6
            )


def test_has_no_branch():
    tx = apply_if_finite(optax.adam(0.1), 5)
    text = str(jax.make_jaxpr(tx.update)(GOOD, tx.init(PARAMS), PARAMS))
    assert "cond[" not in text
