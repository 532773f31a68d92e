"""The minimum cut against trying every set, on small random graphs."""

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from flax_amp._rewriter.recompute.mincut import min_cut


@st.composite
def graphs(draw, least=0):
    """A random DAG: costs, edges from low to high numbers, sources, sinks."""
    size = draw(st.integers(1, 7))
    nodes = st.integers(0, size - 1)
    costs = draw(st.lists(st.integers(least, 4), min_size=size, max_size=size))
    pairs = list(itertools.combinations(range(size), 2))
    edges = draw(st.lists(st.sampled_from(pairs), max_size=12)) if pairs else []
    sources, sinks = draw(st.frozensets(nodes)), draw(st.frozensets(nodes))
    return dict(enumerate(costs)), edges, sources, sinks


def reaches_sinks(edges, sinks, cut):
    """The nodes from which a path leads to a sink around the cut."""
    found = set(sinks) - cut
    while True:
        more = {a for a, b in edges if b in found and a not in cut} - found
        if not more:
            return found
        found |= more


def separates(edges, sources, sinks, cut):
    return not reaches_sinks(edges, sinks, cut) & set(sources)


def cuts(costs, edges, sources, sinks):
    """Every set that separates the sources from the sinks."""
    sizes = range(len(costs) + 1)
    sets = (set(s) for r in sizes for s in itertools.combinations(costs, r))
    return [s for s in sets if separates(edges, sources, sinks, s)]


def total(costs, cut):
    return sum(costs[node] for node in cut)


@settings(deadline=None, max_examples=150)
@given(graphs(), st.sampled_from([1, 10**9, 10**12]))
def test_separates_at_the_least_cost(graph, unit):
    """No set of nodes, free ones included, separates for less, even at terabytes."""
    costs, edges, sources, sinks = graph
    scaled = {node: cost * unit for node, cost in costs.items()}
    cut = min_cut(scaled, edges, sources, sinks)
    assert cut <= costs.keys()
    assert separates(edges, sources, sinks, cut)
    assert total(costs, cut) == min(total(costs, other) for other in cuts(*graph))


@settings(deadline=None, max_examples=100)
@given(graphs(least=1))
def test_of_equals_the_nearest_to_the_sinks(graph):
    """Behind the chosen cut lies no more than behind any other that costs the same."""
    costs, edges, sources, sinks = graph
    cut = min_cut(costs, edges, sources, sinks)
    behind = reaches_sinks(edges, sinks, cut)
    for other in cuts(*graph):
        if total(costs, other) == total(costs, cut):
            assert behind <= reaches_sinks(edges, sinks, other)
