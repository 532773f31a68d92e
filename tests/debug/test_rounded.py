"""What reads rounded numbers: ranks, integers, sums from positions, and the loss."""

import functools

import jax
import jax.numpy as jnp
import pytest

import flax_amp
from _programs import normal
from benchmarks import models
from flax_amp import explain

X, W, BOOK = normal(0, 16, 8), normal(1, 8, 8) / 3, normal(2, 16, 8)
LABELS = jnp.arange(16) % 8
FAR = jnp.arange(16.0)[:, None] * 40 + jnp.zeros((16, 8))


def named(name, fn):
    return jax.named_call(fn, name=name)


def told(fn, *args, **options):
    """The kinds of problems, and how many notes there are."""
    found = explain(fn, backward=False, **options)(*args)
    return [p.kind for p in found.problems], len(found.notes)


# --- ranks and integers --------------------------------------------------------------


def distances(x, book):
    with jax.named_scope("nearest"):
        squared = (x**2).sum(-1, keepdims=True) - 2 * x @ book.T
        return squared + (book**2).sum(-1)[None]


def nearest(x, book):
    return distances(x, book).argmin(-1)


def quantized(params, x):
    w, book = params
    z = x @ w
    return ((book[nearest(z, book)] - z) ** 2).mean()


def of_rows(ranks):
    """A loss of rows that are picked by the ranks of a matmul's results."""
    return lambda w, x: (
        jnp.take_along_axis(x, named("score", lambda: ranks(x @ w))(), 1).sum()
        + (x @ w).sum()
    )


def in_scan(w, x):
    def step(x, _):
        best = jax.jit(lambda x: jnp.argmax(named("score", jnp.matmul)(x, w), 1))(x)
        return x + BOOK[best], None

    return jax.lax.scan(step, x, None, length=3)[0].sum()


RANKED = {
    "nearest": (nearest, (X, BOOK), "ranks", "nearest", "argmin"),
    "distance": (
        lambda x, book: jnp.sqrt(jnp.maximum(distances(x, book), 0)).argmin(-1),
        (X, BOOK),
        "ranks",
        "nearest",
        "argmin",
    ),
    "quantized": (quantized, ((W, BOOK), X), "ranks", "nearest", "argmin"),
    "top_k": (
        of_rows(lambda y: jax.lax.top_k(-y / 3, 2)[1]),
        (W, X),
        "ranks",
        "score",
        "top_k",
    ),
    "argsort": (of_rows(jnp.argsort), (W, X), "ranks", "score", "sort"),
    "round": (
        lambda w, x: (jnp.round(named("score", jnp.matmul)(x, w) * 9) ** 2).sum(),
        (W, X),
        "integers",
        "score",
        "round",
    ),
    "integer": (
        of_rows(lambda y: jnp.clip(y, 0, 7).astype(int)),
        (W, X),
        "integers",
        "score",
        "convert_element_type",
    ),
    "scan": (in_scan, (W, X), "ranks", "score", "argmax"),
    "greedy": (
        lambda w, x: BOOK[named("score", jnp.matmul)(x, w).argmax(-1)],
        (W, X),
        "ranks",
        "score",
        "argmax",
    ),
}


@pytest.mark.parametrize("fn, args, kind, path, name", RANKED.values(), ids=RANKED)
def test_ranks_of_rounded_results(fn, args, kind, path, name):
    (problem,) = explain(fn)(*args).problems
    assert problem.kind == kind and problem.paths == (path,)
    assert problem.message.startswith(f"{name} ")
    assert "flax_amp.use_float32_result" in problem.message
    assert problem.source.startswith("tests/debug/test_rounded.py:")
    policy = flax_amp.default_amp_policy | {path: flax_amp.use_float32_result}
    assert not explain(fn, amp_policy=policy)(*args).problems
    assert not explain(fn, compute_dtype=jnp.float32)(*args).problems


def logits(params, x):
    w, b = params
    return x @ w + b


def cross_entropy(params, x):
    rows = jax.nn.log_softmax(logits(params, x))
    return -jnp.take_along_axis(rows, LABELS[:, None], 1).mean()


def accuracy(params, x):
    return (logits(params, x).argmax(-1) == LABELS).mean()


def top_2(params, x):
    best = jax.lax.top_k(jax.nn.log_softmax(logits(params, x)), 2)[1]
    return (best == LABELS[:, None]).any(-1).mean()


PARAMS = W, jnp.zeros((1, 8))
# What is told of it: nothing but a note for classes that are returned.
QUIET = {
    "loss": (cross_entropy, 0),
    "metric beside the loss": (
        lambda p, x: (cross_entropy(p, x), dict(accuracy=accuracy(p, x))),
        0,
    ),
    "counts": (
        lambda p, x: (
            cross_entropy(p, x),
            (logits(p, x).argmax(-1) == LABELS).sum(),
            top_2(p, x),
        ),
        0,
    ),
    "metric alone": (accuracy, 0),
    "classes": (lambda p, x: logits(p, x).argmax(-1), 1),
    "one class": (lambda p, x: logits(p, x[:1])[0].argmax(), 1),
    "classes of probabilities": (
        lambda p, x: jax.nn.log_softmax(logits(p, x)).argmax(-1),
        1,
    ),
    "classes beside the loss": (
        lambda p, x: (cross_entropy(p, x), logits(p, x).argmax(-1)),
        1,
    ),
    "numbers in order": (lambda p, x: jnp.sort(logits(p, x), 0)[:3].sum(), 0),
    "largest numbers": (lambda p, x: jax.lax.top_k(logits(p, x), 2)[0].sum(), 0),
    "data": (lambda p, x: x[x.sum(-1).argsort()] @ p[0], 0),
}


@pytest.mark.parametrize("fn, notes", QUIET.values(), ids=QUIET)
def test_classes_and_metrics_are_no_problem(fn, notes):
    assert told(fn, PARAMS, X) == ([], notes)


# --- positions -----------------------------------------------------------------------


def read(w, y):
    return (jnp.sin(y) @ w).sum() + (y @ w).sum()


def moved(w, x):
    with jax.named_scope("move"):
        y = jnp.arange(16.0)[:, None] * 40 + x @ w
    return read(w, y)


def moved_often(w, x):
    y = jnp.broadcast_to(jnp.arange(16)[:, None], (16, 8)).astype(jnp.float32)
    with jax.named_scope("move"):
        for step in (x, 2 * x, -x):
            y = y + 9 * (step @ w)
    return read(w, y)


POSITIONS = {
    "iota": (moved, (W, X)),
    "steps": (moved_often, (W, X)),
    "constant": (
        lambda w, x: read(w, named("move", lambda: x @ w + FAR)()),
        (W, X),
    ),
    "data": (
        lambda w, x, far: read(w, named("move", lambda: x @ w + far)()),
        (W, X, FAR),
    ),
    "jit": (jax.jit(moved), (W, X)),
    "checkpoint": (jax.checkpoint(moved), (W, X)),
}


@pytest.mark.parametrize("fn, args", POSITIONS.values(), ids=POSITIONS)
def test_sums_from_positions(fn, args):
    (problem,) = explain(fn)(*args).problems
    assert problem.kind == "positions" and problem.paths == ("move",)
    assert "bfloat16 has no odd numbers above 256" in problem.message
    assert "flax_amp.amp_stop" in problem.message
    in_float16 = explain(fn, compute_dtype=jnp.float16)(*args)
    assert "above 2048" in in_float16.problems[0].message
    policy = flax_amp.default_amp_policy | {"move": jnp.float32}
    assert told(fn, *args, amp_policy=policy)[0] in ([], ["policy"])


def softmax_with(mask):
    def fn(w, x, given):
        q = x @ w
        return (jax.nn.softmax(q @ q.T + mask(given)) @ q).sum()

    return fn


NO_POSITIONS = {
    "bias": (lambda p, x: read(p[0], x @ p[0] + p[1]), (PARAMS, X)),
    "embedding of positions": (
        lambda p, x: read(p[0], x @ p[0] + p[1]),
        ((W, FAR), X),
    ),
    "one for all rows": (
        lambda w, x, b: read(w, x @ w + b),
        (W, X, jnp.ones((1, 8))),
    ),
    "float32 for the loss": (lambda w, x, t: ((x @ w + t) ** 2).sum(), (W, X, FAR)),
    "waves": (
        lambda w, x: read(w, x @ w + jnp.sin(jnp.arange(16.0))[:, None]),
        (W, X),
    ),
    "state": (
        lambda w, x, y: read(w, y + jnp.sin(y) @ w),
        (W, X, FAR),
    ),
    "mask": (softmax_with(lambda mask: mask), (W, X, jnp.zeros((16, 16)))),
    "distance": (
        softmax_with(lambda _: -0.5 * jnp.abs(jnp.arange(16.0)[:, None] - 3)),
        (W, X, None),
    ),
}


@pytest.mark.parametrize("fn, args", NO_POSITIONS.values(), ids=NO_POSITIONS)
def test_what_is_no_position_is_no_problem(fn, args):
    assert told(fn, *args) == ([], 0)


def test_amp_stop_around_the_sum_is_a_remedy():
    def fn(w, x, far):
        y = x @ w
        with flax_amp.amp_stop():
            y = y + far
        return read(w, y)

    assert told(fn, W, X, FAR) == ([], 0)


@pytest.mark.slow
@pytest.mark.parametrize("name", models.COMPARED)
def test_models_have_no_problem(name):
    problem = models.problem(name, "tiny")
    with jax.numpy_rank_promotion("allow"):
        assert told(problem.loss, *problem.shapes()) == ([], 0)


# --- what a loss reads ---------------------------------------------------------------


def condition(w, x):
    def is_next(carry):
        return ((carry[1] @ w).sum() < 1e3) & (carry[0] < 3)

    return jax.lax.while_loop(is_next, lambda c: (c[0] + 1, c[1] * 1.1), (0, x))[1]


def metric_of_steps(w, x):
    def step(carry, _):
        return carry * 1.1, (jax.lax.stop_gradient(carry) @ w).sum()

    return jax.lax.scan(step, x, None, length=3)[0]


# A program, and the modules whose rounded results its loss reads.
LOSSES = {
    "condition": (lambda w, x: condition(w, x).sum(), []),
    "metric of steps": (lambda w, x: metric_of_steps(w, x).sum(), []),
    "metric": (lambda w, x: ((x**2).sum(), (x @ w).sum()), []),
    "count": (lambda w, x: x.sum() + (x @ w > 0).sum(), []),
    "branch": (
        lambda w, x: jax.lax.cond((x @ w).sum() > 0, jnp.sin, jnp.cos, x).sum(),
        [],
    ),
    "no loss": (lambda w, x: x @ w, []),
    "steps": (
        lambda w, x: jax.lax.fori_loop(
            0, 3, lambda _, h: jnp.tanh(named("u", jnp.matmul)(h, w)), x
        ).sum(),
        ["u"],
    ),
    "last layer": (
        lambda w, x: named("v", jnp.matmul)(named("u", jnp.matmul)(x, w), w).sum(),
        ["v"],
    ),
    "head in float32": (
        lambda w, x: jnp.dot(
            named("u", jnp.matmul)(x, w), w, precision="highest"
        ).sum(),
        ["u"],
    ),
    "skip": (
        lambda w, x: (lambda h: (h + named("v", jnp.matmul)(h, w)).sum())(
            jnp.sin(named("u", jnp.matmul)(x, w))
        ),
        ["u", "v"],
    ),
}


@pytest.mark.parametrize("fn, modules", LOSSES.values(), ids=LOSSES)
def test_what_a_loss_reads(fn, modules):
    found = explain(fn, backward=False)(W, X)
    names = [text.partition(",")[0] for text in found.loss_reads]
    assert names == [f"dot_general of {module}" for module in modules]
    assert not explain(fn, backward=False, precision="32-true")(W, X).loss_reads


def test_a_function_that_is_called_twice_is_read_once():
    @functools.partial(jax.jit, static_argnums=2)
    def layer(w, x, name):
        return named(name, jnp.matmul)(x, w)

    def loss(w, x):
        return layer(w, layer(w, x, "u"), "u").sum()

    assert len(explain(loss)(W, X).loss_reads) == 1
