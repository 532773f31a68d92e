"""`explain`: what its report and its rows tell."""

import html
import json
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

import flax_amp
from flax_amp import explain

X, W = jnp.ones((4, 8)), jnp.ones((8, 8))


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x + nn.Dense(8)(nn.relu(nn.Dense(8)(nn.LayerNorm()(x))))


class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        for _ in range(6):
            x = Block()(x)
        return nn.Dense(2, name="out", precision="highest")(x)


def loss(params, x):
    return jnp.mean(Model().apply(params, x) ** 2)


PARAMS = jax.eval_shape(Model().init, jax.random.key(0), X)


@pytest.fixture(scope="module")
def found():
    return explain(loss)(PARAMS, X)


def test_rows():
    def fun(w, x):
        x, _ = jax.lax.scan(lambda x, _: (jnp.tanh(x @ w), None), x, length=3)
        return jnp.exp(jax.jit(jnp.sin)(x))

    found = explain(fun)(W, X)
    rows = {e.primitive: e for e in found.equations}
    dot = rows["dot_general"]
    assert str(dot.before) == "f32 -> f32" and dot.after.operands == ("bfloat16",) * 2
    assert (dot.times, dot.flops) == (3, 3 * 2 * 4 * 8 * 8)
    assert dot.reason == "primitive dot_general"
    assert dot.source.startswith("tests/debug/test_explain.py:")
    assert rows["exp"].after.operands == ("float32",)
    assert "scan" in rows and "jit" not in rows
    unchanged = explain(fun, compute_dtype=jnp.float32)(W, X)
    assert all(row.before == row.after for row in unchanged.equations)
    assert unchanged.low_share == 0


# A convolution, groups and batches, complex factors and experts: FLOPs by hand.
FLOPS = {
    "batched": (lambda: jnp.einsum("bij,bjk->bik", X[None], W[None]), 2 * 4 * 64),
    "convolution": (
        lambda: jax.lax.conv(X[None], jnp.ones((5, 4, 3)), (1,), "SAME"),
        2 * 5 * 8 * 4 * 3,
    ),
    "experts": (
        lambda: jax.lax.ragged_dot(X, jnp.ones((2, 8, 8)), jnp.array([1, 3])),
        2 * 4 * 8 * 8,
    ),
    "one complex factor": (lambda: X @ (W + 0j), 2 * 2 * 4 * 64),
    "integers": (lambda: jnp.ones((8, 8), int) @ jnp.ones((8, 8), int), 0),
}


@pytest.mark.parametrize("fun, flops", FLOPS.values(), ids=FLOPS)
def test_flops(fun, flops):
    found = explain(lambda x: fun() * x.sum().astype(int))(X)
    assert found.flops == flops
    if not flops:
        assert found.low_share is None


def test_a_matmul_of_float64_is_not_in_half():
    with jax.enable_x64(True):
        found = explain(jnp.dot)(X.astype("float64"), W.astype("float64"))
    assert found.low_share == 0


def test_a_dict_for_json(found):
    data = json.loads(json.dumps(found.to_dict()))
    assert data["compute_dtype"] == "bfloat16" and data["name"] == "loss"
    rows = data["equations"]
    assert sum(row["flops"] for row in rows) == found.flops
    assert data["stored"] == found.stored and min(found.stored.values()) > 0
    assert rows[0].keys() >= {"reason", "source", "times"}
    assert rows[0]["before"] == {"operands": ["float32"], "results": ["float32"]}
    assert data["problems"][0]["kind"] == "float32 matmul"


def test_the_report_folds_equal_layers(found):
    text = str(found)
    lines = text.splitlines()
    assert len(lines) < 40 and max(map(len, lines)) <= 120, text
    assert lines[0].split() == ["loss", "in", "bfloat16"]
    # The layers of all blocks are one line, with how many there are.
    (blocks,) = (line.split() for line in lines if line.startswith("    Block_"))
    assert blocks[:2] == ["Block_*", "x6"]
    assert "Dense_*  x12" in text and "\n    out " in text
    assert "100 %" in text and "LayerNorm_0" in text
    # Problems come first.
    assert text.index("float32 matmul x1") < text.index("    Block_*")


LEFT = {  # name: (the value of the key "layer_1", or None, the cell of the module)
    "float32": (jnp.float32, "0 %"),
    "original": (flax_amp.use_original_precision, "as written"),
    "stopped": (None, "as written"),
    # `precision=` takes precedence over a key.
    "highest": (jnp.bfloat16, "as written"),
}


@pytest.mark.parametrize("name", LEFT)
def test_a_module_as_written_and_a_module_in_float32(name):
    """A key with float32 sets a dtype; the other two leave the module alone."""
    value, cell = LEFT[name]
    precision = "highest" if name == "highest" else None

    def layer(w, x):
        with jax.named_scope("layer_1"):
            return jnp.dot(x, w, precision=precision)

    def loss(w, x):
        stopped = flax_amp.amp_stop(layer) if value is None else layer
        return stopped(w, jnp.tanh(x @ w)).sum()

    keys = {} if value is None else {"layer_1": value}
    found = explain(loss, amp_policy=flax_amp.default_amp_policy | keys)(W, X)
    (line,) = (x for x in str(found).splitlines() if x.strip().startswith("layer_1"))
    assert f"  {cell}  " in line
    own = explain(lambda w, x: layer(w.astype("bfloat16"), x.astype("bfloat16")))(W, X)
    assert "as written" in str(own)


def test_a_layer_with_a_dtype_of_its_own_stands_apart():
    class Mixed(nn.Module):
        @nn.compact
        def __call__(self, x):
            for dtype in (None, jnp.bfloat16, None):
                x = nn.Dense(8, dtype=dtype)(x)
            return x

    params = jax.eval_shape(Mixed().init, jax.random.key(0), X)
    lines = [x.split() for x in str(explain(Mixed().apply)(params, X)).splitlines()]
    assert ["Dense_*", "x2", "1.02", "k", "100", "%"] in lines
    assert ["Dense_1", "512", "as", "written"] in lines


def test_the_list_of_equations():
    """A branch has no dtype of its own, and a relu of a half rounds nothing."""

    def fun(w, x):
        x = jax.lax.cond(x.sum() > 0, lambda x: x @ w, lambda x: x, x)
        return jax.nn.relu(x @ w) @ w

    text = explain(fun)(W, X).report(only="equations")
    rows = dict(re.findall(r"^ +(\w+)  +(\S.*)$", text, re.MULTILINE))
    assert rows["cond"].startswith(("half", "rounded"))
    assert rows["max"].split() == ["bf16", "half", "precision"]


def test_a_layer_in_another_dtype_stands_apart():
    def loss(w, x):
        for i in range(3):
            with jax.named_scope(f"layer_{i}"):
                x = x @ w
        return x.sum()

    for dtype, share in ((jnp.float32, "0"), (jnp.float16, "100")):
        policy = flax_amp.default_amp_policy | {"layer_1": dtype}
        text = str(explain(loss, amp_policy=policy)(jnp.ones((4, 4)), jnp.ones((4, 4))))
        rows = [x.split() for x in text.splitlines() if x.startswith("  layer")]
        assert rows[0] == ["layer_*", "x2", "256", "100", "%"]
        assert rows[1][:4] == ["layer_1", "128", share, "%"]
        # Of float16, nothing stays in float32.
        assert ("dot_general" in rows[1]) == (dtype == jnp.float32)


def test_parts_of_the_report(found):
    short = found.report(only="problems")
    assert "  Model" not in short and "1 problem" in short and short in str(found)
    with pytest.raises(ValueError, match="report: got only='modules'; expected None, "):
        found.report(only="modules")


@pytest.mark.parametrize("width", [80, 120])
def test_no_width_drops_figures(width, monkeypatch):
    def fun(w, x):
        with jax.named_scope("VeryLongNameOfAModule/AndOneMoreInsideOfIt"):
            y = jnp.sin(x @ w)
            with jax.named_scope("norm_of_the_module_with_a_long_name_[bold]"):
                y = y * jax.lax.rsqrt((y * y).sum(-1, keepdims=True))
        with jax.named_scope("head"):
            return (y @ w).sum()

    monkeypatch.setenv("COLUMNS", str(width))
    found = explain(fun)(W, X)
    lines = str(found).splitlines()
    assert max(map(len, lines)) <= width
    (head,) = (line for line in lines if line.startswith("  head"))
    figures = ("512", "100 %", "reduce_sum")
    assert all(figure in head for figure in figures), head
    shown = re.sub(r"\s", "", str(found))
    assert ("with_a_long_name_[bold]" in shown) == (width == 120)


def test_a_notebook_shows_the_report():
    def fun(x):
        with jax.named_scope("<b>[bold]"):
            return x @ x.T

    page = explain(fun)(X)._repr_html_()
    assert page.startswith("<pre>") and "<b>" not in page
    text = html.unescape(re.sub("<.*?>", "", page))
    assert text.split() == str(explain(fun)(X)).split()


def test_nothing_is_compiled_or_run():
    calls = []

    def fun(w, x):
        jax.debug.callback(calls.append, x)
        calls.append(x)
        return (x @ w).sum()

    with jax.no_execution():
        explain(fun)(W, X)
    assert all(isinstance(x, jax.core.Tracer) for x in calls)


# --- what became of results, and what a loss reads ------------------------------------


def attention(x, w):
    scores = jnp.where(jnp.tri(4, dtype=bool), (x @ w) @ x.T, -1e9)
    return jax.nn.softmax(scores) @ x


# A program, a primitive, what it computes in, and what became of its result.
RESULTS = {
    "matmul": (attention, "dot_general", "bfloat16", "half precision"),
    "sum": (attention, "reduce_sum", "float32", "float32: a sum"),
    "for a matmul": (attention, "div", "float32", "rounded: a matmul reads it later"),
    "in passing": (attention, "exp", "float32", "float32: only its own region"),
    "loss": (
        lambda x, w: jnp.log(x @ w).sum(),
        "log",
        "float32",
        "float32: no matmul in half precision reads it later",
    ),
    "weights": (
        lambda x, w: x @ (w * w),
        "mul",
        "float32",
        "float32: no matmul comes before",
    ),
    "states": (
        lambda x, w: jax.lax.scan(
            lambda h, y: (jnp.tanh(h @ w + y), h @ w), x, jnp.stack([x, x])
        )[1].sum(),
        "scan",
        "float32",
        "carries float32, stacks bfloat16",
    ),
    "a state that a matmul reads behind the loop": (
        lambda x, w: (
            jax.lax.scan(
                lambda h, y: (jnp.tanh(h @ w + y), None), x, jnp.stack([x, x])
            )[0]
            @ w
        ),
        "scan",
        "float32",
        "carries float32, stacks nothing",
    ),
    "amp_stop": (
        lambda x, w: flax_amp.amp_stop(jnp.sin)(x @ w) @ w,
        "sin",
        "float32",
        "float32: scope amp_stop",
    ),
}


@pytest.mark.parametrize("fun, name, inside, result", RESULTS.values(), ids=RESULTS)
def test_what_becomes_of_results(fun, name, inside, result):
    found = explain(fun)(X, W)
    rows = [row for row in found.equations if row.primitive == name]
    assert rows and all(row.computes_in == inside for row in rows)
    assert any(row.result.startswith(result) for row in rows), rows
    lines = [" ".join(x.split()) for x in found.report(only="equations").splitlines()]
    assert any(line.startswith(f"{name} ") and result in line for line in lines)


def test_rounded_numbers_that_a_loss_reads():
    """The loss reads the gate as it was in its own region, made of a rounded matmul."""

    def gated(w, x):
        with jax.named_scope("gate"):
            t = jax.nn.sigmoid(x @ w)
        with jax.named_scope("head"):
            y = t @ w
        return -jnp.log(1 + t).mean() + (y**2).mean()

    found = explain(gated)(W, X)
    places = [text.partition(",")[0] for text in found.loss_reads]
    assert places == ["dot_general of gate", "dot_general of head"]
    assert "the loss  reads bf16: " in str(found)
    # Of a result that is no loss there is nothing to tell.
    assert not explain(lambda w, x: x @ w)(W, X).loss_reads


@pytest.mark.parametrize(
    "head",
    [
        jax.jit(jnp.matmul),
        lambda x, w: jax.lax.scan(lambda c, _: (c @ w, None), x, length=2)[0],
        lambda x, w: jax.lax.cond(x.sum() > 0, jnp.matmul, lambda x, w: x, x, w),
    ],
    ids=["jit", "scan", "cond"],
)
def test_a_loss_reads_what_a_call_rounds(head):
    found = explain(lambda w, x: jnp.log1p(jnp.abs(head(x, w))).mean())(W, X)
    assert found.loss_reads and "the loss  reads bf16: " in str(found)


def test_what_a_loss_closes_over_is_no_obstacle():
    """JAX traces it as a constant of a body."""
    x, w = jnp.ones((24, 16)), jnp.ones((16, 32))
    found = explain(lambda w: ((x @ w) ** 2).mean())(w)
    given = explain(lambda w, x: ((x @ w) ** 2).mean())(w, x)
    assert found.stored == given.stored and not found.notes


def test_matmuls_in_fp8_are_no_problem():
    in_fp8 = {jax.lax.dot_general_p: flax_amp.use_fp8(emulate=True)}
    policy = flax_amp.default_amp_policy | in_fp8
    sizes = [(4096, 4096), (4096, 4096), (4096, 8)]
    ws = [jax.ShapeDtypeStruct(size, jnp.float32) for size in sizes]
    x = jax.ShapeDtypeStruct((16384, 4096), jnp.float32)

    def loss(ws, x):
        for w in ws:
            x = jnp.tanh(x @ w)
        return jnp.mean(x**2)

    found = explain(loss, amp_policy=policy, backward=False)(ws, x)
    assert "in fp8    " in str(found) and not found.problems
    assert found.low_share == 1

    def half(w, x):
        return jax.named_call(jnp.matmul, name="a")(jnp.tanh(x @ w), w)

    by_scope = flax_amp.default_amp_policy | {"a": flax_amp.use_fp8(emulate=True)}
    found = explain(half, amp_policy=by_scope)(W, X)
    assert "in fp8   50% of them, not: primitive dot_general (1)" in str(found)
