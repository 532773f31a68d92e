"""Training NNX models: the step on a model and its optimizer, and train states."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from _models import (
    CLASSES,
    FEATURES,
    NnxNet,
    changed,
    cross_entropy,
    make_batch,
    nnx_loss,
    optimizer,
)
from _steps import WORDS, arrays
from flax_amp import (
    AmpOptimizer,
    AmpTrainState,
    init_scaler,
    make_nnx_train_step,
    make_train_step,
    no_scaler,
)
from helpers import (
    assert_close,
    assert_identical,
    assert_same_avals,
    dtypes_of,
)

OPTIONS = dict(has_aux=True)


def objects(wrt=nnx.Param, tx=None, **options):
    model = NnxNet(nnx.Rngs(0))
    return model, AmpOptimizer(model, tx or optimizer(), wrt=wrt, **options)


@pytest.mark.parametrize(
    "options",
    [
        {"precision": "bf16-mixed"},
        pytest.param({"accum_steps": 2, "redo_on_nan": 2}, marks=pytest.mark.slow),
    ],
    ids=["plain", "accumulated and redone"],
)
def test_equals_the_step_on_a_state(options):
    """Through growing scales and skipped steps; XLA may fuse the two otherwise."""
    model, opt = objects(scaler=init_scaler(patience=1))
    step = make_nnx_train_step(nnx_loss, **OPTIONS, **options)
    state = AmpTrainState.create(
        model=model, tx=optimizer(), scaler=init_scaler(patience=1)
    )
    reference = make_train_step(nnx_loss, **OPTIONS, **options)
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
    counts, statistics = (
        [x for x in jax.tree.leaves(rest) if x.dtype == dtype]
        for dtype in (jnp.uint32, jnp.float32)
    )
    assert [int(count) for count in counts] == [4 * options.get("accum_steps", 1)]
    expected = [x for x in jax.tree.leaves(state.variables) if x.dtype == jnp.float32]
    assert_close(statistics, expected, jnp.float32)
    assert int(opt.step[...]) == int(state.step) == 5


@pytest.mark.parametrize("donate", [True, False])
def test_no_step_waits_for_the_device(donate):
    model, opt = objects()
    kernel = model.first.kernel[...]
    step = make_nnx_train_step(nnx_loss, **OPTIONS, donate=donate)
    for batch in jax.device_put([make_batch(i, poisoned=i == 2) for i in range(4)]):
        with jax.transfer_guard("disallow"):
            step(model, opt, batch)
    assert kernel.is_deleted() == donate


def test_the_optimizer_says_what_trains():
    def last(path, _):
        return "last" in path

    model, opt = objects(wrt=last)
    before = arrays(model)
    step = make_nnx_train_step(nnx_loss, **OPTIONS)
    step(model, opt, make_batch())

    trained = {path for path in changed(before, arrays(model)) if "kernel" in path}
    assert trained == {"[0]['last'][0]['kernel']"}


@pytest.mark.parametrize("check_vma", [True, False])
def test_over_devices(mesh, check_vma):
    """In `nnx.shard_map` the step is that of one device on all the examples."""

    def loss_fn(model, batch):
        return ((model(batch["x"]) - 1) ** 2).mean()

    def make():
        model = nnx.Linear(FEATURES, 2, rngs=nnx.Rngs(0))
        return model, AmpOptimizer(model, optax.sgd(0.1))

    options = dict(precision="32-true")
    batch = {"x": make_batch(size=16)["x"]}
    (model, opt), (alone, alone_opt) = make(), make()
    inner = make_nnx_train_step(loss_fn, axis_name="data", jit=False, **options)
    spec = jax.sharding.PartitionSpec
    step = nnx.jit(
        nnx.shard_map(
            inner,
            mesh=mesh,
            in_specs=(spec(), spec(), spec("data")),
            out_specs=spec(),
            check_vma=check_vma,
        )
    )
    step(model, opt, batch)
    make_nnx_train_step(loss_fn, **options)(alone, alone_opt, batch)
    assert_close(nnx.state(model), nnx.state(alone), jnp.float32)


# Models of every kind in a train state

LAYERS = 3
SIZE = 8


class Block(nnx.Module):
    """Dense, BatchNorm and dropout: parameters, statistics and a random stream."""

    def __init__(self, rngs):
        self.dense = nnx.Linear(SIZE, SIZE, rngs=rngs)
        self.norm = nnx.BatchNorm(SIZE, momentum=0.9, rngs=rngs)
        self.dropout = nnx.Dropout(0.25, rngs=rngs)

    def __call__(self, x):
        return x + self.dropout(nnx.relu(self.norm(self.dense(x))))


def run_scan(blocks, x):
    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    def layers(x, block):
        return nnx.remat(lambda block, x: block(x))(block, x)

    return layers(x, blocks)


class Net(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(FEATURES, SIZE, rngs=rngs)
        self.blocks = nnx.split_rngs(splits=LAYERS)(nnx.vmap(Block))(rngs)
        self.last = nnx.Linear(SIZE, CLASSES, rngs=rngs)

    def __call__(self, x):
        return self.last(run_scan(self.blocks, self.first(x)))


def net_loss(model, batch):
    return cross_entropy(model(batch["x"]), batch["y"])


def test_a_stack(dtype=jnp.float16):
    """Every state of a stack moves, in half precision, and a bad step moves none."""
    model = Net(nnx.Rngs(0))
    state = AmpTrainState.create(model=model, tx=optax.adam(1e-2), precision="16-mixed")
    step = make_train_step(net_loss, precision=WORDS[dtype], donate=False)

    after, metrics = step(state, make_batch())
    assert metrics["grads_finite"]
    unchanged = {
        path
        for path in paths(state.variables) - changed(state.variables, after.variables)
        if not path.endswith("['key']")
    }
    assert not unchanged
    assert changed(state.params, after.params) == paths(state.params)
    found = dtypes_of(step, state, make_batch())
    assert {name for names in found for name in names} == {jnp.dtype(dtype).name}

    skipped, metrics = step(after, make_batch(poisoned=True))
    assert not metrics["grads_finite"]
    assert_identical(skipped.params, after.params)
    assert_identical(skipped.variables, after.variables)


def paths(tree):
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path) for path, _ in leaves}


def test_shared_parameters_get_the_gradients_of_all_uses():
    class Tied(nnx.Module):
        def __init__(self, rngs):
            self.encoder = nnx.Linear(4, 4, rngs=rngs)
            self.decoder = self.encoder

        def __call__(self, x):
            return self.decoder(self.encoder(x))

    model = Tied(nnx.Rngs(0))
    state = AmpTrainState.create(model=model, tx=optax.sgd(1.0), scaler=no_scaler())
    step = make_train_step(
        lambda model, x: model(x).mean(), precision="32-true", donate=False
    )
    after, _ = step(state, jnp.ones((2, 4)))
    trained = after.merge_model()

    assert trained.encoder is trained.decoder
    assert set(after.params) == {"decoder"} or set(after.params) == {"encoder"}
    grads = nnx.grad(lambda model, x: model(x).mean())(model, jnp.ones((2, 4)))
    expected = model.encoder.kernel[...] - jax.tree.leaves(grads)[1]
    np.testing.assert_allclose(trained.encoder.kernel[...], expected, rtol=1e-6)


# Some parameters only


class Adapted(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.LoRALinear(FEATURES, SIZE, lora_rank=2, rngs=rngs)
        self.norm = nnx.BatchNorm(SIZE, rngs=rngs)
        self.last = nnx.Linear(SIZE, CLASSES, rngs=rngs)

    def __call__(self, x):
        return self.last(nnx.relu(self.norm(self.first(x))))


def test_only_what_is_selected_trains():
    """Only that has moments in the optimizer; what is frozen keeps its bits."""
    model = Adapted(nnx.Rngs(0))
    tx = optax.adam(1e-2)
    state = AmpTrainState.create(model=model, tx=tx, wrt=nnx.LoRAParam)
    assert paths(state.params) == {
        "['first']['lora']['lora_a']",
        "['first']['lora']['lora_b']",
    }
    moments = [x for x in jax.tree.leaves(state.opt_state) if x.ndim]
    assert len(moments) == 2 * len(jax.tree.leaves(state.params))
    step = make_train_step(net_loss, accum_steps=2, donate=False)
    after = state
    for seed in range(3):
        after, metrics = step(after, make_batch(seed))

    assert metrics["grads_finite"]
    assert changed(state.params, after.params) == paths(state.params)
    ends = ("['mean']", "['var']")
    statistics = {path for path in paths(state.variables) if path.endswith(ends)}
    assert statistics
    assert changed(state.variables, after.variables) == statistics
    assert after.merge_model()(make_batch()["x"]).shape == (8, CLASSES)
