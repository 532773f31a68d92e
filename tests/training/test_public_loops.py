"""The loops of seven public programs: trained as in float32, once traced, in half."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import _loops
import _loops_of_tokens
from _models import changed, leaves_by_path
from _steps import copy
from helpers import assert_close, assert_same_avals, dtypes_of

LOOPS = {
    "Flax's VAE": _loops.vae,
    "Flax's WMT": _loops_of_tokens.wmt,
    "Flax's Gemma": _loops_of_tokens.gemma,
    "nanodo": _loops_of_tokens.nanodo,
    "PureJaxRL's PPO": _loops.ppo,
    "big_vision's ViT": _loops.big_vision,
    "Hugging Face's causal model": _loops_of_tokens.hugging_face,
}
QUICK = "Flax's VAE", "nanodo", "PureJaxRL's PPO"
# What a skipped step may change.
COUNTERS = re.compile(r"\.step$|scaler|notfinite|last_finite|skip_state|dropout_rng")


@functools.cache
def trained(name, dtype):
    """Returns the loop after its steps, and their losses."""
    loop = LOOPS[name](dtype)
    start, carry, losses = copy(loop.carry), loop.carry, []
    for batch in loop.batches:
        carry, loss = loop.step(carry, batch)
        losses.append(float(loss))
    assert_same_avals(carry, start)
    moved = changed(start, carry)
    frozen = {path for path in leaves_by_path(start) if loop.frozen in path}
    assert frozen.isdisjoint(moved) and bool(frozen) == (loop.frozen != "nothing")
    if loop.replicated:
        first, second = (jax.tree.map(lambda x, i=i: x[i], carry) for i in range(2))
        assert changed(first, second) <= {".dropout_rng"}
    return loop._replace(carry=carry), np.array(losses)


def check_skip(loop):
    """A bad batch changes no bit, and the next good one trains."""
    for batch, is_bad in [(loop.bad, True), (loop.batches[0], False)]:
        before = copy(loop.carry)
        carry, loss = loop.step(loop.carry, batch)
        assert np.isfinite(loss) != is_bad
        moved = changed(loop.kept(before), loop.kept(carry))
        assert all(map(COUNTERS.search, moved)) == is_bad, moved
        loop = loop._replace(carry=carry)
    return loop


@pytest.mark.parametrize(
    "dtype",
    [
        jnp.bfloat16,  # beside float32
        pytest.param(jnp.float32, marks=pytest.mark.slow),
        pytest.param(jnp.float16, marks=[pytest.mark.slow, pytest.mark.once]),
    ],
    ids=lambda dtype: dtype.__name__,
)
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in LOOPS],
)
def test_public_loop(name, dtype):
    loop, losses = trained(name, dtype)
    _, precise = trained(name, jnp.float32)
    assert precise[-1] < 0.8 * precise[0]
    assert_close(losses, precise, dtype)
    if loop.bad is not None:
        loop = check_skip(loop)
    assert len(loop.traced) == 1

    found = dtypes_of(loop.step, loop.carry, loop.batches[0])
    half = (jnp.dtype(dtype).name,) * 2
    assert len(found) > 12
    assert found.count(half) == len(found) - loop.precise * (dtype != jnp.float32)
