"""A network of messages on a graph in Linen, as public simulators are written.

Each edge reads its two nodes, each node the sum of its edges; both have an MLP with a
norm and a residual.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp

from benchmarks.models import base, gat

SIZES = base.sizes(
    "nodes edges features kinds width classes layers",
    full=(20000, 100000, 16, 4, 128, 3, 6),
    tiny=(64, 256, 8, 4, 48, 3, 6),
)


class MLP(base.Module):
    """Two layers, and a norm."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        width, dtype = self.config.width, self.dtype
        x = nn.relu(nn.Dense(width, dtype=dtype)(x))
        return nn.LayerNorm(dtype=dtype)(nn.Dense(width, dtype=dtype)(x))


class MessagePassing(base.Module):
    """Encoders of nodes and edges, steps of messages, and a head for each node."""

    @nn.compact
    def __call__(self, graph: dict[str, jax.Array]) -> jax.Array:
        config, dtype = self.config, self.dtype
        senders, receivers = graph["senders"], graph["receivers"]
        nodes = MLP(config, dtype)(graph["nodes"])
        edges = MLP(config, dtype)(graph["edges"])
        for _ in range(config.layers):
            read = [edges, nodes[senders], nodes[receivers]]
            edges = edges + MLP(config, dtype)(jnp.concatenate(read, axis=-1))
            heard = jax.ops.segment_sum(edges, receivers, nodes.shape[0])
            read = [nodes, heard]
            nodes = nodes + MLP(config, dtype)(jnp.concatenate(read, axis=-1))
        x = nn.relu(nn.Dense(config.width, dtype=dtype)(nodes))
        return nn.Dense(config.classes, dtype=dtype)(x)


def batch(config: base.Config, key: jax.Array) -> base.Batch:
    keys = jax.random.split(key, 3)
    graph = gat.batch(config, keys[0])["inputs"]
    graph["edges"] = jax.random.normal(keys[1], (config.edges, config.kinds))
    labels = jax.random.normal(keys[2], (config.nodes, config.classes))
    return {"inputs": graph, "labels": labels}


problem = base.problem_of(MessagePassing, SIZES, batch, base.squared_error)
