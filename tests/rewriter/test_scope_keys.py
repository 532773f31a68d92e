"""Scope keys name modules, whatever calls them: every way of calling x every key."""

import fnmatch
import functools

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from flax import nnx

from _programs import squares
from flax_amp import amp, default_amp_policy, use_compute_precision
from helpers import MATMULS, jit, scoped_equations

# Of policies that keep all products in float32.
pytestmark = pytest.mark.filterwarnings("ignore:.*of this program runs in")

SIZE, WORDS, LAYERS = 4, 6, 2
TOKENS = jnp.arange(WORDS)[None]

# --- Linen ---------------------------------------------------------------------------


class Encoder(nn.Module):
    """A submodule of `setup`, used in a method that another method calls."""

    def setup(self):
        self.d = nn.Dense(SIZE)

    def __call__(self, x):
        return self.encode(x)

    def encode(self, x):
        return jnp.tanh(self.d(x))


class Step(Encoder):
    def __call__(self, x, _):
        return self.encode(x), None


class LinenLM(nn.Module):
    def setup(self):
        own = dict(variable_axes={"params": 0}, split_rngs={"params": True})
        self.embed = nn.Embed(WORDS, SIZE)
        self.called = Encoder()
        self.encoded = Encoder()
        self.layers = [Encoder() for _ in range(LAYERS)]
        self.remat = nn.remat(Encoder)()
        self.remat_method = nn.remat(Encoder, methods=["encode"])()
        self.jitted = nn.jit(Encoder)()
        self.jitted_method = nn.jit(Encoder, methods=["encode"])()
        self.scanned = nn.scan(Step, length=LAYERS, **own)()
        self.mapped = nn.vmap(Encoder, **own)()
        self.odd = Encoder(name="odd.0")

    def __call__(self, tokens):
        x = self.called(self.embed(tokens))
        x = self.encoded.encode(x)
        for layer in self.layers:
            x = layer.encode(x)
        x = self.remat_method.encode(self.remat(x))
        x = self.jitted_method.encode(self.jitted(x))
        x, _ = self.scanned(x, None)
        x = self.mapped(jnp.stack([x, -x])).sum(0)
        return self.logits(self.odd(x))

    def logits(self, x):
        return self.embed.attend(x)


# --- NNX -----------------------------------------------------------------------------


class NnxEncoder(nnx.Module):
    def __init__(self, rngs):
        self.d = nnx.Linear(SIZE, SIZE, rngs=rngs)

    def __call__(self, x):
        return self.encode(x)

    def encode(self, x):
        return jnp.tanh(self.d(x))


class NnxLM(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(WORDS, SIZE, rngs=rngs)
        for name in ("called", "encoded", "remat", "remat_method", "jitted"):
            setattr(self, name, NnxEncoder(rngs))
        self.layers = nnx.List([NnxEncoder(rngs) for _ in range(LAYERS)])
        stack = nnx.split_rngs(splits=LAYERS)(nnx.vmap(NnxEncoder, in_axes=0))
        self.scanned, self.mapped = stack(rngs), stack(rngs)

    def __call__(self, tokens):
        x = self.called(self.embed(tokens))
        x = self.encoded.encode(x)
        for layer in self.layers:
            x = layer.encode(x)
        x = nnx.remat(lambda m, x: m(x))(self.remat, x)
        x = nnx.remat(lambda m, x: m.encode(x))(self.remat_method, x)
        x = nnx.jit(lambda m, x: m.encode(x))(self.jitted, x)
        x = nnx.scan(
            lambda x, m: m.encode(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry
        )(x, self.scanned)
        x = nnx.vmap(lambda m, x: m(x))(self.mapped, jnp.stack([x, -x])).sum(0)
        return self.logits(x)

    def logits(self, x):
        return self.embed.attend(x)


# --- the matrix ----------------------------------------------------------------------


@functools.cache
def linen():
    model = LinenLM()
    params = jit(model.init)(jax.random.key(0), TOKENS)
    return lambda params: squares(model.apply(params, TOKENS)), params, jax.grad


@functools.cache
def of_nnx():
    model = NnxLM(nnx.Rngs(0))
    return lambda model: squares(model(TOKENS)), model, nnx.grad


LIFTED = "remat remat_method jitted scanned mapped".split()
BOTH = [
    "embed",
    "*/embed",
    "*/embed.attend",
    "*.attend",
    *(f"*/{name}/d" for name in ("called", "encoded", *LIFTED)),
    "*/encoded.encode",
    "encoded.encode/d",
    "*/remat_method.encode",
    "[ce]*ed",
    "*/d",
]
LINEN = [
    *BOTH,
    "LinenLM/embed",
    "LinenLM.logits",
    "called.encode/d",
    "*/layers_1/d",
    "LinenLM/layers_[01].encode",
    "*/jitted_method.encode/d",
    "odd.0/d",
]
NNX = [
    *BOTH,
    "NnxLM/embed",
    "layers",
    "*/layers/*/d",
    "NnxLM/layers/[01].encode",
]


def products(fn, *args):
    """The scopes and the dtype of every matrix product in `fn(*args)`."""
    return [
        ("/".join(scopes).split("/"), eqn.invars[0].aval.dtype.name)
        for scopes, eqn in scoped_equations(jax.make_jaxpr(fn)(*args))
        if eqn.primitive.name in MATMULS
    ]


def is_meant(key, path):
    """Whether a key means a path, in this model, whose modules have unlike names."""
    plain = [name.removesuffix(".attend").removesuffix(".encode") for name in path]
    plain = [name.removesuffix(".logits") for name in plain]
    wanted = [part for part in key.split("/") if part != "*"]
    return all(fnmatch.filter([*path, *plain], part) for part in wanted)


# One for each way of calling: the paths there come from JAX and Flax. How other keys
# match those paths has to do with neither, nor with the order of amp and grad.
OF_CALLS = [key for key in BOTH if key.endswith("/d") and key != "*/d"]
OF_CALLS += ["*/embed", "*/embed.attend", "*/encoded.encode"]


@pytest.mark.parametrize(
    "setup, key",
    [
        pytest.param(setup, key, marks=() if key in OF_CALLS else pytest.mark.once)
        for setup, keys in ((linen, LINEN), (of_nnx, NNX))
        for key in keys
    ],
)
def test_keys_select_what_they_name(setup, key):
    """Forward and backward, and nothing else."""
    loss, target, grad = setup()
    policy = default_amp_policy | {key: jnp.float32}
    lower = functools.partial(amp, compute_dtype=jnp.bfloat16, amp_policy=policy)
    orders = [lower(grad(loss)), grad(lower(loss))]
    for fn in orders if key in OF_CALLS else orders[:1]:
        found = products(fn, target)
        full = [path for path, dtype in found if dtype == "float32"]
        low = [path for path, dtype in found if dtype == "bfloat16"]
        assert len(full) >= 3 and len(low) >= 3  # forward, and two backward
        assert [path for path in full if not is_meant(key, path)] == []
        assert [path for path in low if is_meant(key, path)] == []


@pytest.mark.parametrize("setup", [linen, of_nnx])
def test_a_method_before_its_module_and_the_outermost_before_all(setup):
    """`{module, module.method}` in any order; a model's own key decides for it all."""
    loss, target, grad = setup()
    module, method = {"*/embed": jnp.float32}, {"*/embed.attend": use_compute_precision}
    for entries in (module | method, method | module):
        lowered = amp(loss, amp_policy=default_amp_policy | entries)
        assert {dtype for _, dtype in products(grad(lowered), target)} == {"bfloat16"}
    model = {"*LM": jnp.float32}
    lowered = amp(loss, amp_policy=default_amp_policy | method | model)
    assert {dtype for _, dtype in products(grad(lowered), target)} == {"float32"}
