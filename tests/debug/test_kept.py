"""`explain` says what each result is kept in, and which rule decided."""

import jax
import jax.numpy as jnp
import pytest

import flax_amp
from flax_amp import explain

X, W = jnp.ones((4, 8)), jnp.full((8, 8), 0.1)
STACK = jnp.full((3, 8, 8), 0.1)


def softmax(w, x):
    y = jnp.exp(x @ w)
    return ((y / y.sum(-1, keepdims=True)) @ w).sum()


def residual(w, x):
    h = jnp.sin(x @ w)
    return ((h + jnp.tanh(h @ w)) @ w).sum()


def layers(stack, x):
    def layer(x, w):
        y = jnp.tanh(x @ w)
        return y / (1 + y * y), None

    return (jax.lax.scan(layer, x, stack)[0] @ stack[0]).sum()


def recurrent(w, x):
    def step(h, row):
        h = jnp.tanh(row @ w + h @ w)
        return h, h

    return (jax.lax.scan(step, jnp.zeros(8), x)[1] @ w).sum()


def checkpointed(w, x):
    return (jnp.exp(jax.checkpoint(lambda x: jnp.sin(x @ w))(x)) @ w).sum()


def casting(w, x):
    low = jnp.sin(x @ w).astype(jnp.bfloat16)
    return (low @ w.astype(jnp.bfloat16)).sum()


def stopped(w, x):
    with flax_amp.amp_stop():
        y = jnp.sin(x @ w)
    return (y @ w).sum()


BF16, F32 = "bfloat16", "float32"
# function, weights, primitive, what it computes in, what its result is kept in, rule
ROWS = {
    "product": (softmax, W, "dot_general", BF16, BF16, "a product gives it"),
    "for a product": (softmax, W, "div", F32, BF16, "a product reads it"),
    "shared": (softmax, W, "exp", F32, BF16, "a sum or a sigmoid shares it"),
    "sum": (softmax, W, "reduce_sum", F32, F32, "a sum"),
    "behind": (
        residual,
        W,
        "sin",
        F32,
        BF16,
        ("read on the other side of a product", "a product reads it"),
    ),
    "in passing": (layers, STACK, "tanh", F32, "", "arithmetic alone reads it"),
    "moved in passing": (softmax, W, "broadcast_in_dim", F32, "", "arithmetic alone"),
    "border": (layers, STACK, "div", F32, BF16, "crosses a border"),
    "of a checkpoint": (checkpointed, W, "sin", F32, BF16, "crosses a border"),
    "state": (recurrent, W, "tanh", F32, F32, "the state of a loop"),
    "loop": (recurrent, W, "scan", F32, F32, "the state of a loop"),
    "cast": (casting, W, "sin", F32, BF16, "the program casts it"),
    "weights": (
        lambda w, x: (x @ (w * w)).sum(),
        W,
        "mul",
        F32,
        F32,
        "computed from arguments and constants alone",
    ),
    "bias": (
        lambda w, x: jnp.sin(x @ w + w[:1]) @ w,
        W,
        "add",
        BF16,
        BF16,
        "adds half-precision",
    ),
    "loss": (lambda w, x: jnp.log(x @ w).sum(), W, "log", F32, F32, "leads to no"),
    "norm": (lambda w, x: jnp.sum((x @ w)[:2]), W, "slice", F32, F32, "leads to no"),
    "stopped": (stopped, W, "sin", F32, F32, "scope amp_stop"),
}


@pytest.mark.parametrize(
    "fun, w, primitive, inside, kept, rule", ROWS.values(), ids=ROWS
)
def test_rules(fun, w, primitive, inside, kept, rule):
    found = explain(fun)(w, X)
    rows = [e for e in found.equations if e.primitive == primitive]
    assert rows, found.report(only="equations")
    assert {row.computes_in for row in rows} == {inside}
    assert {row.kept for row in rows} == {kept}
    rules = (rule,) if isinstance(rule, str) else rule
    assert all(row.kept_by.startswith(rules) for row in rows), rows
    emitted = {row.after.results[0] for row in rows}
    # The border of a loop rounds what its body returns in float32.
    assert emitted == {kept or F32} or rule == "crosses a border"


def test_what_is_no_float32_value_has_no_rule():
    def fun(w, x):
        return jnp.argmax(x @ w), (x @ w).astype(jnp.bfloat16)

    rows = {e.primitive: e for e in explain(fun)(W, X).equations}
    for name in ("argmax", "convert_element_type"):
        assert rows[name].kept == rows[name].kept_by == rows[name].result == ""


def test_a_users_function_decides():
    def to_float16(compute_dtype, original_dtypes, *operands, **params):
        return [x.astype(jnp.float16) for x in operands], params

    policy = flax_amp.default_amp_policy | {
        jax.lax.sin_p: to_float16,
        jax.lax.argmax_p: to_float16,
    }
    found = explain(lambda w, x: jnp.sin(x @ w).sum(), amp_policy=policy)(W, X)
    (row,) = [e for e in found.equations if e.primitive == "sin"]
    assert row.computes_in == "float16" and row.after.results == ("float16",)
    assert row.result == "kept in f16: primitive sin"
    found = explain(lambda w, x: jnp.argmax(x @ w), amp_policy=policy)(W, X)
    (row,) = [e for e in found.equations if e.primitive == "argmax"]
    assert row.computes_in == "float16" and row.kept == row.result == ""


def test_the_list_and_the_dict_have_the_rules():
    found = explain(softmax)(W, X)
    text = found.report(only="equations")
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert lines[0] == "equation computes in result"
    assert "exp f32 kept in bf16: a sum or a sigmoid shares it" in lines
    assert "broadcast_in_dim f32 not kept: arithmetic alone reads it" in lines
    rows = found.to_dict()["modules"]["equations"]
    (row,) = [row for row in rows if row["primitive"] == "exp"]
    assert (row["computes_in"], row["kept"]) == (F32, BF16)
    assert row["kept_by"] == "a sum or a sigmoid shares it"


@pytest.mark.parametrize("fun, w", [(softmax, W), (layers, STACK), (recurrent, W)])
def test_readers_without_a_product_change_no_rule(fun, w):
    def logged(w, x):
        return fun(w, x), jnp.log(jnp.abs(x @ w.reshape(-1, 8)[:8])).mean()

    def rows(fun):
        return [(e.primitive, e.result) for e in explain(fun)(w, X).equations]

    plain, more = rows(fun), rows(logged)
    for row in plain:
        more.remove(row)
    assert all("product reads" not in result for _, result in more)
