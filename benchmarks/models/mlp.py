"""Three wide layers with relu and a head: nothing but matrix products."""

import flax.linen as nn
import jax
from jax.typing import DTypeLike

from benchmarks.models import base

# (width, classes, batch)
CONFIGS = {"full": (4096, 1000, 4096), "tiny": (64, 10, 8)}


class MLP(nn.Module):
    """Three hidden layers of one width, and a head."""

    width: int
    classes: int
    dtype: DTypeLike | None = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for _ in range(3):
            x = nn.relu(nn.Dense(self.width, dtype=self.dtype)(x))
        return nn.Dense(self.classes, dtype=self.dtype)(x)


def problem(
    name: str,
    size: str = "full",
    dtype: DTypeLike | None = None,
    softmax_dtype: DTypeLike | None = None,
) -> base.Problem:
    """Makes the problem of `mlp`; it has no softmax but the one in its loss."""
    width, classes, batch = CONFIGS[size]
    data = base.vectors((batch, width), classes)
    return base.linen_problem(name, MLP(width, classes, dtype), data)
