"""A decoder whose MLPs are mixtures of experts, in Linen, as public ones are written.

Tokens go to their experts by matmuls with one-hot matrices, each expert up to its
capacity (Switch, GShard), and the router sows a term of the loss that spreads them.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp

from benchmarks.models import base, gpt

SIZES = base.sizes(
    "width heads vocab length batch experts layers chosen capacity tied",
    full=(512, 8, 32000, 512, 8, 8, 6, 2, 1.25, False),
    tiny=(48, 4, 128, 32, 4, 4, 6, 2, 1.25, False),
)


class Router(base.Module):
    """Sends each token to the experts that it scores highest, in float32."""

    @nn.compact
    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        config = self.config
        length = x.shape[1]
        logits = nn.Dense(config.experts, use_bias=False, dtype=jnp.float32)(x)
        scores = nn.softmax(logits)
        gates, chosen = jax.lax.top_k(scores, config.chosen)
        gates = gates / jnp.sum(gates, axis=-1, keepdims=True)
        picked = jax.nn.one_hot(chosen, config.experts)  # batch, length, choice, expert
        share = jnp.mean(picked, axis=(1, 2)) * jnp.mean(scores, axis=1)
        self.sow("losses", "balance", config.experts * jnp.mean(jnp.sum(share, -1)))
        # First choices are served first, and in the order of the text.
        order = picked.swapaxes(1, 2).reshape(x.shape[0], -1, config.experts)
        place = jnp.cumsum(order, axis=1) * order - 1.0
        place = place.reshape(x.shape[0], config.chosen, length, config.experts)
        capacity = int(config.capacity * config.chosen * length / config.experts)
        slots = jax.nn.one_hot(place.swapaxes(1, 2).astype(jnp.int32), capacity)
        combine = jnp.einsum("blk,blkec->blec", gates, slots)
        return combine > 0, combine


class Experts(base.Module):
    """An MLP for each expert, over the tokens that are sent to it."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        config, width = self.config, self.config.width
        init = nn.initializers.lecun_normal(batch_axis=0)
        up = self.param("up", init, (config.experts, width, 4 * width))
        down = self.param("down", init, (config.experts, 4 * width, width))
        dispatch, combine = Router(config)(x)
        y = jnp.einsum("blec,blm->ebcm", dispatch.astype(x.dtype), x)
        y = nn.gelu(jnp.einsum("ebcm,emh->ebch", y, base.cast(up, self.dtype)))
        y = jnp.einsum("ebch,ehm->ebcm", y, base.cast(down, self.dtype))
        return jnp.einsum("blec,ebcm->blm", combine.astype(x.dtype), y)


class MoE(gpt.GPT):
    """A decoder with learned positions, a mixture of experts in each layer."""

    def _layers(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        config, dtype = self.config, self.dtype
        for _ in range(config.layers):
            attention = nn.MultiHeadDotProductAttention(config.heads, dtype=dtype)
            x = x + attention(nn.LayerNorm(dtype=dtype)(x), mask=mask)
            x = x + Experts(config, dtype)(nn.LayerNorm(dtype=dtype)(x))
        return x


problem = base.problem_of(MoE, SIZES, base.texts)
