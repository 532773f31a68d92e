"""Names of modules: one dot separates a method, as for the keys of a policy."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from flax_amp import explain, find_nonfinite
from flax_amp.debug._place import module_path

X = jnp.full((2, 4), 0.3)


@pytest.mark.parametrize(
    "scopes, path",
    [
        (("Model", "enc.attend", "inner"), "Model/enc/inner"),
        (("Model", "Model.head", "out"), "Model/out"),
        (("Model/enc.a", "enc.b"), "Model/enc"),
        (("enc", "enc"), "enc/enc"),
        (("eqx.nn.MLP", "eqx.nn.Linear"), "eqx.nn.MLP/eqx.nn.Linear"),
        (("layer.0", "layer.1.attend"), "layer.0/layer.1"),
        (("layers.<lambda>", "ij,jk->ik", "x"), "layers.<lambda>/x"),
        ((), ""),
    ],
)
def test_paths(scopes, path):
    assert module_path(scopes) == path


@jax.custom_vjp
def divided(x):
    return x


divided.defvjp(lambda x: (x, jnp.sin(x)), lambda kept, g: (g * kept / 0,))


class Enc(nn.Module):
    def setup(self):
        self.inner = nn.Embed(4, 4)

    def attend(self, x):
        return self.inner.attend(x)

    @nn.remat
    def rematted(self, x):
        return self.inner.attend(x)

    @nn.jit
    def jitted(self, x):
        return self.inner.attend(x)

    def ruled(self, x):
        return divided(self.inner.attend(x))


class Model(nn.Module):
    method: str

    def setup(self):
        self.enc = Enc()

    def loss(self, x):
        return getattr(self.enc, self.method)(x).mean()


class NNXEnc(nnx.Module):
    def __init__(self):
        self.inner = nnx.Embed(4, 4, rngs=nnx.Rngs(0))

    def attend(self, x):
        return self.inner.attend(x)

    @nnx.remat
    def rematted(self, x):
        return self.inner.attend(x)


class NNXModel(nnx.Module):
    def __init__(self, method):
        self.enc, self.method = NNXEnc(), method

    def loss(self, x):
        return getattr(self.enc, self.method)(x).mean()


def linen(method):
    model = Model(method)
    init = functools.partial(model.init, method="loss")
    params = jax.jit(init)(jax.random.key(0), X)
    return lambda p, x: model.apply(p, x, method="loss"), params


def of_nnx(method):
    return lambda model, x: model.loss(x), NNXModel(method)


@pytest.mark.parametrize(
    "make, method, path",
    [
        *((linen, name, "Model") for name in ("attend", "rematted", "jitted")),
        *((of_nnx, name, "NNXModel") for name in ("attend", "rematted")),
    ],
)
def test_every_tool_names_the_module(make, method, path):
    fun, first = make(method)
    found = explain(fun, backward=False)(first, X)
    products = [e for e in found.equations if e.primitive == "dot_general"]
    assert {e.path for e in products} == {f"{path}/enc/inner"}
    first = jax.tree.map(lambda x: jnp.full_like(x, 6e4), first)
    fault = find_nonfinite(fun, compute_dtype=jnp.float16)(first, X)
    assert fault.finding.path == f"{path}/enc/inner"
    assert fault.policy  # which was tried, with the paths as keys


def test_the_rule_of_a_derivative_stands_in_the_module_that_calls_it():
    fun, first = linen("ruled")
    found = find_nonfinite(fun)(first, X)
    assert (found.finding.path, found.finding.backward) == ("Model/enc", True)
    rows = explain(fun)(first, X).added
    assert [e.path for e in rows if e.stored and e.primitive == "sin"] == ["Model/enc"]
