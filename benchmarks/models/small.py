"""`mlp`, nothing but matmuls, and `lstm`, a language model over `nn.RNN`."""

import flax.linen as nn
import jax

from benchmarks.models import base

MLP_SIZES = base.sizes(
    "width classes batch",
    full=(4096, 1000, 4096),
    tiny=(64, 10, 8),
    cpu=(1024, 1000, 256),
)
LSTM_SIZES = base.sizes(
    "width vocab length batch",
    full=(512, 10000, 128, 64),
    tiny=(64, 128, 32, 4),
)


class MLP(base.Module):
    """Three hidden layers of one width, and a head."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for _ in range(3):
            x = nn.relu(nn.Dense(self.config.width, dtype=self.dtype)(x))
        return nn.Dense(self.config.classes, dtype=self.dtype)(x)


class LSTM(base.Module):
    """Embedding, two LSTM layers, and a head."""

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        width, vocab, dtype = self.config.width, self.config.vocab, self.dtype
        x = nn.Embed(vocab, width, dtype=dtype)(tokens)
        for _ in range(2):
            x = nn.RNN(nn.OptimizedLSTMCell(width, dtype=dtype))(x)
        return nn.Dense(vocab, dtype=dtype)(x)


def _vectors(config: base.Config, key: jax.Array) -> base.Batch:
    return base.vectors(config, key, config.width)


mlp = base.problem_of(MLP, MLP_SIZES, _vectors)
lstm = base.problem_of(LSTM, LSTM_SIZES, base.texts)
