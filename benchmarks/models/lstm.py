"""A language model of two LSTM layers in Linen, over `nn.RNN`."""

import flax.linen as nn
import jax
from jax.typing import DTypeLike

from benchmarks.models import base

# (width, vocab, length, batch)
CONFIGS = {"full": (512, 10000, 128, 64), "tiny": (64, 128, 32, 4)}


class LSTM(nn.Module):
    """Embedding, two LSTM layers, and a head."""

    width: int
    vocab: int
    dtype: DTypeLike | None = None

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = nn.Embed(self.vocab, self.width, dtype=self.dtype)(tokens)
        for _ in range(2):
            x = nn.RNN(nn.OptimizedLSTMCell(self.width, dtype=self.dtype))(x)
        return nn.Dense(self.vocab, dtype=self.dtype)(x)


def problem(
    name: str,
    size: str = "full",
    dtype: DTypeLike | None = None,
    softmax_dtype: DTypeLike | None = None,
) -> base.Problem:
    """Makes the problem of `lstm`; it has no softmax but the one in its loss."""
    width, vocab, length, batch = CONFIGS[size]
    data = base.tokens(batch, length, vocab)
    return base.linen_problem(name, LSTM(width, vocab, dtype), data)
