"""`graph_policy`: the dtypes of rows and sums, over policy.py, roles.py and flow.py.

Computed rows are half; coordinates and counts are float32.
"""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from _programs import DERIVATIVES, normal
from flax_amp import amp, default_amp_policy, explain, graph_policy
from helpers import equations_of, exact_jit, relative_error, run_all

SIZE, NODES, EDGES = 8, 10, 1000
W, X = normal(0, SIZE, SIZE), normal(1, NODES, SIZE)
PLACES = 1000 + normal(2, NODES, SIZE)  # far from zero, as of atoms in a large box
SENDERS = jnp.arange(EDGES) % NODES
RECEIVERS = jnp.minimum(jnp.arange(EDGES), 9)  # nearly all edges lead to the last node


def sums(messages):
    return jax.ops.segment_sum(messages, RECEIVERS, NODES)


def messages(w, x):
    """Sums of few messages for each node."""
    h = jnp.tanh(x @ w)[SENDERS[:40]]
    h = jax.ops.segment_sum(jnp.tanh(h @ w), SENDERS[::-1][:40], NODES)
    return jnp.mean((h @ w) ** 2)


@pytest.mark.parametrize("policy", [default_amp_policy, graph_policy])
def test_dtypes_of_messages(policy):
    """With the policy, rows and sums over edges are half, forward and backward."""
    grad = jax.grad(amp(messages, amp_policy=policy))
    found = equations_of(grad, W, X, primitive=("gather", "scatter-add"))
    dtypes = {str(eqn.outvars[0].aval.dtype) for eqn in found}
    assert dtypes == {"bfloat16" if policy is graph_policy else "float32"}


# The policy adds no rule of its own for a derivative: so each kind of derivative is
# enough. `test_transform.py` has the others.
@pytest.mark.parametrize(
    "name",
    ["grad", "linearize", "checkpoint", "vmap of grad", "grad of grad", "hessian"],
)
def test_derivatives(name):
    derive, fn = DERIVATIVES[name], amp(messages, amp_policy=graph_policy)
    found, expected = run_all(derive(fn), derive(messages))(W / 3, X)
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    assert all(relative_error(*pair) < 0.1 for pair in pairs)


# Functions of a weight whose lookups and sums are of data and of constants.
OF_DATA = {
    "differences of coordinates": lambda w: (
        (PLACES[SENDERS] - PLACES[(SENDERS + 3) % NODES]) @ w
    ),
    "edges of a node": lambda w: (X @ w) / jnp.maximum(sums(jnp.ones((EDGES, 1))), 1),
    "a sum of attributes": lambda w: sums(jnp.abs(PLACES[SENDERS])) / 1e5 @ w,
    "rows of a table": lambda w: w[SENDERS % SIZE] @ w,
    "in a call": lambda w: jax.jit(sums)(jnp.ones((EDGES, 1))) * (X @ w),
    "in a scan": lambda w: lax.scan(
        lambda c, x: (c, (x[SENDERS] - x[(SENDERS + 3) % NODES]) @ w), 0, PLACES[None]
    )[1],
}


@pytest.mark.parametrize("name", OF_DATA)
def test_coordinates_and_counts_are_float32(name):
    """They are as with the default policy; bfloat16 counts to 256."""
    fn = OF_DATA[name]
    ours, default = (
        exact_jit(amp(fn, amp_policy=policy))(W)
        for policy in (graph_policy, default_amp_policy)
    )
    assert (ours == default).all()
    assert relative_error(ours, fn(W)) < 0.01


def test_explain_says_why():
    found = explain(OF_DATA["edges of a node"], amp_policy=graph_policy)(W)
    rows = [row for row in found.equations if row.primitive == "scatter-add"]
    assert rows and all("no matmul comes before" in row.reason for row in rows)
