"""Problems: each kind planted once, and nothing said of a model that has none."""

import functools
import warnings

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flax_amp
from flax_amp import explain

in_float16 = functools.partial(explain, compute_dtype=jnp.float16)

X, W = jnp.ones((4, 8)), jnp.full((8, 8), 0.1)


@jax.jit
def inner(w, x):
    return x @ w


def opaque(w, x):
    inverse = jax.lax.linalg.schur(w)[0]
    return x @ inverse + jax.lax.nextafter(x, x)


def layers(w, x):
    for i in range(3):
        with jax.named_scope(f"Layer_{i}"):
            x = jnp.dot(x, w, precision="highest")
    return x


LAYERS = ["Layer_0", "Layer_1", "Layer_2"]


# name: function, additions to the policy, kind, words of the message, paths
PLANTED = {
    "precision": (layers, {}, "float32 product", "precision=HIGHEST", LAYERS),
    "no key": (
        lambda w, x: inner(w, x) + jax.lax.conv(X[None], X[None], (1,), "SAME")[0, :1],
        {jax.lax.dot_general_p: None},
        "float32 product",
        "no key of the policy names dot_general",
        [""],
    ),
    "preferred": (
        lambda w, x: jax.lax.dot(x, w, preferred_element_type=jnp.bfloat16),
        {},
        "float32 product",
        "preferred_element_type=bfloat16",
        [""],
    ),
    "key": (inner, {"heed": jnp.float32}, "policy", "'heed'", []),
    "own dtype": (
        lambda w, x: nn.Dense(8, dtype="bfloat16").apply(
            {"params": {"kernel": w, "bias": w[0]}}, x
        ),
        {},
        "own dtype",
        "has factors in bf16 without amp",
        ["Dense"],
    ),
    "opaque": (
        opaque,
        {},
        "unknown primitive",
        "says nothing about nextafter",
        [""],
    ),
    "forces": (
        jax.named_call(
            lambda w, x: (jax.grad(lambda x: jnp.tanh(x @ w).sum())(x) ** 2).mean(),
            name="energy",
        ),
        {},
        "second derivative",
        "belongs to a gradient that your function takes",
        ["energy"],
    ),
    "complex": (
        lambda w, x: (x @ (w + 1j * w)).real,
        {},
        "complex product",
        "has factors in f32 and c64: no half precision has complex numbers",
        [""],
    ),
    "own factor": (
        lambda w, x: x @ w.astype(jnp.bfloat16),
        {},
        "own dtype",
        "has factors in f32 and bf16 without amp",
        [""],
    ),
}


@pytest.mark.parametrize("name", PLANTED)
def test_planted(name):
    fun, additions, kind, words, paths = PLANTED[name]
    policy = flax_amp.default_amp_policy | additions
    policy = {key: value for key, value in policy.items() if value is not None}
    found = in_float16(fun, amp_policy=policy)(W, X)
    problem = next(p for p in found.problems if p.kind == kind and words in p.message)
    assert list(problem.paths) == paths
    assert bool(problem.source.startswith("tests/debug/")) == bool(paths)


ORIGINAL = flax_amp.use_original_precision
COMPUTE = flax_amp.use_compute_precision
KEEPS_PRODUCTS = {jax.lax.dot_general_p: ORIGINAL}
PRIMITIVE = "by your policy key 'dot_general': outside of any module"


@pytest.mark.parametrize(
    "fun, additions, note",
    [
        (jax.named_call(inner, name="head"), {"head": jnp.float32}, "key 'head': head"),
        (
            jax.named_call(layers, name="head"),
            {"*/Layer_*": jnp.float32},
            "3 products are kept in float32 by your policy key '*/Layer_*': "
            "head/Layer_0, head/Layer_1, head/Layer_2",
        ),
        (flax_amp.amp_stop(inner), {}, "by flax_amp.amp_stop: amp_stop"),
        (flax_amp.amp_stop(jax.jit(inner)), {}, "by flax_amp.amp_stop: amp_stop"),
        (inner, KEEPS_PRODUCTS, f"1 product is kept in float32 {PRIMITIVE}"),
    ],
)
def test_what_the_user_chose_is_a_note(fun, additions, note):
    policy = flax_amp.default_amp_policy | additions
    found = explain(fun, amp_policy=policy)(W, X)
    # That nothing at all runs in half is no choice.
    assert {p.kind for p in found.problems} <= {"policy"}
    assert found.notes[0].endswith(note), found.notes
    assert not explain(fun, amp_policy=policy, compute_dtype="float32")(W, X).notes


def test_random_numbers_and_callbacks_are_no_problem():
    def fun(w, x):
        noise = jax.random.gamma(jax.random.key(0), jax.nn.softplus(x @ w))
        return noise + jax.pure_callback(lambda x: x, X, x)

    assert not explain(fun)(W, X).problems


@pytest.mark.parametrize(
    "fun",
    [
        lambda w, x: jnp.linalg.inv(w + jnp.eye(8)) @ x.T,
        lambda w, x: jax.grad(lambda w: jnp.linalg.svd(w)[1].sum())(w) @ x.T,
        lambda w, x: jax.image.resize(x, (8, 8), "bilinear") @ w,
    ],
    ids="inv svd resize".split(),
)
def test_products_inside_of_jax_are_a_note(fun):
    found = explain(fun)(W, X)
    assert "float32 product" not in {p.kind for p in found.problems}
    assert any("kept in float32 by JAX's own numerics" in n for n in found.notes)
    assert 0 < found.totals.low_flops < found.totals.flops


def test_the_users_precision_beside_linear_algebra_is_a_problem():
    def fun(w, x):
        y = jnp.linalg.inv(w + jnp.eye(8)) @ x.T
        y = jnp.einsum("ij,jk", y, x, precision="highest")
        return jnp.matmul(y, jax.jit(lambda y: y + 1)(w), precision="highest")

    (problem,) = explain(fun)(W, X).problems
    assert (problem.kind, problem.times) == ("float32 product", 2)


def test_products_of_other_numbers_do_not_count():
    n = jnp.ones((8, 8), jnp.int8)

    def fun(w, x):
        exact = jax.lax.dot(n, n, preferred_element_type=jnp.int32)
        return (x @ w).sum() + exact.sum()

    found = explain(fun)(W, X)
    assert found.totals.low_share == 1 and not found.problems
    assert found.totals.flops == 2 * 4 * 8 * 8
    only = explain(lambda w, x: (n @ n).sum() * w.sum())(W, X)
    assert only.totals.low_share is None
    # JAX multiplies a float matrix by a complex one without a cast.
    for fun, times in (
        (lambda w, x: w @ (w * 1j), 2),
        (lambda w, x: (w * 1j) @ (w * 1j), 4),
    ):
        found = explain(lambda w, x, fun=fun: jnp.abs(fun(w, x)).sum())(W, X)
        size = 2 * 8 * 8 * fun(W, X).shape[1]
        assert found.totals.low_share == 0 and found.totals.flops == times * size
        kinds = {p.kind for p in found.problems}
        assert "complex product" in kinds <= {"complex product", "policy"}
    # A float times an integer is a float product; amp leaves it as it is.
    mixed = explain(lambda w, x: jax.lax.dot(x, n, preferred_element_type="float32"))
    assert mixed(W, X).totals.low_share == 0


@pytest.mark.parametrize("dtype, share", [("float16", 0), ("bfloat16", 1)])
def test_a_product_is_half_if_all_its_factors_are(dtype, share):
    """Amp casts the other factor to bfloat16 only if that is the compute dtype."""

    def fun(w, x):
        return (x @ w.astype(jnp.bfloat16)).sum()

    found = explain(fun, compute_dtype=dtype)(W, X)
    assert found.totals.low_share == share
    stopped = explain(flax_amp.amp_stop(fun), compute_dtype=dtype)(W, X)
    assert stopped.totals.low_share == 0


def test_equal_findings_are_one_problem():
    # That nothing runs in half is another one.
    _, problem = explain(layers)(W, X).problems
    assert problem.times == 3 and problem.flops == 3 * 2 * 4 * 8 * 8
    loop = explain(lambda w, x: jax.lax.fori_loop(0, 7, lambda _, x: layers(w, x), x))
    assert loop(W, X).problems[1].times == 21

    def twice(w, x):
        with jax.named_scope("more"):
            return layers(w, layers(w, x) + layers(w, x))

    assert explain(lambda w, x: layers(w, twice(w, x)))(W, X).problems[1].paths == (
        "more/Layer_*",
        "Layer_*",
    )


def test_a_sound_model_has_no_problems():
    model = nn.Sequential([nn.Dense(8), nn.LayerNorm(), nn.gelu, nn.Dense(2)])
    params = jax.eval_shape(model.init, jax.random.key(0), X)

    def loss(params, x):
        return -jax.nn.log_softmax(model.apply(params, x))[:, 0].mean()

    for dtype in (jnp.float16, jnp.bfloat16, jnp.float32):
        found = explain(loss, compute_dtype=dtype)(params, X)
        assert not found.problems, found
        assert "No problems found" in str(found)


def test_the_costliest_kind_is_first():
    def fun(w, x):
        y = jax.lax.nextafter(x, x) @ jnp.dot(w, w, precision="highest")
        return y @ w

    kinds = [p.kind for p in explain(fun)(W, X).problems]
    assert kinds == ["float32 product", "unknown primitive"]


def test_warnings_of_the_users_code_stay_warnings():
    def fun(w, x):
        warnings.warn("old", DeprecationWarning, stacklevel=1)
        return x @ w

    with pytest.warns(DeprecationWarning, match="old"):
        assert not explain(fun)(W, X).problems
    with jax.default_matmul_precision("highest"):
        kinds = [p.kind for p in explain(inner.__wrapped__)(W, X).problems]
    assert kinds == ["policy", "float32 product"]


@pytest.mark.parametrize(
    ("precision", "words"),
    [
        (("highest", "default"), "precision=HIGHEST/DEFAULT."),
        (jax.lax.DotAlgorithmPreset.F32_F32_F32, "precision=F32_F32_F32."),
        (
            jax.lax.DotAlgorithm(*[np.dtype("f4")] * 3, 1, 1, 1, False),
            "precision=DotAlgorithm(",
        ),
    ],
)
def test_the_precision_that_a_product_asks_for(precision, words):
    found = explain(lambda w, x: jax.lax.dot(x, w, precision=precision))(W, X)
    assert words in found.problems[-1].message


def nested(w, x):
    with jax.named_scope("Model"):
        with jax.named_scope("Block_0"):
            x = jnp.exp(x @ w)
        with jax.named_scope("Block_1"), flax_amp.amp_stop():
            return jnp.tanh(x @ w)


# what: additions to the policy, the shadowed keys with the ones that win
SHADOWED = {
    "an outer scope": (
        {"Model": ORIGINAL, "Block_0": COMPUTE},
        {"Block_0": "'Model'"},  # amp_stop does the same
    ),
    "in any order": ({"Block_1": COMPUTE}, {"amp_stop": "'Block_1'"}),
    "an outer glob": (
        {"Mod*": COMPUTE, "Model/Block_0": ORIGINAL},
        {"Model/Block_0": "'Mod*'", "amp_stop": "'Mod*'"},
    ),
    "a glob behind all it names": (
        {"Block_0": COMPUTE, "Block_1": COMPUTE, "*/Block_*": ORIGINAL},
        {"*/Block_*": "'Block_0', 'Block_1'", "amp_stop": "'Block_1'"},
    ),
    "a key that decides elsewhere": ({"Block_0": COMPUTE, "*/Block_*": ORIGINAL}, {}),
    "the same function": ({"Model/Block_0": COMPUTE, "Block_0": COMPUTE}, {}),
    "nothing": ({}, {}),
}


@pytest.mark.parametrize("additions, expected", SHADOWED.values(), ids=SHADOWED)
def test_keys_that_lose_wherever_they_match(additions, expected):
    policy = flax_amp.default_amp_policy | additions
    problems = explain(nested, amp_policy=policy)(W, X).problems
    shadowed = [p for p in problems if p.kind == "shadowed policy key"]
    texts = {p.message.split("'")[1]: p.message for p in shadowed}
    assert texts.keys() == expected.keys()
    for key, winners in expected.items():
        assert f"{key!r} loses to {winners} wherever it matches. " in texts[key]
        assert f"Narrow {winners}, or leave {key!r} out." in texts[key]
    assert all(p.times and p.source and p.paths for p in shadowed)
    assert not explain(nested, amp_policy=policy, compute_dtype="float32")(
        W, X
    ).problems
