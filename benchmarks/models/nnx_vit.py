"""The vision transformer of `vit.py` in NNX: `nnx_vit`, of the sizes of `vit_s16`."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from benchmarks.models import base, vit


class Block(nnx.Module):
    """One pre-norm layer of attention and MLP."""

    def __init__(
        self,
        config: vit.Config,
        dtype: DTypeLike | None,
        rngs: nnx.Rngs,
    ):
        width = config.width
        options: dict[str, Any] = dict(dtype=dtype, rngs=rngs)
        self.norm1 = nnx.LayerNorm(width, **options)
        self.attention = nnx.MultiHeadAttention(
            config.heads, width, decode=False, **options
        )
        self.norm2 = nnx.LayerNorm(width, **options)
        self.up = nnx.Linear(width, 4 * width, **options)
        self.down = nnx.Linear(4 * width, width, **options)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.norm1(x))
        return x + self.down(nnx.gelu(self.up(self.norm2(x))))


class ViT(nnx.Module):
    """A vision transformer with a class token and learned positions."""

    def __init__(
        self,
        config: vit.Config,
        dtype: DTypeLike | None,
        rngs: nnx.Rngs,
    ):
        width, patch = config.width, (config.patch, config.patch)
        options: dict[str, Any] = dict(dtype=dtype, rngs=rngs)
        length = (config.image // config.patch) ** 2 + 1
        normal = nnx.initializers.normal(0.02)
        self.dtype = dtype
        self.patches = nnx.Conv(3, width, patch, patch, padding="VALID", **options)
        self.token = nnx.Param(jnp.zeros((1, 1, width)))
        self.positions = nnx.Param(normal(rngs.params(), (1, length, width)))
        self.blocks = nnx.List(
            [Block(config, dtype, rngs) for _ in range(config.layers)]
        )
        self.norm = nnx.LayerNorm(width, **options)
        self.head = nnx.Linear(width, config.classes, **options)

    def __call__(self, images: jax.Array) -> jax.Array:
        x = self.patches(images)
        x = x.reshape(x.shape[0], -1, x.shape[-1])
        token = base.cast(self.token[...], self.dtype)
        token = jnp.broadcast_to(token, (x.shape[0], 1, x.shape[-1]))
        positions = base.cast(self.positions[...], self.dtype)
        x = jnp.concatenate([token, x], axis=1) + positions
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x[:, 0]))


def problem(
    name: str,
    size: str = "full",
    dtype: DTypeLike | None = None,
    softmax_dtype: DTypeLike | None = None,
) -> base.Problem:
    """Makes the problem of `nnx_vit`; parameters are nested dicts of plain arrays.

    `softmax_dtype` changes nothing: NNX's attention without a mask is that of
    `jax.nn.dot_product_attention`, whose softmax is in float32 as it is.
    """
    config = vit.CONFIGS["vit_s16", size]

    def make(key: jax.Array) -> ViT:
        return ViT(config, dtype, nnx.Rngs(params=key))

    # The structure alone; `nnx.Rngs` of a tracer must not leak into it.
    graphdef, state = nnx.split(nnx.eval_shape(lambda: make(jax.random.key(0))))
    assert state == nnx.filter_state(state, nnx.Param), "other state is not expected"

    def init(key: jax.Array) -> dict[str, Any]:
        return {"params": nnx.to_pure_dict(nnx.state(make(key)))}

    def loss(params: Any, others: Any, batch: base.Batch) -> tuple[jax.Array, Any]:
        logits = nnx.merge(graphdef, params)(batch["inputs"])
        return base.cross_entropy(logits, batch["labels"]), others

    return base.Problem(name, init, loss, vit.batch(config))
