"""Policy keys that another key shadows: which one wins, and what is said of it."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import flax_amp
from flax_amp import explain

X, W = jnp.ones((4, 8)), jnp.full((8, 8), 0.1)
LOW, FULL = flax_amp.use_compute_precision, flax_amp.use_original_precision
dot_p, exp_p, scan_p = jax.lax.dot_general_p, jax.lax.exp_p, jax.lax.scan_p


def nested(w, x):
    with jax.named_scope("Model"):
        with jax.named_scope("Block_0"):
            x = jnp.exp(x @ w)
        with jax.named_scope("Block_1"), flax_amp.amp_stop():
            return jnp.tanh(x @ w)


def two(w, x):
    with jax.named_scope("head"):
        return nested(w, jnp.exp(x))


def looped(w, x):
    def step(x, _):
        with jax.named_scope("cell"):
            return jnp.exp(x @ w), None

    return jax.lax.scan(step, x @ w, length=3)[0]


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(8, name="out")(x)

    @nn.nowrap
    def loss(self, x):
        return self(x).sum()


class NNX(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(8, 8, rngs=rngs) for _ in range(2)])

    def __call__(self, x):
        return self.layers[1](self.layers[0](x))


# what: function, additions to the policy, the shadowed keys with the ones that win
CASES = {
    "the outermost wins": (
        nested,
        {"Model": FULL, "Block_0": LOW},
        {"Block_0": "Model"},
    ),
    "an outer scope before a path": (
        nested,
        {"Model": FULL, "Model/Block_0": LOW},
        {"Model/Block_0": "Model"},
    ),
    "in any order": (nested, {"Block_0": LOW, "Model": FULL}, {"Block_0": "Model"}),
    "a path": (
        nested,
        {"Model/Block_0": LOW, "Model": FULL},
        {"Model/Block_0": "Model"},
    ),
    "a glob before a name": (
        nested,
        {"*/Block_*": FULL, "Block_0": LOW},
        {"Block_0": "*/Block_*"},
    ),
    "a name before a glob": (nested, {"Block_0": LOW, "*/Block_*": FULL}, {}),
    "a glob before all it names": (
        nested,
        {"Block_0": LOW, "Block_1": LOW, "*/Block_*": FULL},
        {"*/Block_*": "Block_0', 'Block_1", "amp_stop": "Block_1"},
    ),
    "an outer glob": (nested, {"Mod*": FULL, "*_0": LOW}, {"*_0": "Mod*"}),
    "two winners": (
        two,
        {"head": FULL, "Model": LOW, "*/Block_0": LOW},
        {"Model": "head", "*/Block_0": "head"},
    ),
    "a scope before a primitive": (
        jax.named_call(lambda w, x: jnp.exp(x @ w), name="head"),
        {"head": FULL, exp_p: LOW},
        {"exp": "head"},
    ),
    "the primitive elsewhere": (two, {"Model": FULL, exp_p: LOW}, {}),
    "a structured primitive": (looped, {scan_p: FULL, "cell": LOW}, {"cell": "scan"}),
    "in it, a primitive": (looped, {scan_p: FULL, exp_p: LOW}, {"exp": "scan"}),
    "amp_stop in a scope": (nested, {"Model": LOW}, {"amp_stop": "Model"}),
    "a scope in amp_stop": (
        flax_amp.amp_stop(nested),
        {"Block_0": LOW},
        {"Block_0": "amp_stop"},
    ),
    "both mean the same": (nested, {"Model": jnp.float32, "Block_0": FULL}, {}),
    "low both times": (
        two,
        {"head": jnp.bfloat16, "Block_0": LOW},
        {"amp_stop": "head"},
    ),
    "an outer key that is written later": (
        two,
        {"Model": FULL, "head": LOW},
        {"Model": "head", "amp_stop": "head"},
    ),
    "not in this program": (nested, {"Model": FULL, "tail": LOW}, {}),
    "the policy itself": (nested, {}, {}),
    "a path of Linen": (
        lambda w, x: Linen().apply(
            {"params": {"out": {"kernel": w, "bias": w[0]}}}, x, method="loss"
        ),
        {"Linen": FULL, "*/out": LOW},
        {"*/out": "Linen"},
    ),
}


# The cases with two keys for the same scope: the order decides.
IN_ORDER = ("a glob before a name", "a glob before all it names")


def shadowed(found):
    return [p for p in found.problems if p.kind == "shadowed policy key"]


@pytest.mark.parametrize("name", CASES)
def test_keys(name):
    fun, additions, expected = CASES[name]
    policy = flax_amp.default_amp_policy | additions
    problems = shadowed(explain(fun, amp_policy=policy)(W, X))
    texts = {p.message.split("'")[1]: p.message for p in problems}
    assert texts.keys() == expected.keys()
    for key, winner in expected.items():
        assert f"{key!r} loses to '{winner}' wherever it matches. " in texts[key]
        assert f"'{winner}'" in texts[key].partition(". ")[2]
    # `amp_stop` is the inner scope, and the order of keys does not help.
    for key, text in texts.items():
        order_decides = name in IN_ORDER and key != "amp_stop"
        assert ("before it" in text) == order_decides
    for problem in problems:
        assert problem.count and problem.source and problem.paths
    if additions:
        explained = explain(fun, amp_policy=policy, compute_dtype="float32")(W, X)
        assert not explained.problems


def test_of_a_module():
    model = NNX(nnx.Rngs(0))
    policy = flax_amp.default_amp_policy | {"NNX": FULL, "layers/1": LOW}
    (problem,) = shadowed(explain(lambda m, x: m(x), amp_policy=policy)(model, X))
    assert problem.paths == ("NNX/layers/1",)
    assert problem.message == (
        "'layers/1' loses to 'NNX' wherever it matches. The outermost scope wins, "
        "then a method, then what the policy has first. Narrow 'NNX', or leave "
        "'layers/1' out."
    )
