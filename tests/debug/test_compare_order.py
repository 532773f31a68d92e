"""`compare_precision`: the module that mends a program comes before its victims."""

import re

import jax
import jax.numpy as jnp
import pytest

from flax_amp import compare_precision


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


# A program, and the modules that are at fault.
CULPRITS = {
    "shared weights": (ruined, ["cancels"]),
    "more victims than remedies": (many_ruined, ["cancels"]),
    "two culprits": (two_cancel, ["first", "second"]),
    "hardly counts": (small_part, ["cancels"]),
    "a victim in a loop": (in_a_loop, ["cancels"]),
}


@pytest.mark.parametrize(
    "dtype", [jnp.bfloat16, pytest.param(jnp.float16, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("fun, culprits", CULPRITS.values(), ids=CULPRITS)
def test_what_mends_comes_first(fun, culprits, dtype):
    keys = jax.random.split(jax.random.key(0), 5)
    *ws, x = (jax.random.normal(key, (16, 16)) for key in keys)
    found = compare_precision(fun, compute_dtype=dtype)([w / 4 for w in ws], x)
    assert sorted(m.path for m in found.modules[: len(culprits)]) == culprits
    entries = [run for run in found.helpful if run.policy]
    assert entries[-1].gradient_error <= found.threshold
    assert {*culprits} == {*re.findall('"(.*?)": jnp.float32', entries[-1].policy)}
    assert "all" not in [e.name[:3] for e in entries] or culprits[1:]
