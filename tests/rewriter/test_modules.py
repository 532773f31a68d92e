"""What peers test on modules: nested policies, the dtypes of each layer, casts."""

import functools
import re

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen as nn

from flax_amp import amp, amp_stop, default_amp_policy, use_compute_precision
from helpers import (
    HALVES,
    assert_same_avals,
    both_halves,
    dtypes_of,
    equations_of,
)

SIZE = 4
ROWS = jax.ShapeDtypeStruct((2, 3, SIZE), jnp.float32)
WEIGHT = jax.ShapeDtypeStruct((SIZE, SIZE), jnp.float32)

# --- policies of modules in modules, as in Haiku -------------------------------------


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
        x = amp_stop(second)(x) if self.stops_second else second(x)
        return nn.Dense(SIZE, name="head")(x)


@functools.cache
def params_of(model):
    return jax.eval_shape(model.init, jax.random.key(0), ROWS)


def matmuls(policy, model=Net()):  # noqa: B008 - immutable
    """The dtypes of first/a, first/b, second/a, second/b and head."""
    fn = amp(model.apply, amp_policy=default_amp_policy | policy)
    found = dtypes_of(fn, params_of(model), ROWS)
    assert all(len(set(operands)) == 1 for operands in found)
    return " ".join(operands[0].replace("float", "") for operands in found)


FULL = jnp.float32
POLICIES = {  # name: (policy, the dtypes of the five matmuls)
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
def test_policies_of_modules(name):
    policy, expected = POLICIES[name]
    assert matmuls(policy) == expected


def test_a_module_that_is_stopped_inside_of_a_method():
    assert matmuls({}, Net(stops_second=True)) == "b16 b16 32 32 b16"


@both_halves
def test_amp_in_amp(dtype):
    """The inner dtype holds inside, the outer one outside, `amp_stop` in between."""
    other = {jnp.float16: jnp.bfloat16, jnp.bfloat16: jnp.float16}[dtype]

    def fn(x, w):
        y = amp(jnp.matmul, compute_dtype=other)(x @ w, w)
        return amp_stop(jnp.matmul)(y, w) @ w

    found = dtypes_of(amp(fn, compute_dtype=dtype), ROWS, WEIGHT)
    wanted = [jnp.dtype(d).name for d in (dtype, other, jnp.float32, dtype)]
    assert found == [(name, name) for name in wanted]


# --- the dtypes of each layer and loss -----------------------------------------------

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


def assert_only_matmuls_in_half(fn, *args, dtype):
    fn, name = amp(fn, compute_dtype=dtype), jnp.dtype(dtype).name
    in_half = dtypes_of(fn, *args)
    assert in_half and {x for operands in in_half for x in operands} == {name}
    in_full = dtypes_of(fn, *args, primitive=IN_FULL)
    assert in_full and {x for operands in in_full for x in operands} == {"float32"}


@pytest.mark.parametrize("name", LAYERS)
def test_layers(name):
    """Matmuls are half, statistics float32, gradients as without `amp`."""
    layer, dtype = LAYERS[name], HALVES[len(name) % 2]

    def loss(variables, w, x):
        out, _ = layer.apply(variables, x @ w, mutable=["batch_stats"])
        return ((out[..., :SIZE] @ w) ** 2).mean()

    args = params_of(layer), WEIGHT, ROWS
    assert_only_matmuls_in_half(loss, *args, dtype=dtype)
    grads = jax.eval_shape(jax.grad(amp(loss, compute_dtype=dtype)), *args)
    assert_same_avals(grads, params_of(layer))


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
def test_losses(name):
    """Behind logits in half precision, everything is float32."""
    fn = lambda x, w: LOSSES[name](x @ w).mean()  # noqa: E731
    assert_only_matmuls_in_half(fn, ROWS, WEIGHT, dtype=HALVES[len(name) % 2])


# --- casts, and what a platform gets -------------------------------------------------

CASTS = {  # name: (function, casts of float32 down, casts up to float32)
    "one matmul": (lambda x, w: x @ w, 2, 1),
    "before arithmetic": (lambda x, w: jnp.tanh(jnp.exp(x @ w) + 1.0), 2, 1),
    "two readers": (lambda x, w: jnp.tanh(y := x @ w) * jnp.exp(y), 2, 1),
    "behind arithmetic": (lambda x, w: (jnp.tanh(jnp.exp(x)) * 2.0) @ w, 2, 1),
    # The weight of both is cast at each use, so that its gradient adds up in float32;
    # XLA makes one cast of the two.
    "two matmuls": (lambda x, w: (x * 2) @ w + (x * 3) @ w, 4, 2),
    "where": (lambda x, w: jnp.where(x > 0, x @ w, 0.0) + x, 2, 1),
    "softmax": (lambda x, w: jax.nn.softmax(x), 0, 0),
    "no matmul": (lambda x, w: jax.nn.relu(x + w[0, 0]) * x, 0, 0),
}


@pytest.mark.parametrize("name", CASTS)
def test_no_cast_is_in_vain(name):
    fn, down, up = CASTS[name]
    casts = ("convert_element_type", "flax_amp_saturate")
    found = equations_of(amp(fn), WEIGHT, WEIGHT, primitive=casts)
    pairs = [(e.invars[0].aval.dtype, e.outvars[0].aval.dtype) for e in found]
    assert pairs.count((jnp.float32, jnp.bfloat16)) == down
    assert pairs.count((jnp.bfloat16, jnp.float32)) == up


@both_halves
@pytest.mark.parametrize("platform", ["cpu", "cuda", "tpu"])
def test_matmuls_of_the_lowered_program(platform, dtype):
    """Each matmul that a platform is handed has half operands, backward ones too."""
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
