"""ResNet-50, with batch statistics, in Linen and in NNX (`nnx_resnet50`)."""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx

from benchmarks.models import base

STAGES = (3, 4, 6, 3)
SIZES = base.sizes(
    "image width classes batch",
    full=(224, 64, 1000, 32),
    tiny=(32, 8, 10, 8),
)


class Bottleneck(nn.Module):
    """Three convolutions and a shortcut."""

    width: int
    stride: int
    dtype: base.DType = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        conv = functools.partial(nn.Conv, use_bias=False, dtype=self.dtype)
        norm = functools.partial(
            nn.BatchNorm, use_running_average=False, momentum=0.9, dtype=self.dtype
        )
        strides = (self.stride, self.stride)
        y = nn.relu(norm()(conv(self.width, (1, 1))(x)))
        y = nn.relu(norm()(conv(self.width, (3, 3), strides)(y)))
        y = norm(scale_init=nn.initializers.zeros)(conv(4 * self.width, (1, 1))(y))
        if x.shape != y.shape:
            x = norm()(conv(4 * self.width, (1, 1), strides)(x))
        return nn.relu(x + y)


class ResNet(nn.Module):
    """ResNet-50, version 1.5."""

    width: int
    classes: int
    dtype: base.DType = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        dtype = self.dtype
        x = nn.Conv(self.width, (7, 7), (2, 2), use_bias=False, dtype=dtype)(x)
        x = nn.BatchNorm(use_running_average=False, momentum=0.9, dtype=dtype)(x)
        x = nn.max_pool(nn.relu(x), (3, 3), (2, 2), padding="SAME")
        for stage, blocks in enumerate(STAGES):
            for block in range(blocks):
                stride = 2 if stage > 0 and block == 0 else 1
                x = Bottleneck(self.width * 2**stage, stride, dtype)(x)
        return nn.Dense(self.classes, dtype=dtype)(jnp.mean(x, axis=(1, 2)))


class NNXBottleneck(nnx.Module):
    """`Bottleneck` in NNX."""

    def __init__(self, inputs: int, width: int, stride: int, **options: Any):
        conv: Any = functools.partial(nnx.Conv, use_bias=False, **options)
        norm: Any = functools.partial(nnx.BatchNorm, momentum=0.9, **options)
        strides = (stride, stride)
        self.conv1, self.norm1 = conv(inputs, width, (1, 1)), norm(width)
        self.conv2, self.norm2 = conv(width, width, (3, 3), strides), norm(width)
        self.conv3 = conv(width, 4 * width, (1, 1))
        self.norm3 = norm(4 * width, scale_init=nnx.initializers.zeros)
        shortcut: Any = None
        if stride > 1 or inputs != 4 * width:
            shortcut = nnx.Sequential(
                conv(inputs, 4 * width, (1, 1), strides), norm(4 * width)
            )
        self.shortcut = shortcut

    def __call__(self, x: jax.Array) -> jax.Array:
        y = nnx.relu(self.norm1(self.conv1(x)))
        y = nnx.relu(self.norm2(self.conv2(y)))
        y = self.norm3(self.conv3(y))
        return nnx.relu(y + (x if self.shortcut is None else self.shortcut(x)))


class NNXResNet(nnx.Module):
    """`ResNet` in NNX."""

    def __init__(self, width: int, classes: int, dtype: base.DType, rngs: nnx.Rngs):
        options: dict[str, Any] = dict(dtype=dtype, rngs=rngs)
        self.conv = nnx.Conv(3, width, (7, 7), (2, 2), use_bias=False, **options)
        self.norm = nnx.BatchNorm(width, momentum=0.9, **options)
        blocks, inputs = [], width
        for stage, count in enumerate(STAGES):
            for block in range(count):
                stride = 2 if stage > 0 and block == 0 else 1
                blocks.append(
                    NNXBottleneck(inputs, width * 2**stage, stride, **options)
                )
                inputs = 4 * width * 2**stage
        self.blocks = nnx.List(blocks)
        self.head = nnx.Linear(inputs, classes, **options)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = nnx.relu(self.norm(self.conv(x)))
        x = nnx.max_pool(x, (3, 3), (2, 2), padding="SAME")
        for block in self.blocks:
            x = block(x)
        return self.head(jnp.mean(x, axis=(1, 2)))


def problem(name, size, dtype):
    config = SIZES[size]
    data, sizes = functools.partial(base.images, config), (config.width, config.classes)
    if name == "nnx_resnet50":
        return base.nnx_problem(functools.partial(NNXResNet, *sizes, dtype), data)
    return base.linen(ResNet(*sizes, dtype), data)
