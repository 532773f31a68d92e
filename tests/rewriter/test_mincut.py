"""The minimum cut against trying every set, on small random graphs."""

import itertools

import pytest
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
    sets = (set(s) for r in range(len(costs) + 1) for s in _combinations(costs, r))
    return [s for s in sets if separates(edges, sources, sinks, s)]


def _combinations(costs, size):
    return itertools.combinations(costs, size)


def total(costs, cut):
    return sum(costs[node] for node in cut)


@settings(deadline=None, max_examples=150)
@given(graphs())
def test_separates_at_the_least_cost(graph):
    """No set of nodes, free ones included, separates for less."""
    costs, edges, sources, sinks = graph
    cut = min_cut(costs, edges, sources, sinks)
    assert cut <= costs.keys()
    assert separates(edges, sources, sinks, cut)
    cheapest = min(total(costs, other) for other in cuts(*graph))
    assert total(costs, cut) == cheapest


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


@settings(deadline=None, max_examples=100)
@given(graphs(), st.integers(10**9, 10**12))
def test_huge_costs(graph, unit):
    """Costs of terabytes neither overflow nor change which set is the cheapest."""
    costs, edges, sources, sinks = graph
    huge = {node: cost * unit for node, cost in costs.items()}
    cut = min_cut(huge, edges, sources, sinks)
    assert separates(edges, sources, sinks, cut)
    assert total(costs, cut) == min(total(costs, s) for s in cuts(*graph))


@pytest.mark.parametrize("sources, sinks", [((), ("b",)), (("a",), ()), ((), ())])
def test_nothing_to_separate(sources, sinks):
    """Without a source or a sink there is no path, and nothing is cut."""
    assert min_cut({"a": 1, "b": 0}, [("a", "b")], sources, sinks) == set()


@pytest.mark.parametrize(
    "costs, expected",
    [
        ((2, 2, 2), {"c"}),
        ((1, 2, 2), {"a"}),
        ((2, 1, 1), {"c"}),
        ((3, 1, 2), {"b"}),
        ((10**12, 10**12, 10**12), {"c"}),
        ((10**12, 1, 10**12), {"b"}),
    ],
)
def test_chain(costs, expected):
    """Of a chain one node is cut: the cheapest, of equals the last."""
    costs = dict(zip("abc", costs, strict=True))
    assert min_cut(costs, [("a", "b"), ("b", "c")], ["a"], ["c"]) == expected


def test_node_that_is_source_and_sink():
    """A value that is both read and impossible to compute again must be cut."""
    assert min_cut({"a": 5, "b": 1}, [("a", "b")], ["a"], ["a", "b"]) == {"a"}


def test_edges_given_twice():
    """An operand that is read twice counts once."""
    edges = [("a", "b"), ("a", "b"), ("a", "c"), ("b", "d"), ("c", "d")]
    costs = {"a": 3, "b": 1, "c": 1, "d": 3}
    assert min_cut(costs, edges, ["a"], ["d"]) == {"b", "c"}
