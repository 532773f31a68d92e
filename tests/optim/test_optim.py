"""Pytree optimizers in steps and on disk, over __init__.py, _call.py, _optimizer.py."""

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
from flax import nnx, serialization

import flax_amp
from _gradients import GRADS, PARAMS
from _steps import linear_batch, linear_loss, linear_state
from flax_amp import AmpTrainState, make_train_step, optim
from helpers import assert_identical


def names_of(tx):
    return [jax.tree_util.keystr(p) for p, _ in jax.tree_util.tree_leaves_with_path(tx)]


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


def test_replacing_a_number_by_a_number_compiles_nothing(count_traces):
    step, traces = count_traces(lambda tx, grads: tx.update(grads, PARAMS))
    step, tx = jax.jit(step), optim.adamw(0.1, b1=jnp.float32(0.9)).init(PARAMS)
    for rate in [0.5, np.float64(0.25), jnp.bfloat16(0.5), 1, np.float16(0.5)]:
        tx = tx.replace(learning_rate=rate, b1=rate)
        assert tx.learning_rate == tx.b1 == rate
        _, tx = step(tx, GRADS)
    assert traces() == 1 and step._cache_size() == 1
    _, tx = step(tx.replace(b2=0.5), GRADS)  # static, as in optax
    assert traces() == 2 and tx.hyperparams["b2"] == 0.5
    runs = jax.vmap(lambda rate: optim.sgd(rate).init(PARAMS))(jnp.ones(3))
    assert runs.replace(learning_rate=0.5).learning_rate.shape == (3,)
    runs = runs.replace(learning_rate=jnp.arange(3.0))
    updates, runs = jax.vmap(lambda tx: tx.update(GRADS))(runs)
    np.testing.assert_allclose(updates["b"][:, 0], 0.2 * jnp.arange(3.0), rtol=1e-6)
    assert runs.hyperparams["learning_rate"].shape == (3,)


TRACES = {
    "jit": lambda f, tx, rates: jax.jit(f)(tx, rates[0]),
    "closed over": lambda f, tx, rates: jax.jit(lambda x: f(tx, x))(rates[0]),
    "a constant": lambda f, tx, rates: jax.jit(lambda tx: f(tx, 0.5))(tx),
    "vmap": lambda f, tx, rates: jax.vmap(f, (None, 0))(tx, rates)[0],
    "scan": lambda f, tx, xs: jax.lax.scan(lambda c, x: (c, f(c, x)), tx, xs)[1][0],
}


@pytest.mark.parametrize("trace", TRACES)
def test_replacing_under_a_trace(trace):
    """In an optimizer, and in a state whose arrays are committed to a device."""
    state = AmpTrainState.create(params=PARAMS, tx=optim.adamw(0.1))

    def of_optimizer(tx, x):
        return tx.replace(learning_rate=x).hyperparams["learning_rate"]

    def of_state(state, x):
        return state.replace_hyperparams(learning_rate=x).hyperparams["learning_rate"]

    for rate, held in (
        (of_optimizer, optim.adamw(0.1).init(PARAMS)),
        (of_state, jax.device_put(state, jax.devices()[0])),
    ):
        assert TRACES[trace](rate, held, jnp.array([0.5, 0.25])) == 0.5


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


def test_functions_that_are_no_schedules():
    """A schedule is known by its type or its name, and not called."""

    def shaped(learning_rate, activation, decay, **more):
        assert activation is jnp.tanh and callable(decay) and more == {"peak": 2.0}
        return optax.adamw(learning_rate, weight_decay=0.1)

    fall = optim.linear_schedule(1.0, 0.0, 10)
    tx = optim.sgd(fall, momentum=0.5, accumulator_dtype=jnp.float32)
    assert set(tx.hyperparams) == {"learning_rate", "momentum"}
    tx = optim.wrap(shaped)(0.1, jnp.tanh, fall, peak=2.0)
    assert set(tx.hyperparams) == {"learning_rate", "decay", "peak"}
    adam = optim.wrap(lambda **kwargs: optax.adam(**kwargs))  # arguments like others
    tx = adam(learning_rate=0.1, b1=0.8)
    assert names_of(tx) == [".learning_rate"] and tx.b1 == 0.8
    assert tx.replace(b1=0.5).hyperparams["b1"] == 0.5


def test_hyperparams_inside():
    rates = {
        "a": optim.adamw(optim.linear_schedule(1.0, 0.0, 10)),
        "b": optim.sgd(0.01),
    }
    of = optim.partition(rates, {"w": "a", "b": "b"})
    tx, path = optim.chain(optim.clip_by_global_norm(1.0), of), "args/1/transforms"
    tx = tx.init(PARAMS)
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
    for name in ("init_value", "learning_rate/init_value"):
        new = tx.replace(**{name: 0.8})
        assert new.hyperparams["learning_rate"] == np.float32(0.8)
    np.testing.assert_allclose(new.update(GRADS)[0]["b"], 0.16, rtol=1e-6)
    joined = optim.join_schedules([swept, optim.constant_schedule(1.0)], [3])
    assert joined.replace(init_value=0.4)(0) == np.float32(0.4)


# In steps


def test_in_make_train_step(count_traces):
    schedule = optax.warmup_cosine_decay_schedule(0.0, 0.1, 3, 20)
    counted, traces = count_traces(linear_loss)
    step, plain_step = make_train_step(counted), make_train_step(linear_loss)
    plain, state = (linear_state(of.adamw(schedule)) for of in (optax, optim))
    for i in range(5):
        state, metrics = step(state, linear_batch())
        plain, _ = plain_step(plain, linear_batch())
        rate = metrics["hyperparams/learning_rate"]
        assert rate == jnp.float32(schedule(i)) == state.hyperparams["learning_rate"]
        assert all(jnp.shape(value) == () for value in metrics.values())
    np.testing.assert_allclose(state.params["w"], plain.params["w"], rtol=1e-6)
    first, state = traces(), linear_state(optim.adamw(0.1))
    for rate in (0.1, 0.5):
        state = state.replace_hyperparams(learning_rate=rate)
        state, later = step(state, linear_batch())
        assert traces() == first + 1
        assert later["hyperparams/learning_rate"] == np.float32(rate)
    before = jax.tree.map(jnp.copy, (state.params, state.opt_state.inner_state))
    skipped, metrics = step(state, linear_batch(poisoned=True))
    assert not metrics["grads_finite"] and metrics["skipped_total"] == 1
    assert_identical((skipped.params, skipped.opt_state.inner_state), before)


def test_state_with_several_optimizers():
    tx = optax.chain(*(optim.sgd(x).to_optax(in_state=True) for x in (1.0, 0.1)))
    state = AmpTrainState.create(params=PARAMS, tx=tx)
    state = state.replace_hyperparams(**{"1/learning_rate": 0.2})
    assert state.hyperparams["1/learning_rate"] == np.float32(0.2)
    changed = state.apply_gradients(grads=GRADS)
    np.testing.assert_allclose(changed.params["b"], 1 - 0.04, rtol=1e-6)
    with pytest.raises(TypeError, match="got learning_rate; .*0/learning_rate"):
        state.replace_hyperparams(learning_rate=0.1)
    with pytest.raises(
        TypeError, match="Expected hyper-parameters of .* of flax_amp.optim"
    ):
        linear_state(optax.adam(0.1)).replace_hyperparams(learning_rate=0.1)


def test_nnx_optimizer():
    X = jnp.sin(jnp.arange(24.0)).reshape(8, 3)
    model, plain = (nnx.Linear(3, 2, rngs=nnx.Rngs(0)) for _ in range(2))
    tx = optim.adam(0.1).to_optax(in_state=True)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    reference = nnx.Optimizer(plain, optax.adam(0.1), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, x):
        grads = nnx.grad(lambda model: jnp.mean(model(x) ** 2))(model)
        optimizer.update(model, grads)

    for _ in range(2):
        step(model, optimizer, X)
        step(plain, reference, X)
    assert_identical(model.kernel[...], plain.kernel[...])
    for name, value in (("learning_rate", 0.5), ("b1", 0.5)):  # the second is static
        optimizer.opt_state = optimizer.opt_state.replace(**{name: value})
        step(model, optimizer, X)
        assert optimizer.opt_state.hyperparams[name] == value
    with pytest.raises(ValueError, match="argument 2 is longer"):  # one more array
        optimizer.opt_state.replace(b2=jnp.float32(0.5))
    train = flax_amp.make_nnx_train_step(lambda model, x: jnp.mean(model(x) ** 2))
    metrics = train(model, optimizer, X)
    assert metrics["hyperparams/learning_rate"] == 0.5


# Errors


def branching(learning_rate, cut):
    return optax.sgd(learning_rate if cut > 0.1 else 0.0)


def jitted(tx):
    return jax.jit(lambda tx: tx.update(GRADS, PARAMS))(tx)


STATE = optim.adam(0.1).init
MESSAGES = [
    (lambda: optim.adam(0.1, beta=1), TypeError, "unexpected keyword argument 'beta'"),
    (lambda: optim.adam(0.1).update(GRADS), RuntimeError, r"tx = tx.init\(params"),
    (lambda: optim.adam(0.1).replace(lr=1), TypeError, "0 arguments are lr; .*b1"),
    (lambda: optim.adam(0.1).lr, AttributeError, "Optimizer has no 'lr'"),
    (lambda: setattr(optim.sgd(1), "a", 1), AttributeError, "sgd is frozen; expec"),
    (lambda: optim.nothing, AttributeError, "no 'nothing'.*optim.wrap"),
    (lambda: optim.inject_hyperparams, AttributeError, "no 'inject_hyperparams'"),
    (lambda: optim.chain(optim.adam), AttributeError, "no attribute 'init'"),
    (
        lambda: jitted(optim.wrap(branching)(0.1, jnp.ones(())).init(PARAMS)),
        jax.errors.TracerBoolConversionError,
        "boolean conversion of traced array",
    ),
    (
        lambda: serialization.from_state_dict(STATE(PARAMS), {"rate": 1}),
        ValueError,
        "do not match",
    ),
]


@pytest.mark.parametrize("call, kind, message", MESSAGES)
def test_messages(call, kind, message):
    with pytest.raises(kind, match=message):
        call()


# Classes, copies and checkpoints


def test_a_factory_is_freed():
    def factory(learning_rate):
        return optax.sgd(learning_rate)

    optim.wrap(factory)(0.1).init(PARAMS).update(GRADS)
    freed = weakref.ref(factory)
    del factory
    gc.collect()
    assert freed() is None


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
    clipped = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(rate))
    for tx in (clipped, optim.nadamw(0.1)):
        tx = tx.init(PARAMS)
        assert_identical(pickle.loads(pickle.dumps(tx)), tx)


def test_type_checkers_know_the_names():
    """Those of `_names.py`; another optax may have more, or fewer."""
    listed = ast.parse(Path(optim.__file__).with_name("_names.py").read_text())
    names = {
        kind.value.id: {name.id for name in kind.targets[0].elts}
        for kind in ast.walk(listed)
        if isinstance(kind, ast.Assign) and isinstance(kind.value, ast.Name)
    }
    own = {"Optimizer", "Schedule", "schedule", "skip_spikes", "small_state", "wrap"}
    made = {name: optim._find(name)[1] for name in {*dir(optim)} - own}
    if version("optax") == "0.2.8":
        for kind, of in (("_optimizers", "Optimizer"), ("_schedules", "Schedule")):
            assert names[kind] == {n for n, x in made.items() if x.__name__ == of}
