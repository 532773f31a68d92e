"""The cheapest set of nodes of a directed graph that separates sources from sinks."""

from collections.abc import Collection, Hashable, Iterable, Mapping
from typing import TypeVar

import numpy as np

Node = TypeVar("Node", bound=Hashable)

_CAPACITY = 1 << 29  # of all nodes together; scipy adds up in int32
_UNLIMITED = 1 << 30


def min_cut(
    costs: Mapping[Node, int],
    edges: Iterable[tuple[Node, Node]],
    sources: Collection[Node],
    sinks: Collection[Node],
) -> set[Node]:
    """Returns the nodes to cut so that no path leads from a source to a sink.

    Of several cheapest sets, the one nearest to the sinks is returned. It is found by a
    maximum flow (Ford and Fulkerson, 1956), for which each node becomes an edge whose
    capacity is the cost of the node.

    Args:
      costs: what cutting each node costs; costs are compared to about 9 digits.
      edges: from node to node.
      sources: where paths begin. They may be cut themselves.
      sinks: where paths end. They may be cut themselves.
    """
    if not sources or not sinks:
        return set()
    # Importing scipy.sparse takes as long as importing NNX, and float32 needs no cut.
    from scipy.sparse import csr_array, csr_matrix
    from scipy.sparse.csgraph import breadth_first_order, maximum_flow

    index = {node: 2 + 2 * i for i, node in enumerate(costs)}  # its entry; + 1 its exit
    unit = sum(costs.values()) / _CAPACITY
    scale = max(unit, 1.0)
    capacity = {(i, i + 1): _scaled(costs[n], scale) for n, i in index.items()}
    capacity |= {(index[a] + 1, index[b]): _UNLIMITED for a, b in edges}
    capacity |= {(0, index[n]): _UNLIMITED for n in sources}
    capacity |= {(index[n] + 1, 1): _UNLIMITED for n in sinks}
    rows, columns = zip(*capacity, strict=True)
    size = 2 + 2 * len(index)
    data = np.fromiter(capacity.values(), np.int32, len(capacity))
    graph = csr_matrix((data, (rows, columns)), shape=(size, size))
    residual = graph - maximum_flow(graph, 0, 1).flow
    # The cut is where the flow uses up a node: its exit can still reach the sinks,
    # through edges with capacity left, and its entry cannot.
    backwards = csr_array(residual > 0).T.astype(np.int8)
    reaching = set(
        breadth_first_order(csr_matrix(backwards), 1, return_predecessors=False)
    )
    return {n for n, i in index.items() if i + 1 in reaching and i not in reaching}


def _scaled(cost: int, scale: float) -> int:
    return max(1, int(cost / scale)) if cost else 0
