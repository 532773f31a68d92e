"""Switches for roundings: the errors are those of programs that round, or do not."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import flax_amp
from debug._nets import WIDTH, of_nnx
from flax_amp import compare_precision
from flax_amp.debug._call import Call, Request
from flax_amp.debug._sensitivity import ALL, KINDS, RESULT, Roundings
from flax_amp.debug._trial import Part, Trials

BATCH, N = 6, 16
W, X = (
    jax.random.normal(jax.random.key(i), shape)
    for i, shape in ((0, (N, N)), (1, (BATCH, N)))
)
W = W / 4


def first(w, x):
    with jax.named_scope("first"):
        return jnp.tanh(x @ w)


def last(w, x):
    with jax.named_scope("last"):
        return ((x @ w) ** 2).mean()


def planted(fault):
    """A loss with a fault in one of three scopes; `size` is unknown to XLA."""

    def loss(w, x, size):
        y = first(w, x)
        with jax.named_scope("bad"):
            y = fault(y, w, size)
        return last(w, y)

    return loss


def offset(y, w, size):
    return (y + size) @ w - size * w.sum(0, keepdims=True)


def cancel(y, w, size):
    return (y * size) @ w - (y * size - y) @ w


def variance(y, w, size):
    z = (y + size) @ jnp.eye(N)
    return (z - z.mean(-1, keepdims=True)) @ w


def softmax(y, w, size):
    return jax.nn.softmax(size * (y @ w) @ w.T) @ w * 10


def log(y, w, size):
    p = jax.nn.sigmoid(size + y @ w)
    return jnp.log(1e-3 + 1 - p @ jnp.eye(N))


def embedding(y, w, size):
    return ((y * size) @ w) / size + jnp.sin(size * (y @ w))


def deep(y, w, size):
    for _ in range(4):
        y = y + jnp.sin(size * (y @ w))
    return y


def quotient(y, w, size):
    a, b = (y + size) @ w, size * w.sum(0, keepdims=True)
    return (a - b) / (1 + jnp.abs(a - b))


def underflow(y, w, size):
    return ((y / size) @ w) * size


def overflow(y, w, size):
    return ((y * size) @ w) / size


# By name: the fault, its size and the dtype.
PLANTED = {
    "offset": (offset, 300.0, jnp.bfloat16),
    "cancel": (cancel, 300.0, jnp.bfloat16),
    "variance": (variance, 300.0, jnp.bfloat16),
    "softmax": (softmax, 100.0, jnp.bfloat16),
    "log": (log, 5.0, jnp.bfloat16),
    "embedding": (embedding, 30.0, jnp.bfloat16),
    "deep": (deep, 10.0, jnp.bfloat16),
    "quotient": (quotient, 500.0, jnp.float16),
    "underflow": (underflow, 1e7, jnp.float16),
    "overflow": (overflow, 1e6, jnp.float16),
}


def asked(loss, *args, scale=1.0, **options):
    """The trials of a call, its parts, and their roundings."""
    call = Call(Request.read("compare_precision", loss, (), **options), args, {})
    trials = Trials(call)
    parts = trials.parts()
    return trials, parts, Roundings(trials, parts, scale)


def measured(trials, parts):
    """The error of the gradients with some parts in float32."""
    exact, found = (
        np.concatenate([np.ravel(x) for x in trial.gradients]).astype(float)
        for trial in (trials.exact, trials.run(parts))
    )
    if not np.isfinite(found).all():
        return math.inf
    return float(np.linalg.norm(found - exact) / np.linalg.norm(exact))


def agree(found, expected):
    """Whether two errors agree; below 2e-3, float32 sums of another order differ."""
    return found == expected or expected / 1.5 < found + 2e-3 < expected * 1.5 + 4e-3


# A fault of digits, and a fault whose error is an inf.
QUICK = ("softmax", "overflow")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (name not in QUICK))
        for name in PLANTED
    ],
)
def test_the_worst_part_is_that_of_leave_one_out(name):
    fault, size, dtype = PLANTED[name]
    given = W, X, jnp.full((1, N), size)
    trials, parts, roundings = asked(planted(fault), *given, compute_dtype=dtype)
    assert agree(roundings.error(parts), measured(trials, []))
    without = {part: measured(trials, [part]) for part in parts}
    for part, error in without.items():
        assert agree(roundings.error_without([part]), error), part
    best = min(without, key=without.get)
    assert best == Part("bad")
    assert roundings.worst(2 * without[best], 3) == [best]


# --- programs with bodies ------------------------------------------------------------


def fault_in_scan(w, x, size):
    def step(y, _):
        with jax.named_scope("bad"):
            return jnp.tanh(cancel(y, w, size)), None

    return last(w, lax.scan(step, first(w, x), length=2)[0])


def in_cond(w, x, size):
    def bad(y):
        with jax.named_scope("bad"):
            return cancel(y, w, size)

    return last(w, lax.cond(size[0, 0] > 0, bad, lambda y: y @ w, first(w, x)))


def in_checkpoint(w, x, size):
    """A call in a `checkpoint`."""
    bad = jax.jit(jax.named_call(cancel, name="bad"))
    run = lambda w, x, size: last(w, bad(first(w, x), w, size))  # noqa: E731
    return jax.checkpoint(run)(w, x, size)


@jax.custom_vjp
def with_rule(y, w, size):
    with jax.named_scope("bad"):
        return cancel(y, w, size)


def _forward(y, w, size):
    return with_rule(y, w, size), (y, w, size)


def _backward(saved, g):
    y, w, size = saved
    with jax.named_scope("bad"):
        dy = (g * size) @ w.T - (g * size - g) @ w.T
    return dy, y.T @ g, jnp.zeros_like(size)


with_rule.defvjp(_forward, _backward)


def in_custom_vjp(w, x, size):
    return last(w, with_rule(first(w, x), w, size))


def in_while(w, x, size):
    """No derivative goes through the loop."""
    with jax.named_scope("bad"):
        start = 0, lax.stop_gradient(X)
        _, y = lax.while_loop(
            lambda state: state[0] < 2,
            lambda state: (state[0] + 1, cancel(jnp.tanh(state[1]), W, size)),
            start,
        )
    return last(w, first(w, x) + y)


def in_shard_map(w, x, size):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.P("data")

    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=(jax.P(), spec, jax.P()), out_specs=spec
    )
    def run(w, x, size):
        y = first(w, x)
        with jax.named_scope("bad"):
            return cancel(y, w, size)

    return last(w, run(w, x, size))


@pytest.mark.once
@pytest.mark.parametrize(
    "loss",
    [
        fault_in_scan,
        in_cond,
        in_checkpoint,
        in_custom_vjp,
        in_while,
        in_shard_map,
    ],
)
def test_roundings_in_bodies(loss):
    given = W, X, jnp.full((1, N), 100.0)
    trials, parts, roundings = asked(loss, *given)
    bad = [part for part in parts if part.path.endswith("bad")]
    assert len(parts) > len(bad) == 1, parts
    before, after = measured(trials, []), measured(trials, bad)
    assert before > 4 * after
    assert agree(roundings.error(parts), before)
    assert agree(roundings.error_without(bad), after)
    assert roundings.error([]) < 1e-4
    assert roundings.worst(2 * after, 3) == bad


@pytest.mark.once
@pytest.mark.parametrize("option", ["fp8", "reduce_in_float32"])
def test_matmuls_of_amp(option):
    loss = planted(cancel)
    options = {"reduce_in_float32": True}
    if option == "fp8":
        fp8 = flax_amp.use_fp8(emulate=True)
        policy = flax_amp.default_amp_policy | {jax.lax.dot_general_p: fp8}
        options = {"amp_policy": policy | {"last": fp8, "bad": fp8}}
        loss = planted(lambda y, w, size: jnp.tanh(y @ w))
    trials, parts, roundings = asked(loss, W, X, jnp.full((1, N), 100.0), **options)
    before = measured(trials, [])
    assert before > 0.02
    assert agree(roundings.error(parts), before)
    for part in parts:
        assert agree(roundings.error_without([part]), measured(trials, [part])), part


@pytest.mark.once
@pytest.mark.parametrize("mantissa_bits", [3, 7, 9])
def test_digits_that_the_user_reduces(mantissa_bits):
    """JAX reduces to the digits of half precision; other digits are the user's."""

    def loss(w, x):
        with jax.named_scope("reduced"):
            y = lax.reduce_precision(x @ w, 8, mantissa_bits)
        return last(w, y)

    policy = flax_amp.default_amp_policy | {"reduced": jnp.bfloat16}
    trials, parts, roundings = asked(loss, W, X, amp_policy=policy)
    assert agree(roundings.error(parts), measured(trials, []))
    if mantissa_bits != 7:  # the program in float32 has them, too
        assert roundings.error([]) < 1e-4


@pytest.mark.once
def test_nnx():
    apply, model = of_nnx(lambda x, a, b: (x + a) @ jnp.eye(WIDTH) - a)
    x = jnp.linspace(-1, 1, 5 * WIDTH).reshape(5, WIDTH)
    given = model, x, jnp.full((1, WIDTH), 300.0), 1.0
    trials, parts, roundings = asked(lambda m, *a: (apply(m, *a) ** 2).mean(), *given)
    assert agree(roundings.error(parts), measured(trials, []))
    (part,) = roundings.worst(0.05, 3)
    assert part == Part("NNXNet/bad") and roundings.error([part]) > 0.1


# --- kinds ---------------------------------------------------------------------------


def test_kinds_of_roundings():
    """Where a result alone is too rough, its matmul may stay in half precision."""
    whole = jnp.round(X * 8)  # half precision has these numbers
    table = jnp.arange(N * N, dtype=jnp.float32).reshape(N, N) % 16

    def loss(w, x, table):
        with jax.named_scope("bad"):
            z = jnp.sin(x @ table)
        return last(w, first(w, z))

    _, parts, roundings = asked(loss, W, whole, table)
    bad = [Part("bad")]
    errors = {name: roundings.error(bad, [kind]) for kind, name in enumerate(KINDS)}
    assert errors.pop("result") > 0.1 > 1e-4 > max(errors.values())
    assert roundings.error(bad, ALL) > 0.1
    remaining = roundings.error_without(bad, [RESULT])
    assert remaining < 0.1 * roundings.error(parts)
    found = compare_precision(loss)(W, whole, table)
    assert found.best.value == "flax_amp.use_float32_result", str(found)


def test_roundings_that_do_harm_together_only():
    """A choice that one rounded score does not change, but two of them do."""
    step = 2.0**-10  # lost behind 1 in bfloat16

    def loss(w, ones):
        scores = []
        for name in ("a", "b", "c"):
            with jax.named_scope(name):
                scores.append(ones @ w[:, :1])
        is_more = scores[0] + scores[1] > 2 + step / 2
        factor = jnp.where(is_more, 1.0, 3.0).sum()
        return factor * (w**2).sum() + 0.01 * scores[2].sum()

    w = jnp.zeros((N, N)).at[:, 0].set((1 + step) / N)
    _, _, roundings = asked(loss, w, jnp.ones((1, N)))
    parts = [Part("a"), Part("b"), Part("c")]
    alone = [roundings.error([part]) for part in parts]
    assert max(alone) < 0.1 < 1 < roundings.error(parts)
    (found,) = roundings.worst(0.1, 3)
    assert found in parts[:2]


def test_a_group_is_opened_only_if_it_matters():
    """Of 32 modules with two faults, a quarter of the runs of one by one and less."""

    def loss(w, x, size):
        for i in range(32):
            with jax.named_scope(f"m{i}"):
                x = x + (cancel(x, w, size) if i in (7, 20) else x @ w * 0.01) * 0.1
        return (x**2).mean()

    _, parts, roundings = asked(loss, W, X, jnp.full((1, N), 100.0))
    runs = []
    run = roundings._run
    roundings._run = lambda *args: runs.append(1) or run(*args)
    found = roundings.worst(0.02, 3)
    assert {part.path for part in found} == {"m7", "m20"}
    assert len(runs) < len(parts), len(runs)
    # One more than there may be says that there are too many.
    assert len(roundings.worst(0.02, 1)) == 2


def test_a_cast_for_a_matmul_is_a_rounding_of_its_operands():
    _, parts, roundings = asked(last, W, X)
    operand, _, border, _ = (roundings.error(parts, [i]) for i in range(4))
    assert operand > 1e-3 and border == 0


def test_parts_that_make_an_error_only_together_are_found_by_the_fall():
    _, _, roundings = asked(planted(cancel), W, X, jnp.full((1, N), 300.0))
    error = roundings.error
    roundings.error = lambda parts, kinds=ALL: 0.0
    found = roundings.worst(0.02, 3)
    roundings.error = error
    assert found == [Part("bad")]


def test_a_bias_beyond_the_range_is_limited_and_not_rounded():
    """As a mask that is an argument: a row of such scores is uniform, and no NaN."""

    def loss(w, x, mask):
        with jax.named_scope("scores"):
            scores = jax.nn.softmax(x @ w + mask)
        return last(w, first(w, scores))

    mask = jnp.full((1, N), -1e9)
    trials, _, roundings = asked(loss, W, X, mask, compute_dtype=jnp.float16)
    assert agree(roundings.error_without(()), measured(trials, []))


# --- the report ----------------------------------------------------------------------


def test_the_report_ranks_and_concludes():
    given = W, X, jnp.full((1, N), 300.0)
    found = compare_precision(planted(cancel))(*given)
    (worst,) = found.sensitivities
    assert worst.name == "bad" and tuple(worst.by_kind) == KINDS
    assert worst.alone > found.threshold > worst.without
    text = str(found)
    assert "all but" in text and "operands" in text
    before, after = found.as_it_is.gradient_error, found.remedies[0].gradient_error
    assert f"from {before:.2g} to {after:.2g}" in text
    saved = found.to_dict()["sensitivities"]
    assert saved[0]["by_kind"]["result"] == worst.by_kind["result"]


def test_values_that_a_checkpoint_computes_again_are_no_cotangents():
    """They are results and border values, whichever pass computes them."""
    given = W, X, jnp.full((1, N), 300.0)
    plain, again = (
        compare_precision(loss)(*given).sensitivities[0].by_kind
        for loss in (planted(cancel), jax.checkpoint(planted(cancel)))
    )
    assert again["cotangent"] < again["result"]
    np.testing.assert_allclose(again["cotangent"], plain["cotangent"], rtol=0.5)
    np.testing.assert_allclose(again["result"], plain["result"], rtol=0.5)


def test_a_group_may_be_less_exact_than_all_gradients_together():
    def loss(w, x):
        close = 1e3 + w["small"] * x
        small = ((close @ W) - 1e3 * W.sum(0, keepdims=True)).mean()
        return 1e6 * ((x @ w["large"]) ** 2).mean() + (small**2).sum()

    found = compare_precision(loss)({"small": W[:1], "large": W}, X)
    assert found.as_it_is.gradient_error < found.threshold
    text = str(found)
    assert "The gradients, all together, are as exact as usual" in text
    assert "Some groups alone are above: " in text and "small" in text


def test_roundings_without_a_switch_are_searched_by_trials():
    """A loop with a condition for each example runs as it was written."""

    def loss(w, x, size):
        def one(y):
            with jax.named_scope("bad"):
                return lax.while_loop(
                    lambda state: state[0] < 1,
                    lambda state: (
                        state[0] + 1 + 0 * state[1][0, 0],
                        cancel(state[1], W, size),
                    ),
                    (jnp.float32(0), y[None]),
                )[1][0]

        y = jax.vmap(one)(lax.stop_gradient(X))
        return last(w, first(w, x) + y)

    found = compare_precision(loss)(W, X, jnp.full((1, N), 300.0))
    assert found.remedies[0].keys == ("bad",), str(found)
    assert found.best.gradient_error < found.threshold
