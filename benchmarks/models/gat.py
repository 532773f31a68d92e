"""Graph attention networks in Linen, as public ones are written: GATv2, and GAT.

Nodes are gathered for each edge, a softmax over the edges of each receiver is made of
segment operations, and messages are added up by `jax.ops.segment_sum`.
"""

from typing import ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp

from benchmarks.models import base

# `size` is that of a head.
SIZES = base.sizes(
    "nodes edges features size classes heads layers",
    full=(20000, 100000, 128, 64, 40, 4, 4),
    tiny=(64, 256, 24, 12, 10, 4, 4),
)
V1_SIZES = base.sizes(
    "nodes edges features size classes heads layers",
    full=(20000, 100000, 256, 32, 40, 8, 4),
    tiny=(64, 256, 24, 12, 10, 4, 4),
)


def segment_softmax(scores: jax.Array, segments: jax.Array, count: int) -> jax.Array:
    """Returns the softmax of scores over the edges of each segment."""
    highest = jax.ops.segment_max(scores, segments, count)
    scores = jnp.exp(scores - highest[segments])
    return scores / jax.ops.segment_sum(scores, segments, count)[segments]


class Layer(base.Module):
    """Attention of each node to those that send to it."""

    @nn.compact
    def __call__(
        self, x: jax.Array, senders: jax.Array, receivers: jax.Array
    ) -> jax.Array:
        count, shape = x.shape[0], (self.config.heads, self.config.size)
        sent = nn.DenseGeneral(shape, dtype=self.dtype, name="sent")(x)[senders]
        received = nn.DenseGeneral(shape, dtype=self.dtype, name="received")(x)
        init = nn.initializers.lecun_normal(in_axis=-1, out_axis=-2)
        query = base.cast(self.param("query", init, shape), self.dtype)
        y = nn.leaky_relu(sent + received[receivers], 0.2)
        scores = jnp.einsum("ehd,hd->eh", y, query)
        weights = segment_softmax(scores, receivers, count)
        y = jax.ops.segment_sum(sent * weights[..., None], receivers, count)
        return y.reshape(count, -1)


class LayerV1(base.Module):
    """The same as it was first published: a score is a sum of two terms.

    The softmax is computed in float32, and its result cast back.
    """

    @nn.compact
    def __call__(
        self, x: jax.Array, senders: jax.Array, receivers: jax.Array
    ) -> jax.Array:
        count, shape = x.shape[0], (self.config.heads, self.config.size)
        z = nn.DenseGeneral(shape, use_bias=False, dtype=self.dtype)(x)
        init = nn.initializers.lecun_normal(in_axis=-1, out_axis=-2)

        def terms(name: str) -> jax.Array:
            query = base.cast(self.param(name, init, shape), self.dtype)
            return jnp.sum(z * query, axis=-1)

        scores = terms("source")[senders] + terms("target")[receivers]
        scores = nn.leaky_relu(scores, 0.2).astype(jnp.float32)
        weights = segment_softmax(scores, receivers, count).astype(z.dtype)
        y = jax.ops.segment_sum(weights[..., None] * z[senders], receivers, count)
        return y.reshape(count, -1)


class GAT(base.Module):
    """Layers of graph attention with shortcuts, and a head for each node."""

    layer: ClassVar[type[base.Module]] = Layer

    @nn.compact
    def __call__(self, graph: dict[str, jax.Array]) -> jax.Array:
        config, dtype = self.config, self.dtype
        edges = graph["senders"], graph["receivers"]
        x = nn.Dense(config.heads * config.size, dtype=dtype)(graph["nodes"])
        for _ in range(config.layers):
            y = self.layer(config, dtype)(nn.LayerNorm(dtype=dtype)(x), *edges)
            x = x + nn.elu(y)
        return nn.Dense(config.classes, dtype=dtype)(x)


class GATv1(GAT):
    """The same with the layers as they were first published."""

    layer = LayerV1


def batch(config: base.Config, key: jax.Array) -> base.Batch:
    keys = jax.random.split(key, 3)
    ends = jax.random.randint(keys[0], (2, config.edges), 0, config.nodes)
    nodes = jax.random.normal(keys[1], (config.nodes, config.features))
    labels = jax.random.randint(keys[2], (config.nodes,), 0, config.classes)
    graph = {"nodes": nodes, "senders": ends[0], "receivers": ends[1]}
    return {"inputs": graph, "labels": labels}


problem = base.problem_of(GAT, SIZES, batch)
v1 = base.problem_of(GATv1, V1_SIZES, batch)
