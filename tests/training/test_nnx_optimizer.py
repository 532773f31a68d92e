"""`AmpOptimizer`: what it holds, and what a step leaves in it and in the model."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx

from _models import changed
from _steps import arrays, counting, linear_objects, sum_loss
from flax_amp import (
    AmpOptimizer,
    init_scaler,
    make_eval_step,
    make_nnx_train_step,
    optim,
)
from helpers import assert_identical

X = jnp.ones((2, 3))
BAD = X * jnp.nan


def test_it_is_an_nnx_optimizer_with_the_scaler_and_the_counts():
    model, optimizer = linear_objects(tx=optax.adam(0.1), precision="fp16")
    assert isinstance(optimizer, nnx.Optimizer)
    assert (optimizer.precision, optimizer.wrt) == ("16-mixed", nnx.Param)
    scaler = {key: x[...] for key, x in optimizer.scaler.items()}
    assert_identical(scaler, init_scaler())
    state = nnx.to_pure_dict(nnx.state((model, optimizer)))
    leaves = jax.tree_util.tree_leaves_with_path(state[1])
    paths = {jax.tree_util.keystr(p, simple=True, separator="/") for p, _ in leaves}
    assert {f"scaler/{key}" for key in init_scaler()} < paths
    assert {"opt_state/notfinite_count", "opt_state/total_notfinite"} < paths
    assert all(isinstance(x, jax.Array) and not x.aval.weak_type for _, x in leaves)
    # Of the optimizer inside, as without the wrapper.
    assert optimizer.opt_state[3][0].mu is optimizer.opt_state.inner_state[0].mu


@pytest.mark.parametrize("way", ["metrics_fn", "names", "loss", "shape"])
@pytest.mark.parametrize("jit", [True, False])
def test_an_error_leaves_the_objects_as_they_were(way, jit):
    """Also one after the update, in eager mode, of a batch with a NaN."""

    def fails(*_):
        raise ZeroDivisionError

    def loss_fn(model, batch):
        model.seen[...] += 1
        return (
            model(batch)
            if way == "shape"
            else fails()
            if way == "loss"
            else (model(batch).sum())
        )

    metrics_fn = {"metrics_fn": fails, "names": lambda *_: {"loss": 1.0}}.get(way)
    model, optimizer = linear_objects(tx=optax.adam(0.1))
    model.seen = nnx.Variable(jnp.int32(0))
    before = arrays(model, optimizer)
    step = make_nnx_train_step(loss_fn, metrics_fn=metrics_fn, jit=jit)
    for batch in (X, BAD):
        with pytest.raises((ZeroDivisionError, ValueError, TypeError)):
            step(model, optimizer, batch)
        assert not changed(before, arrays(model, optimizer))


@pytest.mark.parametrize("make", [AmpOptimizer, nnx.Optimizer])
@pytest.mark.parametrize("name", ["mechanize", "prodigy", "dog", "schedule_free_sgd"])
def test_one_step_for_many_pairs(name, make):
    """The first states of these hold the parameters themselves."""
    contrib = optax.contrib
    tx = {
        "mechanize": lambda: contrib.mechanize(optax.sgd(0.1)),
        "prodigy": lambda: contrib.prodigy(1.0),
        "dog": lambda: contrib.dog(1.0),
        "schedule_free_sgd": lambda: contrib.schedule_free_sgd(0.1),
    }[name]()
    step = make_nnx_train_step(sum_loss)
    kernels = []
    for _ in range(2):
        model, _ = linear_objects()
        optimizer = make(model, tx, wrt=nnx.Param)
        for _ in range(2):
            step(model, optimizer, X)
        kernels.append(np.asarray(model.kernel[...]))
    assert (kernels[0] == kernels[1]).all()


class Counting(nnx.Module):
    """Its variables are a Python number and two weakly typed arrays."""

    def __init__(self):
        self.linear = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
        self.number = nnx.Variable(0.0)
        self.array = nnx.Variable(jnp.asarray(1.0))
        self.strong = nnx.Variable(jnp.asarray(1.0))
        self.scale = nnx.Param(jnp.asarray(1.0))

    def __call__(self, x):
        self.number[...] = self.number[...] + 1
        self.array[...] = self.array[...] * 2
        self.strong[...] = self.strong[...] + x.sum()  # which is strongly typed
        return self.linear(x) * self.scale


def test_weakly_typed_variables_are_traced_once():
    counted, traces = counting(sum_loss)
    model = Counting()
    optimizer = AmpOptimizer(model, optax.adam(0.1))
    step = make_nnx_train_step(counted)
    for x in (X, X, BAD, X):
        step(model, optimizer, x)
    assert len(traces) == 1
    assert (float(model.number[...]), float(model.array[...])) == (3, 8)


# Beside a run


def test_plain_orbax_saves_all_there_is(tmp_path):
    """A run that is restored goes on bit for bit."""

    def make():
        model, _ = linear_objects()
        scaler = init_scaler(patience=1)
        tx = optax.adam(0.1)
        return model, AmpOptimizer(model, tx, precision="fp16", scaler=scaler)

    step = make_nnx_train_step(lambda m, x: (m(x) ** 2).mean())
    model, optimizer = make()
    for x in (X, BAD, X):
        step(model, optimizer, x)
    checkpointer = ocp.StandardCheckpointer()
    checkpointer.save(tmp_path / "run", nnx.state((model, optimizer)))
    checkpointer.wait_until_finished()
    objects = make()
    restored = checkpointer.restore(tmp_path / "run", nnx.state(objects))
    nnx.update(objects, restored)
    for x in (X, BAD, X):
        step(model, optimizer, x)
        step(*objects, x)
    assert not changed(arrays(model, optimizer), arrays(*objects))
    assert int(optimizer.opt_state.total_notfinite[...]) == 2


def test_evaluation():
    """In evaluation mode, in the precision asked for, and nothing changes."""

    class Net(nnx.Module):
        def __init__(self):
            self.norm = nnx.BatchNorm(3, rngs=nnx.Rngs(0))
            self.linear = nnx.Linear(3, 1, rngs=nnx.Rngs(0))

        def __call__(self, x):
            return self.linear(self.norm(x))

    model = Net()
    before = arrays(model)
    for jit in (True, False):
        evaluate = make_eval_step(lambda m, x: m(x), precision="32-true", jit=jit)
        out = evaluate(model, X * 5)
        assert not changed(before, arrays(model))
        np.testing.assert_allclose(
            out, nnx.view(model, use_running_average=True)(X * 5)
        )


@pytest.mark.parametrize(
    "tx", [optim.adam(0.1), optax.inject_hyperparams(optax.adam)(0.1)]
)
def test_hyperparams(tx):
    model, _ = linear_objects()
    optimizer = AmpOptimizer(model, tx)
    step = make_nnx_train_step(sum_loss)
    metrics = step(model, optimizer, X)
    rate = metrics["hyperparams/learning_rate"]
    assert rate == optimizer.hyperparams["learning_rate"] == np.float32(0.1)
    if isinstance(tx, optim.Optimizer):
        optimizer.replace_hyperparams(learning_rate=0.5)
    else:  # optax's own way, through the wrapper
        optimizer.opt_state.hyperparams["learning_rate"][...] = jnp.float32(0.5)
    assert step(model, optimizer, X)["hyperparams/learning_rate"] == 0.5
