"""Unmodified float32 Flax models under `amp`: what runs in which precision."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from _programs import normal
from flax_amp import amp
from helpers import (
    HALVES,
    MATMULS,
    assert_same_avals,
    dtypes_of,
    equations,
    jit,
    run_all,
)
from helpers import relative_error as error

BATCH, LENGTH, WIDTH, CLASSES = 4, 8, 16, 5


# --- Linen models --------------------------------------------------------------------


class Mlp(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.gelu(nn.Dense(2 * WIDTH)(x))
        return nn.Dense(WIDTH)(nn.LayerNorm()(x))


class Block(nn.Module):
    """Pre-norm, as in a ViT or a GPT; it marks its stream."""

    causal: bool = False

    @nn.compact
    def __call__(self, x, _=None):
        mask = nn.make_causal_mask(jnp.ones(x.shape[:2])) if self.causal else None
        y = nn.LayerNorm()(x)
        y = nn.MultiHeadDotProductAttention(2)(y, y, mask=mask)
        x = checkpoint_name(x + y, "stream")
        x = checkpoint_name(x + Mlp()(nn.LayerNorm()(x)), "stream")
        return (x, None) if self.causal else x


class Vit(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Dense(WIDTH)(x)
        where = self.param("where", nn.initializers.normal(0.1), (LENGTH, WIDTH))
        x = checkpoint_name(x + where[None], "stream")
        for _ in range(2):
            x = Block()(x)
        return nn.Dense(CLASSES)(nn.LayerNorm()(x))


class Gpt(nn.Module):
    """Scanned and rematerialized blocks over embedded tokens."""

    @nn.compact
    def __call__(self, tokens):
        embed = nn.Embed(CLASSES, WIDTH)
        block = nn.scan(
            nn.remat(Block, prevent_cse=False),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=3,
        )
        x, _ = block(causal=True)(embed(tokens), None)
        return embed.attend(nn.LayerNorm()(x))


class ResNet(nn.Module):
    @nn.compact
    def __call__(self, x):
        norm = functools.partial(nn.BatchNorm, use_running_average=False)
        conv = functools.partial(nn.Conv, WIDTH, (3, 3), use_bias=False)
        x = nn.relu(norm()(conv()(x)))
        for _ in range(2):
            y = norm()(conv()(nn.relu(norm()(conv()(x)))))
            x = nn.relu(checkpoint_name(x, "stream") + y)
        return nn.Dense(CLASSES)(x.mean((1, 2)))


class Case(NamedTuple):
    model: Callable[..., nn.Module]
    inputs: jax.Array
    matmuls: int
    streams: int | None  # marked values between blocks, if they must be low


SEQUENCE = normal(0, BATCH, LENGTH, WIDTH)
TOKENS = jnp.arange(BATCH * LENGTH).reshape(BATCH, -1) % CLASSES
MODELS = {
    "vit": Case(Vit, SEQUENCE, 18, 5),
    "gpt": Case(Gpt, TOKENS, 9, 2),
    "resnet": Case(ResNet, normal(0, BATCH, LENGTH, LENGTH, 3), 6, None),
}


def make_loss(model, inputs):
    """Returns `loss(params)` with the new batch statistics as auxiliary output."""

    def loss(params, state):
        logits, updates = model.apply(
            {"params": params, **state}, inputs, mutable=["batch_stats"]
        )
        logits = logits.astype(jnp.float32)
        labels = jnp.arange(logits[..., 0].size).reshape(logits.shape[:-1]) % CLASSES
        cost = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return cost.mean(), updates

    return loss


@functools.cache
def setup(name):
    case = MODELS[name]
    variables = dict(jit(case.model().init)(jax.random.key(0), case.inputs))
    return make_loss(case.model(), case.inputs), variables.pop("params"), variables


def grad_of(loss):
    return jax.value_and_grad(loss, has_aux=True)


def marked(jaxpr, name):
    """The dtypes of the values that `checkpoint_name` has given a name."""
    return [
        str(e.invars[0].aval.dtype)
        for _, e in equations(jaxpr)
        if e.primitive.name == "name" and e.params["name"] == name
    ]


def operands(jaxpr, primitives):
    """The operand dtypes of each equation of some primitives."""
    return [
        {str(v.aval.dtype) for v in e.invars}
        for _, e in equations(jaxpr)
        if e.primitive.name in primitives
    ]


FULL_PRECISION = ("exp", "log", "rsqrt", "reduce_sum", "logistic_grad", "erf_inv")


@pytest.mark.parametrize("name", MODELS)
def test_structure(name):
    """Matmuls and stream low; statistics, softmax and loss in float32; same avals."""
    dtype = HALVES[len(name) % 2]
    case, (loss, *args) = MODELS[name], setup(name)
    lowered, half = amp(loss, compute_dtype=dtype), jnp.dtype(dtype).name
    jaxpr = jax.make_jaxpr(lowered)(*args)
    assert operands(jaxpr, MATMULS) == [{half}] * case.matmuls
    if case.streams is not None:  # otherwise it is marked where it is computed
        assert marked(jaxpr, "stream") == [half] * case.streams
    full = operands(jaxpr, FULL_PRECISION)
    assert full and set().union(*full) <= {"float32", "int32"}
    grads, shapes = jax.make_jaxpr(grad_of(lowered), return_shape=True)(*args)
    original, expected = jax.make_jaxpr(grad_of(loss), return_shape=True)(*args)
    assert operands(grads, MATMULS) == [{half}] * len(operands(original, MATMULS))
    assert_same_avals(shapes, expected)


def test_batch_statistics():
    """Running statistics are float32 and those of the float32 model."""
    loss, *args = setup("resnet")
    (_, expected), (_, actual) = run_all(loss, amp(loss))(*args)
    assert_same_avals(actual, expected)
    assert {v.dtype for v in jax.tree.leaves(actual)} == {jnp.dtype(jnp.float32)}
    assert error(actual, expected) < 1e-2


# --- NNX -----------------------------------------------------------------------------


class NnxNet(nnx.Module):
    def __init__(self, rngs, attends=True):
        self.first = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.again = self.first  # shared
        self.norm = nnx.BatchNorm(WIDTH, momentum=0.5, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        heads = nnx.MultiHeadAttention(2, WIDTH, decode=False, rngs=rngs)
        self.attend = heads if attends else jnp.tanh
        self.last = nnx.List([nnx.Linear(WIDTH, CLASSES, rngs=rngs)])

    def __call__(self, x):
        x = self.drop(nnx.relu(self.norm(self.again(self.first(x)))))
        return self.last[0](x + self.attend(x))


def nnx_loss(model, x):
    labels = jnp.arange(BATCH * LENGTH).reshape(BATCH, LENGTH) % CLASSES
    return optax.softmax_cross_entropy_with_integer_labels(model(x), labels).mean()


def leaves(model):
    _, state = nnx.split(model)
    return [
        jax.random.key_data(v) if jnp.issubdtype(v.dtype, jax.dtypes.prng_key) else v
        for v in jax.tree.leaves(state)
    ]


WRAPPERS = [
    pytest.param(lambda fn: fn, id="plain", marks=pytest.mark.slow),
    pytest.param(nnx.jit, id="jit"),
    pytest.param(
        lambda fn: nnx.jit(lambda m, x: nnx.value_and_grad(fn)(m, x)[0]),
        id="jit_of_grad",
    ),
]


@pytest.mark.parametrize("wrap", WRAPPERS)
def test_nnx_mutations_reach_the_caller(wrap):
    """Statistics and random state after two calls are those of the float32 module."""
    plain, lowered = (NnxNet(nnx.Rngs(0), attends=False) for _ in range(2))
    expected_fn, actual_fn = wrap(nnx_loss), wrap(amp(nnx_loss))
    before = leaves(plain)
    for _ in range(2):
        expected, actual = expected_fn(plain, SEQUENCE), actual_fn(lowered, SEQUENCE)
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


def test_nnx_gradients():
    """Float32 gradients of the module's own structure, matmuls in half."""
    graphdef, state = nnx.split(NnxNet(nnx.Rngs(0)))
    lowered = amp(nnx_loss, compute_dtype=jnp.float16)
    value_and_grad = nnx.value_and_grad(lowered)

    def step(state, x):
        return value_and_grad(nnx.merge(graphdef, state), x)

    found = dtypes_of(step, state, SEQUENCE)
    assert len(found) > 9
    assert {d for row in found for d in row} == {"float16"}
    grads, expected = (
        nnx.jit(nnx.grad(loss))(NnxNet(nnx.Rngs(0)), SEQUENCE)
        for loss in (lowered, nnx_loss)
    )
    assert_same_avals(grads, expected)
    assert error(grads, expected) < 2e-2


def test_nnx_modules_anywhere_among_the_arguments():
    """In keywords, in containers, twice, beside static arguments; all are updated."""

    def fn(pair, x, *, model, mode):
        assert mode == "train" and pair["a"] is model
        return pair["a"](x) + pair["b"][0](x), mode

    a, b = NnxNet(nnx.Rngs(0)), nnx.BatchNorm(WIDTH, rngs=nnx.Rngs(1))
    b_before = b.mean[...]
    last = nnx.Linear(WIDTH, CLASSES, rngs=nnx.Rngs(2))
    pair = {"a": a, "b": [nnx.Sequential(b, last)]}
    out, mode = amp(fn)(pair, SEQUENCE, model=a, mode="train")
    assert (out.shape, out.dtype) == ((BATCH, LENGTH, CLASSES), jnp.float32)
    assert mode == "train"
    assert not np.array_equal(b.mean[...], b_before)


def test_nnx_structure_changes_are_refused():
    """A module that grows during the call: an error that says so."""

    def grow(model, x):
        model.extra = nnx.Param(x)
        return x

    with pytest.raises(ValueError, match="changed the structure of its nnx.Module"):
        amp(grow)(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), jnp.ones(2))
