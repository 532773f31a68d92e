"""`mlp`, nothing but matrix products, and `lstm`, a language model over `nn.RNN`."""

import functools

import flax.linen as nn
import jax

from benchmarks.models import base

MLP_SIZES = base.sizes(
    "width classes batch",
    full=(4096, 1000, 4096),
    tiny=(64, 10, 8),
)
LSTM_SIZES = base.sizes(
    "width vocab length batch",
    full=(512, 10000, 128, 64),
    tiny=(64, 128, 32, 4),
)


class MLP(nn.Module):
    """Three hidden layers of one width, and a head."""

    width: int
    classes: int
    dtype: base.DType = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for _ in range(3):
            x = nn.relu(nn.Dense(self.width, dtype=self.dtype)(x))
        return nn.Dense(self.classes, dtype=self.dtype)(x)


class LSTM(nn.Module):
    """Embedding, two LSTM layers, and a head."""

    width: int
    vocab: int
    dtype: base.DType = None

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = nn.Embed(self.vocab, self.width, dtype=self.dtype)(tokens)
        for _ in range(2):
            x = nn.RNN(nn.OptimizedLSTMCell(self.width, dtype=self.dtype))(x)
        return nn.Dense(self.vocab, dtype=self.dtype)(x)


def problem(name, size, dtype):
    if name == "mlp":
        config = MLP_SIZES[size]
        mlp = MLP(config.width, config.classes, dtype)
        return base.linen(mlp, lambda key: base.vectors(config, key, config.width))
    config = LSTM_SIZES[size]
    lstm = LSTM(config.width, config.vocab, dtype)
    return base.linen(lstm, functools.partial(base.texts, config))
