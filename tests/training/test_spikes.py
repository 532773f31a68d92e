"""Steps that skip a spike as a whole, over core.py, progress.py, _skip_spikes.py."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

from _models import MODELS, changed, make_batch
from _steps import EmaState, copy, linear_objects, mapped, raised
from examples.digits import data
from flax_amp import (
    AmpTrainState,
    check_progress,
    checkpoint,
    init_scaler,
    make_nnx_train_step,
    make_train_step,
    optim,
)
from flax_amp._training.progress import StuckError
from helpers import assert_identical

# What a spike changes: the counts of steps and of skipped ones, what the guard has
# seen, and the count of finite steps of the scaler.
GUARD = tuple(
    f".opt_state.inner_state.{name}"
    for name in ("losses", "grad_norms", "update_norms")
)
COUNTS = (
    ".step",
    ".scaler['count']",
    ".opt_state.notfinite_count",
    ".opt_state.last_finite",
    ".opt_state.total_notfinite",
    ".opt_state.inner_state.spikes_total",
    ".opt_state.inner_state.spikes_in_a_row",
)


def guard(tx):
    return optim.skip_spikes(tx, window=16, factor=6.0)


def times(loss):
    """A loss times a number of the batch: a batch norm hides a batch that is large."""

    @functools.wraps(loss)
    def scaled(target, batch, **keywords):
        value, aux = loss(target, batch, **keywords)
        # Finite, but not its derivative if the root is 0.
        root = jnp.sqrt(batch["root"] * (1 + 0 * value))
        return batch["factor"] * value + root, aux

    return scaled


def a_batch(seed, factor=1.0, root=1.0, **options):
    numbers = {"factor": np.float32(factor), "root": np.float32(root)}
    return make_batch(seed, **options) | numbers


@functools.cache
def trained(name):
    """A state that has seen twelve batches, and its step."""
    make, loss = MODELS[name]
    made = dict(tx=guard(optax.adam(1e-3)), scaler=init_scaler(scaler=16))
    state = make(cls=EmaState, ema={"p": make().params, "n": 0}, **made)
    step = make_train_step(times(loss), has_aux=True, donate=False)
    for seed in range(12):
        state, _ = step(state, a_batch(seed))
    return state, step


@pytest.mark.parametrize("name", MODELS)
def test_a_spike_changes_nothing_else(name):
    """Batch statistics, random streams and averages of parameters stay, too."""
    state, step = trained(name)
    after, metrics = step(state, a_batch(20, 1e3))
    assert jnp.isfinite(metrics["loss"]) and not metrics["grads_finite"]
    assert metrics["spikes_total"] == metrics["skipped_total"] == 1
    assert metrics["scaler"] == 16
    moved = changed(state, after)
    assert moved >= {".step", ".opt_state.inner_state.spikes_total"}
    assert all(path in COUNTS or path.startswith(GUARD) for path in moved)
    again, metrics = step(after, a_batch(21))
    assert metrics["grads_finite"] and metrics["spikes_total"] == 1
    assert changed(after.params, again.params)


@pytest.mark.parametrize("bad", [{"poisoned": True}, {"root": 0.0}])
@pytest.mark.parametrize("name", MODELS)
def test_a_step_that_is_not_finite_is_no_spike(name, bad):
    """The guard remembers nothing of it, also if only the gradients are not finite."""
    state, step = trained(name)
    after, metrics = step(state, a_batch(20, **bad))
    assert metrics["spikes_total"] == 0 and metrics["skipped_total"] == 1
    assert not any(path.startswith(GUARD) for path in changed(state, after))


LINE = {"w": jnp.float32([1.0, -2.0, 0.5])}


def line_loss(params, x):
    return ((x @ params["w"]) ** 2).mean()


def line_batches(count, spike):
    generator = np.random.default_rng(0)
    x = generator.normal(size=(count, 16, 3)).astype(np.float32)
    x[spike] *= 1e3
    return jnp.asarray(x)


def line_state(tx):
    return AmpTrainState.create(params=copy(LINE), tx=tx)


TX = {
    "guard": guard(optax.adam(1e-3)),
    "in a chain": optax.chain(optax.clip_by_global_norm(1e3), guard(optax.adam(1e-3))),
    "around a chain": guard(optax.chain(optax.clip(1e3), optax.adam(1e-3))),
    "optim": guard(optim.adam(1e-3)),
    "guarded": optax.apply_if_finite(guard(optax.adam(1e-3)), 2**30),
    "guards it": guard(optax.apply_if_finite(optax.adam(1e-3), 2**30)),
    "small": guard(optim.small_state(optax.adam(1e-3))),
    "around micro-steps": guard(optax.MultiSteps(optax.adam(1e-3), 2)),
    "labelled": optax.multi_transform({"a": guard(optax.adam(1e-3))}, {"w": "a"}),
}


@pytest.mark.parametrize("name", TX)
@pytest.mark.once
def test_wherever_the_guard_is(name):
    """A run with a spike is the run without this batch."""
    step = make_train_step(line_loss, donate=False)
    batches = line_batches(20, spike=14)
    state = without = line_state(TX[name])
    for i, x in enumerate(batches):
        state, metrics = step(state, x)
        assert metrics["grads_finite"] == (i != 14)
        if i != 14:
            without, _ = step(without, x)
    assert metrics["spikes_total"] == 1
    assert_identical(state.params, without.params)


def test_in_the_updates_of_micro_steps():
    """A spike is one of a sum of gradients, which is dropped."""
    step = make_train_step(line_loss, donate=False)
    state = line_state(optax.MultiSteps(guard(optax.adam(1e-3)), 2))
    seen = []
    for x in line_batches(40, spike=30):
        state, metrics = step(state, x)
        seen.append(bool(metrics["grads_finite"]))
    assert metrics["spikes_total"] == 1
    assert seen[31] is False and seen.count(False) == 1


def test_in_a_scan_and_over_micro_batches():
    batches = line_batches(20, spike=14)
    step = make_train_step(line_loss, accum_steps=4, jit=False)
    run = jax.jit(lambda state, xs: jax.lax.scan(step, state, xs))
    _, metrics = run(line_state(TX["guard"]), batches)
    assert metrics["grads_finite"].tolist() == [i != 14 for i in range(20)]
    assert metrics["spikes_total"][-1] == 1


def test_over_devices(mesh):
    """The devices decide alike: one that has seen no spike skips, too."""
    step = make_train_step(line_loss, axis_name="data", jit=False)
    step = mapped(step, mesh)
    state = line_state(TX["guard"])
    for i, x in enumerate(line_batches(16, spike=[])):
        x = x.at[:2].multiply(1e3) if i == 14 else x
        state, metrics = step(state, x)
        assert metrics["grads_finite"] == (i != 14)


@pytest.mark.parametrize("kind", ["amp", "plain"])
def test_nnx(kind):
    """Of a plain optimizer, too, which counts no skipped steps."""

    model, optimizer = linear_objects(tx=TX["guard"])
    if kind == "plain":
        optimizer = nnx.Optimizer(model, TX["guard"], wrt=nnx.Param)
    step = make_nnx_train_step(lambda model, x: (model(x) ** 2).mean())
    for i, x in enumerate(line_batches(16, spike=14)):
        kernel = np.asarray(model.kernel[...])
        metrics = step(model, optimizer, x)
        assert (kernel == model.kernel[...]).all() == (i == 14)
    assert metrics["spikes_total"] == 1
    assert ("skipped_total" in metrics) == (kind == "amp")


def test_check_progress_names_spikes():
    state, step = trained("linen")
    after, metrics = step(state, a_batch(20, 1e3))
    call = functools.partial(check_progress, after, metrics, max_skips=1)
    raised(call, StuckError, "far above the recent values: flax_amp.optim.skip_spikes")
    # A bad batch after the spike is what it is.
    after, metrics = step(after, a_batch(21, poisoned=True))
    call = functools.partial(check_progress, after, metrics, max_skips=1)
    raised(call, StuckError, "The loss is not finite.*find_nonfinite")


# --- a real task ---------------------------------------------------------------------


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(10)(nn.relu(nn.Dense(32)(x.reshape(len(x), -1))))


def digits_loss(params, batch):
    logits = Net().apply({"params": params}, batch["image"])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    return losses.mean()


DIGITS_TX = optim.skip_spikes(optax.adam(1e-3))


def digits(steps, spike=None, state=None, first=0):
    """Trains on digits; the batch of one step may be a thousand times too large."""
    train, _ = data.load(split_seed=0)
    if state is None:
        params = Net().init(jax.random.key(0), jnp.ones((1, 8, 8, 1)))["params"]
        state = AmpTrainState.create(params=params, tx=DIGITS_TX)
    step = digits_step()
    losses = []
    for i in range(first, steps):
        batch = data.batch_at(train, i, batch_size=64, seed=0)
        if i == spike:
            batch = batch | {"image": 1e3 * batch["image"]}
        state, metrics = step(state, batch)
        losses.append(metrics["loss"])
    return state, metrics, np.mean(losses[-20:])


@functools.cache
def digits_step():
    return make_train_step(digits_loss)


@pytest.mark.once
def test_a_run_with_a_spike_ends_where_the_other_does(tmp_path):
    """And a run that is saved behind the spike and resumed ends with its bits."""
    _, metrics, undisturbed = digits(300)
    assert metrics["spikes_total"] == 0
    state, metrics, disturbed = digits(300, spike=200)
    assert metrics["spikes_total"] == 1
    assert disturbed == pytest.approx(undisturbed, rel=0.05)
    killed, *_ = digits(230, spike=200)
    with checkpoint.manager(tmp_path / "run") as manager:
        checkpoint.save(manager, killed)
    fresh, *_ = digits(1)
    restored = checkpoint.restore(tmp_path / "run", fresh)
    resumed, *_ = digits(300, spike=200, state=restored, first=230)
    assert_identical(resumed, state)
