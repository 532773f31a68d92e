"""Pytree optimizers: their interface, and what they are inside of each other."""

import ast
import gc
import pickle
import subprocess
import sys
import weakref
from importlib.metadata import version
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import serialization

from _gradients import GRADS, PARAMS
from flax_amp import AmpTrainState, optim
from helpers import assert_identical


def in_optax(tx, params=PARAMS):
    return tx.update(GRADS, tx.init(params), params)[0]


def names_of(tx):
    return [jax.tree_util.keystr(p) for p, _ in jax.tree_util.tree_leaves_with_path(tx)]


# The thread that asked for it


def test_the_example_of_the_thread_runs_as_written():
    """Apart from its typos, and with the class made for it."""
    SGD, params, grads = optim.sgd, PARAMS, GRADS

    tx = SGD(3e-4)
    tx = tx.init(params)
    updates, tx = tx.update(grads)
    params = optax.apply_updates(params, updates)

    expected = in_optax(optax.sgd(3e-4))
    assert_identical(params, optax.apply_updates(PARAMS, expected))


# The rule


def test_a_leaf_is_an_array():
    tx = optim.adamw(0.1, b1=jnp.float32(0.8), b2=np.full((), 0.9))
    assert names_of(tx) == [".learning_rate", ".b1", ".b2"]
    assert tx.weight_decay == 1e-4 and type(tx.eps) is float
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(tx))
    assert not any(jax.tree.leaves(optim.linear_schedule(0.1, 0.0, 10)))
    inside = optim.chain(optim.clip(1.0), optim.prodigy(betas=(0.9, jnp.ones(()))))
    assert names_of(inside) == [".args[1].learning_rate", ".args[1].betas[1]"]
    for rate in (1, np.int64(1), jnp.int32(1), 0.5):
        assert optim.sgd(rate).learning_rate.dtype == jnp.float32


def test_static_arguments_are_structure():
    structures = {
        jax.tree.structure(optim.adam(0.1, **more))
        for more in ({}, {"b1": 0.8}, {"b1": jnp.ones(())}, {"nesterov": True})
    }
    assert len(structures) == 4
    assert jax.tree.structure(optim.adam(0.3)) in structures
    one, other = (optim.adam(0.1, b1=b1) for b1 in (0, 0.0))
    assert one._static != other._static
    masks = [optim.adamw(0.1, mask={"w": True, "b": False}) for _ in range(2)]
    assert len({*map(jax.tree.structure, masks)}) == 1
    with pytest.raises(TypeError, match="'nesterov': False"):
        jax.lax.cond(
            True, lambda: optim.adam(0.1), lambda: optim.adam(0.1, nesterov=True)
        )


def test_replacing_a_number_by_a_number_compiles_nothing(count_traces):
    step, traces = count_traces(lambda tx, grads: tx.update(grads, PARAMS))
    step, tx = jax.jit(step), optim.adamw(0.1, b1=jnp.float32(0.9)).init(PARAMS)
    changes = [0.5, np.float64(0.25), jnp.bfloat16(0.5), 1, np.float16(0.5)]
    for rate in changes:
        tx = tx.replace(learning_rate=rate, b1=rate)
        assert tx.learning_rate == tx.b1 == rate
        _, tx = step(tx, GRADS)
    assert traces() == 1 and step._cache_size() == 1
    _, tx = step(tx.replace(b2=0.5), GRADS)  # static, as in optax
    assert traces() == 2 and tx.hyperparams["b2"] == 0.5
    clip = optim.adaptive_grad_clip(0.1, eps=jnp.uint8(1))
    assert clip.replace(eps=2).eps.dtype == jnp.uint8
    assert clip.replace(eps=0.5).eps.dtype == jnp.float32
    runs = jax.vmap(lambda rate: optim.sgd(rate).init(PARAMS))(jnp.ones(3))
    assert runs.replace(learning_rate=0.5).learning_rate.shape == (3,)
    runs = runs.replace(learning_rate=jnp.arange(3.0))
    updates, runs = jax.vmap(lambda tx: tx.update(GRADS))(runs)
    np.testing.assert_allclose(updates["b"][:, 0], 0.2 * jnp.arange(3.0), rtol=1e-6)
    assert runs.hyperparams["learning_rate"].shape == (3,)


def test_arrays_of_the_user_stay_his_own():
    rate, key = jnp.float32(0.1), jax.random.key(1)
    noisy = optim.add_noise(rate, 0.5, jax.random.key(0)).init(PARAMS).replace(key=key)
    jax.jit(lambda tx: tx.update(GRADS)[1], donate_argnums=0)(noisy)
    assert not key.is_deleted() and not rate.is_deleted()
    written = np.array(0.1, np.float32)
    tx = optim.sgd(written)
    written[...] = 7
    assert tx.learning_rate == np.float32(0.1)


# Hyper-parameters


def composed():
    rates = {
        "a": optim.adamw(optim.linear_schedule(1.0, 0.0, 10)),
        "b": optim.sgd(0.01),
    }
    labels = {"w": "a", "b": "b"}
    return optim.chain(optim.clip_by_global_norm(1.0), optim.partition(rates, labels))


def shaped(learning_rate, activation, decay: optax.ScalarOrSchedule = 0.0, **more):
    assert activation is jnp.tanh and callable(decay) and more == {"peak": 2.0}
    return optax.adamw(learning_rate, weight_decay=0.1)


def test_functions_that_are_no_schedules():
    """A schedule is known by its type, its name or its annotation, and not called."""
    fall = optax.linear_schedule(1.0, 0.0, 10)
    tx = optim.sgd(fall, momentum=0.5, accumulator_dtype=jnp.float32)
    assert set(tx.hyperparams) == {"learning_rate", "momentum"}
    tx = optim.wrap(shaped)(0.1, jnp.tanh, fall, peak=2.0)
    assert set(tx.hyperparams) == {"learning_rate", "decay", "peak"}


def test_keyword_arguments_of_a_factory():
    """`**kwargs` are arguments like the others."""
    adam = optim.wrap(lambda **kwargs: optax.adam(**kwargs))
    tx = adam(learning_rate=0.1, b1=0.8)
    assert names_of(tx) == [".learning_rate"] and tx.b1 == 0.8
    assert tx.replace(b1=0.5).hyperparams["b1"] == 0.5
    with pytest.raises(
        TypeError, match="arguments opt_state have the names .* Optimizer;"
    ):
        adam(opt_state=3)


def test_a_factory_is_freed():
    def factory(learning_rate):
        return optax.sgd(learning_rate)

    optim.wrap(factory)(0.1).init(PARAMS).update(GRADS)
    freed = weakref.ref(factory)
    del factory
    gc.collect()
    assert freed() is None


def test_hyperparams_inside():
    tx, path = composed().init(PARAMS), "args/1/transforms"
    assert {"max_norm", "b1", f"{path}/a/learning_rate"} <= {*tx.hyperparams}
    changed = tx.replace(**{"max_norm": 2.0, f"{path}/b/learning_rate": 0.5})
    assert changed.hyperparams[f"{path}/b/learning_rate"] == 0.5
    assert tx.replace(**{"a/b1": 0.5}).hyperparams["b1"] == 0.5  # the end of a path
    assert changed.args[0].max_norm == 2.0
    with pytest.raises(TypeError, match=f"2 arguments are learning_rate; .*{path}/a"):
        tx.replace(learning_rate=0.3)
    for i in range(3):
        _, tx = tx.update(GRADS, PARAMS)
        rate = tx.hyperparams[f"{path}/a/learning_rate"]
        np.testing.assert_allclose(rate, 1 - i / 10, rtol=1e-6)


def test_schedules():
    fall = optax.linear_schedule(1.0, 0.0, 10)
    halves = optax.MultiSteps(optax.sgd(fall), 2).gradient_transformation()
    tx = optim.partition({"a": halves, "b": optim.sgd(fall)}, {"w": "a", "b": "b"})
    _, tx = tx.init(PARAMS).update(GRADS, PARAMS)
    assert tx.hyperparams == {}  # counts that may differ
    assert optim.sgd(fall).hyperparams["learning_rate"] == 1.0  # of the first step
    swept = optim.linear_schedule(jnp.float32(0.2), 0.0, 10)
    assert swept(5).dtype == jnp.float32 and swept.replace(init_value=1)(5) == 0.5
    assert jax.grad(lambda s: s(5))(swept).init_value == 0.5
    tx = optim.sgd(swept).init(PARAMS)
    tx = tx.replace(learning_rate=tx.learning_rate.replace(init_value=0.4))
    np.testing.assert_allclose(tx.update(GRADS)[0]["b"], 0.08, rtol=1e-6)
    for name in ("init_value", "learning_rate/init_value"):
        assert tx.replace(**{name: 0.8}).hyperparams["learning_rate"] == np.float32(0.8)
    joined = optim.join_schedules([swept, optim.constant_schedule(1.0)], [3])
    assert joined.replace(init_value=0.4)(0) == np.float32(0.4)


# In optax


def test_to_optax_is_plain_optax():
    tx = optim.adam(0.1)
    assert_identical(tx.to_optax().init(PARAMS), optax.adam(0.1).init(PARAMS))
    fall = optax.linear_schedule(1.0, 0.0, 4)
    make = optax.inject_hyperparams(lambda rate: optim.sgd(rate).to_optax())(fall)
    state = make.init(PARAMS)
    for i in range(3):  # without jit
        updates, state = make.update(GRADS, state, PARAMS)
        np.testing.assert_allclose(updates["b"], 0.2 * (1 - i / 4), rtol=1e-6)


def test_in_state():
    tx = optax.chain(optax.clip(0.1), optim.sgd(0.1).to_optax(in_state=True))
    state = AmpTrainState.create(params=PARAMS, tx=tx)
    state = state.replace_hyperparams(learning_rate=0.5)
    changed = state.apply_gradients(grads=GRADS)
    np.testing.assert_allclose(changed.params["b"], 1 + 0.05, rtol=1e-6)


# Errors


def branching(learning_rate, cut):
    return optax.sgd(learning_rate if cut > 0.1 else 0.0)


def branching_on_the_rate(learning_rate):
    return optax.sgd(learning_rate if learning_rate > 0 else 0.0)


def jitted(tx):
    return jax.jit(lambda tx: tx.update(GRADS, PARAMS))(tx)


STATE = optim.adam(0.1).init
NEEDS = "optax needs a Python number.*Arrays are: "


TOO_MANY = "takes from 2 to 3 positional arguments"


@pytest.mark.parametrize(
    "call, kind, message",
    [
        (lambda: optim.adam(), TypeError, "adam: missing .*learning_rate.*expected"),
        (lambda: optim.adam(0.1, beta=1), TypeError, "adam: .*beta'; expected learn"),
        (lambda: optim.adam(True), TypeError, "learning_rate is True; expected a num"),
        (lambda: optim.adam("0.1"), TypeError, "learning_rate is '0.1'; expected"),
        (lambda: optim.adam(0.1).update(GRADS), RuntimeError, r"tx = tx.init\(params"),
        (lambda: optim.adam(0.1).replace(lr=1), TypeError, "0 arguments are lr; .*b1"),
        (lambda: optim.adam(0.1).lr, AttributeError, "Optimizer has no 'lr'"),
        (lambda: setattr(optim.sgd(1), "a", 1), AttributeError, "sgd is frozen; expec"),
        (lambda: optim.nothing, AttributeError, "no 'nothing'.*optim.wrap"),
        (lambda: optim.inject_hyperparams, AttributeError, "no 'inject_hyperparams'"),
        (lambda: optim.wrap(3)(1), TypeError, "3 is not a callable"),
        (lambda: optim.wrap(lambda init: 0)(1), TypeError, "arguments init have the n"),
        (lambda: optim.wrap(lambda a: 0)(1), AttributeError, "no attribute 'init'"),
        (lambda: optim.chain(optim.adam), AttributeError, "no attribute 'init'"),
        (lambda: optim.adam(0.1)[0], TypeError, "'Optimizer' object is not subscript"),
        (lambda: [*optim.adam(0.1)], TypeError, "must be an iterable, not Opt"),
        (lambda: STATE(PARAMS).update(GRADS, 1, 2), TypeError, TOO_MANY),
        (lambda: optim.chain(STATE(PARAMS)), ValueError, "adam, an argument, has a st"),
        (
            lambda: STATE(PARAMS).update(GRADS, STATE(PARAMS).opt_state),
            TypeError,
            r"got grads and a state.*tx.to_optax\(\)",
        ),
        (
            lambda: jax.eval_shape(STATE, PARAMS).hyperparams,
            TypeError,
            "holds shapes without values",
        ),
        (
            lambda: jax.jit(lambda m: optim.lbfgs(0.1, m))(3),
            TypeError,
            f"{NEEDS}learning_rate, memory_size",
        ),
        (
            lambda: jitted(optim.wrap(branching)(0.1, jnp.ones(())).init(PARAMS)),
            TypeError,
            f"branching: {NEEDS}learning_rate, cut",
        ),
        (
            lambda: jitted(optim.wrap(branching_on_the_rate)(0.1).init(PARAMS)),
            TypeError,
            f"{NEEDS}learning_rate.*another name for it",
        ),
        (
            lambda: serialization.from_state_dict(STATE(PARAMS), {"rate": 1}),
            ValueError,
            "do not match",
        ),
    ],
)
def test_messages(call, kind, message):
    with pytest.raises(kind, match=message):
        call()


@pytest.mark.parametrize(
    "change",
    [
        dict(mu_dtype="f"),
        dict(learning_rate=jnp.ones(3)),
        dict(b1=optax.linear_schedule(0.1, 0.2, 3)),
        dict(opt_state=3),
    ],
)
def test_a_state_that_may_not_fit(change):
    (name,) = change
    with pytest.raises(ValueError, match=f"may not fit another {name}; .*a new state"):
        STATE(PARAMS).replace(**change)
    runs = jax.vmap(lambda x: optim.sgd(x).init(PARAMS))(jnp.ones(3))
    with pytest.raises(ValueError, match="may not fit another learning_rate"):
        runs.replace(learning_rate=jnp.ones(1))


# Classes, copies and state dicts


@pytest.mark.once
def test_making_one_starts_no_backend():
    """So that `jax.distributed.initialize` can come after it."""
    code = """
from flax_amp import optim
tx = optim.chain(optim.clip(1.0), optim.adamw(optim.cosine_decay_schedule(0.1, 9)))
print(optim.sgd(0.1).replace(learning_rate=0.5), tx.replace(b1=0.5))
from jax._src import xla_bridge
assert not xla_bridge._backends
"""
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_pickles():
    """As far as pickle can find the functions."""
    rate = optim.linear_schedule(1.0, 0.0, 9)
    for tx in (
        optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(rate)),
        optim.nadamw(0.1),
    ):
        tx = tx.init(PARAMS)
        assert_identical(pickle.loads(pickle.dumps(tx)), tx)


def test_type_checkers_know_the_names():
    """Those of `_names.py`; another optax may have more, or fewer."""
    listed = ast.parse(Path(optim.__file__).with_name("_names.py").read_text())
    names = {
        kind.value.func.id: {name.id for name in kind.targets[0].elts}
        for kind in ast.walk(listed)
        if isinstance(kind, ast.Assign)
    }
    own = {"Optimizer", "Schedule", "schedule", "small_state", "wrap"}
    made = {name: optim._kind_of(name) for name in {*dir(optim)} - own}
    if version("optax") == "0.2.8":
        for kind, of in (("_optimizers", "Optimizer"), ("_schedules", "Schedule")):
            assert names[kind] == {n for n, x in made.items() if x.__name__ == of}


def test_state_dict_is_a_dict_of_arrays():
    tx = optim.adam(0.1).init(PARAMS)
    state = serialization.to_state_dict(tx)
    assert {*state} == {"learning_rate", "opt_state"}
    plain = optax.adam(0.1).init(PARAMS)
    assert_identical(tx.opt_state, plain)
    assert_identical(state["opt_state"], serialization.to_state_dict(plain))
    other = optim.adam(0.7).init(PARAMS)
    assert_identical(serialization.from_state_dict(other, state), tx)
