"""Scope keys name modules, whatever calls them: every way of calling x every key.

The calls of NNX modules leave scopes as those of Linen modules do, and nothing else.
"""

import fnmatch
import functools
import threading
from concurrent import futures

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen as nn
from flax import nnx

from _programs import squares
from flax_amp import (
    AmpTrainState,
    amp,
    default_amp_policy,
    make_train_step,
    use_original_precision,
)
from helpers import MATMULS, equations, jit

# Some policies have no effect, or keep all matmuls in float32.
pytestmark = pytest.mark.filterwarnings("ignore::flax_amp.PolicyWarning")

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


# A key for each way of calling: the paths there come from JAX and Flax. How other keys
# match the paths, `test_policy.py` tells. Two keys that name unlike modules share a
# program, and ask for unlike dtypes.
BOTH = [
    ("*/called/d", "*/encoded.encode"),
    ("*/encoded/d", "*/embed"),
    ("*/remat/d", "*/embed.attend"),
    ("*/remat_method/d", "[ce]*ed"),
    ("*/jitted/d", "*/scanned/d"),
]
LINEN = [
    *BOTH,
    ("*/mapped/d", "LinenLM.logits"),
    ("*/layers_1/d", "*/jitted_method.encode/d"),
    ("odd.0/d",),
]
NNX = [
    *BOTH,
    ("*/mapped/d", "layers"),
    ("*/layers/*/d",),
    ("NnxLM/layers/[01].encode",),
]


def matmuls(fn, *args):
    """The scopes and the dtype of every matmul in `fn(*args)`."""
    return [
        ("/".join(scopes).split("/"), eqn.invars[0].aval.dtype.name)
        for scopes, eqn in equations(jax.make_jaxpr(fn)(*args))
        if eqn.primitive.name in MATMULS
    ]


def is_meant(key, path):
    """Whether a key means a path, in this model, whose modules have unlike names."""
    plain = [name.removesuffix(".attend").removesuffix(".encode") for name in path]
    plain = [name.removesuffix(".logits") for name in plain]
    wanted = [part for part in key.split("/") if part != "*"]
    return all(fnmatch.filter([*path, *plain], part) for part in wanted)


def grad_of_amp(lower, grad, loss):
    return grad(lower(loss))


def amp_of_grad(lower, grad, loss):
    return lower(grad(loss))


# Of two programs with equal keys, Linen has one order of the transforms, NNX the other.
ORDERS = grad_of_amp, amp_of_grad


@pytest.mark.parametrize(
    "setup, keys, order",
    [
        (setup, keys, ORDERS[(k + i) % 2])
        for k, (setup, table) in enumerate(((linen, LINEN), (of_nnx, NNX)))
        for i, keys in enumerate(table)
    ],
)
def test_keys_select_what_they_name(setup, keys, order):
    """Forward and backward, and nothing else."""
    loss, target, grad = setup()
    asked = dict(zip(keys, (jnp.float32, jnp.float16), strict=False))
    policy = default_amp_policy | asked
    lower = functools.partial(amp, compute_dtype=jnp.bfloat16, amp_policy=policy)
    found = matmuls(order(lower, grad, loss), target)
    for key, dtype in asked.items():
        chosen = [path for path, found_in in found if found_in == dtype.__name__]
        others = [path for path, found_in in found if found_in != dtype.__name__]
        assert len(chosen) >= 3  # forward, and two backward
        assert [path for path in chosen if not is_meant(key, path)] == []
        assert [path for path in others if is_meant(key, path)] == []
    assert len([path for path, dtype in found if dtype == "bfloat16"]) >= 3


# --- the scopes of NNX modules: nothing of them stays --------------------------------


class Model(nnx.Module):
    """Encoders in a list."""

    def __init__(self, rngs):
        self.layers = nnx.List([NnxEncoder(rngs) for _ in range(LAYERS)])

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


X = jnp.ones((2, SIZE))
# Names are given where a policy asks for scopes.
SCOPED = default_amp_policy | {"no such scope": use_original_precision}
PATHS = [f"Model/layers/{i}/d" for i in range(LAYERS)]


def mean(model, x):
    return model(x).mean()


def lowered(fn=mean, amp_policy=SCOPED):
    return amp(fn, compute_dtype=jnp.bfloat16, amp_policy=amp_policy)


def scopes(fn, *args):
    """The scope of every matmul, in order, without methods."""
    return ["/".join(path).replace(".encode", "") for path, _ in matmuls(fn, *args)]


def stack_layers(model, x):
    layers = jax.tree.map(lambda *leaves: jnp.stack(leaves), *model.layers)
    return jax.lax.scan(lambda x, layer: (layer(x), None), x, layers)[0].mean()


def test_code_that_needs_equal_modules_is_told_why_it_fails(count_traces):
    counted, traces = count_traces(stack_layers)
    model = Model(nnx.Rngs(0))
    with pytest.raises((ValueError, TypeError), match="different structures here"):
        lowered(counted)(model, X)
    assert traces() == 1
    assert_untouched(model, nnx.graphdef(Model(nnx.Rngs(0))))
    lowered(stack_layers, default_amp_policy)(model, X)

    state = AmpTrainState.create(model=model, tx=optax.sgd(0.1))
    step = make_train_step(stack_layers, amp_policy=SCOPED)
    with pytest.raises((ValueError, TypeError), match="nnx.split"):
        step(state, X)


def assert_untouched(model, before):
    assert nnx.graphdef(model) == before
    for cls in (Model, NnxEncoder, nnx.Linear):
        assert not hasattr(cls.__call__, "__wrapped__")


def test_nothing_is_left_behind():
    """In a model, its clone, one that is returned, and after an error."""

    def fail(model, x):
        model(x)
        raise LookupError

    model = Model(nnx.Rngs(0))
    before = nnx.graphdef(model)
    lowered()(model, X)
    assert_untouched(model, before)
    with pytest.raises(LookupError) as caught:
        lowered(fail)(model, X)
    notes = getattr(caught.value, "__notes__", [])  # JAX may add one
    assert not any("nnx.Module" in note for note in notes)
    assert_untouched(model, before)
    clone = lowered(lambda m, x: nnx.clone(m))(model, X)
    assert nnx.graphdef(clone) == before
    returned = lowered(lambda m, x: m.layers[0])(model, X)
    assert nnx.graphdef(returned) == nnx.graphdef(model.layers[0])


def test_other_threads_go_on_undisturbed():
    """Two traces overlap, and a third thread uses the same classes without names."""
    both_trace, plain_called = threading.Barrier(3), threading.Event()

    def trace(other):
        def fn(model, x):
            both_trace.wait(timeout=60)
            assert plain_called.wait(timeout=60)
            return other(model(x))

        return scopes(lowered(fn), Model(nnx.Rngs(0)), X)

    with futures.ThreadPoolExecutor() as pool:
        traced = pool.map(trace, [jnp.mean, jnp.sum])
        both_trace.wait(timeout=60)
        plain = scopes(mean, Model(nnx.Rngs(0)), X)
        plain_called.set()
        assert list(traced) == [PATHS, PATHS]
    assert plain == [""] * LAYERS
    assert not hasattr(Model.__call__, "__wrapped__")
