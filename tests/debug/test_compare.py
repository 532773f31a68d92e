"""`compare_precision`: planted faults are found and mended, on Linen and NNX."""

import functools
import json
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

import flax_amp
from _models import FEATURES, linen_loss, linen_state, nnx_loss, nnx_state
from flax_amp import compare_precision

# Whose range and scale most faults are about.
in_float16 = functools.partial(compare_precision, compute_dtype=jnp.float16)

WIDTH, BATCH = 8, 6
SQUARE, X = (
    jax.random.normal(jax.random.key(i), (n, WIDTH))
    for i, n in ((0, WIDTH), (2, BATCH))
)


def kept(x):
    """A product reads and gives half precision; this one changes nothing else."""
    return x @ jnp.eye(WIDTH)  # kept


def divide_by_zero(x, a, b):
    """Both products overflow in float16."""
    quotient = x * x / nn.relu(kept(x * x * a) - 5 * kept(x * x * b))
    return x + (quotient - quotient)


# What a layer does with its result, by two numbers that XLA does not know. They are not
# trained: a gradient that is 0 but for rounding would have any error.
FAULTS = {
    "offset": (lambda x, a, b: kept(x + a) - a, 300.0, 1.0),
    "cancel": (lambda x, a, b: kept(x * a) - kept(x * a - x), 500.0, 1.0),
    "tiny": (lambda x, a, b: kept(x * a * a) * b, 1e-4, 1e8),
    "huge": (lambda x, a, b: kept(x * a) / a, 1e6, 1.0),
    "nan": (divide_by_zero, 1e6, 1e5),
}
RANGE = ("tiny", "huge", "nan")  # bfloat16 has the exponents of float32


class LinenLayer(nn.Module):
    fault: str = ""

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(WIDTH, name="inner")(x)
        if not self.fault:
            return nn.tanh(x)
        break_, a, b = FAULTS[self.fault]
        a = self.param("a", nn.initializers.constant(a), (WIDTH,))
        b = self.param("b", nn.initializers.constant(b), (WIDTH,))
        return nn.tanh(break_(x, *jax.lax.stop_gradient((a[None], b[None]))))


class LinenNet(nn.Module):
    fault: str = ""

    @nn.compact
    def __call__(self, x):
        for i in range(3):
            x = LinenLayer(self.fault if i == 1 else "", name=f"layer_{i}")(x)
        return nn.Dense(2, name="head")(x)


def linen(fault):
    model = LinenNet(fault)
    params = model.init(jax.random.key(0), X)
    return lambda params, x: jnp.mean(model.apply(params, x) ** 2), params, "LinenNet"


class NNXLayer(nnx.Module):
    def __init__(self, fault, rngs):
        self.inner = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.break_, a, b = FAULTS.get(fault, (None, 0.0, 0.0))
        self.numbers = nnx.BatchStat(jnp.full((2, 1, WIDTH), a).at[1].set(b))

    def __call__(self, x):
        x = self.inner(x)
        numbers = jax.lax.stop_gradient(self.numbers[...])
        return jnp.tanh(self.break_(x, *numbers) if self.break_ else x)


class NNXNet(nnx.Module):
    def __init__(self, fault):
        rngs = nnx.Rngs(0)
        for i in range(3):
            layer = NNXLayer(fault if i == 1 else "", rngs)
            setattr(self, f"layer_{i}", layer)
        self.head = nnx.Linear(WIDTH, 2, rngs=rngs)

    def __call__(self, x):
        for i in range(3):
            x = getattr(self, f"layer_{i}")(x)
        return self.head(x)


def of_nnx(fault):
    return lambda model, x: jnp.mean(model(x) ** 2), NNXNet(fault), "NNXNet"


CASES = [
    *((linen, fault, jnp.float16) for fault in FAULTS),
    *((of_nnx, fault, jnp.bfloat16) for fault in ("offset", "cancel")),
    (of_nnx, "nan", jnp.float16),
]


@pytest.mark.once
@pytest.mark.parametrize("make, fault, dtype", CASES)
def test_each_fault_is_found_and_mended(make, fault, dtype):
    fun, first, name = make(fault)
    found = compare_precision(fun, compute_dtype=dtype)(first, X)
    (remedy,) = (run for run in found.remedies if run.keys)
    assert remedy.keys == (f"{name}/layer_1",)
    before = found.as_it_is
    assert before.gradient_error > found.threshold > 1.5 * remedy.gradient_error
    assert remedy.low_share < before.low_share == 1
    text = f'flax_amp.default_amp_policy | {{"{name}/layer_1": jnp.float32}}'
    assert found.policy == text and text in str(found)
    policy = eval(text, {"flax_amp": flax_amp, "jnp": jnp})
    mended = compare_precision(fun, compute_dtype=dtype, amp_policy=policy)(first, X)
    assert mended.as_it_is.gradient_error == remedy.gradient_error
    assert not mended.remedies and "as exact as usual" in str(mended)
    if fault in RANGE:
        in_bfloat16 = compare_precision(fun, compute_dtype=jnp.bfloat16)
        assert not in_bfloat16(first, X).remedies


def cancelled(y, w, size=300.0):
    return (y @ w + size) @ w - size * w.sum(0, keepdims=True)


def ruined(ws, x):
    """`good` reads the weights of `cancels`, whose error is in their gradient."""
    with jax.named_scope("good"):
        y = jnp.tanh(x @ ws[0])
    with jax.named_scope("cancels"):
        return cancelled(y, ws[0]).sum()


def many_ruined(ws, x):
    y = x
    for i, w in enumerate(ws):
        with jax.named_scope(f"good_{i}"):
            y = jnp.tanh(y @ w)
    with jax.named_scope("cancels"):
        return sum(cancelled(y, w).sum() for w in ws)


def two_cancel(ws, x):
    with jax.named_scope("good"):
        y = jnp.tanh(x @ ws[0]) @ ws[1]
    with jax.named_scope("first"):
        y = cancelled(y, ws[0])
    with jax.named_scope("second"):
        return (cancelled(jnp.tanh(y), ws[1]) ** 2).mean()


def small_part(ws, x):
    """`small` has the larger error, in a part of the loss that hardly counts."""
    with jax.named_scope("small"):
        small = cancelled(x, ws[0], 3000.0)
    with jax.named_scope("cancels"):
        y = cancelled(x, ws[0], 200.0)
    return (y**2).mean() + 1e-5 * (small**2).mean()


def in_a_loop(ws, x):
    """A scan reads the weights in its body; the module behind it cancels with them."""

    def body(x, _):
        with jax.named_scope("good"):
            return jnp.tanh(x @ ws[0]), None

    x = jax.lax.scan(body, x, length=3)[0]
    with jax.named_scope("cancels"):
        return cancelled(x, ws[0]).sum()


def inside(ws, x):
    """The whole model is no remedy, and a part of a module is enough."""
    with jax.named_scope("net"):
        with jax.named_scope("good"):
            y = jnp.tanh(x @ ws[0])
        with jax.named_scope("outer"):
            with jax.named_scope("good"):
                y = jnp.tanh(y @ ws[1])
            with jax.named_scope("cancels"):
                return cancelled(y, ws[0]).sum()


# A program, and the modules that are at fault.
CULPRITS = {
    "shared weights": (ruined, ["cancels"]),
    "many victims": (many_ruined, ["cancels"]),
    "two culprits": (two_cancel, ["first", "second"]),
    "hardly counts": (small_part, ["cancels"]),
    "a victim in a loop": (in_a_loop, ["cancels"]),
    "a part of a module": (inside, ["net/outer/cancels"]),
}


@pytest.mark.parametrize(
    "dtype", [jnp.bfloat16, pytest.param(jnp.float16, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("fun, culprits", CULPRITS.values(), ids=CULPRITS)
def test_what_mends_is_found(fun, culprits, dtype):
    keys = jax.random.split(jax.random.key(0), 5)
    *ws, x = (jax.random.normal(key, (16, 16)) for key in keys)
    found = compare_precision(fun, compute_dtype=dtype)([w / 4 for w in ws], x)
    best = found.best
    assert sorted(best.keys) == culprits, found
    assert best.gradient_error <= found.threshold


def layers(w, x, size, loop):
    y = jnp.tanh(x @ w)

    def layer(y, _):
        y = jnp.tanh(y @ w)
        return kept(y * size) - kept(y * size - y), None

    y = jax.lax.scan(layer, y, length=2)[0] if loop else layer(y, None)[0]
    return jnp.mean(jnp.tanh(y @ w) ** 2)


@pytest.mark.parametrize("loop", [False, True])
def test_the_line_of_code_outside_of_modules(loop):
    """In the model itself, or in a plain function without any scope."""

    def loss(w, x, size):
        with jax.named_scope("a"):
            x = jnp.tanh(x @ w)
        return layers(w, x, size, loop)

    lines = Path(__file__).read_text().splitlines()
    (number,) = [n for n, x in enumerate(lines, 1) if x.endswith("# kept")]
    for fun in (loss, functools.partial(layers, loop=loop)):
        found = in_float16(fun)(SQUARE, X, jnp.full((1, WIDTH), 500.0))
        best = found.best
        assert best.lines == (f"tests/debug/test_compare.py:{number}",), str(found)
        assert best.gradient_error < found.threshold and not found.policy
        assert f"flax_amp.amp_stop around {best.lines[0]}" in str(found)


SCALES = {
    "flushed": (1e-6, 1, jnp.float16, True),
    "too large": (1.0, 2.0**24, jnp.float16, True),
    "fits": (1.0, 2.0**8, jnp.float16, False),
    "bfloat16": (1e-6, 1, jnp.bfloat16, False),
}


@pytest.mark.once
@pytest.mark.parametrize("factor, scale, dtype, helps", SCALES.values(), ids=SCALES)
def test_a_scale_is_the_first_remedy(factor, scale, dtype, helps):
    def fun(w, x):
        with jax.named_scope("a"):
            y = x @ w
        with jax.named_scope("b"):
            return jnp.mean((y @ w) ** 2) * factor

    found = compare_precision(fun, scale=scale, compute_dtype=dtype)(SQUARE / 3, X)
    assert len(found.remedies) == helps  # no module is blamed
    for run in found.remedies:
        assert run.gradient_error < 3e-3 and not run.keys
        largest = found.gradients[0].largest / scale * run.scale
        assert run.scale == 2.0**24 or 2**13 <= largest <= 2**14
        assert f"init_scaler(scaler={run.scale:.8g})" in str(found)


@pytest.mark.once
def test_after_the_scale_a_bad_module_is_found():
    fun, params, _ = linen("offset")
    found = in_float16(fun, scale=2.0**24)(params, X)
    scale, entry = found.remedies
    assert scale.scale == entry.scale < 2.0**20 and not scale.keys
    assert entry.keys == ("LinenNet/layer_1",)
    assert entry.gradient_error < 5e-3 < scale.gradient_error < math.inf
    assert found.policy in str(found) and f"{scale.scale:.8g})" in str(found)


@pytest.mark.once
def test_without_fp8_comes_first():
    def fun(ws, x):
        for w in ws:
            x = jnp.tanh(x @ w)
        return jnp.mean(x**2)

    keys = jax.random.split(jax.random.key(0), 4)
    *ws, x = (jax.random.normal(key, (32, 32)) for key in keys)
    policy = flax_amp.default_amp_policy | {
        jax.lax.dot_general_p: flax_amp.use_fp8(emulate=True),
        "fp8": flax_amp.use_fp8(emulate=True),
    }
    fp8 = jax.named_call(fun, name="fp8")
    found = compare_precision(fp8, amp_policy=policy)([w * 0.3 for w in ws], x)
    (run,) = found.remedies
    assert run.name == "without fp8"
    assert run.gradient_error < found.threshold < found.as_it_is.gradient_error


def test_what_is_not_finite():
    fun, params, _ = linen("nan")
    found = in_float16(fun, remedies=0)(params, X)
    assert found.as_it_is.gradient_error == math.inf and not found.remedies
    saved = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert float(saved["gradients"][0]["error"]) == math.inf
    assert saved["loss"][1] == "nan" and str(found).count(" inf") > 3


def test_float32_has_no_errors():
    fun, params, _ = linen("offset")
    found = compare_precision(fun, compute_dtype=jnp.float32)(params, X)
    assert found.as_it_is.gradient_error == found.as_it_is.loss_error == 0
    assert all(group.error == 0 for group in found.gradients)


@pytest.mark.once
def test_a_state_a_pair_and_further_arguments():
    x = jax.random.normal(jax.random.key(0), (4, FEATURES))
    data = {"x": x, "y": jnp.arange(4) % 3}
    for state, loss in ((linen_state(), linen_loss), (nnx_state(), nnx_loss)):
        found = compare_precision(state, loss, data, remedies=0)
        assert found.as_it_is.scale == 2.0**15 and found.compute_dtype == "float16"
        assert found.as_it_is.gradient_error < 5e-3
        unscaled = compare_precision(state, loss, data, remedies=0, scale=1)
        largest = {group.path: group.largest for group in unscaled.gradients}
        for group in found.gradients:
            np.testing.assert_allclose(group.largest, 2.0**15 * largest[group.path])

    def weighted(model, batch, weight, others):
        return nnx_loss(model, batch)[0] * weight * others["more"]

    given = data, jnp.float32(2), {"more": jnp.float32(3)}
    more = compare_precision(state, weighted, *given, remedies=0)
    np.testing.assert_allclose(more.loss[0], 6 * found.loss[0], rtol=1e-6)
    model = NNXNet("")
    pair = model, nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    by_pair = compare_precision(pair, lambda m, x: jnp.mean(m(x) ** 2), X)
    paths = {group.path for group in by_pair.gradients}
    assert "model/layer_1/inner" in paths and by_pair.compute_dtype == "bfloat16"


@pytest.mark.once
def test_results_for_a_person_and_for_a_program(monkeypatch):
    fun, params, _ = linen("offset")
    found = in_float16(fun)(params, X)
    for columns in (80, 120):
        monkeypatch.setenv("COLUMNS", str(columns))
        lines = found.report().splitlines()
        assert max(map(len, lines)) <= columns and len(lines) < 40
    assert "and 3 more" in found.report(top=2)
    saved = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert saved["gradients"][0]["error"] == found.gradients[0].error
    assert saved["remedies"][-1]["keys"] == [*found.remedies[-1].keys]
    assert repr(found).startswith("<Comparison of <lambda>: gradients differ by ")
    for top in (0, "all"):
        with pytest.raises(ValueError, match="number of groups"):
            found.report(top=top)


W = jnp.ones((2, 2))
WRONG = {
    "abstract": ({}, (jax.ShapeDtypeStruct((2, 2), jnp.float32),), "is run"),
    "no floats": ({}, (jnp.arange(4),), "no float arrays"),
    "policy": ({"amp_policy": 1}, (W,), "expected a dict"),
    "precision": ({"precision": "half"}, (W,), "expected one of 'bf16-mixed'"),
    "scale": ({"scale": 0.0}, (W,), "positive number"),
    "no scale": ({"scale": "big"}, (W,), "positive number"),
    "remedies": ({"remedies": -1}, (W,), "at least 0, the number of modules"),
    "recompute": ({"recompute": "no"}, (W,), "recompute"),
    "no loss": ({}, (jnp.ones((2, 3)),), "scalar float"),
}


@pytest.mark.parametrize("options, args, message", WRONG.values(), ids=WRONG)
def test_messages(options, args, message):
    def fun(w):
        return (w**2) if w.shape == (2, 3) else jnp.sum(w @ w) * 1.0

    with pytest.raises((TypeError, ValueError), match=message):
        compare_precision(fun, **options)(*args)
    with pytest.raises(TypeError, match="outside of jax.jit"):
        jax.jit(compare_precision(fun))(W)


# --- code outside of modules ---------------------------------------------------------


def centred(w, x, offset):
    """A centring that loses all its digits in between: the products round `y`."""
    y = x @ w + offset
    z = y @ jnp.eye(WIDTH)  # rounded
    return ((z - z.mean()) ** 2).mean()


def decays(w, x, rates):
    """Decays close to one that a product makes: half precision has no such numbers."""
    a = jnp.exp(-rates) @ jnp.eye(WIDTH)  # decays

    def step(h, _):
        return a * h + (1 - a) * jnp.tanh(x @ w), None

    return jax.lax.scan(step, jnp.ones((BATCH, WIDTH)), length=256)[0].mean()


@pytest.mark.parametrize(
    "fun, number, mark",
    [(centred, 1e4, "# rounded"), (decays, 1e-4, "# decays")],
    ids=["centring", "decays"],
)
def test_a_remedy_for_a_line_without_a_module(fun, number, mark):
    lines = Path(__file__).read_text().splitlines()
    (wanted,) = [n for n, text in enumerate(lines, 1) if text.endswith(mark)]
    found = compare_precision(fun)(SQUARE, X, jnp.full((1, WIDTH), number))
    assert found.as_it_is.gradient_error > 0.5 and found.best is not None, found
    assert any(line.endswith(f":{wanted}") for line in found.best.lines), found
    assert found.best.gradient_error < 0.1 * found.as_it_is.gradient_error
