"""Training NNX models: `AmpOptimizer`, its step, and train states."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx

from _models import (
    CLASSES,
    FEATURES,
    NnxNet,
    changed,
    cross_entropy,
    leaves_by_path,
    make_batch,
    nnx_loss,
    optimizer,
)
from _steps import arrays, linear_objects, sum_loss
from flax_amp import (
    AmpOptimizer,
    AmpTrainState,
    init_scaler,
    make_nnx_train_step,
    make_train_step,
    optim,
)
from helpers import assert_close, assert_identical, assert_same_avals

# What the optimizer holds, and what a step leaves in it and in the model

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


def test_a_step_can_be_lowered_before_it_runs():
    model, optimizer = linear_objects()
    step = make_nnx_train_step(sum_loss)
    batch = jax.ShapeDtypeStruct(X.shape, X.dtype)
    memory = step.lower(model, optimizer, batch).compile().memory_analysis()
    assert memory.temp_size_in_bytes >= 0
    step(model, optimizer, X)  # nothing was donated


@pytest.mark.parametrize("way", ["metrics_fn", "loss", "shape"])
@pytest.mark.parametrize("jit", [True, False])
def test_an_error_leaves_the_objects_as_they_were(way, jit):
    """Also one after the update, in eager mode, of a batch with a NaN."""

    def fails(*_):
        raise ZeroDivisionError

    def loss_fn(model, batch):
        model.seen[...] += 1
        out = model(batch)
        return {"shape": lambda: out, "loss": fails}.get(way, out.sum)()

    metrics_fn = fails if way == "metrics_fn" else None
    model, optimizer = linear_objects(tx=optax.adam(0.1))
    model.seen = nnx.Variable(jnp.int32(0))
    before = arrays(model, optimizer)
    step = make_nnx_train_step(loss_fn, metrics_fn=metrics_fn, jit=jit)
    for batch in (X, BAD):
        with pytest.raises((ZeroDivisionError, ValueError, TypeError)):
            step(model, optimizer, batch)
        assert not changed(before, arrays(model, optimizer))


@pytest.mark.parametrize("make", [AmpOptimizer, nnx.Optimizer])
@pytest.mark.parametrize(
    "tx",
    [optax.contrib.mechanize(optax.sgd(0.1)), optax.contrib.schedule_free_sgd(0.1)],
)
def test_one_step_for_many_pairs(tx, make):
    """The first states of these hold the parameters themselves."""
    step, kernels = make_nnx_train_step(sum_loss), []
    for _ in range(2):
        model, _ = linear_objects()
        optimizer = make(model, tx, wrt=nnx.Param)
        for _ in range(2):
            step(model, optimizer, X)
        kernels.append(np.asarray(model.kernel[...]))
    assert (kernels[0] == kernels[1]).all()


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


# The step on a model and its optimizer


def objects(wrt=nnx.Param, tx=None, **options):
    model = NnxNet(nnx.Rngs(0))
    return model, AmpOptimizer(model, tx or optimizer(), wrt=wrt, **options)


def test_equals_the_step_on_a_state():
    """Through growing scales and skipped steps; XLA may fuse the two otherwise."""
    scaler = init_scaler(patience=1)
    model, opt = objects(scaler=scaler)
    state = AmpTrainState.create(model=model, tx=optimizer(), scaler=scaler)
    step = make_nnx_train_step(nnx_loss, has_aux=True)
    reference = make_train_step(nnx_loss, has_aux=True)
    for seed in range(5):
        batch = make_batch(seed, poisoned=seed == 3)
        metrics = step(model, opt, batch)
        state, expected = reference(state, batch)
        assert {*metrics} == {*expected}
        assert metrics["skipped_total"] == expected["skipped_total"]
        assert metrics["grads_finite"] == expected["grads_finite"] == (seed != 3)

    counts = opt.opt_state.notfinite_count, opt.opt_state.total_notfinite
    assert [int(count[...]) for count in counts] == [0, 1]
    assert_identical({k: x[...] for k, x in opt.scaler.items()}, state.scaler)
    params, rest = (nnx.to_pure_dict(part) for part in nnx.state(model, nnx.Param, ...))
    assert_close(params, state.params, jnp.float32)
    assert_same_avals(rest, state.variables)
    assert_close(rest["norm"], state.variables["norm"], jnp.float32)
    assert int(rest["dropout"]["rngs"]["count"]) == 4
    assert int(opt.step[...]) == int(state.step) == 5


@pytest.mark.parametrize("donate", [True, False])
def test_no_step_waits_for_the_device(donate):
    model, opt = objects()
    kernel = model.first.kernel[...]
    step = make_nnx_train_step(nnx_loss, has_aux=True, donate=donate)
    for batch in jax.device_put([make_batch(i, poisoned=i == 2) for i in range(4)]):
        with jax.transfer_guard("disallow"):
            step(model, opt, batch)
    assert kernel.is_deleted() == donate


def test_a_running_optimizer_takes_another_precision_and_scaler():
    model, opt = objects()
    step = make_nnx_train_step(nnx_loss, has_aux=True)
    step(model, opt, make_batch())
    mine = init_scaler(scaler=16)
    opt.precision, opt.scaler = "fp16", mine
    assert step(model, opt, make_batch())["scaler"] == 16
    assert float(mine["scaler"]) == 16  # the step has deleted a copy
    # All of it is saved as that of a new one.
    assert_same_avals(nnx.state(opt), nnx.state(objects(precision="16-mixed")[1]))
    with pytest.raises(ValueError, match="scaler has the keys .* expected a dict of"):
        opt.scaler = {"scaler": 2.0}
    opt.scaler["scaler"] = jnp.float32(2)  # which no checkpoint would restore
    with pytest.raises(
        TypeError, match=r"scaler\['scaler'\] is .* expected a Variable"
    ):
        step(model, opt, make_batch())
    opt.scaler = mine
    with pytest.raises(ValueError, match="precision is 'half'; expected one of"):
        opt.precision = "half"
    assert step(model, opt, make_batch())["grads_finite"]


def test_the_optimizer_says_what_trains():
    def last(path, _):
        return "last" in path

    model, opt = objects(wrt=last)
    before = arrays(model)
    step = make_nnx_train_step(nnx_loss, has_aux=True)
    step(model, opt, make_batch())

    trained = {path for path in changed(before, arrays(model)) if "kernel" in path}
    assert trained == {"[0]['last'][0]['kernel']"}


def test_an_optimizer_with_names_of_its_own():
    """What it calls `scaler` and `precision` is neither read nor lost."""

    class Own(nnx.Optimizer):
        def __init__(self, model, tx):
            super().__init__(model, tx, wrt=nnx.Param)
            self.precision, self.scaler = "highest", nnx.OptState(jnp.zeros(()))

        def update(self, model, grads):
            super().update(model, grads)
            self.scaler[...] += 1

    model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    optimizer = Own(model, optax.sgd(0.1))
    metrics = make_nnx_train_step(sum_loss)(model, optimizer, X)
    assert metrics["grads_finite"] and optimizer.scaler[...] == 1


@pytest.mark.parametrize("check_vma", [True, False])
def test_over_devices(mesh, check_vma):
    """In `nnx.shard_map` the step is that of one device on all the examples."""

    def loss_fn(model, batch):
        return ((model(batch["x"]) - 1) ** 2).mean()

    def make():
        model = nnx.Linear(FEATURES, 2, rngs=nnx.Rngs(0))
        return model, AmpOptimizer(model, optax.sgd(0.1), precision="32-true")

    batch = {"x": make_batch(size=16)["x"]}
    (model, opt), (alone, alone_opt) = make(), make()
    inner = make_nnx_train_step(loss_fn, axis_name="data", jit=False)
    spec = jax.sharding.PartitionSpec
    options = dict(mesh=mesh, out_specs=spec(), check_vma=check_vma)
    in_specs = (spec(), spec(), spec("data"))
    nnx.jit(nnx.shard_map(inner, in_specs=in_specs, **options))(model, opt, batch)
    make_nnx_train_step(loss_fn)(alone, alone_opt, batch)
    assert_close(nnx.state(model), nnx.state(alone), jnp.float32)


# Models of every kind in a train state


def paths(tree):
    return {*leaves_by_path(tree)}


def test_shared_parameters_get_the_gradients_of_all_uses():
    class Tied(nnx.Module):
        def __init__(self):
            self.encoder = self.decoder = nnx.Linear(4, 4, rngs=nnx.Rngs(0))

        def __call__(self, x):
            return self.decoder(self.encoder(x)).mean()

    model, x = Tied(), jnp.ones((2, 4))
    state = AmpTrainState.create(model=model, tx=optax.sgd(1.0), precision="32-true")
    after, _ = make_train_step(lambda model, x: model(x))(state, x)
    trained = after.merge_model()
    assert trained.encoder is trained.decoder
    assert len(after.params) == 1
    grads = nnx.grad(lambda model, x: model(x))(model, x)
    expected = model.encoder.kernel[...] - jax.tree.leaves(grads)[1]
    np.testing.assert_allclose(trained.encoder.kernel[...], expected, rtol=1e-6)


def adapted_loss(model, batch):
    return cross_entropy(model(batch["x"]), batch["y"])


def test_only_what_is_selected_trains():
    """Only that has moments in the optimizer; what is frozen keeps its bits."""
    rngs = nnx.Rngs(0)
    first = nnx.LoRALinear(FEATURES, 8, lora_rank=2, rngs=rngs)
    last = nnx.Linear(8, CLASSES, rngs=rngs)
    model = nnx.Sequential(first, nnx.BatchNorm(8, rngs=rngs), nnx.relu, last)
    tx = optax.adam(1e-2)
    state = AmpTrainState.create(model=model, tx=tx, wrt=nnx.LoRAParam)
    selected = {f"['layers'][0]['lora']['lora_{name}']" for name in "ab"}
    assert paths(state.params) == selected
    assert sum(x.ndim > 0 for x in jax.tree.leaves(state.opt_state)) == 4
    step, after = make_train_step(adapted_loss, accum_steps=2, donate=False), state
    for seed in range(3):
        after, metrics = step(after, make_batch(seed))
    assert metrics["grads_finite"]
    assert changed(state.params, after.params) == selected
    statistics = {f"['layers'][1]['{name}']" for name in ("mean", "var")}
    assert changed(state.variables, after.variables) == statistics
    assert after.merge_model()(make_batch()["x"]).shape == (8, CLASSES)
