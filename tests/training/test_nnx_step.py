"""The step on `(model, optimizer, scaler)`."""

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

from _models import FEATURES, NnxNet, changed, make_batch, nnx_loss, optimizer
from _steps import arrays
from flax_amp import (
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
    both_halves,
    dtypes_of,
)

OPTIONS = dict(has_aux=True)


def objects(wrt=nnx.Param, tx=None):
    model = NnxNet(nnx.Rngs(0))
    return model, nnx.Optimizer(model, tx or optimizer(), wrt=wrt)


@pytest.mark.parametrize(
    "options",
    [
        {"compute_dtype": jnp.bfloat16},
        pytest.param({"compute_dtype": jnp.float16}, marks=pytest.mark.slow),
        pytest.param({"accum_steps": 2, "redo_on_nan": 2}, marks=pytest.mark.slow),
    ],
    ids=["bfloat16", "float16", "accumulated and redone"],
)
def test_equals_the_step_on_a_state(options):
    """Through growing scales and skipped steps; XLA may fuse the two otherwise."""
    model, opt = objects()
    scaler = init_scaler(patience=1)
    step = make_nnx_train_step(nnx_loss, **OPTIONS, **options)
    state = AmpTrainState.create(
        model=model, tx=optimizer(), scaler=init_scaler(patience=1)
    )
    reference = make_train_step(nnx_loss, **OPTIONS, **options)
    for seed in range(5):
        batch = make_batch(seed, poisoned=seed == 3)
        scaler, metrics = step(model, opt, scaler, batch)
        state, expected = reference(state, batch)
        assert {*metrics} == {*expected}
        assert metrics["skipped_total"] == expected["skipped_total"]
        assert metrics["grads_finite"] == expected["grads_finite"] == (seed != 3)

    assert (scaler.pop("skipped_in_a_row"), scaler.pop("skipped_total")) == (0, 1)
    assert_identical(scaler, state.scaler)
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
    assert int(opt.step[...]) == 4


@both_halves
def test_products_run_in_the_compute_dtype(dtype):
    model, opt = objects()
    step = make_nnx_train_step(nnx_loss, **OPTIONS, compute_dtype=dtype, jit=False)

    def pure(state, scaler, batch):
        new = nnx.merge(graphdef, state)
        return step(*new, scaler, batch)

    graphdef, state = nnx.split((model, opt))
    found = dtypes_of(pure, state, no_scaler(), make_batch())
    assert len(found) == 5
    assert {name for names in found for name in names} == {jnp.dtype(dtype).name}


def test_the_optimizer_says_what_trains():
    def last(path, _):
        return "last" in path

    model, opt = objects(wrt=last)
    before = arrays(model)
    step = make_nnx_train_step(nnx_loss, **OPTIONS)
    step(model, opt, init_scaler(), make_batch())

    trained = {path for path in changed(before, arrays(model)) if "kernel" in path}
    assert trained == {"[0]['last'][0]['kernel']"}


@pytest.mark.parametrize("donate", [True, False])
def test_one_trace_for_life_and_no_host_sync(donate):
    traces = []

    def loss_fn(model, batch):
        traces.append(batch)
        return nnx_loss(model, batch)

    model, opt = objects()
    kernel = model.first.kernel[...]
    scaler = init_scaler(patience=1)
    step = make_nnx_train_step(loss_fn, **OPTIONS, donate=donate)
    batches = [
        jax.device_put(make_batch(seed, poisoned=seed == 2)) for seed in range(4)
    ]
    for batch in batches:
        with jax.transfer_guard("disallow"):
            scaler, _ = step(model, opt, scaler, batch)
    assert len(traces) == 1
    assert kernel.is_deleted() == donate


def test_a_failed_trace_leaves_the_objects_alone():
    model, opt = objects()
    before = arrays(model, opt)
    step = make_nnx_train_step(lambda model, batch: model(batch["x"]))
    with pytest.raises(TypeError, match="expected a scalar float"):
        step(model, opt, init_scaler(), make_batch())
    assert not changed(before, arrays(model, opt))


@pytest.mark.parametrize("check_vma", [True, False])
def test_over_devices(mesh, check_vma):
    """In `nnx.shard_map` the step is that of one device on all the examples."""

    def loss_fn(model, batch):
        return ((model(batch["x"]) - 1) ** 2).mean()

    def make():
        model = nnx.Linear(FEATURES, 2, rngs=nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)

    options = dict(compute_dtype=jnp.float32)
    batch = {"x": make_batch(size=16)["x"]}
    (model, opt), (alone, alone_opt) = make(), make()
    inner = make_nnx_train_step(loss_fn, axis_name="data", jit=False, **options)
    spec = jax.sharding.PartitionSpec
    step = nnx.jit(
        nnx.shard_map(
            inner,
            mesh=mesh,
            in_specs=(spec(), spec(), spec(), spec("data")),
            out_specs=spec(),
            check_vma=check_vma,
        )
    )
    step(model, opt, no_scaler(), batch)
    make_nnx_train_step(loss_fn, **options)(alone, alone_opt, no_scaler(), batch)
    assert_close(nnx.state(model), nnx.state(alone), jnp.float32)
