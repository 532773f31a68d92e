"""`compare_precision`: planted faults are found and fixed, in each kind of program."""

import json
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn

import flax_amp
from debug._nets import PATHS, WIDTH, linen, of_nnx, plain
from flax_amp import compare_precision

BATCH = 6
SQUARE, X = (
    jax.random.normal(jax.random.key(i), (n, WIDTH))
    for i, n in ((0, WIDTH), (2, BATCH))
)


def kept(x):
    """A matmul reads and gives half precision; this one changes nothing else."""
    return x @ jnp.eye(WIDTH)


def divide_by_zero(x, a, b):
    """Both matmuls overflow in float16."""
    quotient = x * x / nn.relu(kept(x * x * a) - 5 * kept(x * x * b))
    return x + (quotient - quotient)


# What a layer does with its result, by two numbers that XLA does not know.
FAULTS = {
    "none": (lambda x, a, b: x, 1.0, 1.0),
    "offset": (lambda x, a, b: kept(x + a) - a, 300.0, 1.0),
    "cancel": (lambda x, a, b: kept(x * a) - kept(x * a - x), 500.0, 1.0),
    "tiny": (lambda x, a, b: kept(x * a * a) * b, 1e-4, 1e8),
    "huge": (lambda x, a, b: kept(x * a) / a, 1e6, 1.0),
    "nan": (divide_by_zero, 1e6, 1e5),
}
# Each fault once, and each kind of network at least twice.
CASES = [
    (linen, "none", jnp.float16),
    (linen, "offset", jnp.float16),
    (of_nnx, "cancel", jnp.bfloat16),
    (plain, "tiny", jnp.float16),
    (plain, "huge", jnp.float16),
    (of_nnx, "nan", jnp.float16),
]


def compare(make, fault, **options):
    fun, *given = FAULTS[fault]
    apply, first = make(fun)
    numbers = [jnp.full((1, WIDTH), number) for number in given]

    def loss(first, x, *numbers):
        return jnp.mean(apply(first, x, *numbers) ** 2)

    return compare_precision(loss, **options)(first, X, *numbers)


@pytest.mark.once
@pytest.mark.parametrize("make, fault, dtype", CASES)
def test_each_fault_is_found_and_fixed(make, fault, dtype):
    found = compare(make, fault, compute_dtype=dtype)
    before = found.as_it_is
    if fault == "none":
        assert not found.remedies and "as exact as usual" in str(found)
        return
    (remedy,) = (run for run in found.remedies if run.keys)
    key = PATHS[make]
    assert remedy.keys == (key,)
    assert before.gradient_error > found.threshold > 1.5 * remedy.gradient_error
    assert remedy.low_share < before.low_share == 1
    text = f'flax_amp.default_amp_policy | {{"{key}": jnp.float32}}'
    assert text in str(found)
    policy = eval(text, {"flax_amp": flax_amp, "jnp": jnp})
    again = compare(make, fault, compute_dtype=dtype, amp_policy=policy)
    assert again.as_it_is.gradient_error == remedy.gradient_error
    assert not again.remedies
    if fault == "nan":  # bfloat16 has the exponents of float32
        assert not compare(make, fault, compute_dtype=jnp.bfloat16).remedies


def cancelled(y, w, size=300.0):
    return (y @ w + size) @ w - size * w.sum(0, keepdims=True)


def lossy(ws, x):
    """The whole model is no remedy, and a part of a module is enough."""
    with jax.named_scope("net"):
        with jax.named_scope("good"):
            y = jnp.tanh(x @ ws[0]) @ ws[1]
        with jax.named_scope("outer"):
            with jax.named_scope("good"):
                y = jnp.tanh(y @ ws[1])
            with jax.named_scope("first"):
                y = cancelled(y, ws[0])
        with jax.named_scope("second"):
            return (cancelled(jnp.tanh(y), ws[1]) ** 2).mean()


def test_the_modules_at_fault_are_found():
    keys = jax.random.split(jax.random.key(0), 5)
    *ws, x = (jax.random.normal(key, (16, 16)) for key in keys)
    given = [w / 4 for w in ws], x
    found = compare_precision(lossy)(*given)
    best = found.best
    assert sorted(best.keys) == ["net/outer/first", "net/second"], found
    assert best.gradient_error <= found.threshold
    few = compare_precision(lossy, remedies=1)(*given)
    named = "than 1 module would have to be in float32: net/second, net/outer/first"
    assert any(named in note for note in few.notes), few.notes
    assert not any(run.keys for run in few.remedies)


def codes(book, x):
    """Whoever is nearest learns: numbers that half precision has, and their rank."""
    with jax.named_scope("nearest"):
        squared = (x**2).sum(-1, keepdims=True) - 2 * x @ book.T
        best = (squared + (book**2).sum(-1)[None]).argmin(-1)
    with jax.named_scope("loss"):
        return ((book[best] - x) ** 2).mean() + ((x @ book.T) ** 2).mean() * 1e-9


X_AND_BOOK = [
    (jax.random.normal(key, (64, 8)) + 4).astype(jnp.bfloat16).astype(jnp.float32)
    for key in jax.random.split(jax.random.key(0))
]


@pytest.mark.once
@pytest.mark.parametrize("fun", [codes, jax.named_call(codes, name="net")])
def test_float32_results_are_the_cheaper_remedy(fun):
    x, book = X_AND_BOOK
    found = compare_precision(fun, remedies=1)(book, x)
    in_float32, with_results = found.remedies
    assert in_float32.gradient_error <= found.threshold < found.as_it_is.gradient_error
    assert found.best is with_results and with_results.low_share == 1
    assert in_float32.low_share == 0.5 and in_float32.value == "jnp.float32"
    assert with_results.name.endswith("nearest with float32 results")
    (key,) = with_results.keys
    code = f'flax_amp.default_amp_policy | {{"{key}": flax_amp.use_float32_result}}'
    assert code in str(found)
    again = compare_precision(fun, amp_policy=eval(code))(book, x)
    assert again.as_it_is.gradient_error == with_results.gradient_error


def test_float32_results_of_a_line():
    def loss(book, x):
        best = ((x**2).sum(-1, keepdims=True) - 2 * x @ book.T).argmin(-1)
        return ((book[best] - x) ** 2).mean()

    x, book = X_AND_BOOK
    found = compare_precision(loss)(book, x)
    best = found.best
    assert best is found.remedies[-1] and best.value == "flax_amp.use_float32_result"
    words = f"a jax.named_scope around {best.lines[0]}, with the value {best.value}"
    assert best.low_share == 1 and words in str(found)


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
    assert run.name == "without fp8" and "in bfloat16 and fp8 against" in str(found)
    assert run.gradient_error < found.threshold < found.as_it_is.gradient_error


@pytest.mark.once
def test_results_for_a_person_and_for_a_program(monkeypatch):
    # After the scale a bad module is found.
    found = compare(linen, "offset", precision="16-mixed", scale=2.0**24)
    scale, entry = found.remedies
    assert scale.scale == entry.scale < 2.0**20 and not scale.keys
    assert entry.keys == ("LinenNet/bad",)
    assert entry.gradient_error < 5e-3 < scale.gradient_error < math.inf
    assert "LinenNet/bad" in str(found) and f"{scale.scale:.8g})" in str(found)
    for columns in (80, 120):
        monkeypatch.setenv("COLUMNS", str(columns))
        lines = str(found).splitlines()
        assert max(map(len, lines)) <= columns and len(lines) < 40
    saved = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert saved["remedies"][-1]["keys"] == [*entry.keys]
    assert repr(found) == "<Comparison of loss: print it to read it>"
    with pytest.raises(ValueError, match="at least 0, the number of modules"):
        compare_precision(kept, remedies=-1)(X)


def test_what_is_not_finite_and_what_has_no_errors():
    found = compare(linen, "nan", precision="16-mixed", remedies=0)
    assert found.as_it_is.gradient_error == math.inf and not found.remedies
    saved = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert float(saved["gradients"][0]["error"]) == math.inf
    assert math.isnan(float(saved["loss"][1])) and str(found).count(" inf") > 3
    exact = compare(linen, "offset", precision="32-true")
    assert exact.as_it_is.gradient_error == exact.as_it_is.loss_error == 0


@pytest.mark.parametrize("fun", [jnp.sqrt, lambda y: jnp.log(y - 1e3)])
def test_what_is_not_finite_in_float32_either(fun):
    found = compare_precision(lambda w, x: fun(x @ w).mean())(0 * SQUARE, X)
    assert found.as_it_is.gradient_error == math.inf and not found.remedies
    assert "not finite in float32 either" in str(found)
    assert "as exact as usual" not in str(found)


# --- code outside of modules ---------------------------------------------------------


def centred(w, x, offset):
    """A centring that loses all its digits in between: the matmuls round `y`."""
    y = x @ w + offset
    z = y @ jnp.eye(WIDTH)  # rounded
    return ((z - z.mean()) ** 2).mean()


def decays(w, x, rates):
    """Decays close to one that a matmul makes: half precision has no such numbers."""
    a = jnp.exp(-rates) @ jnp.eye(WIDTH)  # decays

    def step(h, _):
        return a * h + (1 - a) * jnp.tanh(x @ w), None

    return jax.lax.scan(step, jnp.ones((BATCH, WIDTH)), length=256)[0].mean()


LOST = {
    "centring": (centred, 1e4, "# rounded"),
    "decays": (decays, 1e-4, "# decays"),
}


@pytest.mark.parametrize("fun, number, mark", LOST.values(), ids=LOST)
def test_a_remedy_for_a_line_without_a_module(fun, number, mark):
    lines = Path(__file__).read_text().splitlines()
    (wanted,) = [n for n, text in enumerate(lines, 1) if text.endswith(mark)]
    found = compare_precision(fun)(SQUARE, X, jnp.full((1, WIDTH), number))
    best = found.best
    assert best is not None and not best.keys, str(found)
    assert f"tests/debug/test_compare_precision.py:{wanted}" in best.lines, found
    assert best.gradient_error < 0.1 * found.as_it_is.gradient_error
    assert f"flax_amp.amp_stop around {best.lines[0]}" in str(found)
    assert best.name in (
        f"{best.lines[0]} in float32",
        f"all {len(best.lines)} in float32",
    )


def test_an_error_a_little_above_the_threshold_is_searched():
    """At a little more than the threshold, too, a module in float32 is found."""
    rows = jax.random.normal(jax.random.key(0), (4, 16))
    eye = jnp.eye(16)

    def loss(w, x, size):
        with jax.named_scope("first"):
            y = jnp.tanh(x @ w)
        with jax.named_scope("cancels"):
            y = (y * size) @ w - (y * size - y) @ w
        return jnp.mean(y**2)

    for size in (8.0, 16.0, 32.0, 64.0):
        found = compare_precision(loss)(eye, rows, jnp.full((1, 16), size))
        error = found.as_it_is.gradient_error / found.threshold
        if 1 < error < 2:
            break
    else:
        raise AssertionError("no size gives such an error")
    assert found.best is not None and found.best.keys == ("cancels",), str(found)
