"""The errors of a program under `amp`, beside those of its twin.

The twin is the same program with its products cast to half, and all else in float32.
Sums of products are exact in both, so that the errors are those of the roundings.
"""

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.matmuls import cast_matmuls, exact_matmuls
from flax_amp import amp
from helpers import exact_jit

SCALE = 2.0**6  # of the loss: the cotangents of some are small for float16


def normal(seed, *shapes):
    """A normal array for each shape."""
    keys = jax.random.split(jax.random.key(seed), len(shapes))
    pairs = zip(keys, shapes, strict=True)
    return [jax.random.normal(key, shape) for key, shape in pairs]


def errors(loss, dtype, draw, count):
    """Relative errors against float32: `[draw, value or gradient, amp or twin]`."""

    def both(fn):
        return jax.value_and_grad(lambda *args: SCALE * fn(*args), argnums=(0, 1, 2))

    fns = both(loss), both(amp(loss, compute_dtype=dtype))
    fns = [exact_matmuls(f) for f in fns] + [cast_matmuls(both(loss), dtype)]
    run = exact_jit(lambda *args: [f(*args) for f in fns])
    found = []
    for seed in range(count):
        results = run(*draw(seed))
        values = np.stack([np.ravel(value) for value, _ in results])
        grads = [jnp.concatenate([g.ravel() for g in grads]) for _, grads in results]
        for kind in (values, np.stack(grads)):
            finite = np.isfinite(kind).all(-1)
            assert finite.all(), f"float32, amp, twin: finite {finite} in draw {seed}"
            gaps = np.linalg.norm(kind[1:] - kind[0], axis=-1)
            found.append(gaps / np.linalg.norm(kind[0]))
    return np.reshape(found, (count, 2, 2))


def assert_as_exact(loss, dtype, draw, count=8, factor=1.1, floor=5e-5):
    """Asserts that the errors are at most `factor` times those of the twin."""
    ours, theirs = np.sqrt(np.square(errors(loss, dtype, draw, count)).mean(0)).T
    text = f"value, gradient: {ours} under amp, {theirs} with products cast"
    assert (ours <= factor * theirs + floor).all(), text
