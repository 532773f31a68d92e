"""The dtypes of unmodified Flax layers and models, over all files of the rewriter."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from _models import CLASSES, FEATURES, NnxNet
from _programs import norm, normal
from benchmarks import models
from flax_amp import amp
from helpers import (
    HALVES,
    MATMULS,
    assert_same_avals,
    both_halves,
    dtypes_of,
    equations_of,
)
from helpers import relative_error as error


def only_dtype(fn, *args, primitive=MATMULS):
    """The one dtype of all float operands of some primitives."""
    found = dtypes_of(fn, *args, primitive=primitive)
    (name,) = {name for names in found for name in names if name != "int32"}
    return name


IN_FULL = (
    "reduce_sum exp log log1p rsqrt integer_pow square logistic_grad erf_inv".split()
)


def assert_only_matmuls_in_half(fn, *args, dtype):
    lowered = amp(fn, compute_dtype=dtype)
    assert only_dtype(lowered, *args) == dtype.__name__
    assert only_dtype(lowered, *args, primitive=tuple(IN_FULL)) == "float32"


# --- layers --------------------------------------------------------------------------

ROWS = jax.ShapeDtypeStruct((2, 3, 4), jnp.float32)
WEIGHT = jax.ShapeDtypeStruct((4, 4), jnp.float32)
LAYERS = {
    "Dense": nn.Dense(4),
    "Conv": nn.Conv(4, (3,)),
    "ConvTranspose": nn.ConvTranspose(4, (3,)),
    "Einsum": nn.Einsum((4, 4), "...a,ab->...b"),
    "BatchNorm": nn.BatchNorm(use_running_average=False),
    "LayerNorm": nn.LayerNorm(),
    "GroupNorm": nn.GroupNorm(2),
    "InstanceNorm": nn.InstanceNorm(),
    "RMSNorm": nn.RMSNorm(),
    "attention": nn.MultiHeadDotProductAttention(2),
    "LSTM": nn.RNN(nn.LSTMCell(4)),
    "GRU": nn.RNN(nn.GRUCell(4)),
    "bidirectional": nn.Bidirectional(nn.RNN(nn.GRUCell(4)), nn.RNN(nn.GRUCell(4))),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers(name):
    """Matmuls are half, statistics float32, gradients as without `amp`."""
    layer, dtype = LAYERS[name], HALVES[len(name) % 2]

    def loss(variables, w, x):
        out, _ = layer.apply(variables, x @ w, mutable=["batch_stats"])
        return ((out[..., :4] @ w) ** 2).mean()

    variables = jax.eval_shape(layer.init, jax.random.key(0), ROWS)
    args = variables, WEIGHT, ROWS
    assert_only_matmuls_in_half(loss, *args, dtype=dtype)
    grads = jax.eval_shape(jax.grad(amp(loss, compute_dtype=dtype)), *args)
    assert_same_avals(grads, variables)


# --- models --------------------------------------------------------------------------


@both_halves
@pytest.mark.parametrize("name, sums", [("vit_s16", 1 + 48), ("gpt_scan", 4)])
def test_the_stream_of_a_model_is_half(name, sums, dtype):
    """Blocks in a list, or scanned with `nn.remat`: two biases and two residuals."""
    task = models.problem(name, "tiny")
    loss = lambda *args: task.loss(*args)[0]  # noqa: E731
    with jax.numpy_rank_promotion("allow"):
        args = task.shapes()
        assert_only_matmuls_in_half(loss, *args, dtype=dtype)
        lowered = amp(loss, compute_dtype=dtype)
        adds = equations_of(lowered, *args, primitive="add")
        assert only_dtype(jax.grad(lowered), *args) == dtype.__name__
    pairs = [[v.aval for v in eqn.invars] for eqn in adds]
    found = [a.dtype for a, b in pairs if a.shape == b.shape and a.shape[2:] == (48,)]
    assert found == [dtype] * sums


@both_halves
def test_the_stream_between_checkpoints_is_half(dtype):
    """Though the arithmetic of a block reads it before a matmul does."""

    @jax.checkpoint
    def block(x, w):
        return checkpoint_name(x + jnp.tanh(norm(x) @ w) @ w, "stream")

    def loss(w, x):
        return jnp.sum(norm(block(block(x @ w[0], w[1]), w[2]) @ w[3]) ** 3)

    lowered = amp(loss, compute_dtype=dtype)
    args = jnp.stack([jnp.eye(8)] * 4), jnp.ones((4, 8))
    found = equations_of(lowered, *args, primitive="name")
    assert [eqn.invars[0].aval.dtype for eqn in found] == [dtype] * 2


# --- NNX -----------------------------------------------------------------------------


SAMPLES = normal(0, 4, FEATURES)


def nnx_net():
    model = NnxNet(nnx.Rngs(0))
    model.again = model.first  # shared
    return model


def nnx_loss(model, x):
    return jnp.mean(model(x) ** 2)


def leaves(model):
    _, state = nnx.split(model)
    return [
        jax.random.key_data(v) if jnp.issubdtype(v.dtype, jax.dtypes.prng_key) else v
        for v in jax.tree.leaves(state)
    ]


WRAPPERS = {
    "jit": nnx.jit,
    "jit of grad": lambda fn: nnx.jit(lambda m, x: nnx.value_and_grad(fn)(m, x)[0]),
}


@pytest.mark.parametrize("name", WRAPPERS)
def test_nnx_mutations_reach_the_caller(name):
    """Statistics and random state after two calls are those of the float32 module."""
    plain, lowered = nnx_net(), nnx_net()
    expected_fn, actual_fn = map(WRAPPERS[name], (nnx_loss, amp(nnx_loss)))
    before = leaves(plain)
    for _ in range(2):
        expected, actual = expected_fn(plain, SAMPLES), actual_fn(lowered, SAMPLES)
        assert abs(float(actual - expected)) < 0.05
    assert lowered.again is lowered.first
    after = leaves(lowered)
    assert_same_avals(after, leaves(plain))
    assert error(after, leaves(plain)) < 1e-2
    changed = [not np.array_equal(a, b) for a, b in zip(before, after, strict=True)]
    assert 3 <= sum(changed) < len(changed)  # mean, var and counters; no weights
    for a, b in zip(after, leaves(plain), strict=True):
        if jnp.issubdtype(a.dtype, jnp.integer):
            assert np.array_equal(a, b)


def test_nnx_modules_anywhere_among_the_arguments():
    """In keywords, in containers, twice, beside static arguments; all are updated."""

    def fn(pair, x, *, model, mode):
        assert mode == "train" and pair["a"] is model
        return pair["a"](x) + pair["b"][0](x), mode

    a, b = nnx_net(), nnx.BatchNorm(FEATURES, rngs=nnx.Rngs(1))
    b_before = b.mean[...]
    last = nnx.Linear(FEATURES, CLASSES, rngs=nnx.Rngs(2))
    pair = {"a": a, "b": [nnx.Sequential(b, last)]}
    out, mode = amp(fn)(pair, SAMPLES, model=a, mode="train")
    assert (out.shape, out.dtype) == ((4, CLASSES), jnp.float32)
    assert mode == "train"
    assert not np.array_equal(b.mean[...], b_before)


def test_nnx_structure_changes_are_refused():
    def grow(model, x):
        model.extra = nnx.Param(x)
        return x

    with pytest.raises(ValueError, match="changed the structure of its nnx.Module"):
        amp(grow)(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), jnp.ones(2))


# --- casts ---------------------------------------------------------------------------

CASTS = {  # name: (function, casts of float32 down, casts up to float32)
    "one matmul": (lambda x, w: x @ w, 2, 1),
    "before arithmetic": (lambda x, w: jnp.tanh(jnp.exp(x @ w) + 1.0), 2, 1),
    "two readers": (lambda x, w: jnp.tanh(y := x @ w) * jnp.exp(y), 2, 1),
    "behind arithmetic": (lambda x, w: (jnp.tanh(jnp.exp(x)) * 2.0) @ w, 2, 1),
    # The weight of both is cast at each use, so that its gradient adds up in float32;
    # XLA makes one cast of the two.
    "two matmuls": (lambda x, w: (x * 2) @ w + (x * 3) @ w, 4, 2),
    "where": (lambda x, w: jnp.where(x > 0, x @ w, 0.0) + x, 2, 1),
    "no matmul": (lambda x, w: jax.nn.softmax(x + w[0, 0]) * x, 0, 0),
}


@pytest.mark.parametrize("name", CASTS)
def test_no_cast_is_in_vain(name):
    fn, down, up = CASTS[name]
    casts = ("convert_element_type", "flax_amp_saturate")
    found = equations_of(amp(fn), WEIGHT, WEIGHT, primitive=casts)
    pairs = [(e.invars[0].aval.dtype, e.outvars[0].aval.dtype) for e in found]
    assert pairs.count((jnp.float32, jnp.bfloat16)) == down
    assert pairs.count((jnp.bfloat16, jnp.float32)) == up
