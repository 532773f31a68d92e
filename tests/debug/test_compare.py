"""`compare_precision`: a planted bad layer comes first, and is mended."""

import dataclasses
import functools
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

import flax_amp
from _models import FEATURES, linen_loss, linen_state, nnx_loss, nnx_state
from flax_amp import compare_precision
from helpers import equations

# Whose range and scale most faults are about.
in_float16 = functools.partial(compare_precision, compute_dtype=jnp.float16)


def kept(x):
    """A product reads and gives half precision; this one changes nothing else."""
    return x @ jnp.eye(WIDTH)


def divide_by_zero(x, a, b):
    """Both products overflow in float16."""
    quotient = x * x / nn.relu(kept(x * x * a) - 5 * kept(x * x * b))
    return x + (quotient - quotient)


# What a layer does with its result, by two numbers that XLA does not know. They are not
# trained: a gradient that is 0 but for rounding would have any error.
FAULTS = {
    "offset": (lambda x, a, b: (x + a) - a, 300.0, 1.0),
    "cancel": (lambda x, a, b: kept(x * a) - kept(x * a - x), 500.0, 1.0),
    "tiny": (lambda x, a, b: kept(x * a * a) * b, 1e-4, 1e8),
    "huge": (lambda x, a, b: kept(x * a) / a, 1e6, 1.0),
    "nan": (divide_by_zero, 1e6, 1e5),
}
WIDTH, BATCH = 8, 6
SQUARE, EIGHT = (jax.random.normal(jax.random.key(i), (WIDTH, WIDTH)) for i in (0, 1))


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
    position: int = 0

    @nn.compact
    def __call__(self, x):
        for i in range(3):
            fault = self.fault if i == self.position else ""
            x = LinenLayer(fault, name=f"layer_{i}")(x)
        return nn.Dense(2, name="head")(x)


def batch():
    return jax.random.normal(jax.random.key(2), (BATCH, WIDTH))


def linen(fault, position):
    model = LinenNet(fault, position)
    params = model.init(jax.random.key(0), batch())
    return lambda params, x: jnp.mean(model.apply(params, x) ** 2), (params, batch())


@pytest.mark.parametrize("position, dtype", [(0, jnp.bfloat16), (2, jnp.float16)])
def test_a_planted_bad_layer_comes_first(position, dtype):
    fun, args = linen("offset", position)
    found = compare_precision(fun, compute_dtype=dtype, remedies=0)(*args)
    first, second = found.modules[:2]
    assert first.path == f"LinenNet/layer_{position}"
    assert first.harm > found.threshold > second.harm
    # Those behind it have its error, too, but add none of their own.
    behind = [m for m in found.modules if m.path.endswith("head")][0]
    assert behind.total.forward > 5 * behind.own.forward


@pytest.mark.once
@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_found_and_mended(fault):
    fun, args = linen(fault, 1)
    found = in_float16(fun)(*args)
    assert found.modules[0].path == "LinenNet/layer_1"
    (remedy,) = found.remedies
    assert remedy.policy == '"LinenNet/layer_1": jnp.float32'
    before = found.settings[0]
    assert remedy.gradient_error < min(before.gradient_error / 5, 5e-3)
    assert remedy.low_share < before.low_share == 1
    policy = flax_amp.default_amp_policy | {"LinenNet/layer_1": jnp.float32}
    mended = in_float16(fun, amp_policy=policy)(*args)
    assert mended.settings[0].gradient_error == remedy.gradient_error
    assert not mended.remedies and "No module adds more" in str(mended)
    if fault in ("tiny", "huge"):  # bfloat16 has the exponents of float32
        assert not compare_precision(fun, compute_dtype=jnp.bfloat16)(*args).remedies


@pytest.mark.once
def test_the_whole_model_in_float32_is_no_remedy():
    """The net itself has the fault: a key for it would leave nothing in half."""

    def model(w, x, size):
        with jax.named_scope("net"):
            with jax.named_scope("a"):
                y = jnp.tanh(x @ w)
            return jnp.mean(jnp.tanh((kept(y * size) - kept(y * size - y)) @ w) ** 2)

    found = in_float16(model, scale=1)(SQUARE, batch(), jnp.full((1, WIDTH), 500.0))
    assert found.modules[0].path == "net" and found.modules[0].harm > found.threshold
    assert not found.remedies


@pytest.mark.once
def test_a_remedy_comes_before_a_glob_and_takes_the_place_of_an_equal_key():
    def fun(w, x, size):
        with jax.named_scope("net"):
            with jax.named_scope("a"):
                y = jnp.tanh(x @ w)
            with jax.named_scope("bad"):
                y = jnp.tanh(((y @ w) * size) / size)
            return jnp.mean((y @ w) ** 2)

    args = SQUARE / 3, batch(), jnp.array(1e6)
    for key in ("*/bad", "net/bad"):
        own = {key: flax_amp.use_compute_precision}
        policy = flax_amp.default_amp_policy | own
        found = in_float16(fun, amp_policy=policy, remedies=1)(*args)
        (remedy,) = found.remedies
        assert remedy.policy == '"net/bad": jnp.float32'
        assert remedy.gradient_error < 3e-3 < 3e-2 < found.settings[0].gradient_error
        assert remedy.low_share < found.settings[0].low_share


SCALES = {
    "flushed": (1e-6, 1, jnp.float16, 2.0**24),
    "too large": (1.0, 2.0**24, jnp.float16, None),
    "fits": (1.0, 2.0**8, jnp.float16, 2.0**8),
    "bfloat16": (1e-6, 1, jnp.bfloat16, 1),
}


@pytest.mark.once
@pytest.mark.parametrize("factor, scale, dtype, best", SCALES.values(), ids=SCALES)
def test_a_scale_is_the_first_remedy(factor, scale, dtype, best):
    def fun(w, x):
        with jax.named_scope("a"):
            y = x @ w
        with jax.named_scope("b"):
            return jnp.mean((y @ w) ** 2) * factor

    args = SQUARE / 3, batch()
    found = compare_precision(fun, scale=scale, compute_dtype=dtype)(*args)
    if best == scale:
        assert not found.remedies
        return
    (first,) = found.remedies  # no module is blamed
    largest = max(m.largest_gradient for m in found.modules) / scale * first.scale
    assert first.scale == best or 65504 / 8 < largest <= 65504 / 4
    assert first.gradient_error < 3e-3
    assert f"init_scaler(scaler={first.scale:.8g})" in str(found)
    assert "Add to" not in str(found)


@pytest.mark.once
def test_after_the_scale_a_bad_module_is_found():
    fun, args = linen("offset", 1)
    found = in_float16(fun, scale=2.0**24)(*args)
    scale, entry = found.remedies
    assert scale.scale == entry.scale < 2.0**16 and not scale.policy
    assert entry.policy == '"LinenNet/layer_1": jnp.float32'
    assert entry.gradient_error < 5e-3 < scale.gradient_error < math.inf
    assert entry.policy in str(found) and f"{scale.scale:.8g})" in str(found)


@pytest.mark.once
def test_what_helps_is_recommended_and_what_is_not_enough_only_alone():
    fun, args = linen("offset", 1)
    found = in_float16(fun)(*args)
    (enough,) = found.remedies
    error = found.settings[0].gradient_error
    less = dataclasses.replace(enough, policy="less", gradient_error=error / 2)
    lost = dataclasses.replace(enough, gradient_error=math.inf)
    assert error / 2 > found.threshold
    for remedies, named in (
        ((enough,), enough.policy),
        ((less, enough), enough.policy),
        ((less,), "less"),
        ((lost,), ""),
    ):
        report = str(dataclasses.replace(found, remedies=remedies))
        assert ("Add to amp_policy" in report) == bool(named)
        assert report.endswith(f"\n  {named}") or not named
        assert ("None of them helps" in report) == (not named)


def test_what_is_not_finite_is_the_fault_of_one():
    fun, args = linen("nan", 1)
    found = in_float16(fun, remedies=0)(*args)
    assert [m.path for m in found.modules if math.isinf(m.harm)] == ["LinenNet/layer_1"]
    assert found.settings[0].gradient_error == math.inf
    saved = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert float(saved["modules"][0]["harm"]) == math.inf
    assert saved["loss"][1] == "nan" and str(found).count(" inf") > 3


def test_the_layer_of_a_scan():
    def layer(x, w):
        with jax.named_scope("layer"):
            kernel, offset = w
            return jnp.tanh((x @ kernel + offset) - offset), None

    def fun(params, x):
        return jnp.mean(jax.lax.scan(jax.checkpoint(layer), x, params)[0] ** 2)

    kernels = jax.random.normal(jax.random.key(0), (4, WIDTH, WIDTH)) / 3
    offsets = jnp.zeros((4, 1, WIDTH)).at[2].set(300)
    found = in_float16(fun, remedies=0)((kernels, offsets), batch())
    first = found.modules[0]
    assert first.path == "layer" and len(first.iterations) == 4
    assert int(np.argmax(first.iterations)) == 2
    assert max(np.delete(first.iterations, 2)) < found.threshold < first.harm
    assert "layer x4, worst 2" in str(found)


def test_float32_has_no_errors():
    fun, args = linen("offset", 1)
    found = compare_precision(fun, compute_dtype=jnp.float32)(*args)
    assert found.settings[0].gradient_error == found.settings[0].loss_error == 0
    assert all(m.harm == m.total.largest == 0 for m in found.modules)


@pytest.mark.once
def test_a_state_and_its_scale():
    x = jax.random.normal(jax.random.key(0), (4, FEATURES))
    data = {"x": x, "y": jnp.arange(4) % 3}
    for state, loss in ((linen_state(), linen_loss), (nnx_state(), nnx_loss)):
        found = compare_precision(state, loss, data, remedies=0)
        assert found.scale == 2.0**15 and found.compute_dtype == "float16"
        assert found.settings[0].gradient_error < 5e-3
        unscaled = compare_precision(state, loss, data, remedies=0, scale=1)
        by_path = {m.path: m.largest_gradient for m in unscaled.modules}
        for module in found.modules:
            np.testing.assert_allclose(
                module.largest_gradient, 2.0**15 * by_path[module.path]
            )


@pytest.mark.once
def test_further_arguments_of_a_step():
    x = jax.random.normal(jax.random.key(0), (4, FEATURES))
    data = {"x": x, "y": jnp.arange(4) % 3}
    state, weights = nnx_state(), (jnp.float32(2), {"more": jnp.float32(3)})

    def loss(model, batch, weight, others):
        return nnx_loss(model, batch)[0] * weight * others["more"]

    found = compare_precision(state, loss, data, *weights, remedies=0)
    plain = compare_precision(state, nnx_loss, data, remedies=0)
    np.testing.assert_allclose(found.loss[0], 6 * plain.loss[0], rtol=1e-6)


def test_a_scale_saves_small_gradients():
    def fun(w, x):
        with jax.named_scope("small"):
            y = x @ w
        return jnp.mean(y) * 1e-8

    args = jnp.ones((WIDTH, 2)), batch()
    lost, saved = (in_float16(fun, remedies=0, scale=s)(*args) for s in (1, 2.0**15))
    assert lost.settings[0].gradient_error == 1
    assert saved.settings[0].gradient_error < 1e-3
    for found, error in ((lost, 1), (saved, 0)):
        module = next(m for m in found.modules if m.path == "small")
        assert module.flushed == 1 and round(module.harm, 2) == error


@pytest.mark.once
def test_settings_stand_side_by_side():
    fun, args = linen("offset", 1)
    policy = flax_amp.default_amp_policy | {"*/layer_*": jnp.float32}
    settings = {
        "wide sums": {"reduce_dtype": jnp.float32},
        "bf16": {"compute_dtype": jnp.bfloat16},
        "layers": {"amp_policy": policy},
    }
    found = in_float16(fun, settings=settings, remedies=0)(*args)
    assert [row.name for row in found.settings] == ["as it is", *settings]
    as_is, wide, bf16, full = found.settings
    assert as_is.gradient_error < bf16.gradient_error
    assert wide.gradient_error < 1.1 * as_is.gradient_error
    assert full.gradient_error < 2e-3 and full.low_share < as_is.low_share == 1
    assert full.stored != as_is.stored
    assert "wide sums" in str(found)


def test_an_author_who_set_a_dtype_is_named():
    def fun(dtype):
        def loss(w, x):
            with jax.named_scope("own"):
                y = x.astype(dtype) @ w.astype(dtype)
            return y.astype(jnp.float32).mean()

        return in_float16(loss, remedies=0)(jnp.ones((WIDTH, 2)), batch())

    note = "the author of this code set a dtype, in which the reference computes, too:"
    with jax.enable_x64(True):
        wide = fun(jnp.float64)
        assert wide.settings[0].gradient_error == 0
    for found in (fun(jnp.bfloat16), wide):
        assert found.notes == (f"{note} own",)
        assert f"Note: {note} own." in " ".join(str(found).split())


@pytest.mark.once
def test_results_for_a_person_and_for_a_program(tmp_path, monkeypatch):
    fun, args = linen("offset", 1)
    found = in_float16(fun)(*args)
    for columns in (80, 120):
        monkeypatch.setenv("COLUMNS", str(columns))
        lines = found.report().splitlines()
        assert max(map(len, lines)) <= columns and len(lines) < 40
    assert "\nFirst the modules whose remedy helps, then by own error:\n" in str(found)
    assert "and 6 more" in found.report(top=2)
    saved = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert saved["modules"][0]["harm"] == found.modules[0].harm
    assert saved["modules"][0]["own"]["forward"] == found.modules[0].own.forward
    assert repr(found).startswith("<Comparison of <lambda>: 8 modules")
    found.plot(tmp_path / "found.png")
    assert (tmp_path / "found.png").read_bytes().startswith(b"\x89PNG")
    for call in (found.report, functools.partial(found.plot, "unused.png")):
        for top in (0, "all"):
            with pytest.raises(ValueError, match="number of modules"):
                call(top=top)
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match="pip install matplotlib"):
        found.plot(tmp_path / "found.png")


W = jnp.ones((2, 2))
WRONG = {
    "abstract": ({}, (jax.ShapeDtypeStruct((2, 2), jnp.float32),), "is run"),
    "no floats": ({}, (jnp.arange(3),), "no float arrays"),
    "option": ({"settings": {"a": {"dtype": 1}}}, (W,), "argument 'dtype'"),
    "settings": ({"settings": {"a": 1}}, (W,), "must be a mapping"),
    "policy": ({"settings": {"a": {"amp_policy": 1}}}, (W,), r"in settings\['a'\]"),
    "scale": ({"scale": 0.0}, (W,), "positive number"),
    "no scale": ({"scale": "big"}, (W,), "positive number"),
    "remedies": ({"remedies": -1}, (W,), "at least 0, the number of modules"),
    "budget": ({"budget": -0.1}, (W,), "budget=-0.1; expected the largest"),
    "no budget": ({"budget": "2 %"}, (W,), "expected the largest"),
    "recompute": ({"recompute": "no"}, (W,), "recompute"),
    "no loss": ({}, (jnp.ones((2, 3)),), "scalar float"),
}


@pytest.mark.parametrize("options, args, message", WRONG.values(), ids=WRONG)
def test_messages(options, args, message):
    def fun(w):
        return (w**2) if w.shape == (2, 3) else jnp.sum(w @ w)

    with pytest.raises((TypeError, ValueError), match=message):
        compare_precision(fun, **options)(*args)


def test_what_cannot_be_compared():
    def fun(w):
        twice = jax.custom_vjp(lambda y: y * 2)
        h = w @ w
        twice.defvjp(lambda y: (y * 2, None), lambda _, g: (g * 2 * h,))
        return jnp.mean(twice(h))

    with pytest.raises(ValueError, match="closes over a traced value"):
        compare_precision(fun)(W)
    with pytest.raises(TypeError, match="outside of jax.jit"):
        jax.jit(compare_precision(lambda w: jnp.sum(w @ w)))(W)


@pytest.mark.parametrize(
    "entry",
    [{"residual": jnp.float32}, {jax.lax.add_p: flax_amp.use_original_precision}],
    ids=["scope", "add"],
)
@pytest.mark.parametrize("wrap", [jax.jit, jax.checkpoint])
def test_the_page_tells_how_to_keep_the_residual_stream_in_float32(entry, wrap):
    def layer(x, w):
        h = jnp.tanh(x @ w)
        with jax.named_scope("residual"):
            return x + h

    layer = wrap(layer)

    def fun(w, x):
        return jax.lax.scan(lambda x, w: (layer(x, w), None), x @ w[0], w)[0]

    for policy, dtype in (({}, jnp.bfloat16), (entry, jnp.float32)):
        low = flax_amp.amp(fun, amp_policy=flax_amp.default_amp_policy | policy)
        closed = jax.make_jaxpr(low)(jnp.ones((3, WIDTH, WIDTH)), batch())
        (scan,) = [e for _, e in equations(closed) if e.primitive.name == "scan"]
        assert scan.outvars[0].aval.dtype == dtype


def test_the_cheapest_policy_within_a_budget():
    """Each of three modules loses digits: for a small budget, one is not enough."""

    def fun(w, x, offsets):
        for name, offset in offsets.items():
            x = x @ w
            with jax.named_scope(name):
                x = (x + offset) - offset
            x = jnp.tanh(x)
        return jnp.mean(jnp.square(x @ w))

    offsets = {"first": 60.0, "second": 60.0, "third": 20.0}
    args = 0.5 * SQUARE, EIGHT, {n: jnp.full((1, 8), x) for n, x in offsets.items()}
    every = compare_precision(fun, budget=1e-9)(*args)
    assert every.cheapest is None and "within the budget of 1e-09" in str(every)
    as_it_is, *single, two, all_three = (*every.settings, *every.remedies)
    assert (two.name, all_three.name) == ("best 2", "all 3")
    alone = min(run.gradient_error for run in single)
    assert two.gradient_error < alone < as_it_is.gradient_error

    def cheapest(budget):
        found = compare_precision(fun, budget=budget)(*args)
        assert found.cheapest.gradient_error <= budget
        assert f"within the budget of {budget:g} is" in str(found)
        saved = json.loads(json.dumps(found.to_dict(), allow_nan=False))
        assert saved["cheapest"]["policy"] == found.cheapest.policy
        return found.cheapest

    assert cheapest(as_it_is.gradient_error) == as_it_is
    assert cheapest(alone).name in offsets
    found = cheapest(two.gradient_error)
    assert found == two
    pasted = eval(f"{{{found.policy}}}") | flax_amp.default_amp_policy
    again = compare_precision(fun, amp_policy=pasted, remedies=0)(*args)
    assert again.cheapest is None  # without a budget
    assert again.settings[0].gradient_error == found.gradient_error
