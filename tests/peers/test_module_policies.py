"""What peers test on modules: Haiku's nested policies, Flux' layers, Apex' cells."""

import concurrent.futures
import functools
import re

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen as nn
from flax import nnx
from peer_graphs import only, painted

from flax_amp import amp, amp_stop, default_amp_policy, use_compute_precision
from helpers import HALVES, MATMULS, assert_same_avals, both_halves, dtypes_of

SIZE = 4
ROWS = jax.ShapeDtypeStruct((2, 3, SIZE), jnp.float32)
WEIGHT = jax.ShapeDtypeStruct((SIZE, SIZE), jnp.float32)

# --- Haiku: policies of modules in modules -------------------------------------------


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(SIZE, name="b")(nn.relu(nn.Dense(SIZE, name="a")(x)))


class Net(nn.Module):
    stops_second: bool = False

    @nn.compact
    def __call__(self, x):
        x = Block(name="first")(x)
        second = Block(name="second")
        if self.stops_second:
            with amp_stop():
                x = second(x)
        else:
            x = second(x)
        return nn.Dense(SIZE, name="head")(x)


@functools.cache
def params_of(model):
    return jax.eval_shape(model.init, jax.random.key(0), ROWS)


def products(policy, model=Net(), run=None):  # noqa: B008 - immutable
    """The dtypes of first/a, first/b, second/a, second/b and head."""
    run = model.apply if run is None else run
    fn = amp(run, amp_policy=default_amp_policy | policy)
    return shown(dtypes_of(fn, params_of(model), ROWS))


def shown(found):
    assert all(len(set(operands)) == 1 for operands in found)
    return " ".join(operands[0].replace("float", "") for operands in found)


FULL = jnp.float32
POLICIES = {  # name: (policy, the dtypes of the five products)
    "none": ({}, "b16 b16 b16 b16 b16"),
    "one module": ({"head": FULL}, "b16 b16 b16 b16 32"),
    "another dtype": ({"head": jnp.float16}, "b16 b16 b16 b16 16"),
    "a parent covers its children": ({"first": FULL}, "32 32 b16 b16 b16"),
    "a path": ({"second/a": FULL}, "b16 b16 32 b16 b16"),
    "all of a name": ({"*/a": FULL}, "32 b16 32 b16 b16"),
    "two modules": ({"first": FULL, "head": FULL}, "32 32 b16 b16 32"),
    "the root": ({"Net": FULL}, "32 32 32 32 32"),
    # In Haiku the policy of the inner module wins. Here it is that of the outermost
    # scope, as in jaxamp, so that what a user has switched off stays off.
    "nested": ({"first": FULL, "first/a": use_compute_precision}, "32 32 b16 b16 b16"),
    "nested, inside": (
        {"Net": use_compute_precision, "first/a": FULL}, "b16 b16 b16 b16 b16"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.filterwarnings("ignore:.*of this program runs in:flax_amp.PolicyWarning")
def test_haiku_policies(name):
    policy, expected = POLICIES[name]
    assert products(policy) == expected


def test_haiku_policy_inside_of_a_method():
    assert products({}, Net(stops_second=True)) == "b16 b16 32 32 b16"


def test_haiku_no_policy_is_set_for_others():
    """A policy belongs to one call of `amp`: there is nothing to pop or to clear."""
    names = ["one module", "a path", "none"] * 4
    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda name: products(POLICIES[name][0]), names))
    assert found == [POLICIES[name][1] for name in names]
    assert set(dtypes_of(Net().apply, params_of(Net()), ROWS)) == {("float32",) * 2}


def test_haiku_interceptors():
    """Methods may be intercepted inside, as those of a policy are in Haiku."""

    def stop_a(call, args, kwargs, context):
        if context.module.name == "a" and context.method_name == "__call__":
            return amp_stop(call)(*args, **kwargs)
        return call(*args, **kwargs)

    def run(params, x):
        with nn.intercept_methods(stop_a):
            return Net().apply(params, x)

    assert products({}, run=run) == "32 b16 32 b16 b16"


@both_halves
def test_torch_nested_autocast(dtype):
    """The inner dtype holds inside, the outer one outside, `amp_stop` in between."""
    other = {jnp.float16: jnp.bfloat16, jnp.bfloat16: jnp.float16}[dtype]

    @amp_stop
    def stopped(x, w):
        return x @ w

    def fn(x, w):
        y = amp(jnp.matmul, compute_dtype=other)(x @ w, w)
        return stopped(y, w) @ w

    found = dtypes_of(amp(fn, compute_dtype=dtype), ROWS, WEIGHT)
    wanted = [jnp.dtype(d).name for d in (dtype, other, jnp.float32, dtype)]
    assert found == [(name, name) for name in wanted]


# --- Flux and Apex: the dtypes of each layer -----------------------------------------

IN_FULL = ("reduce_sum", "exp", "log", "log1p", "rsqrt", "integer_pow", "square")
LAYERS = {
    "Dense": nn.Dense(SIZE),
    "Conv": nn.Conv(SIZE, (3,)),
    "ConvTranspose": nn.ConvTranspose(SIZE, (3,)),
    "Einsum": nn.Einsum((SIZE, SIZE), "...a,ab->...b"),
    "BatchNorm": nn.BatchNorm(use_running_average=False),
    "BatchNorm, running": nn.BatchNorm(use_running_average=True),
    "LayerNorm": nn.LayerNorm(),
    "GroupNorm": nn.GroupNorm(2),
    "InstanceNorm": nn.InstanceNorm(),
    "RMSNorm": nn.RMSNorm(),
    "attention": nn.MultiHeadDotProductAttention(2),
    "LSTM": nn.RNN(nn.LSTMCell(SIZE)),
    "OptimizedLSTM": nn.RNN(nn.OptimizedLSTMCell(SIZE)),
    "GRU": nn.RNN(nn.GRUCell(SIZE)),
    "MGU": nn.RNN(nn.MGUCell(SIZE)),
    "SimpleCell": nn.RNN(nn.SimpleCell(SIZE)),
    "bidirectional": nn.Bidirectional(
        nn.RNN(nn.GRUCell(SIZE)), nn.RNN(nn.GRUCell(SIZE))
    ),
}


@pytest.mark.parametrize("name", LAYERS)
def test_flux_layers_and_apex_cells(name):
    """Products are half, statistics float32, gradients as without `amp`."""
    dtype = HALVES[len(name) % 2]
    layer = LAYERS[name]
    variables = params_of(layer)

    def loss(variables, w, x):
        out, _ = layer.apply(variables, x @ w, mutable=["batch_stats"])
        return ((out[..., :SIZE] @ w) ** 2).mean()

    lowered = amp(loss, compute_dtype=dtype)
    args = variables, WEIGHT, ROWS
    found = painted(loss, *args, compute_dtype=dtype)
    in_half = only(found, *MATMULS)
    assert len(in_half) >= 2 and all(entry.endswith(":16") for entry in in_half)
    in_full = only(found, *IN_FULL)
    assert in_full and all(entry.endswith(":32") for entry in in_full)
    grads = jax.eval_shape(jax.grad(lowered), *args)
    assert_same_avals(grads, variables)


def test_flux_statistics_and_embeddings():
    """Running averages stay float32; a table of embeddings is read as it is."""
    layer = nn.BatchNorm(use_running_average=False)
    run = lambda v, x: layer.apply(v, x @ x, mutable=["batch_stats"])  # noqa: E731
    square = jax.ShapeDtypeStruct((SIZE, SIZE), jnp.float32)
    _, updates = jax.eval_shape(amp(run), params_of(layer), square)
    assert {leaf.dtype for leaf in jax.tree.leaves(updates)} == {jnp.dtype("float32")}
    embed = nn.Embed(5, SIZE)
    table = jax.eval_shape(embed.init, jax.random.key(0), jnp.arange(2))
    (read,) = only(painted(embed.apply, table, jnp.arange(2)), "gather")
    assert read == "gather:32"


LOSSES = {
    "cross entropy": lambda y: optax.softmax_cross_entropy_with_integer_labels(
        y, jnp.zeros(y.shape[:-1], int)
    ),
    "binary": lambda y: optax.sigmoid_binary_cross_entropy(y, jnp.ones(y.shape)),
    "squared": lambda y: optax.squared_error(y, jnp.ones(y.shape)),
    "huber": lambda y: optax.huber_loss(y, jnp.ones(y.shape)),
    "cosine": lambda y: optax.cosine_distance(y, jnp.ones(y.shape)),
    "KL": lambda y: optax.kl_divergence(jax.nn.log_softmax(y), jnp.ones(y.shape) / 4),
}


@pytest.mark.parametrize("name", LOSSES)
def test_flux_losses(name):
    """Behind logits in half precision, everything is float32."""
    dtype = HALVES[len(name) % 2]
    fn = lambda x, w: LOSSES[name](x @ w).mean()  # noqa: E731
    found = painted(fn, ROWS, WEIGHT, compute_dtype=dtype)
    assert found.count("dot_general:16") == 1
    in_full = only(found, *IN_FULL, "sub")
    assert in_full and all(entry.endswith(":32") for entry in in_full)


def test_qwix_unmodified_models():
    """One policy with paths serves a Linen and an NNX model that know nothing of it."""

    class NnxBlock(nnx.Module):
        def __init__(self, rngs):
            self.a = nnx.Linear(SIZE, SIZE, rngs=rngs)
            self.b = nnx.Linear(SIZE, SIZE, rngs=rngs)

        def __call__(self, x):
            return self.b(nnx.relu(self.a(x)))

    class NnxNet(nnx.Module):
        def __init__(self, rngs):
            self.first, self.second = NnxBlock(rngs), NnxBlock(rngs)
            self.head = nnx.Linear(SIZE, SIZE, rngs=rngs)

        def __call__(self, x):
            return self.head(self.second(self.first(x)))

    model = NnxNet(nnx.Rngs(0))
    for name in ("one module", "a path", "two modules", "all of a name"):
        policy, expected = POLICIES[name]
        fn = amp(lambda m, x: m(x), amp_policy=default_amp_policy | policy)
        found = dtypes_of(lambda x, fn=fn: fn(model, x), ROWS)
        assert shown(found) == expected


@both_halves
@pytest.mark.parametrize("platform", ["cpu", "cuda", "tpu"])
def test_products_of_the_lowered_program(platform, dtype):
    """Each product that a platform is handed has half operands, backward ones too.

    What XLA compiles them to on a TPU and a GPU, the benchmarks show; that for the CPU
    casts them up again.
    """
    loss = lambda w, x: jnp.tanh(x @ w).sum()  # noqa: E731
    grad = jax.jit(jax.grad(amp(loss, compute_dtype=dtype), (0, 1)))
    traced = grad.trace(WEIGHT, ROWS)
    text = traced.lower(lowering_platforms=(platform,)).as_text()
    lines = [line for line in text.splitlines() if "stablehlo.dot_general" in line]
    name = {jnp.float16: "f16", jnp.bfloat16: "bf16"}[dtype]
    assert len(lines) == 3
    for line in lines:
        left, right = re.findall(r"\(tensor<(\S+)>, tensor<(\S+)>\)", line)[0]
        assert left.endswith(f"x{name}") and right.endswith(f"x{name}")
