"""`skip_spikes`: steps with a loss or gradients far above the recent ones."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx, serialization

from flax_amp import AmpTrainState, checkpoint, optim
from flax_amp.optim._skip_spikes import keep_counts, spiked, spikes_total
from flax_amp.optim._small_state import SmallState, rounds_parameters
from flax_amp.optim._spike_rule import SpikeState
from helpers import assert_identical

pytestmark = pytest.mark.once  # arithmetic, and optax

PARAMS = {"w": jnp.ones((4, 2)), "b": jnp.zeros(2)}
GRADS = jax.tree.map(lambda x: jnp.full_like(x, 0.5), PARAMS)
SPIKE = jax.tree.map(lambda x: 1e3 * x, GRADS)
ZEROS = jax.tree.map(jnp.zeros_like, PARAMS)


@functools.partial(jax.jit, static_argnames=("window", "warmup"))
def judged(losses, factor, **options):
    """The state after all losses, and which are skipped; one program for a length."""
    tx = optim.skip_spikes(optax.identity(), factor=factor, **options)

    def step(state, loss):
        _, new = tx.update({}, state, loss=loss)
        return new, new.spikes_total > state.spikes_total

    return jax.lax.scan(step, tx.init({}), losses)


def skipped_steps(losses, factor=20.0, **options):
    """Which of these losses are skipped, and the state after all of them."""
    losses, factor = np.asarray(losses, np.float32), np.float32(factor)
    state, skipped = judged(losses, factor, **options)
    return np.asarray(skipped), state


# The rule


def by_hand(losses, factor, window, warmup):
    """The rule with lists and float64: which losses are spikes, and what is kept."""
    kept, skipped, in_a_row = [], [], 0
    for loss in losses:
        if in_a_row == window // 2:
            kept = []
        recent = kept[-window:]
        spread = mean = 0.0
        if len(recent) >= 8:
            mean = np.mean(recent, dtype=np.float64)
            spread = max(np.std(recent, ddof=1, dtype=np.float64), 0.01 * abs(mean))
        above = (loss - mean) / spread if spread else 0.0
        is_spike = bool(len(recent) >= warmup and np.isfinite(loss) and above > factor)
        if np.isfinite(loss):
            kept.append(min(loss, mean + 6 * spread) if spread else loss)
        skipped.append(is_spike)
        in_a_row = in_a_row + 1 if is_spike else 0
    return np.array(skipped), kept


def noise(rng, size=600):
    return rng.normal(1.0, 0.05, size)


def with_spikes(rng):
    losses = noise(rng)
    losses[rng.choice(600, 30, replace=False)] *= 1e3
    return losses


def with_a_new_level(rng):
    return noise(rng) * np.where(np.arange(600) < 300, 1.0, 30.0)


def not_finite(rng):
    losses = with_spikes(rng)
    losses[rng.choice(600, 90, replace=False)] = np.nan
    losses[rng.choice(600, 90, replace=False)] = np.inf
    losses[rng.choice(600, 90, replace=False)] = -np.inf
    return losses


SEQUENCES = {
    "noise": noise,
    "long tails": lambda rng: rng.lognormal(0.0, 1.5, 600),
    "falling": lambda rng: noise(rng) * np.exp(-np.arange(600) / 30),
    "rising": lambda rng: noise(rng) * np.exp(np.arange(600) / 30),
    "negative": lambda rng: with_spikes(rng) - 10.0,
    "around zero": lambda rng: rng.normal(0.0, 1.0, 600) ** 3,
    "spikes": with_spikes,
    "a new level": with_a_new_level,
    "mostly zeros": lambda rng: noise(rng) * (rng.random(600) < 0.1),
    "large": lambda rng: 1e35 * with_spikes(rng),
    "small": lambda rng: 1e-30 * with_spikes(rng),
    "not finite": not_finite,
}


@pytest.mark.parametrize("factor, window, warmup", [(20, 128, 64), (4, 16, 8)])
@pytest.mark.parametrize("name", SEQUENCES)
def test_the_rule_by_hand(name, factor, window, warmup, rng):
    losses = SEQUENCES[name](rng).astype(np.float32)
    expected, kept = by_hand(losses, factor, window, warmup)
    found, state = skipped_steps(losses, factor, window=window, warmup=warmup)
    np.testing.assert_array_equal(found, expected)
    assert state.spikes_total == expected.sum()
    values, seen = state.losses
    position = int(seen) % window
    ordered = np.roll(values, -position)[-min(int(seen), window) :]
    np.testing.assert_allclose(ordered, kept[-window:], rtol=1e-4)


@pytest.mark.parametrize("name", ["noise", "falling", "rising", "around zero"])
def test_without_a_spike_nothing_is_skipped(name, rng):
    assert not skipped_steps(SEQUENCES[name](rng))[0].any()


def test_no_spike_hides_another(rng):
    """Two in a row, and one in every forty steps for ever."""
    losses = rng.normal(1.0, 0.05, 8000)
    at = np.append(np.arange(200, 8000, 40), 201)
    losses[at] *= 1e3
    found, _ = skipped_steps(losses)
    np.testing.assert_array_equal(np.flatnonzero(found), np.sort(at))


def test_a_spike_in_the_warmup_passes_and_hides_no_other(rng):
    losses = noise(rng)
    losses[[30, 70]] *= 1e3
    assert np.flatnonzero(skipped_steps(losses)[0]).tolist() == [70]


JUMPS = [1.5, 2.0, 10.0, 1e3, 1e6, 1e30]


@pytest.mark.parametrize(
    "factor, window, lasts",
    [
        (20, 128, [11, 17, 35, 64, 64, 64]),
        (20, 16, [2, 4, 7, 8, 8, 8]),
        (6, 128, [21, 26, 44, 64, 64, 64]),
        (1, 128, [64] * 6),
    ],
)
def test_a_new_level_becomes_normal(factor, window, lasts):
    """From constant losses, which is slowest, after half a window at the latest."""
    for jump, expected in zip(JUMPS, lasts, strict=True):
        losses = np.repeat([1.0, jump], [2 * window, 8 * window])
        found, state = skipped_steps(losses, factor, window=window)
        skipped = np.flatnonzero(found) - 2 * window
        assert skipped.tolist() == list(range(expected)), jump
        assert state.spikes_in_a_row == 0 and expected <= window // 2


def test_a_level_of_some_steps_becomes_normal(rng):
    """Never half a window in a row, but more than one step in 36."""
    losses = noise(rng, 3000)
    harder = (rng.random(3000) < 0.3) & (np.arange(3000) > 500)
    losses[harder] *= 100
    found, _ = skipped_steps(losses)
    assert found[:1000].any() and not found[1000:].any()


@pytest.mark.parametrize("loss", [2.0, -2.0, 1e-30, 0.0])
def test_constant_losses(loss):
    losses = np.full(300, loss)
    losses[200:] += abs(loss) * 1e-6 * np.arange(100)
    assert not skipped_steps(losses)[0].any()


def test_zeros_tell_no_size():
    """The first other loss is no spike, and those like it are none either."""
    losses = np.zeros(500)
    losses[100::25] = 1.0
    losses[300] = 100.0
    assert np.flatnonzero(skipped_steps(losses)[0]).tolist() == [300]


def test_losses_in_float64():
    with jax.enable_x64(True):
        tx = optim.skip_spikes(optax.identity(), factor=jnp.float64(20.0))
        state = tx.init({})
        for loss in [1.0] * 64 + [1e300]:
            _, state = jax.jit(tx.update)({}, state, loss=jnp.float64(loss))
        assert state.spikes_total == 1
        assert {x.dtype.name for x in jax.tree.leaves(state)} == {"float32", "int32"}


# What is judged


def warm(tx, params=PARAMS, steps=12, update=None, **extra):
    """A state after some steps, in which a spike is seen, and its update."""
    state = tx.init(params)
    update = update or jax.jit(tx.update)
    for _ in range(steps):
        _, state = update(GRADS, state, params, **extra)
    return state, update


OPTIONS = dict(window=16)
LARGE = jnp.float32(1e6)
JUDGED = {  # names of extra arguments in usual steps, all 1; a last step is skipped
    "the norm of the updates": ((), {}, SPIKE),
    "grad_norm": (("grad_norm",), dict(grad_norm=LARGE), GRADS),
    "the updates beside grad_norm": (("grad_norm",), dict(grad_norm=1.0), SPIKE),
    "loss": (("loss",), dict(loss=LARGE), GRADS),
    "value": (("value",), dict(value=LARGE), GRADS),
    "loss, not value": (("loss",), dict(loss=LARGE, value=1.0), GRADS),
    "no loss, but value": (("value",), dict(loss=None, value=LARGE), GRADS),
    "bfloat16": (("loss",), dict(loss=jnp.bfloat16(1e6)), GRADS),
}
PASSED = {  # the same, and the last one is not skipped
    "a small loss": (("loss",), dict(loss=jnp.float32(-1e6)), GRADS),
    "value beside loss": (("loss",), dict(loss=1.0, value=LARGE), GRADS),
    "nan": (("loss",), dict(loss=jnp.nan), GRADS),
    "inf": (("loss",), dict(loss=jnp.inf), GRADS),
    "updates of inf": ((), {}, jax.tree.map(lambda x: x + jnp.inf, GRADS)),
    "a first loss": ((), dict(loss=LARGE), GRADS),
}


GUARDED_SGD = optim.skip_spikes(optax.sgd(0.1), **OPTIONS)


@functools.cache
def warm_sgd(names):
    """A state of usual steps with these extra arguments; all share an update."""
    update = jax.jit(GUARDED_SGD.update) if not names else warm_sgd(())[1]
    usual = dict.fromkeys(names, np.float32(1))
    return warm(GUARDED_SGD, update=update, **usual)


@pytest.mark.parametrize("name", [*JUDGED, *PASSED])
def test_what_is_judged(name):
    usual, last, grads = (JUDGED | PASSED)[name]
    state, update = warm_sgd(usual)
    updates, state = update(grads, state, PARAMS, **last)
    assert state.spikes_total == (name in JUDGED)
    sent = ZEROS if name in JUDGED else jax.tree.map(lambda x: -0.1 * x, grads)
    jax.tree.map(np.testing.assert_allclose, updates, sent)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
def test_gradients_whose_squares_overflow_are_a_spike(dtype):
    tx = optim.skip_spikes(optax.sgd(0.1), **OPTIONS)
    largest = float(jnp.finfo(dtype).max) / 4
    cast = lambda tree, x: jax.tree.map(lambda leaf: (x * leaf).astype(dtype), tree)  # noqa: E731
    state, update = tx.init(PARAMS), jax.jit(tx.update)
    for scale in [1e3] * 12 + [largest]:
        _, state = update(cast(GRADS, scale), state, PARAMS)
    assert state.spikes_total == 1
    np.testing.assert_allclose(state.update_norms.values[0], 500 * 10**0.5, rtol=1e-3)
    assert all(jnp.isfinite(x).all() for x in jax.tree.leaves(state))


def test_what_is_not_finite_is_not_recorded():
    tx = optim.skip_spikes(optax.adam(0.1), **OPTIONS)
    state, update = warm(tx, loss=1.0)
    _, new = update(GRADS, state, PARAMS, loss=jnp.nan)
    assert_identical(new.losses, state.losses)
    assert new.update_norms.seen == state.update_norms.seen + 1
    plain = optax.adam(0.1).update(GRADS, state.inner_state, PARAMS)[1]
    jax.tree.map(np.testing.assert_allclose, new.inner_state, plain)


# A skipped step


NOISY = optax.chain(optax.add_noise(0.1, 0.5, jax.random.key(0)), optax.adam(0.1))


@pytest.mark.parametrize("inner", [optax.adam(0.1), NOISY, optax.contrib.prodigy(1.0)])
def test_a_spike_changes_no_bit(inner):
    """And afterwards, the run goes on as if it had not been."""
    tx = optim.skip_spikes(inner, **OPTIONS)
    state, update = warm(tx)
    poisoned = jax.tree.map(lambda x: -x, SPIKE) | {"b": jnp.zeros(2)}
    updates, new = update(poisoned, state, PARAMS)
    assert_identical(updates, ZEROS)
    assert_identical(new.inner_state, state.inner_state)
    assert (new.spikes_total, new.spikes_in_a_row) == (1, 1)
    again, new = update(GRADS, new, PARAMS)
    expected, state = update(GRADS, state, PARAMS)
    assert_identical(again, expected)
    assert_identical(new.inner_state, state.inner_state)
    assert (new.spikes_total, new.spikes_in_a_row) == (1, 0)


def test_extra_arguments_are_handed_on():
    seen = []

    def update(updates, state, params=None, **extra):
        seen.append(extra)
        return updates, state

    class Own:  # an optimizer that is no optax.GradientTransformation
        def init(self, params):
            return ()

        def update(self, updates, state, params=None, *, loss):
            seen.append({"loss": loss})
            return updates, state

    given = dict(loss=1.0, grad_norm=2.0, mine="x")
    of_optax = optax.GradientTransformationExtraArgs(lambda params: (), update)
    for inner, expected in [
        (of_optax, [given]),
        (optax.MultiSteps(of_optax, 2), [given]),
        (Own(), [{"loss": 1.0}]),
        (optax.adam(0.1), []),
    ]:
        seen.clear()
        tx = optim.skip_spikes(inner)
        state = jax.eval_shape(tx.init, PARAMS)
        update = functools.partial(tx.update, **given)
        jax.eval_shape(update, GRADS, state, PARAMS)
        assert seen[-1:] == expected  # MultiSteps traces it several times


# Inside of other optimizers, and around them


def guard(inner=None, **options):
    return optim.skip_spikes(inner or optax.adam(0.1), **OPTIONS | options)


LABELS = {"w": "a", "b": "b"}
NESTINGS = {
    "alone": guard,
    "chain": lambda: optax.chain(optax.trace(0.9), guard(), optax.ema(0.9)),
    "named_chain": lambda: optax.named_chain(("a", guard()), ("b", optax.ema(0.9))),
    "multi_transform": lambda: optax.multi_transform(
        {"a": guard(), "b": optax.sgd(0.1)}, LABELS
    ),
    "two": lambda: optax.multi_transform({"a": guard(), "b": guard()}, LABELS),
    "around multi_transform": lambda: guard(
        optax.multi_transform({"a": optax.adam(0.1), "b": optax.sgd(0.1)}, LABELS)
    ),
    "twice": lambda: guard(optax.chain(optax.trace(0.9), guard(factor=30.0))),
    "the inner one of two": lambda: guard(
        optax.chain(optax.trace(0.9), guard()), factor=1e9
    ),
    "in MultiSteps": lambda: optax.MultiSteps(guard(), 1),
    "in a cond": lambda: optax.MultiSteps(
        guard(), 1, should_skip_update_fn=optax.skip_not_finite
    ),
    "around MultiSteps": lambda: guard(optax.MultiSteps(optax.adam(0.1), 2)),
    "in apply_if_finite": lambda: optax.apply_if_finite(guard(), 5),
    "around apply_if_finite": lambda: guard(optax.apply_if_finite(optax.sgd(0.1), 5)),
    "in inject_hyperparams": lambda: optax.inject_hyperparams(
        lambda learning_rate: guard(optax.adam(learning_rate))
    )(0.1),
    "in masked": lambda: optax.masked(guard(), {"w": True, "b": False}),
    "in small_state": lambda: optim.small_state(guard()),
    "around small_state": lambda: guard(optim.small_state(optax.adam(0.1))),
    "optim": lambda: guard(optim.adamw(0.1)).to_optax(in_state=True),
    "optim, inside": lambda: optim.chain(
        optim.trace(0.9), guard(optim.adam(0.1))
    ).to_optax(in_state=True),
    "optim.MultiSteps": lambda: optim.MultiSteps(guard(), 1).to_optax(in_state=True),
}


def own_part(state):
    return state._replace(inner_state=None)


def split(opt_state):
    """Returns the guards of a state, without the states inside, and all the rest."""
    guards = []

    def rest(tree):
        is_guard = lambda node: isinstance(node, SpikeState)  # noqa: E731
        leaves = jax.tree.leaves(tree, is_leaf=is_guard)
        found = [leaf for leaf in leaves if isinstance(leaf, SpikeState)]
        guards.extend(map(own_part, found))
        return [x for x in leaves if not is_guard(x)], [
            rest(x.inner_state) for x in found
        ]

    kept = rest(opt_state)
    return guards, kept


@pytest.mark.parametrize("name", NESTINGS)
def test_wherever_it_stands(name, count_traces):
    tx = NESTINGS[name]()
    update, traces = count_traces(tx.update)

    @jax.jit
    def step(grads, old):
        _, new = update(grads, old, PARAMS, loss=jnp.float32(1.0))
        return new, keep_counts(old, new), spiked(old, new), spikes_total(new)

    state = jax.jit(tx.init)(PARAMS)
    assert not any(x.weak_type for x in jax.tree.leaves(state))
    for i in range(14):
        is_spike = i == 12
        old = state
        state, kept, has_spiked, total = step(SPIKE if is_spike else GRADS, old)
        assert has_spiked == is_spike
        count = 2 if name == "two" else 1  # of these, each sees a spike
        assert total == (count if i >= 12 else 0)
        if is_spike:
            new, state = state, kept
            assert_identical(split(state), (split(new)[0], split(old)[1]))
            assert jax.tree.structure(state) == jax.tree.structure(old)
    assert traces() == 1


def test_without_one():
    state = optax.chain(optax.adam(0.1), optax.MultiSteps(optax.sgd(0.1), 2)).init(
        PARAMS
    )
    other = jax.tree.map(lambda x: x + 1, state)
    assert spiked(state, other) is None and spikes_total(state) is None
    assert_identical(keep_counts(state, other), state)


def test_any_of_several():
    """One sees a spike, of its own gradients; both have recorded the step."""
    tx = optax.multi_transform({"a": guard(), "b": guard()}, LABELS)
    state, update = warm(tx)
    _, new = update(GRADS | {"b": SPIKE["b"]}, state, PARAMS)
    assert spiked(state, new) and spikes_total(new) == 1
    kept = keep_counts(state, new)
    (one, other), inside = split(kept)
    assert (one.spikes_total, other.spikes_total) == (0, 1)
    assert one.update_norms.seen == other.update_norms.seen == 13
    assert_identical(inside, split(state)[1])


def test_micro_steps_with_a_spike_are_dropped_together():
    """Their mean is judged, and the sum of a skipped update is not that of the next."""
    tx = optax.MultiSteps(guard(optax.sgd(1.0)), 2)
    state, update = warm(tx, steps=24, grad_norm=optax.tree.norm(GRADS))
    seen = []
    for grads in SPIKE, GRADS, GRADS, GRADS:
        norm = optax.tree.norm(grads)  # of the micro-step alone
        old, (updates, state) = state, update(grads, state, PARAMS, grad_norm=norm)
        seen.append(bool(spiked(old, state)))
        if seen[-1]:
            assert_identical(updates, ZEROS)
            state = keep_counts(old, state)
            assert (state.mini_step, state.gradient_step) == (0, 12)
            assert_identical(state.acc_grads, ZEROS)
    assert seen == [False, True, False, False]
    jax.tree.map(np.testing.assert_allclose, updates, jax.tree.map(jnp.negative, GRADS))


def test_another_guard_drops_no_micro_steps():
    """Only the sum that is a spike itself begins anew."""
    sums = optax.MultiSteps(guard(optax.sgd(1.0), factor=1e9), 3)
    tx = optax.chain(guard(optax.identity()), sums.gradient_transformation())
    state, update = warm(tx, steps=13)  # the last one is the first of three
    _, new = update(SPIKE, state, PARAMS)
    assert spiked(state, new) and new[1].mini_step == 2
    assert_identical(keep_counts(state, new)[1], state[1])


@pytest.mark.parametrize("around", [guard, lambda tx: optax.apply_if_finite(tx, 5)])
def test_parameters_in_half_precision(around):
    """A spike changes no bit of parameters that are rounded stochastically."""
    tx = guard(optim.small_state(optax.adam(0.1)))
    assert isinstance(tx.init(PARAMS).inner_state, SmallState)
    assert rounds_parameters(tx.init(PARAMS))
    assert not rounds_parameters(guard().init(PARAMS))
    tx = around(optim.small_state(guard()))
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), PARAMS)
    state, update = warm(tx, half)
    updates, new = update(SPIKE, state, half)
    assert_identical(optax.apply_updates(half, updates), half)
    assert spiked(state, new)
    moments = lambda state: split(state)[1][1]  # noqa: E731
    assert_identical(moments(new), moments(state))


# Pytree optimizers


def test_an_optimizer_stays_one():
    fall = optim.linear_schedule(1.0, 0.0, 100)
    tx = guard(optim.adamw(fall, weight_decay=jnp.float32(0.1))).init(PARAMS)
    assert isinstance(tx, optim.Optimizer) and isinstance(tx.opt_state, SpikeState)
    step = jax.jit(lambda tx, grads, loss: tx.update(grads, PARAMS, loss=loss)[1])
    for _ in range(12):
        tx = step(tx, GRADS, 1.0)
    rate = tx.hyperparams["learning_rate"]
    np.testing.assert_allclose(rate, 1.0 - 0.11)
    tx = step(tx, SPIKE, 1.0)
    assert tx.opt_state.spikes_total == 1
    assert tx.hyperparams["learning_rate"] == rate  # that of the last update
    assert tx.hyperparams["factor"] == 20.0
    tx = step(tx.replace(weight_decay=0.2), GRADS, 1.0)
    assert step._cache_size() == 1


def test_the_schedule_around_one_is_not_told():
    """Its count goes on at a spike, that inside does not."""
    fall = optim.linear_schedule(1.0, 0.0, 100)
    tx = optim.chain(guard(optim.adam(fall)), optim.scale_by_schedule(fall))
    assert tx.init(PARAMS).opt_state is not None
    assert "step_size_fn" not in tx.init(PARAMS).hyperparams


def test_factors_of_a_sweep():
    """A factor that is an array is traced."""
    tx = optim.skip_spikes(optim.sgd(0.1), factor=jnp.float32(20.0), **OPTIONS)
    runs = jax.vmap(lambda factor: tx.replace(factor=factor).init(PARAMS))(
        jnp.array([5.0, 20.0, 1e9])
    )
    update = jax.jit(
        jax.vmap(lambda tx, loss: tx.update(GRADS, loss=loss)[1], (0, None))
    )
    for loss in [1.0] * 12 + [1.1, 3.0]:
        runs = update(runs, loss)
    assert runs.opt_state.spikes_total.tolist() == [2, 1, 0]


def test_an_optimizer_of_nnx():
    model = nnx.Linear(4, 2, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, guard(), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, loss):
        grads = jax.tree.map(jnp.ones_like, nnx.state(model, nnx.Param))
        optimizer.update(model, grads, loss=loss)

    for loss in [1.0] * 12:
        step(model, optimizer, loss)
    kernel, state = model.kernel[...], nnx.as_pure(optimizer.opt_state)
    step(model, optimizer, 1e3)
    new = nnx.as_pure(optimizer.opt_state)
    assert spiked(state, new) and spikes_total(new) == 1
    assert_identical(new.inner_state, state.inner_state)
    assert_identical(model.kernel[...], kernel)


# Under transformations, and on disk


def run(grads_and_losses, tx=guard()):  # noqa: B008
    def step(carry, given):
        params, state = carry
        scale, loss = given
        grads = jax.tree.map(lambda x: scale * x, GRADS)
        updates, state = tx.update(grads, state, params, loss=loss)
        return (optax.apply_updates(params, updates), state), updates

    return jax.lax.scan(step, (PARAMS, tx.init(PARAMS)), grads_and_losses)


def test_runs_of_a_vmap_are_those_alone():
    """Each skips its own steps."""
    scales, losses = np.ones((3, 30), np.float32), np.ones((3, 30), np.float32)
    scales[0, 20] = losses[1, 10] = 1e3
    together = jax.jit(jax.vmap(run))((scales, losses))
    assert together[0][1].spikes_total.tolist() == [1, 1, 0]
    run_alone = jax.jit(run)
    for i in range(3):
        alone = run_alone((scales[i], losses[i]))
        found = jax.tree.map(lambda x: x[i], together)  # noqa: B023
        jax.tree.map(
            lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), found, alone
        )


def test_a_step_donates_and_is_traced_once(count_traces):
    """Also if the optimizer keeps the parameters in its state."""
    tx = guard(optax.contrib.prodigy(1.0))
    update, traces = count_traces(tx.update)
    update, state = jax.jit(update, donate_argnums=1), tx.init(PARAMS)
    for loss in [1.0] * 12 + [1e3]:
        old, (_, state) = state, update(GRADS, state, PARAMS, loss=jnp.float32(loss))
        assert all(x.is_deleted() for x in jax.tree.leaves(old))
    assert not any(x.is_deleted() for x in jax.tree.leaves(PARAMS))
    assert traces() == 1 and state.spikes_total == 1
    assert not any(x.weak_type for x in jax.tree.leaves(state))


def test_a_state_is_saved_and_restored(tmp_path):
    tx = guard()

    def new_state():
        return AmpTrainState.create(params=PARAMS, tx=tx)

    state, step = new_state(), jax.jit(lambda s, grads: s.apply_gradients(grads=grads))
    for grads in [GRADS] * 13 + [SPIKE]:
        state = step(state, grads)
    assert spikes_total(state.opt_state) == 1
    with checkpoint.manager(tmp_path) as manager:
        checkpoint.save(manager, state)
    assert_identical(checkpoint.restore(tmp_path, new_state()), state)
    as_dict = serialization.to_state_dict(state.opt_state.inner_state)
    assert set(as_dict) == set(SpikeState._fields)
    read = serialization.from_state_dict(guard().init(PARAMS), as_dict)
    assert_identical(read, state.opt_state.inner_state)


# Messages


@pytest.mark.parametrize("make", [optim.skip_spikes, optim.small_state])
@pytest.mark.parametrize(
    "tx, name",
    [
        (optax.adam, "'adam'"),
        (optim.adam, "'adam'"),
        (optax.MultiSteps, "'MultiSteps'"),
        (1e-3, "'float'"),
        (None, "'NoneType'"),
    ],
)
def test_no_optimizer(make, tx, name):
    text = rf"flax_amp.optim.{make.__name__}: got {name}; .* call the function: optax"
    with pytest.raises(TypeError, match=text):
        make(tx)


def test_a_factory_of_no_optimizer():
    with pytest.raises(TypeError, match=r"mine: got 'adam'; .* call the function"):

        def mine():
            return optax.adam

        optim.wrap(mine)()


@pytest.mark.parametrize("inner", [optax.adam(0.1), optim.adam(0.1)])
@pytest.mark.parametrize(
    "options, text",
    [
        (dict(factor=0), "factor=0; expected a number above 0"),
        (dict(factor=-1.0), "factor=-1.0; expected a number above 0"),
        (dict(factor=float("nan")), "factor=nan; expected a number above 0"),
        (dict(factor="6"), "factor='6'; expected a number above 0"),
        (dict(factor=True), "factor=True; expected a number above 0"),
        (dict(window=15), "window=15; expected an integer of at least 16"),
        (dict(window=64.0), "window=64.0; expected an integer of at least 16"),
        (dict(warmup=7), "warmup=7; expected an integer from 8 to 128"),
        (dict(warmup=129), "warmup=129; expected an integer from 8 to 128"),
    ],
)
def test_wrong_arguments(inner, options, text):
    with pytest.raises(ValueError, match=f"flax_amp.optim.skip_spikes: {text}"):
        optim.skip_spikes(inner, **options)


def test_wrong_arguments_of_an_update():
    tx = guard()
    state = tx.init(PARAMS)
    with pytest.raises(TypeError, match=r"skip_spikes: update got a tuple as state"):
        tx.update(GRADS, state.inner_state, PARAMS)
    with pytest.raises(ValueError, match=r"float32\[4\] as losses; expected a real"):
        tx.update(GRADS, state, PARAMS, loss=jnp.ones(4))
    with pytest.raises(ValueError, match=r"complex64\[\] as grad_norms; expected"):
        tx.update(GRADS, state, PARAMS, grad_norm=jnp.complex64(1))
