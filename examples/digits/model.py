"""Model, loss and metrics in float32; nothing in this file is about precision."""

from collections.abc import Callable, Sequence
from typing import Any

import flax
import jax
import optax
from clu import metrics
from flax import linen as nn


class ConvNet(nn.Module):
    """Convolutions with BatchNorm and relu, then dropout and one dense layer."""

    num_classes: int
    features: Sequence[int] = (16, 32, 64)
    dropout_rate: float = 0.2
    gain: float = 1.0  # a planted fault: BatchNorm divides by it, but float16 overflows

    @nn.compact
    def __call__(self, images: jax.Array, *, train: bool) -> jax.Array:
        x = images
        for index, features in enumerate(self.features):
            strides = (1, 1) if index == 0 else (2, 2)
            if index == 1 and self.gain != 1:
                with jax.named_scope("gain"):
                    x = x * self.gain
            x = nn.Conv(features, (3, 3), strides, use_bias=False)(x)
            x = nn.BatchNorm(use_running_average=not train, momentum=0.9)(x)
            x = nn.relu(x)
        x = x.mean(axis=(1, 2))
        x = nn.Dropout(self.dropout_rate, deterministic=not train)(x)
        return nn.Dense(self.num_classes)(x)


@flax.struct.dataclass
class Metrics(metrics.Collection):
    """What an evaluation measures; sums, which can be merged over batches."""

    accuracy: metrics.Accuracy
    loss: metrics.Average.from_output("loss")  # type: ignore[valid-type]


def make_loss_fn(weight: float = 1.0) -> Callable[..., Any]:
    """Returns a loss function. Its `aux` updates the batch statistics; the accuracy
    becomes a metric."""

    def loss_fn(params, batch, *, state, rngs):
        logits, updated = state.apply_fn(
            {"params": params, **state.variables},
            batch["image"],
            train=True,
            mutable=["batch_stats"],
            rngs=rngs,
        )
        accuracy = (logits.argmax(-1) == batch["label"]).mean()
        aux = {"variables": updated, "accuracy": accuracy}
        return weight * _loss(logits, batch["label"]), aux

    return loss_fn


def eval_fn(params, batch, *, state):
    """Returns the metrics of one batch, with running statistics and without dropout."""
    variables = {"params": params, **state.variables}
    logits = state.apply_fn(variables, batch["image"], train=False)
    return Metrics.single_from_model_output(
        logits=logits, labels=batch["label"], loss=_loss(logits, batch["label"])
    )


def _loss(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
