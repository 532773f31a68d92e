"""Problems: each kind planted once, and nothing said of a model that has none."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

import flax_amp
from flax_amp import explain

in_float16 = functools.partial(explain, compute_dtype=jnp.float16)

X, W = jnp.ones((4, 8)), jnp.full((8, 8), 0.1)


@jax.jit
def inner(w, x):
    return x @ w


def layers(w, x):
    for i in range(3):
        with jax.named_scope(f"Layer_{i}"):
            x = jnp.dot(x, w, precision="highest")
    return x


LAYERS = ["Layer_0", "Layer_1", "Layer_2"]


# name: function, additions to the policy, kind, words of the message, paths
PLANTED = {
    "precision": (layers, {}, "float32 matmul", "precision=HIGHEST", LAYERS),
    "no key": (
        lambda w, x: inner(w, x) + jax.lax.conv(X[None], X[None], (1,), "SAME")[0, :1],
        {jax.lax.dot_general_p: None},
        "float32 matmul",
        "no key of the policy names dot_general",
        [""],
    ),
    "preferred": (
        lambda w, x: jax.lax.dot(x, w, preferred_element_type=jnp.bfloat16),
        {},
        "float32 matmul",
        "preferred_element_type=bfloat16",
        [""],
    ),
    "key": (inner, {"heed": jnp.float32}, "policy", "'heed'", []),
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
        "complex matmul",
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


KEEPS_MATMULS = {jax.lax.dot_general_p: flax_amp.use_original_precision}


@pytest.mark.parametrize(
    "fun, additions",
    [
        (jax.named_call(inner, name="head"), {"head": jnp.float32}),
        (flax_amp.amp_stop(jax.jit(inner)), {}),
        (inner, KEEPS_MATMULS),
        (
            lambda w, x: jax.lax.fori_loop(
                0, 3, lambda _, x: jax.named_call(inner, name="head")(w, x), x
            ),
            {"head": jnp.float32},
        ),
    ],
)
def test_what_the_user_chose_is_no_problem(fun, additions):
    policy = flax_amp.default_amp_policy | additions
    found = explain(fun, amp_policy=policy)(W, X)
    # That nothing at all runs in half is no choice.
    assert {p.kind for p in found.problems} <= {"policy"} and not found.notes


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
def test_matmuls_inside_of_jax_are_no_problem(fun):
    found = explain(fun)(W, X)
    assert "float32 matmul" not in {p.kind for p in found.problems}
    assert 0 < found.low_share < 1


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


@pytest.mark.parametrize(
    ("precision", "words"),
    [
        (("highest", "default"), "precision=HIGHEST/DEFAULT."),
        (jax.lax.DotAlgorithmPreset.F32_F32_F32, "precision=F32_F32_F32."),
    ],
)
def test_the_precision_that_a_matmul_asks_for(precision, words):
    found = explain(lambda w, x: jax.lax.dot(x, w, precision=precision))(W, X)
    assert words in found.problems[-1].message


def test_a_solver_runs_as_a_whole_in_float32():
    def solve(matvec, b):
        return jax.lax.fori_loop(0, 5, lambda _, y: y + 0.2 * (b - matvec(y)), b)

    def loss(w, b):
        return jnp.sum(jax.lax.custom_linear_solve(lambda v: w @ v, b, solve, solve))

    with pytest.warns(flax_amp.PolicyWarning):
        jax.make_jaxpr(flax_amp.amp(loss))(jnp.eye(3), jnp.ones(3))
    found = flax_amp.explain(loss)(jnp.eye(3), jnp.ones(3))
    text = " ".join(str(found).split())
    assert "inside of custom_linear_solve, which runs as a whole" in text
    assert not found.loss_reads
