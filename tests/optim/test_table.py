"""Every optimizer of optax as a pytree, over __init__.py, _call.py and _optimizer.py.

A check raises an `AssertionError` where the pytree optimizer and plain optax part, or
skips what plain optax cannot do either. It may return two functions, whose results have
to be equal.
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

from _optimizer_cases import (
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


def needs_a_rate(case):
    if not case.rate:
        pytest.skip("has no learning rate")


def final(way, case):
    """Parameters after a few steps, as a function of the learning rate."""

    def train(rate):
        params, training = params_of(), way(case, rate)
        state = training.init(params)
        for _ in range(FEW):
            params, state = training.step(params, state)
        return params

    return train


def trajectory(case):
    """20 steps against plain optax; the state has the structure that optax gives it."""
    expected, state = run(in_optax(case, RATE), 20)
    params, tx = run(ours(case, RATE), 20)
    assert_same_avals(tx.opt_state, state)
    assert distance(params, expected) <= ROUNDED.get(case.name, 0)


def static_trajectory(case):
    """Bit for bit, where nothing is an array: the rate has another name."""
    tx = optim.wrap(lambda rate: case.plain(rate))(RATE)
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
    tx, step = training.init(params), jit(training.step)
    for _ in range(FEW):
        params, tx = step(params, tx)
    jax.effects_barrier()
    last = seen[-1]
    rates = [v for n, v in tx.hyperparams.items() if n.endswith("learning_rate")]
    assert any(rate == np.float32(last) for rate in rates), (rates, seen)


def replace(case):
    """Another learning rate, without compiling again; the old state may be donated."""
    needs_a_rate(case)
    training = ours(case, RATE)
    step, params = jit(training.step, donate_argnums=1), params_of()
    params, tx = step(params, training.init(params))
    rates = [n for n in tx.hyperparams if n.endswith("learning_rate")]
    rates = ["learning_rate"] if "learning_rate" in rates else rates
    other = tx.replace(**dict.fromkeys(rates, RATE / 3))
    expected, _ = jit(in_optax(case, RATE / 3).step)(params, other.opt_state)
    found, _ = step(params, other)
    assert step._cache_size() == 1
    assert any(leaf.is_deleted() for leaf in jax.tree.leaves(other))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(params))
    close(case, found, expected)


def vmap(case):
    """Two learning rates in one step, on two devices, each equal to its own run."""
    needs_a_rate(case)
    mesh = jax.make_mesh((2,), ("run",), axis_types=(jax.sharding.AxisType.Auto,))
    rates = np.float32([0.5, 2]) * np.float32(RATE)
    placed = jax.device_put(rates, jax.NamedSharding(mesh, P("run")))
    sweep = jax.vmap(final(ours, case))
    stack = lambda *rows: jnp.stack(rows)  # noqa: E731
    return (
        lambda: sweep(placed),
        lambda: jax.tree.map(stack, *map(final(in_optax, case), rates)),
    )


def grad(case, wrapped=lambda function: function):
    """The derivative by the rate is that of plain optax."""
    needs_a_rate(case)

    def slope(way):
        loss = wrapped(lambda rate: loss_of(final(way, case)(rate)))
        return lambda: jax.grad(loss)(RATE)

    try:
        jax.eval_shape(slope(in_optax))
    except ValueError:
        pytest.skip("plain optax has no derivative")
    return slope(ours), slope(in_optax)


def checkpoint(case):
    """The same, with what was computed again instead of stored."""
    return grad(case, jax.checkpoint)


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
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

    def mapped():
        training = ours(case, RATE)
        state = params_of(), training.init(params_of())
        spec = dict(mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
        for _ in range(FEW):
            state = jax.shard_map(training.step, **spec)(*state)
        return state[0]

    return mapped, lambda: final(in_optax, case)(RATE)


def shapes(case):
    """Of `init` and of a step without values; no tracer stays in an optimizer."""
    training = ours(case, RATE)
    with jax.checking_leaks():
        real = training.init(params_of())
        assert_same_avals(real, jax.eval_shape(training.init, params_of()))
        assert_same_avals(real, jax.eval_shape(training.step, params_of(), real)[1])
    leaves = jax.tree.leaves(real)
    assert not any(getattr(leaf, "weak_type", False) for leaf in leaves)
    assert not any(isinstance(leaf, jax.core.Tracer) for leaf in leaves)


def copies(case):
    """`deepcopy` and state dicts: what comes back is the same optimizer."""
    tx = case.pytree(RATE).init(params_of())
    assert_same_avals(copy.deepcopy(tx), tx)
    if any(jnp.issubdtype(x.dtype, jax.dtypes.prng_key) for x in jax.tree.leaves(tx)):
        pytest.skip("Flax does not write typed keys")
    moved = lambda x: ~x if x.dtype == bool else x + 1  # noqa: E731
    state = case.plain(RATE).init(params_of())
    state, trained = (jax.tree.map(moved, tree) for tree in (state, tx))
    other = serialization.from_bytes(tx, serialization.to_bytes(trained))
    assert_same_avals(other, trained)
    assert distance(other, trained) == 0
    theirs, mine = map(serialization.to_state_dict, (state, trained))
    assert jax.tree.structure(mine["opt_state"]) == jax.tree.structure(theirs)


def around(case):
    """`inject_hyperparams` and `MultiSteps` around `to_optax` see plain optax."""
    needs_a_rate(case)
    fall = optax.linear_schedule(RATE, 0.0, 5)

    def trained(make):
        inject = optax.inject_hyperparams(lambda learning_rate: make(learning_rate))
        plain = lambda _: optax.MultiSteps(inject(learning_rate=fall), 2)  # noqa: E731
        return run(in_optax(case._replace(plain=plain), RATE), 4)[0]

    expected = trained(case.plain)
    close(case, trained(lambda rate: case.pytree(rate).to_optax()), expected)
    assert distance(expected, params_of()) > 0


# Of every optimizer: trajectories, and shapes and dtypes under the transformations.
LIGHT = [trajectory, static_trajectory, vmap, grad, scan, shard_map, shapes, copies]
HEAVY = [schedule, replace, around, checkpoint]


@pytest.mark.parametrize("check", [*LIGHT, *HEAVY])
@pytest.mark.parametrize(
    "name", [FAST[0], pytest.param(FAST[1], marks=pytest.mark.once)]
)
def test_transform(name, check):
    if both := check(case(name)):
        found, expected = both
        close(case(name), jit(found)(), jit(expected)())


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in ALL if name not in FAST])
def test_every_optimizer(name, monkeypatch):
    """The trajectory of each optimizer, and the other checks in turns.

    The transformations see an optimizer as a pytree, whatever the optimizer is.
    """
    monkeypatch.setitem(globals(), "FEW", 2)  # steps; a third has the same types
    first, *others = LIGHT
    number = ALL.index(name)
    for check in (first, others[number % len(others)]):
        with contextlib.suppress(pytest.skip.Exception):
            if both := check(case(name)):
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
