"""The training step: what it computes, what a skipped step leaves, and one trace."""

import functools
from typing import Any

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from _models import (
    MODELS,
    changed,
    linen_loss,
    linen_state,
    make_batch,
    nnx_loss,
    nnx_state,
)
from flax_amp._training.scaler import init_scaler, no_scaler, static_scaler
from flax_amp._training.train_state import AmpTrainState
from flax_amp._training.train_step import make_eval_step, make_train_step

DTYPES = [jnp.float16, jnp.bfloat16, jnp.float32]

# What a step that is skipped for its loss changes, and nothing else.
SKIP_LEAVES = {
    ".step",
    ".scaler['total_resets']",
    ".opt_state.notfinite_count",
    ".opt_state.last_finite",
    ".opt_state.total_notfinite",
}


class EmaState(AmpTrainState):
    """Averages the parameters, with a counter, at every update."""

    ema: Any

    def apply_gradients(self, *, grads, **kwargs):
        new = super().apply_gradients(grads=grads, **kwargs)
        mean = jax.tree.map(lambda e, p: 0.9 * e + 0.1 * p, self.ema["p"], new.params)
        return new.replace(ema={"p": mean, "n": self.ema["n"] + 1})


def setup(name, *, cls=AmpTrainState, scaler=None, **options):
    """Returns a state that has taken two steps, and its training step."""
    make, loss = MODELS[name]
    extra = {}
    if cls is EmaState:
        extra["ema"] = {"p": make().params, "n": 0}
    state = make(cls=cls, scaler=scaler or init_scaler(scaler=16), **extra)
    step = make_train_step(loss, has_aux=True, **options)
    for seed in (1, 2):
        state, _ = step(state, make_batch(seed))
    return state, step


def linear_loss(params, batch):
    return ((batch["x"] @ params["w"] - batch["y"]) ** 2).mean()


def linear_state(tx=None, w=None, **options):
    params = {"w": jnp.array([1.0, -2.0, 0.5]) if w is None else w}
    options = {"scaler": init_scaler(scaler=16)} | options  # 2**15 is too much here
    return AmpTrainState.create(params=params, tx=tx or optax.sgd(0.1), **options)


def linear_batch(size=8, poisoned=False):
    generator = np.random.default_rng(0)
    x = generator.integers(-4, 5, (size, 3)).astype(np.float32)
    if poisoned:
        x[size // 2] = np.inf
    return {"x": x, "y": generator.integers(-4, 5, size).astype(np.float32)}


def counting(fn):
    """Returns `fn`, its signature kept, and a list that grows with every trace."""
    traces = []

    @functools.wraps(fn)
    def counted(*args, **kwargs):
        traces.append(None)
        return fn(*args, **kwargs)

    return counted, traces


def copy(state):
    return jax.tree.map(jnp.copy, state)


# What a step computes


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_training_learns(name, dtype):
    make, loss = MODELS[name]
    step = make_train_step(loss, has_aux=True, compute_dtype=dtype)
    state = make(tx=optax.adamw(0.02))
    batch = make_batch(size=32)
    losses = []
    for _ in range(60):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    assert losses[-1] < 0.6 * losses[0]
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(state.params))


@pytest.mark.parametrize("scale", [1.0, 2.0**12])
def test_float32_step_is_plain_training(scale):
    tx = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(0.1))
    state = linear_state(tx, scaler=static_scaler(scale))
    params, opt_state = state.params, tx.init(state.params)
    step = make_train_step(linear_loss, compute_dtype=jnp.float32, donate=False)
    for _ in range(3):
        loss, grads = jax.value_and_grad(linear_loss)(params, linear_batch())
        updates, opt_state = tx.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        state, metrics = step(state, linear_batch())
        np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-6)
        norm = optax.tree.norm(grads)  # before clipping
        np.testing.assert_allclose(metrics["grad_norm"], norm, rtol=1e-6)
    np.testing.assert_allclose(state.params["w"], params["w"], rtol=1e-5)


def test_float16_step_is_near_float32():
    results = [
        make_train_step(linear_loss, compute_dtype=dtype)(
            linear_state(), linear_batch()
        )[0].params["w"]
        for dtype in DTYPES
    ]
    for result, tolerance in zip(results, (2e-3, 2e-2), strict=False):
        np.testing.assert_allclose(result, results[2], rtol=tolerance, atol=tolerance)


def test_metrics_are_scalars_on_the_device():
    state, step = setup("linen")
    _, metrics = step(state, make_batch())
    assert set(metrics) == {
        "loss", "grads_finite", "scaler", "grad_norm", "skipped_total", "accuracy"
    }  # fmt: skip
    assert {key: (m.shape, m.dtype) for key, m in metrics.items()} == {
        "loss": ((), jnp.float32),
        "grads_finite": ((), jnp.bool_),
        "scaler": ((), jnp.float32),
        "grad_norm": ((), jnp.float32),
        "skipped_total": ((), jnp.int32),
        "accuracy": ((), jnp.float32),
    }


def test_loss_and_update_are_right_on_growing_and_skipped_steps():
    def loss(params, batch):
        return params["w"] * batch

    state = AmpTrainState.create(
        params={"w": jnp.float32(1)},
        tx=optax.sgd(1.0),
        scaler=init_scaler(scaler=2.0**4, patience=1),
    )
    step = make_train_step(loss)
    scales, expected = [], 1.0
    for x in (1.0, 1.0, np.inf, 1.0, 1.0):
        state, metrics = step(state, np.float32(x))
        scales.append(float(metrics["scaler"]))
        if np.isfinite(x):
            assert metrics["loss"] == expected
            assert metrics["grad_norm"] == 1
            expected -= 1
        assert state.params["w"] == expected
    assert scales == [16, 32, 32, 32, 64]


def test_statistics_and_dropout_of_a_linen_model():
    state, step = setup("linen")
    after, metrics = step(copy(state), make_batch())
    assert changed(state.variables, after.variables)
    assert not changed(state.rngs, after.rngs)
    # Another step draws another mask, the same step the same one.
    still = state.replace(step=state.step + 1)
    assert step(copy(state), make_batch())[1]["loss"] == metrics["loss"]
    assert step(still, make_batch())[1]["loss"] != metrics["loss"]


def test_statistics_and_dropout_of_an_nnx_model():
    state, step = setup("nnx")
    assert int(state.variables["dropout"]["rngs"]["count"]) == 2
    after, _ = step(copy(state), make_batch())
    assert int(after.variables["dropout"]["rngs"]["count"]) == 3
    assert changed(state.variables["norm"], after.variables["norm"])
    assert int(state.merge_model().dropout.rngs.count[...]) == 2


def test_loss_gets_state_and_rngs_only_if_it_declares_them():
    seen = {}

    def loss(params, batch, *, rngs, state):
        seen.update(state=state, rngs=rngs)
        assert state.params is params
        return linear_loss(params, batch)

    state = linear_state(rngs={"a": jax.random.key(0)})
    make_train_step(loss)(state, linear_batch())
    assert isinstance(seen["state"], AmpTrainState)
    assert set(seen["rngs"]) == {"a"}
    make_train_step(lambda params, batch, **unused: linear_loss(params, batch))(
        linear_state(), linear_batch()
    )


def test_models_disagree_in_nothing_but_their_framework():
    """Linen and NNX go through one code: the same weights give the same step."""
    linen, nnx_ = linen_state(tx=optax.sgd(0.1)), nnx_state(tx=optax.sgd(0.1))
    params = {
        "Dense_0": nnx_.params["first"],
        "BatchNorm_0": nnx_.params["norm"],
        "Dense_1": nnx_.params["last"][0],
    }

    def still_linen(params, batch, *, state):
        logits = state.apply_fn(
            {"params": params, **state.variables}, batch["x"], train=False
        )
        return (logits**2).mean()

    def still_nnx(model, batch):
        model.eval()
        return (model(batch["x"]) ** 2).mean()

    batch = make_batch()
    a, _ = make_train_step(still_linen)(
        linen.replace(params=jax.tree.map(jnp.copy, params)), batch
    )
    b, _ = make_train_step(still_nnx)(nnx_, batch)
    for old, new in [("Dense_0", b.params["first"]), ("Dense_1", b.params["last"][0])]:
        np.testing.assert_allclose(a.params[old]["kernel"], new["kernel"], rtol=1e-5)


# What a skipped step leaves


@pytest.mark.parametrize(
    "dtype, cls, accum_steps",
    [(dtype, AmpTrainState, 1) for dtype in DTYPES] + [(jnp.float16, EmaState, 4)],
)
@pytest.mark.parametrize("name", MODELS)
def test_poisoned_batch_changes_no_other_bit(name, dtype, cls, accum_steps):
    state, step = setup(name, cls=cls, compute_dtype=dtype, accum_steps=accum_steps)
    after, metrics = step(copy(state), make_batch(poisoned=True))
    assert changed(state, after) == SKIP_LEAVES
    assert not metrics["grads_finite"] and int(metrics["skipped_total"]) == 1
    assert int(after.step) == int(state.step) + 1
    # The next good step is what it would have been, but for its number and scale.
    if name == "linen":  # whose dropout follows the step; NNX counts applied ones
        after = after.replace(step=state.step)
    after = after.replace(scaler=state.scaler)
    seen, _ = step(copy(after), make_batch(5))
    never, _ = step(copy(state), make_batch(5))
    counters = {".opt_state.total_notfinite", ".step"}
    assert changed(seen, never) - counters == set()
    assert seen.opt_state.notfinite_count == 0


def test_negative_zeros_survive_a_skipped_step():
    w = jnp.array([-0.0, 0.0, -1.0])
    step = make_train_step(linear_loss)
    after, _ = step(linear_state(w=w), linear_batch(poisoned=True))
    np.testing.assert_array_equal(np.signbit(after.params["w"]), [True, False, True])


def test_many_skipped_steps_do_no_harm_and_are_left_again():
    state = linear_state(optax.adam(0.1))
    step = make_train_step(linear_loss)
    before = copy(state)
    for _ in range(40):
        state, metrics = step(state, linear_batch(poisoned=True))
    assert changed(before, state) == SKIP_LEAVES
    assert (float(metrics["scaler"]), int(metrics["skipped_total"])) == (16.0, 40)
    state, metrics = step(state, linear_batch())
    assert metrics["grads_finite"] and changed(before.params, state.params)


@pytest.mark.parametrize(
    "tx",
    [
        optax.MultiSteps(optax.adam(0.1), 2),
        optax.apply_if_finite(optax.adam(0.1), 0),  # applies the NaN at once
        optax.chain(optax.apply_if_finite(optax.adam(0.1), 0)),
        optax.contrib.schedule_free_sgd(0.1),
    ],
)
def test_skips_whatever_the_optimizer(tx):
    step = make_train_step(linear_loss)
    state = linear_state(tx)
    for _ in range(3):
        state, _ = step(state, linear_batch())
    after, _ = step(copy(state), linear_batch(poisoned=True))
    assert changed(state, after) <= SKIP_LEAVES
    for _ in range(2):
        after, _ = step(after, linear_batch())
    assert changed(state.params, after.params)


@pytest.mark.parametrize(
    "loss",
    [
        lambda p, batch: p["w"].sum() + jax.lax.stop_gradient(batch),  # only the loss
        lambda p, batch: p["w"].sum() + 0 * jnp.sqrt(p["w"][0] * 0) * batch,
        lambda p, batch: p["w"].sum() * batch,
    ],
)
def test_one_flag_covers_loss_and_gradients(loss):
    state = linear_state(optax.adam(0.1))
    after, metrics = make_train_step(loss)(copy(state), np.float32(np.inf))
    assert not metrics["grads_finite"]
    assert changed(state, after) == SKIP_LEAVES


def test_aux_that_is_not_finite_skips_nothing():
    def loss(params, batch):
        return linear_loss(params, batch), {"ratio": jnp.float32(jnp.nan)}

    _, metrics = make_train_step(loss, has_aux=True)(linear_state(), linear_batch())
    assert metrics["grads_finite"] and np.isnan(metrics["ratio"])


def test_redo_lowers_the_scale_within_the_step():
    def loss(params, batch):
        # The cotangent of the cast is float16: 2**15 * 12 does not fit.
        return (params["w"].astype(jnp.float16) ** 3).astype(jnp.float32)

    state = AmpTrainState.create(params={"w": jnp.float32(2)}, tx=optax.sgd(0.125))
    for redo, scale, skipped, w in [(0, 14, 1, 2), (2, 13, 1, 2), (3, 12, 0, 0.5)]:
        after, metrics = make_train_step(loss, redo_on_nan=redo)(copy(state), 0.0)
        if redo == 2:
            scale = 12  # lowered three times, the last time for the next step
        assert float(metrics["scaler"]) == 2.0**scale
        assert int(metrics["skipped_total"]) == skipped
        assert float(after.params["w"]) == w


@pytest.mark.parametrize("name", MODELS)
def test_redo_with_all_collections(name):
    state, step = setup(name, redo_on_nan=3)
    after, metrics = step(copy(state), make_batch(poisoned=True))
    assert changed(state, after) == SKIP_LEAVES
    assert int(after.scaler["total_resets"]) == 1  # no lower scale would have helped
    assert int(metrics["skipped_total"]) == 1
    good, _ = step(copy(state), make_batch())
    assert changed(state.params, good.params)


# One trace


@pytest.mark.parametrize("redo_on_nan", [0, 2])
@pytest.mark.parametrize("name", MODELS)
def test_one_trace_for_life(name, redo_on_nan):
    make, loss = MODELS[name]
    counted, traces = counting(loss)
    step = make_train_step(counted, has_aux=True, redo_on_nan=redo_on_nan)
    state = make(scaler=init_scaler(patience=1))
    for poisoned in (0, 0, 1, 0, 1, 1, 0):
        state, _ = step(state, make_batch(poisoned=bool(poisoned)))
    assert step._cache_size() == 1
    assert len(traces) == (1 if redo_on_nan == 0 else 2)


def test_no_transfer_in_a_step():
    state, step = setup("nnx")
    batch = jax.device_put(make_batch())
    bad = jax.device_put(make_batch(poisoned=True))
    with jax.transfer_guard("disallow"):
        for part in (batch, bad, batch):
            state, metrics = step(state, part)
    assert int(metrics["skipped_total"]) == 1


def test_donation_deletes_the_old_state_and_nothing_else():
    state, step = setup("linen")
    batch = jax.device_put(make_batch())
    after, metrics = step(state, batch)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state.params))
    _, _ = step(after, batch)
    assert all(np.isfinite(value) for value in metrics.values())  # of the step before
    state, step = setup("linen", donate=False)
    step(state, batch)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(state))


def test_without_jit_gives_a_function_to_compose():
    step = make_train_step(linear_loss, jit=False)
    assert not hasattr(step, "lower")
    batches = jax.tree.map(lambda x: np.stack([x] * 3), linear_batch())
    state, metrics = jax.lax.scan(step, linear_state(), batches)
    assert int(state.step) == 3 and metrics["loss"].shape == (3,)


# Accumulation


@pytest.mark.parametrize("steps", [2, 4])
def test_accumulated_steps_equal_the_full_batch(steps):
    def loss(params, batch):
        error = batch["x"] @ params["w"] - batch["y"]
        aux = {"mse": (error**2).mean(), "worst": error.max(), "each": error}
        return (error**2).mean(), aux

    full, metrics = make_train_step(loss, has_aux=True)(linear_state(), linear_batch())
    split, parts = make_train_step(loss, has_aux=True, accum_steps=steps)(
        linear_state(), linear_batch()
    )
    np.testing.assert_allclose(full.params["w"], split.params["w"], rtol=1e-3)
    for key in ("loss", "mse", "grad_norm"):
        np.testing.assert_allclose(metrics[key], parts[key], rtol=1e-3)
    # Micro-batch i holds the examples i, i + steps, i + 2 * steps, ...
    stacked = np.reshape(metrics["each"], (8 // steps, steps)).T
    np.testing.assert_allclose(parts["each"], stacked, rtol=1e-2, atol=1e-2)
    assert int(split.scaler["count"]) == 1  # one update of the scaler


def test_accumulation_is_in_float32():
    def loss(params, batch):
        return params["w"].astype(jnp.float16).astype(jnp.float32) * batch.mean()

    values = np.r_[np.float32(2048), np.ones(255, np.float32)]
    state = AmpTrainState.create(
        params={"w": jnp.float32(0)}, tx=optax.sgd(1.0), scaler=no_scaler()
    )
    state, _ = make_train_step(loss, accum_steps=256)(state, values)
    assert float(state.params["w"]) == -(2048 + 255) / 256


def test_statistics_go_through_the_micro_batches():
    state, _ = setup("nnx")
    step = make_train_step(nnx_loss, has_aux=True, accum_steps=4)
    after, _ = step(copy(state), make_batch())
    count = int(state.variables["dropout"]["rngs"]["count"])
    assert int(after.variables["dropout"]["rngs"]["count"]) == count + 4
    # Four updates with momentum 0.9 leave less of the old mean than one does.
    once, _ = make_train_step(nnx_loss, has_aux=True)(copy(state), make_batch())
    old, new, one = (
        jnp.abs(s.variables["norm"]["var"] - state.variables["norm"]["var"]).sum()
        for s in (state, after, once)
    )
    assert old == 0 and new > 1.5 * one


def test_micro_batches_draw_different_keys():
    def loss(params, batch, *, rngs):
        noise = jax.random.normal(rngs["noise"])
        return params["w"].sum() * 0, {"noise": noise[None]}

    state = linear_state(rngs={"noise": jax.random.key(0)})
    _, metrics = make_train_step(loss, has_aux=True, accum_steps=4)(
        state, linear_batch()
    )
    assert len(set(np.asarray(metrics["noise"]).ravel().tolist())) == 4


def test_metrics_with_a_reduce_method_are_reduced():
    from clu import metrics as clu_metrics

    def loss(params, batch):
        values = batch["x"][:, 0]
        average = clu_metrics.Average.from_model_output(values=values)
        return linear_loss(params, batch), {"mean_x": average}

    step = make_train_step(loss, has_aux=True, accum_steps=2)
    _, metrics = step(linear_state(), linear_batch())
    expected = linear_batch()["x"][:, 0].mean()
    np.testing.assert_allclose(metrics["mean_x"].compute(), expected, rtol=1e-5)


def test_batch_that_does_not_split_is_named():
    step = make_train_step(linear_loss, accum_steps=3)
    with pytest.raises(ValueError, match=r"batch\['x'\] has shape \(8, 3\).*steps=3"):
        step(linear_state(), linear_batch())
    with pytest.raises(ValueError, match=r"batch\['n'\] has shape \(\)"):
        step(linear_state(), {"x": np.ones((3, 3)), "n": 3})


# Devices


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("accum_steps, redo_on_nan", [(1, 0), (2, 1)])
def test_shard_map_equals_one_device(mesh, check_vma, accum_steps, redo_on_nan):
    options = dict(compute_dtype=jnp.float32, redo_on_nan=redo_on_nan)
    step = jax.jit(
        jax.shard_map(
            make_train_step(
                linear_loss,
                axis_name="data",
                jit=False,
                accum_steps=accum_steps,
                **options,
            ),
            mesh=mesh,
            in_specs=(PartitionSpec(), PartitionSpec("data")),
            out_specs=PartitionSpec(),
            check_vma=check_vma,
        )
    )
    single = make_train_step(linear_loss, donate=False, **options)
    state, alone = linear_state(), linear_state()
    batch = linear_batch(32)
    for _ in range(2):
        state, metrics = step(state, batch)
        alone, expected = single(alone, batch)
        np.testing.assert_allclose(metrics["loss"], expected["loss"], rtol=1e-5)
    np.testing.assert_allclose(state.params["w"], alone.params["w"], rtol=1e-5)
    # One device of eight sees the inf; all of them skip.
    after, metrics = step(state, linear_batch(32, poisoned=True))
    assert not metrics["grads_finite"]
    assert changed(state, after) == SKIP_LEAVES
    for leaf in jax.tree.leaves(after):
        copies = [np.asarray(shard.data) for shard in leaf.addressable_shards]
        assert all((c == copies[0]).all() for c in copies)


@pytest.mark.slow
@pytest.mark.parametrize("check_vma, accum_steps", [(True, 2), (False, 1)])
@pytest.mark.parametrize("name", MODELS)
def test_shard_map_with_all_collections(mesh, name, check_vma, accum_steps):
    make, loss = MODELS[name]
    step = make_train_step(
        loss, has_aux=True, axis_name="data", jit=False, accum_steps=accum_steps
    )
    step = jax.jit(
        jax.shard_map(
            step,
            mesh=mesh,
            in_specs=(PartitionSpec(), PartitionSpec("data")),
            out_specs=PartitionSpec(),
            check_vma=check_vma,
        )
    )
    state, _ = step(make(scaler=init_scaler(scaler=16)), make_batch(size=32))
    bad, metrics = step(state, make_batch(size=32, poisoned=True))
    assert changed(state, bad) == SKIP_LEAVES
    good, metrics = step(bad, make_batch(3, size=32))
    assert metrics["grads_finite"] and changed(bad.variables, good.variables)
    for leaf in jax.tree.leaves((good.params, good.variables)):
        if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            copies = [np.asarray(shard.data) for shard in leaf.addressable_shards]
            assert all((c == copies[0]).all() for c in copies)


def test_devices_draw_different_keys(mesh):
    def loss(params, batch, *, rngs):
        return (params["w"] * 0).sum(), {"noise": jax.random.normal(rngs["a"], (1,))}

    step = make_train_step(loss, has_aux=True, axis_name="data", jit=False)

    def noise(state, batch):
        return step(state, batch)[1]["noise"]

    noise = jax.shard_map(
        noise,
        mesh=mesh,
        in_specs=(PartitionSpec(), PartitionSpec("data")),
        out_specs=PartitionSpec("data"),
    )
    drawn = jax.jit(noise)(linear_state(rngs={"a": jax.random.key(0)}), linear_batch())
    assert len(set(np.asarray(drawn).tolist())) == 8


def test_vmapped_axis():
    step = make_train_step(
        linear_loss, axis_name="data", jit=False, compute_dtype=jnp.float32
    )
    batch = jax.tree.map(lambda x: x.reshape(4, 2, *x.shape[1:]), linear_batch())
    state, _ = jax.vmap(step, axis_name="data", in_axes=(None, 0))(
        linear_state(), batch
    )
    alone, _ = make_train_step(linear_loss, compute_dtype=jnp.float32)(
        linear_state(), linear_batch()
    )
    for row in state.params["w"]:
        np.testing.assert_allclose(row, alone.params["w"], rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("accum_steps", [1, 2])
def test_jit_with_sharded_batch(mesh, name, accum_steps):
    make, loss = MODELS[name]
    tx = optax.sgd(0.1)  # Adam makes a step of the noise before a BatchNorm
    everywhere = NamedSharding(mesh, PartitionSpec())
    split = NamedSharding(mesh, PartitionSpec("data"))
    scaler = init_scaler(scaler=16)
    state = jax.jit(lambda: make(scaler=scaler, tx=tx), out_shardings=everywhere)()
    counted, traces = counting(loss)
    step = make_train_step(counted, has_aux=True, accum_steps=accum_steps)
    for poisoned in (False, True, False):
        batch = jax.device_put(make_batch(size=32, poisoned=poisoned), split)
        before = copy(state)
        state, metrics = step(state, batch)
        assert bool(metrics["grads_finite"]) != poisoned
        assert (changed(before, state) == SKIP_LEAVES) == poisoned
    assert len(traces) == 1
    alone = make(scaler=scaler, tx=tx)
    step = make_train_step(loss, has_aux=True, accum_steps=accum_steps)
    for poisoned in (False, True, False):
        alone, _ = step(alone, make_batch(size=32, poisoned=poisoned))
    for a, b in zip(
        jax.tree.leaves(state.params), jax.tree.leaves(alone.params), strict=True
    ):
        np.testing.assert_allclose(a, b, rtol=0.02, atol=0.02)


# Special parameters


def test_integer_parameters_pass_through():
    def loss(params, batch):
        return (params["w"][params["order"]] * batch).sum()

    params = {"w": jnp.ones(3), "order": jnp.array([2, 0, 1])}
    state = AmpTrainState.create(params=params, tx=optax.adamw(0.1))
    after, metrics = make_train_step(loss)(copy(state), np.float32(2))
    assert changed(state.params, after.params) == {"['w']"}
    assert metrics["grads_finite"]


def test_fp8_statistics_are_neither_unscaled_nor_summed():
    @jax.custom_vjp
    def record(stat, x):
        return x

    def backward(x, g):
        return jnp.where(x > 6, jnp.inf, x), g

    record.defvjp(lambda stat, x: (x, x), backward)

    def loss(params, batch):
        stat = params["_overwrite_with_gradient"]["stat"]
        return (record(stat, batch.max()) * params["params"]["w"]).sum()

    params = {
        "params": {"w": jnp.ones(2)},
        "_overwrite_with_gradient": {"stat": jnp.float32(0)},
    }
    for accum_steps in (1, 2):
        state = AmpTrainState.create(params=params, tx=optax.adam(0.1))
        step = make_train_step(loss, accum_steps=accum_steps, compute_dtype=jnp.float32)
        good, _ = step(copy(state), np.array([3.0, 5.0], np.float32))
        assert float(good.params["_overwrite_with_gradient"]["stat"]) == 5
        bad, metrics = step(copy(state), np.array([3.0, 7.0], np.float32))
        assert not metrics["grads_finite"]
        assert not changed(state.params, bad.params)
        assert int(metrics["skipped_total"]) == 1


# Evaluation


@pytest.mark.parametrize("dtype", DTYPES)
def test_eval_step_of_an_nnx_model(dtype):
    state, _ = setup("nnx")
    eval_step = make_eval_step(lambda model, b: model(b["x"]), compute_dtype=dtype)
    before = copy(state)
    out = eval_step(state, make_batch())
    assert not changed(before, state)
    model = state.merge_model()
    model.eval()
    np.testing.assert_allclose(out, model(make_batch()["x"]), rtol=0.02, atol=0.02)
    assert out.dtype == jnp.float32


def test_eval_step_folds_its_keys_with_the_step():
    def noise(params, batch, *, rngs):
        return jax.random.normal(rngs["a"])

    state = linear_state(rngs={"a": jax.random.key(0)})
    eval_step = make_eval_step(noise)
    first = eval_step(state, linear_batch())
    assert first == eval_step(state, linear_batch())
    later = state.replace(step=state.step + 1)
    assert first != eval_step(later, linear_batch())


def test_eval_step_of_a_linen_model():
    def predict(params, batch, *, state):
        variables = {"params": params, **state.variables}
        return state.apply_fn(variables, batch["x"], train=False)

    state, _ = setup("linen")
    out = make_eval_step(predict, compute_dtype=jnp.float32)(state, make_batch())
    expected = predict(state.params, make_batch(), state=state)
    np.testing.assert_allclose(out, expected, rtol=1e-5)
    raw = make_eval_step(predict, jit=False)
    assert not hasattr(raw, "lower")
    assert raw(state, make_batch()).shape == out.shape


# Errors


def linen_with(update):
    def loss(params, batch, *, state, rngs):
        value, aux = linen_loss(params, batch, state=state, rngs=rngs)
        return value, update(aux)

    return loss


def grow(aux):
    return {"variables": jax.tree.map(lambda x: x[None], aux["variables"])}


@pytest.mark.parametrize(
    "loss, options, error, message",
    [
        (lambda p, b: p["w"], {}, TypeError, r"float32\[3\] as its loss.*mean\(\)"),
        (lambda p, b: p["w"].sum().astype(int), {}, TypeError, r"int32\[\] as its"),
        (lambda p, b: None, {}, TypeError, "NoneType as its loss"),
        (
            lambda p, b: (p["w"].sum(), {}),
            {},
            TypeError,
            "tuple as its loss.*has_aux=True",
        ),
        (
            linear_loss,
            dict(has_aux=True),
            TypeError,
            r"make_train_step: linear_loss returned.*expected a \(loss, aux\) pair",
        ),
        (
            lambda p, b: (p["w"].sum(), 3.0),
            dict(has_aux=True),
            TypeError,
            "a float as aux; expected a dict",
        ),
        (
            lambda p, b: (p["w"].sum(), {"loss": 3.0, "scaler": 1}),
            dict(has_aux=True),
            ValueError,
            r"reserved names \['loss', 'scaler'\]",
        ),
        (
            lambda p, b: (p["w"].sum(), {"variables": {"cache": 1}}),
            dict(has_aux=True),
            ValueError,
            r"aux\['variables'\] with \['cache'\]; expected .* collections \[\]",
        ),
    ],
)
def test_bad_losses_are_named(loss, options, error, message):
    with pytest.raises(error, match=message):
        make_train_step(loss, **options)(linear_state(), linear_batch())


@pytest.mark.parametrize(
    "update, message",
    [
        (grow, r"batch_stats\['BatchNorm_0'\]\['mean'\]: float32\[8\] before, float32"),
        (
            lambda aux: {"variables": {"batch_stats": {}}},
            r"\['mean'\]: float32\[8\] before, absent now",
        ),
        (
            lambda aux: {"variables": {"intermediates": {}}},
            r"\['intermediates'\]; expected .*\['batch_stats'\]",
        ),
        (lambda aux: {"variables": 3}, "with int; expected a dict"),
    ],
)
def test_bad_collections_are_named(update, message):
    with pytest.raises(ValueError, match=message):
        make_train_step(linen_with(update), has_aux=True)(linen_state(), make_batch())


def test_frozen_collections_are_taken():
    def freeze(aux):
        return {"variables": flax.core.freeze(aux["variables"])}

    state, _ = make_train_step(linen_with(freeze), has_aux=True)(
        linen_state(), make_batch()
    )
    assert type(state.variables["batch_stats"]) is dict


def test_nnx_state_that_grows_is_named():
    def loss(model, batch):
        model.seen = nnx.BatchStat(jnp.zeros(2))
        return model(batch["x"]).mean()

    with pytest.raises(ValueError, match=r"\['seen'\]: absent before, float32"):
        make_train_step(loss)(nnx_state(), make_batch())


def test_nnx_loss_must_not_return_collections():
    def loss(model, batch):
        return model(batch["x"]).mean(), {"variables": {"norm": 1}}

    with pytest.raises(ValueError, match="model's own state is collected"):
        make_train_step(loss, has_aux=True)(nnx_state(), make_batch())


@pytest.mark.parametrize(
    "options, error, message",
    [
        (dict(compute_dtype=jnp.int8), TypeError, "compute_dtype.*int8"),
        (dict(compute_dtype="float17"), TypeError, "compute_dtype.*float17"),
        (dict(accum_steps=0), ValueError, "accum_steps=0; expected"),
        (dict(accum_steps=1.5), ValueError, "accum_steps=1.5; expected"),
        (dict(redo_on_nan=-1), ValueError, "make_train_step: redo_on_nan=-1"),
        (dict(loss_fn=3), TypeError, "loss_fn is a int; expected a function"),
    ],
)
def test_bad_arguments_are_named(options, error, message):
    with pytest.raises(error, match=message):
        make_train_step(**(dict(loss_fn=linear_loss) | options))


def test_bad_states_are_named():
    from flax.training.train_state import TrainState

    plain = TrainState.create(
        apply_fn=None, params={"w": jnp.ones(3)}, tx=optax.sgd(0.1)
    )
    for make in (make_train_step, make_eval_step):
        with pytest.raises(TypeError, match="state is a TrainState; expected an Amp"):
            make(linear_loss)(plain, linear_batch())
        with pytest.raises(TypeError, match="state is a dict"):
            make(linear_loss)({"w": jnp.ones(3)}, linear_batch())
    state = linear_state()
    state = state.replace(opt_state=state.opt_state.inner_state)
    with pytest.raises(TypeError, match="expected an optax.ApplyIfFiniteState"):
        make_train_step(linear_loss)(state, linear_batch())
    with pytest.raises(TypeError, match="make_eval_step: fn is a NoneType"):
        make_eval_step(None)
