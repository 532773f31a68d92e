"""Every optimizer of optax as a pytree: one table of optimizers and transformations.

A check raises an `AssertionError` where the pytree optimizer and plain optax part, or
skips what plain optax cannot do either.
"""

import contextlib
import copy

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import serialization
from jax.sharding import PartitionSpec as P

from benchmarks.optimizers.cases import (
    COMPOSED,
    RATE,
    case,
    distance,
    in_optax,
    loss_of,
    names,
    ours,
    params_of,
    run,
)
from flax_amp import optim
from helpers import assert_same_avals, jit

pytestmark = [
    pytest.mark.filterwarnings("ignore:`optimistic_adam` is deprecated"),
    pytest.mark.filterwarnings('ignore:"seed" is deprecated'),  # dpsgd needs it
]
ALL = [*names(), *COMPOSED]
FAST = ["sgd", "chain(clip, adamw)"]
FEW = 3

# Whose trajectories XLA rounds otherwise when the learning rate is no constant: they
# part by this much, relative, after 20 steps.
ROUNDED = {"adafactor": 1e-6, "fromage": 2e-6, "lbfgs": 1e-5, "MultiSteps(adam)": 1e-6}

# What amplifies roundings: a line search, a normalized or projected direction.
ROUGH = {"galore": 5e-2, "lbfgs": 1e-4, "madgrad": 1e-5, "muon": 1e-5}


def close(case, found, expected, bound=1e-6):
    apart = distance(found, expected)
    assert apart <= max(bound, ROUGH.get(case.name, 0)), f"{apart:.1e}"


def trajectory(case):
    """20 steps against plain optax; the state has the structure that optax gives it."""
    expected, state = run(in_optax(case, RATE), 20)
    params, tx = run(ours(case, RATE), 20)
    assert_same_avals(tx.opt_state, state)
    assert distance(params, expected) <= ROUNDED.get(case.name, 0)


def static_trajectory(case):
    """Bit for bit, where nothing is an array: the rate has another name."""
    factory = lambda rate: case.plain(rate)  # noqa: E731
    tx = optim.wrap(factory)(RATE)
    assert not jax.tree.leaves(tx)
    expected, _ = run(in_optax(case, RATE), 5)
    found, _ = run(ours(case._replace(pytree=lambda _: tx), RATE), 5)
    assert distance(found, expected) == 0


def schedule(case):
    """`hyperparams` has the value that optax computed with."""
    if not case.schedules:
        pytest.skip("takes no schedule")
    seen = []

    def falling(count):
        rate = RATE / (1 + count)
        jax.debug.callback(lambda rate: seen.append(float(rate)), rate)
        return rate

    params, training = params_of(), ours(case, falling)
    tx = training.init(params)
    for _ in range(FEW):
        params, tx = training.step(params, tx)
    jax.effects_barrier()
    last = seen[-1]
    rates = [v for n, v in tx.hyperparams.items() if n.endswith("learning_rate")]
    assert any(rate == np.float32(last) for rate in rates), (rates, seen)


def replace(case):
    """Another learning rate, without compiling again."""
    needs_a_rate(case)
    training = ours(case, RATE)
    step = jit(training.step)
    params, tx = step(params_of(), training.init(params_of()))
    rates = [n for n in tx.hyperparams if n.endswith("learning_rate")]
    rates = ["learning_rate"] if "learning_rate" in rates else rates
    other = tx.replace(**dict.fromkeys(rates, RATE / 3))
    expected, _ = jit(in_optax(case, RATE / 3).step)(params, other.opt_state)
    found, _ = step(params, other)
    assert step._cache_size() == 1
    close(case, found, expected)


def needs_a_rate(case):
    if not case.rate:
        pytest.skip("has no learning rate")


def final(way, case, dtype=jnp.float32):
    """Parameters after a few steps, as a function of the learning rate."""

    def train(rate):
        params, training = params_of(dtype=dtype), way(case, rate)
        state = training.init(params)
        for _ in range(FEW):
            params, state = training.step(params, state)
        return params

    return train


def vmap(case):
    """Three learning rates in one step, each equal to its own run."""
    needs_a_rate(case)
    rates = np.array([0.5, 1, 2], np.float32) * RATE
    train = final(ours, case)
    stack = lambda *rows: jnp.stack(rows)  # noqa: E731
    return (
        lambda: jax.vmap(train)(rates),
        lambda: jax.tree.map(stack, *map(train, rates)),
    )


def grad(case):
    """The derivative by the rate is that of plain optax."""
    return slope(ours, case), slope(in_optax, case)


def checkpoint(case):
    """The same, with what was computed again instead of stored."""
    return slope(ours, case, jax.checkpoint), slope(in_optax, case)


def slope(way, case, wrapped=lambda function: function):
    needs_a_rate(case)
    loss = wrapped(lambda rate: loss_of(final(way, case)(rate)))
    gradient = lambda: jax.grad(loss)(RATE)  # noqa: E731
    try:
        jax.eval_shape(slope(in_optax, case) if way is ours else gradient)
    except ValueError:
        pytest.skip("plain optax has no derivative")
    return gradient


def scan(case):
    """Steps in `lax.scan`, against a loop of plain optax."""

    def scanned():
        training = ours(case, RATE)
        first = params_of(), training.init(params_of())
        body = lambda carry, _: (training.step(*carry), None)  # noqa: E731
        return jax.lax.scan(body, first, length=FEW)[0][0]

    return scanned, lambda: final(in_optax, case)(RATE)


def shard_map(case):
    """The whole optimizer as an argument of `shard_map`."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

    def mapped():
        training = ours(case, RATE)
        state = params_of(), training.init(params_of())
        spec = dict(mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
        for _ in range(FEW):
            state = jax.shard_map(training.step, **spec)(*state)
        return state[0]

    return mapped, lambda: final(in_optax, case)(RATE)


def sharded_sweep(case):
    """Eight learning rates over eight devices: each its own run, on its own device."""
    needs_a_rate(case)
    mesh = jax.make_mesh((8,), ("run",), axis_types=(jax.sharding.AxisType.Auto,))
    rates = jnp.geomspace(0.5, 2, 8) * RATE
    placed = jax.device_put(rates, jax.NamedSharding(mesh, P("run")))
    sweep = lambda rates: jax.vmap(final(ours, case))(rates)  # noqa: E731
    shards = jax.jit(sweep)(placed)["w"].sharding
    assert shards.is_equivalent_to(placed.sharding, 3)
    stack = lambda *rows: jnp.stack(rows)  # noqa: E731
    return (
        lambda: sweep(placed),
        lambda: jax.tree.map(stack, *map(final(in_optax, case), rates)),
    )


def masks(case):
    """Masks of bools are static; of arrays, they are leaves, and no masks."""
    mask = {"w": True, "b": False}
    plain = lambda rate: optax.masked(case.plain(rate), mask)  # noqa: E731
    tx = optim.masked(case.pytree(RATE), mask)
    assert tx.mask == mask and jax.tree.structure(tx) != jax.tree.structure(
        optim.masked(case.pytree(RATE), {"w": 1, "b": 0})
    )
    masked = case._replace(plain=plain, pytree=lambda _: tx)
    arrays = optim.masked(case.pytree(RATE), jax.tree.map(np.bool_, mask))
    with pytest.raises(TypeError, match="Arrays are: .*mask"):
        jax.eval_shape(lambda tx: tx.init(params_of()), arrays)
    return lambda: final(ours, masked)(RATE), lambda: final(in_optax, masked)(RATE)


def leaks(case):
    """No tracer stays in an optimizer that a transformation was given."""
    training = ours(case, RATE)
    tx = training.init(params_of())
    with jax.checking_leaks():
        jit(training.step)(params_of(), tx)
        jax.eval_shape(final(ours, case), RATE)
    assert not any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(tx))


def donation(case):
    """The old optimizer gives its memory to the new one, and the user's stays."""
    training, params = ours(case, RATE), params_of()
    tx = training.init(params)
    found, _ = jit(training.step, donate_argnums=1)(params, tx)
    assert any(leaf.is_deleted() for leaf in jax.tree.leaves(tx))
    close(case, found, run(training, 1)[0])
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(params))


def eval_shape(case):
    """Shapes without values, of `init` and of a step."""
    training = ours(case, RATE)
    real = training.init(params_of())
    assert_same_avals(real, jax.eval_shape(training.init, params_of()))
    assert_same_avals(real, jax.eval_shape(training.step, params_of(), real)[1])
    leaves = jax.tree.leaves(real)
    assert not any(getattr(leaf, "weak_type", False) for leaf in leaves)


def copies(case):
    """`deepcopy` and state dicts: what comes back is the same optimizer."""
    tx = case.pytree(RATE).init(params_of())
    assert_same_avals(copy.deepcopy(tx), tx)
    if any(jnp.issubdtype(x.dtype, jax.dtypes.prng_key) for x in jax.tree.leaves(tx)):
        pytest.skip("Flax does not write typed keys")
    state, trained = map(moved, (case.plain(RATE).init(params_of()), tx))
    other = serialization.from_bytes(tx, serialization.to_bytes(trained))
    assert_same_avals(other, trained)
    assert distance(other, trained) == 0
    theirs, mine = map(serialization.to_state_dict, (state, trained))
    assert jax.tree.structure(mine["opt_state"]) == jax.tree.structure(theirs)


def moved(tree):
    """Other values in the place of all of a tree."""
    return jax.tree.map(lambda x: ~x if x.dtype == bool else x + 1, tree)


def around(case):
    """`inject_hyperparams` and `MultiSteps` around `to_optax` see plain optax."""
    needs_a_rate(case)
    fall = optax.linear_schedule(RATE, 0.0, 5)

    def injected(make):
        factory = lambda learning_rate: make(learning_rate)  # noqa: E731
        return lambda _: optax.MultiSteps(
            optax.inject_hyperparams(factory)(learning_rate=fall), 2
        )

    def trained(make):
        return run(in_optax(case._replace(plain=injected(make)), RATE), 4)[0]

    expected = trained(case.plain)
    close(case, trained(lambda rate: case.pytree(rate).to_optax()), expected)
    assert distance(expected, params_of()) > 0


CHECKS = {
    check.__name__: check
    for check in (
        [trajectory, static_trajectory, schedule, replace, vmap, grad, checkpoint]
        + [scan, shard_map, sharded_sweep, donation, eval_shape, copies, around]
        + [masks, leaks]
    )
}


# Of the others: trajectories, and shapes and dtypes under every transformation.
HEAVY = ["schedule", "replace", "donation", "around", "sharded_sweep", "masks", "leaks"]
HEAVY += ["checkpoint"]
LIGHT = [title for title in CHECKS if title not in HEAVY]


@pytest.mark.parametrize("title", CHECKS)
@pytest.mark.parametrize(
    "name", [FAST[0], pytest.param(FAST[1], marks=pytest.mark.once)]
)
def test_transform(name, title):
    if both := CHECKS[title](case(name)):
        found, expected = both
        close(case(name), jit(found)(), jit(expected)())


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in ALL if name not in FAST])
def test_every_optimizer(name, monkeypatch):
    monkeypatch.setitem(globals(), "FEW", 2)  # steps; a third has the same types
    for title in LIGHT:
        with contextlib.suppress(pytest.skip.Exception):
            if both := CHECKS[title](case(name)):
                assert_same_avals(*map(jax.eval_shape, both))
    jax.clear_caches()


def test_no_optimizer_is_missing():
    assert {*"adabelief adam lars lbfgs radam cocob muon prodigy sophia".split()} < {
        *ALL
    }
    assert len(ALL) >= 29 + 22 + 5
    assert {"cosine_decay_schedule", "chain", "clip", "MultiSteps"} <= set(dir(optim))


def test_checks_can_fail(monkeypatch):
    """With an optimizer that computes another thing than that of optax."""
    faster = case("adam")._replace(pytree=lambda rate: optim.adam(rate * 1.001))
    with pytest.raises(AssertionError):
        trajectory(faster)
    update = optim.Optimizer.update

    def cut(self, grads, params=None, **extra):
        updates, tx = update(self, grads, params, **extra)
        return jax.lax.stop_gradient(updates), tx

    monkeypatch.setattr(optim.Optimizer, "update", cut)
    found, expected = grad(case("adam"))
    with pytest.raises(AssertionError):
        close(case("adam"), jit(found)(), jit(expected)())
