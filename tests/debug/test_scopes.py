"""Names of modules: a dot separates the method that Flax calls, and nothing else."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from flax_amp import compare_precision, explain, find_nonfinite

X, W = jnp.full((2, 4), 0.3), jnp.full((4, 4), 0.2)


def decorated(method):
    @functools.wraps(method)
    def wrapper(*args):
        return method(*args)

    return wrapper


def scoped(w, x):
    """Scopes whose names a reader could take for methods of `enc`."""
    for name in ("enc.attn", "enc.mlp", "enc"):
        with jax.named_scope(name):
            x = x @ w
    return x


@jax.custom_vjp
def divided(x):
    return x


divided.defvjp(lambda x: (x, jnp.sin(x)), lambda kept, g: (g * kept / 0,))


class Enc(nn.Module):
    def setup(self):
        self.inner = nn.Embed(4, 4)

    def attend(self, x):
        return self.inner.attend(x)

    def calls_attend(self, x):
        return self.attend(x)

    @nn.remat
    def rematted(self, x):
        return self.inner.attend(x)

    @nn.jit
    def jitted(self, x):
        return self.inner.attend(x)

    @decorated
    def decorated(self, x):
        return self.inner.attend(x)

    def ruled(self, x):
        return divided(self.inner.attend(x))

    def scoped(self, x):
        with jax.named_scope("enc.attn"):
            return self.inner.attend(x)

    def helped(self, x):
        def attn(x):
            with jax.named_scope("enc.attn"):
                return self.inner.attend(x)

        return attn(x)


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

    @nnx.jit
    def jitted(self, x):
        return self.inner.attend(x)

    @nnx.remat
    def rematted(self, x):
        return self.inner.attend(x)

    def scoped(self, x):
        with jax.named_scope("enc.attn"):
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


def looped(w, x):
    body = jax.checkpoint(lambda x, _: (scoped(w, x), None))
    return jax.lax.scan(body, jax.jit(scoped)(w, x), length=2)[0].mean()


def of_equinox():
    eqx = pytest.importorskip("equinox")
    mlp = eqx.nn.MLP(4, 4, 4, 1, key=jax.random.key(0))
    arrays, static = eqx.partition(mlp, eqx.is_array)
    return lambda m, x: jax.vmap(eqx.combine(m, static))(x).mean(), arrays


ENC = {"enc.attn", "enc.mlp", "enc"}
# name: what returns the loss and its first argument, the modules with products
CASES = {
    "scopes": (lambda: (lambda w, x: scoped(w, x).mean(), W), ENC),
    "scopes_in_loops": (lambda: (looped, W), ENC),
    "equinox": (of_equinox, {"eqx.nn.MLP/eqx.nn.Linear"}),
    **{
        f"linen_{method}": (functools.partial(linen, method), {"Model/enc/inner"})
        for method in ("attend", "calls_attend", "rematted", "jitted", "decorated")
    },
    **{
        f"linen_{method}": (
            functools.partial(linen, method),
            {"Model/enc/enc.attn/inner"},
        )
        for method in ("scoped", "helped")
    },
    **{
        f"nnx_{method}": (functools.partial(of_nnx, method), {"NNXModel/enc/inner"})
        for method in ("attend", "rematted", "jitted")
    },
    "nnx_scoped": (
        functools.partial(of_nnx, "scoped"),
        {"NNXModel/enc/enc.attn/inner"},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_modules_of_explain(name):
    make, expected = CASES[name]
    fun, first = make()
    for _ in range(2):  # the second one finds what JAX has traced
        found = explain(fun, backward=False)(first, X)
        products = [e for e in found.equations if e.primitive == "dot_general"]
        assert {e.path for e in products} == expected
        assert all(e.casts_down for e in products[:1])


@pytest.mark.parametrize("name", ["scopes_in_loops", "equinox", "linen_scoped"])
def test_modules_of_compare_precision(name):
    make, expected = CASES[name]
    fun, first = make()
    found = compare_precision(fun, remedies=0)(first, X)
    assert expected <= {module.path for module in found.modules}


@pytest.mark.parametrize("name", ["scopes", "equinox", "linen_jitted", "nnx_attend"])
def test_module_of_find_nonfinite(name):
    make, expected = CASES[name]
    fun, first = make()
    first = jax.tree.map(lambda x: jnp.full_like(x, 6e4), first)
    found = find_nonfinite(fun, compute_dtype=jnp.float16)(first, X)
    assert found.finding.primitive == "dot_general"
    assert found.finding.path in expected, found
    assert found.policy  # which was tried, with the paths as keys


def test_the_rule_of_a_derivative_stands_in_the_module_that_calls_it():
    fun, first = linen("ruled")
    found = find_nonfinite(fun)(first, X)
    assert (found.finding.path, found.finding.backward) == ("Model/enc", True)
    rows = explain(fun)(first, X).equations
    (kept,) = [e for e in rows if e.reason == "stored by the rule of a derivative"]
    assert kept.path == "Model/enc" and kept.stored
