"""ResNet, loss and metrics in float32; nothing in this file is about precision."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
from clu import metrics
from flax import linen as nn

# The number of blocks in each stage; the last one is for tests.
MODELS = {
    "ResNet50": (3, 4, 6, 3),
    "ResNet101": (3, 4, 23, 3),
    "ResNet152": (3, 8, 36, 3),
    "ResNetTiny": (1, 1),
}
# Of the pixels of ImageNet, by color.
MEAN = np.array([[[[123.68, 116.28, 103.53]]]], np.float32)
STDDEV = np.array([[[[58.40, 57.12, 57.38]]]], np.float32)


class Bottleneck(nn.Module):
    """Three convolutions and a shortcut; begins as the identity."""

    width: int
    stride: int
    norm: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        conv = functools.partial(nn.Conv, use_bias=False)
        strides = (self.stride, self.stride)
        y = nn.relu(self.norm()(conv(self.width, (1, 1))(x)))
        y = nn.relu(self.norm()(conv(self.width, (3, 3), strides)(y)))
        y = conv(4 * self.width, (1, 1))(y)
        y = self.norm(scale_init=nn.initializers.zeros)(y)
        if x.shape != y.shape:
            x = self.norm()(conv(4 * self.width, (1, 1), strides)(x))
        return nn.relu(x + y)


class ResNet(nn.Module):
    """ResNet of version 1.5, for images in uint8."""

    stages: Sequence[int]
    num_classes: int
    width: int = 64

    @nn.compact
    def __call__(self, images: jax.Array, *, train: bool) -> jax.Array:
        norm = functools.partial(
            nn.BatchNorm, use_running_average=not train, momentum=0.9
        )
        x = (images.astype(jnp.float32) - MEAN) / STDDEV
        x = nn.Conv(self.width, (7, 7), (2, 2), use_bias=False)(x)
        x = nn.max_pool(nn.relu(norm()(x)), (3, 3), (2, 2), padding="SAME")
        for stage, blocks in enumerate(self.stages):
            for block in range(blocks):
                stride = 2 if stage > 0 and block == 0 else 1
                x = Bottleneck(self.width * 2**stage, stride, norm)(x)
        return nn.Dense(self.num_classes)(x.mean(axis=(1, 2)))


def create(name: str, num_classes: int, width: int) -> ResNet:
    if name not in MODELS:
        raise ValueError(f"config.model is {name!r}; expected one of {list(MODELS)}")
    return ResNet(MODELS[name], num_classes, width)


@flax.struct.dataclass
class Metrics(metrics.Collection):
    """Sums over many steps, which stay on the devices until `compute()`."""

    accuracy: metrics.Accuracy
    loss: metrics.Average.from_output("loss")  # type: ignore[valid-type]


def make_loss_fn(label_smoothing: float) -> Callable[..., Any]:
    """Returns a loss function; its `aux` updates the batch statistics."""

    def loss_fn(params, batch, *, state):
        logits, updated = state.apply_fn(
            {"params": params, **state.variables},
            batch["image"],
            train=True,
            mutable=["batch_stats"],
        )
        accuracy = (logits.argmax(-1) == batch["label"]).mean()
        loss = _losses(logits, batch["label"], label_smoothing).mean()
        return loss, {"variables": updated, "accuracy": accuracy}

    return loss_fn


def eval_fn(params, batch, *, state):
    """Returns the metrics of one batch, without the examples of the label -1."""
    variables = {"params": params, **state.variables}
    logits = state.apply_fn(variables, batch["image"], train=False)
    label, losses = batch["label"], _losses(logits, batch["label"], 0.0)
    return Metrics.single_from_model_output(
        logits=logits, labels=label, loss=losses, mask=label >= 0
    )


def _losses(logits, labels, smoothing):
    targets = optax.smooth_labels(jax.nn.one_hot(labels, logits.shape[-1]), smoothing)
    return optax.losses.softmax_cross_entropy(logits, targets)
