"""The names of merged layers: what a profile and the tools of `debug` show of them."""

import functools
import re
from collections import Counter
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from _transformer import bfloat16, exact_jit
from flax_amp import default_amp_policy, explain, find_nonfinite
from flax_amp._rewriter.outline import repeats
from flax_amp._rewriter.outline.scopes import layer_scopes, resolved
from helpers import assert_identical, equations, scoped_equations

LAYERS, WIDTH = 7, 8
X = jax.random.normal(jax.random.key(2), (4, WIDTH))


# --- names ---------------------------------------------------------------------------


class Scope(NamedTuple):
    name: str


class Transform(NamedTuple):
    name: str


def paths(text, kind=Scope):
    """`Net Dense_2, Net` as the scopes of two equations."""
    return [tuple(map(kind, path.split())) for path in text.split(", ")]


SHOWN = {  # name: (layers, what calls have, what the function has)
    "modules": (
        ["Net Block_0 Dense_0, Net Block_0", "Net Block_1 Dense_0, Net Block_1"],
        ["Net Block_0", "Net Block_1"],
        "Dense_0, ",
    ),
    "automatic numbers": (
        ["Net Dense_2, Net Dense_3, Net", "Net Dense_4, Net Dense_5, Net"],
        ["Net [Dense_2,Dense_3]", "Net [Dense_4,Dense_5]"],
        "Dense_#1, Dense_#2, ",
    ),
    "a module that all layers share": (
        ["N Dense_0, N LayerNorm_1", "N Dense_0, N LayerNorm_2"],
        ["N [LayerNorm_1]", "N [LayerNorm_2]"],
        "Dense_0, LayerNorm_#1",
    ),
    "a module that is called twice": (
        ["N Dense_1, N LayerNorm_0, N Dense_1", "N Dense_2, N LayerNorm_3, N Dense_2"],
        ["N [Dense_1,LayerNorm_0]", "N [Dense_2,LayerNorm_3]"],
        "Dense_#1, LayerNorm_#2, Dense_#1",
    ),
    "inside of a module": (
        ["N Attention_1 query, N LayerNorm_1", "N Attention_2 query, N LayerNorm_2"],
        ["N [Attention_1,LayerNorm_1]", "N [Attention_2,LayerNorm_2]"],
        "Attention_#1 query, LayerNorm_#2",
    ),
    "two towers": (
        ["C text h_0 fc, C image h_0 fc", "C text h_1 fc, C image h_1 fc"],
        ["C [h_0]", "C [h_1]"],
        "text h_#1 fc, image h_#1 fc",
    ),
    "two towers with numbers of their own": (
        ["C text Dense_0, C image Dense_3", "C text Dense_1, C image Dense_4"],
        ["C [Dense_0,Dense_3]", "C [Dense_1,Dense_4]"],
        "text Dense_#1, image Dense_#2",
    ),
    "numbers as names": (
        ["M layers/3/fc, M norms/3", "M layers/4/fc, M norms/4"],
        ["M [layers.3,norms.3]", "M [layers.4,norms.4]"],
        "layers/#1/fc, norms/#2",
    ),
    "names of a user": (
        ["N block.01, N q1, N", "N block.02, N q2, N"],
        ["N [block.01,q1]", "N [block.02,q2]"],
        "block.#1, q#2, ",
    ),
}
HIDDEN = {
    "letters": ["N proj_a, N", "N proj_b, N"],
    "another method": ["N Embed_3.attend, N", "N Embed_4, N"],
    "a number in the middle": ["N block1_a, N", "N block2_a, N"],
    "two numbers": ["N block1_unit1, N", "N block2_unit2, N"],
    "more names in a scope": ["N layers/1, N", "N layers/2/fc, N"],
    "one module and two": ["N D_1, N B, N D_1", "N D_2, N B, N D_3"],
    "characters of a list": ["N a.b:c/1, N", "N a.b:c/2, N"],
    "layers in layers": ["N D_#1, N D_1", "N D_#2, N D_2"],
}


@pytest.mark.parametrize(("layers", "calls", "inside"), SHOWN.values(), ids=SHOWN)
def test_what_the_call_and_the_function_show(layers, calls, inside):
    layers = [paths(text) for text in layers]
    found = layer_scopes(layers)
    assert found.calls == [path for call in calls for path in paths(call)]
    assert [found.inside(path) for path in layers[0]] == paths(inside)
    # Nothing is lost.
    for call, original in zip(found.calls, layers, strict=True):
        names = [tuple(scope.name for scope in path) for path in original]
        merged = [call + found.inside(path) for path in layers[0]]
        assert names == [resolved(tuple(s.name for s in path)) for path in merged]


@pytest.mark.parametrize("layers", HIDDEN.values(), ids=HIDDEN)
def test_what_no_function_could_show(layers):
    assert layer_scopes([paths(text) for text in layers]) is None


def test_transformations_are_no_scopes():
    layers = [paths(f"a_{i}, b", Transform) for i in range(2)]
    assert layer_scopes(layers) is None


@pytest.mark.parametrize("scopes", [("a#1",), ("[Dense_1]", "b#2"), ("[x]", "a_1")])
def test_names_of_users_that_look_like_these(scopes):
    assert resolved(scopes) == tuple(s for s in scopes if s != "[Dense_1]")


# --- models --------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def small_layers(monkeypatch):
    monkeypatch.setattr(repeats, "_MIN_SAVED", 2)


def residual(dense, x, y):
    return x + dense(jax.nn.gelu(y))


class Inline(nn.Module):
    """Layers that are no modules of their own, as others write them."""

    kind: str = "plain"

    @nn.compact
    def __call__(self, x):
        dense = nn.remat(nn.Dense) if self.kind == "remat" else nn.Dense
        for i in range(LAYERS):
            letter = "abcdefg"[i]
            name = f"fc_{letter}" if self.kind == "letters" else None
            y = dense(2 * WIDTH, name=name)(nn.LayerNorm()(x))
            if self.kind == "dropout":
                y = nn.Dropout(0.5, deterministic=False)(y)
            x = residual(dense(WIDTH), x, y)
            if self.kind == "gaps":
                nn.Dense(3)(x)
        return x


class NNXInline(nnx.Module):
    def __init__(self, rngs):
        linear = functools.partial(nnx.Linear, rngs=rngs)
        self.up = nnx.List([linear(WIDTH, 2 * WIDTH) for _ in range(LAYERS)])
        self.down = nnx.List([linear(2 * WIDTH, WIDTH) for _ in range(LAYERS)])

    def __call__(self, x):
        for up, down in zip(self.up, self.down, strict=True):
            x = residual(down, x, up(x))
        return x


def linen(model, **options):
    x, key = X + 0.0, jax.random.key(0)
    variables = model.init({"params": key, "dropout": key}, x)

    def loss(variables, x):
        rngs = {"dropout": jax.random.key(3)}
        return jnp.mean(model.apply(variables, x, rngs=rngs) ** 2)

    return loss, (variables, x), options


def of_nnx(key):
    options = {"amp_policy": default_amp_policy | {key: jnp.float32}}
    return (
        lambda model, x: jnp.mean(model(x) ** 2),
        (NNXInline(nnx.Rngs(0)), X),
        options,
    )


ONE = default_amp_policy | {"*/Dense_7": jnp.float32}
MODELS = {  # name: (how it is made, whether its layers are merged, a name)
    "inline": (lambda: linen(Inline()), True, "Inline/Dense_7"),
    "remat": (lambda: linen(Inline("remat")), True, "/CheckpointDense_7"),
    "dropout": (lambda: linen(Inline("dropout")), True, "Inline/Dense_7"),
    "gaps": (lambda: linen(Inline("gaps")), True, "Inline/Dense_9"),
    "letters": (lambda: linen(Inline("letters")), False, "Inline/fc_d"),
    "a key for one": (lambda: linen(Inline(), amp_policy=ONE), False, "Inline/Dense_7"),
    # Without a key for scopes, modules of NNX have none.
    "nnx": (lambda: of_nnx("up/0"), True, "NNXInline/down/4"),
    "nnx, a key for one": (lambda: of_nnx("down/3"), False, "NNXInline/down/4"),
}


def products(fn, *args):
    """The scopes and dtypes of all products."""
    return [
        ("/".join(resolved(scopes)), eqn.outvars[0].aval.dtype)
        for scopes, eqn in scoped_equations(jax.make_jaxpr(fn)(*args))
        if eqn.primitive.name == "dot_general"
    ]


@pytest.mark.parametrize(("make", "merges", "name"), MODELS.values(), ids=MODELS)
def test_models(make, merges, name):
    loss, args, options = make()
    fn = bfloat16(loss, **options)
    apart = bfloat16(loss, **options, merge_layers=False)
    eqns = [eqn for _, eqn in equations(jax.make_jaxpr(fn)(*args))]
    calls = [eqn for eqn in eqns if eqn.params.get("name") == "repeated"]
    assert (len(calls) >= LAYERS - 2) == merges
    # All equations are where they were, and compute what they did.
    expected = products(apart, *args)
    assert products(fn, *args) == expected
    assert any(path.endswith(name) for path, _ in expected)
    if name == "inline":
        found, plain = (exact_jit(jax.value_and_grad(f))(*args) for f in (fn, apart))
        assert_identical(found, plain)


def test_layers_begin_where_modules_do():
    """The first layer lacks its first equation, which reads a float32 leaf."""

    def fn(w, x):
        for i in range(LAYERS):
            with jax.named_scope(f"layer_{i}"):
                with jax.named_scope("first"):
                    x = jnp.sin(x)
                with jax.named_scope("second"):
                    x = jnp.tanh(x @ w[i])
        return jnp.mean(x**2)

    w = jnp.ones((LAYERS, WIDTH, WIDTH))
    found = scoped_equations(jax.make_jaxpr(bfloat16(fn))(w, X))
    calls = [scopes for scopes, eqn in found if eqn.params.get("name") == "repeated"]
    assert calls == [(f"layer_{i}",) for i in range(1, LAYERS)]


# --- what shows the names ------------------------------------------------------------


def test_a_profile_tells_layers_apart():
    loss, args, _ = linen(Inline())
    step = jax.jit(jax.grad(bfloat16(loss))).lower(*args)
    text, compiled = step.as_text(debug_info=True), step.compile().as_text()
    for i in range(1, LAYERS - 1):  # the first and the last one differ
        names = f"[LayerNorm_{i},Dense_{2 * i},Dense_{2 * i + 1}]"
        for transform in "jvp(Inline)", "transpose(jvp(Inline))":
            call = f"{transform}/{names}/jit(repeated)"
            assert f'/{call}"' in text
            # The compiler puts what is called behind it.
            pattern = re.escape(call) + '[^"]*/Dense_#2/dot_general'
            assert re.search(pattern, compiled)


NORMS = {"*/LayerNorm_*": jnp.float32, "*/LayerNorm_4": jnp.bfloat16}


@pytest.mark.parametrize("name", ["inline", "nnx"])
def test_explain_shows_what_it_shows_of_layers_apart(name):
    loss, args, options = MODELS[name][0]()
    if name == "inline":  # the second key loses
        options["amp_policy"] = default_amp_policy | NORMS
    merged, apart = (
        explain(loss, **options, merge_layers=merges)(*args) for merges in (True, False)
    )
    found, expected = (
        Counter(
            (row.path, row.primitive, row.after, row.casts_down, row.casts_up)
            for row in report.equations
        )
        for report in (merged, apart)
    )
    assert found == expected
    assert merged.problems == apart.problems
    assert len(merged.problems) == (name == "inline")


def test_find_nonfinite_names_the_layer():
    loss, (variables, x), _ = linen(Inline())
    number = 4
    kernel = variables["params"][f"Dense_{number}"]["kernel"]
    too_large = kernel.at[::2, 0].set(6e4)
    variables["params"][f"Dense_{number}"]["kernel"] = too_large
    report = find_nonfinite(loss, compute_dtype=jnp.float16)(variables, x)
    assert report.finding.path == f"Inline/Dense_{number}"
