"""Optimizers that read more than gradients: the loss, or the norm of the gradients."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from optax import contrib

from _steps import linear_batch, linear_loss, linear_state, raised
from flax_amp import (
    AmpOptimizer,
    AmpTrainState,
    make_nnx_train_step,
    make_train_step,
    optim,
)
from helpers import assert_close

W = jnp.array([1.0, -2.0, 0.5])


class Seen(NamedTuple):
    """What `watching` was given last."""

    numbers: jax.Array
    grad: optax.Updates


def watching(*, strict=False):
    """Keeps what a step gives it; a strict one takes nothing else."""

    def init(params):
        return Seen(jnp.zeros(3), jax.tree.map(jnp.zeros_like, params))

    def strictly(updates, state, params=None, *, value, loss, grad, grad_norm):
        del state, params
        return updates, Seen(jnp.stack([value, loss, grad_norm]), grad)

    def update(updates, state, params=None, **extra):
        assert set(extra) >= {"value", "loss", "grad", "grad_norm"}
        known = ("value", "loss", "grad", "grad_norm")
        return strictly(updates, state, params, **{k: extra[k] for k in known})

    fn = strictly if strict else update
    return optax.GradientTransformationExtraArgs(init, fn)


def then_plateau(tx):
    return optax.chain(tx, contrib.reduce_on_plateau(patience=1, rtol=0.5))


def with_value(factory, *args, **options):
    return lambda: factory(*args, **options)


OPTIMIZERS = {
    "reduce_on_plateau": lambda: then_plateau(optax.adam(0.1)),
    "polyak_sgd": with_value(optax.polyak_sgd, max_learning_rate=0.1),
    "momo": with_value(contrib.momo, learning_rate=0.1),
    "schedule_free around": lambda: contrib.schedule_free(
        then_plateau(optax.sgd(0.1)), 0.1
    ),
    "prodigy": with_value(contrib.prodigy, 1.0),
    "mechanize": lambda: contrib.mechanize(then_plateau(optax.sgd(0.1))),
    "injected": lambda: optax.inject_hyperparams(optax.polyak_sgd)(0.1),
    "masked": lambda: optax.masked(then_plateau(optax.sgd(0.1)), {"w": True}),
    "labelled": lambda: optax.multi_transform(
        {"a": then_plateau(optax.sgd(0.1))}, {"w": "a"}
    ),
    "micro-steps": lambda: optax.MultiSteps(then_plateau(optax.sgd(0.1)), 2),
    "guarded": lambda: optax.apply_if_finite(then_plateau(optax.adam(0.1)), 2**30),
    "small": lambda: optim.small_state(then_plateau(optax.adam(0.1))),
    "small micro-steps": lambda: optim.small_state(
        optax.MultiSteps(then_plateau(optax.sgd(0.1)), 2)
    ),
    "watching": lambda: optax.chain(watching(), optax.sgd(0.1)),
    "strict": lambda: watching(strict=True),
    # These take none, whatever they say about themselves.
    "plain": with_value(optax.adam, 0.1),
    "sam": with_value(contrib.sam, optax.sgd(0.1), optax.sgd(0.05), sync_period=2),
    "sam in a chain": lambda: optax.chain(
        optax.clip(100.0),
        contrib.sam(optax.sgd(0.1), optax.sgd(0.05), sync_period=2),
    ),
}
TAKE_NONE = ("plain", "sam", "sam in a chain")
BAD = 2
BATCHES = [linear_batch(poisoned=i == BAD) for i in range(5)]


def pure(state):
    """The state of an optimizer as arrays, without what counts skipped steps."""
    state = nnx.as_pure(state)
    return state.inner_state if isinstance(state, optax.ApplyIfFiniteState) else state


def by_hand(tx, takes=None):
    """Trains with plain optax, and leaves out the bad batch."""

    @jax.jit
    def step(params, state, batch):
        loss, grads = jax.value_and_grad(linear_loss)(params, batch)
        norm = optax.tree.norm(grads)
        extra = dict(value=loss, loss=loss, grad=grads, grad_norm=norm)
        if takes is not None:
            extra = {name: extra[name] for name in takes}
        updates, state = tx.update(grads, state, params, **extra)
        return optax.apply_updates(params, updates), state

    params, state = {"w": W}, jax.jit(tx.init)({"w": W})
    for i, batch in enumerate(BATCHES):
        if i != BAD:
            params, state = step(params, state, batch)
    return params, pure(state)


@functools.cache
def run_by_hand(name):
    """The run by hand of an optimizer of the table."""
    return by_hand(OPTIMIZERS[name](), () if name in TAKE_NONE else None)


def by_steps(tx):
    state = linear_state(tx, W, precision="32-true", scaler=None)
    step = make_train_step(linear_loss)
    for batch in BATCHES:
        state, metrics = step(state, batch)
        assert metrics["grads_finite"] == (batch is not BATCHES[BAD])
    assert int(metrics["skipped_total"]) == 1
    return state.params, pure(state.opt_state)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.once
def test_a_step_gives_an_optimizer_what_it_takes(name):
    """The run is that of a loop by hand which leaves out the bad batch."""
    assert_close(by_steps(OPTIMIZERS[name]()), run_by_hand(name), jnp.float32)


@pytest.mark.parametrize(
    "factory",
    [
        optim.wrap(lambda learning_rate: then_plateau(optax.adam(learning_rate)))(0.1),
        optim.polyak_sgd(max_learning_rate=0.1),
        optim.MultiSteps(optim.polyak_sgd(0.1), 2),
        optim.small_state(optim.polyak_sgd(0.1)),
    ],
)
def test_pytree_optimizers(factory):
    params, state = by_hand(factory.build())
    found, tx = by_steps(factory)
    assert_close((found, tx.opt_state), (params, state), jnp.float32)


# --- NNX -----------------------------------------------------------------------------


class Line(nnx.Module):
    def __init__(self):
        self.w = nnx.Param(W + 0)


def line_loss(model, batch):
    return linear_loss({"w": model.w[...]}, batch)


class HandsOn(nnx.Optimizer):
    """A subclass that counts, and hands its keywords on."""

    def update(self, model, grads, **kwargs):
        return super().update(model, grads, **kwargs)


class TakesNone(nnx.Optimizer):
    def update(self, model, grads):
        return super().update(model, grads)


NNX = {
    "amp": (AmpOptimizer, "watching"),
    "amp, strict": (AmpOptimizer, "strict"),
    "amp, guarded": (AmpOptimizer, "guarded"),
    "plain, plateau": (nnx.Optimizer, "reduce_on_plateau"),
    "plain, no extra arguments": (nnx.Optimizer, "plain"),
    "plain, sam": (nnx.Optimizer, "sam in a chain"),
    "amp, sam": (AmpOptimizer, "sam in a chain"),
    "hands on": (HandsOn, "watching"),
    "takes none": (TakesNone, "plain"),
}


@pytest.mark.parametrize("kind", NNX)
def test_optimizers_of_nnx(kind):
    make, name = NNX[kind]
    params, state = run_by_hand(name)
    model = Line()
    optimizer = make(model, OPTIMIZERS[name](), wrt=nnx.Param)
    step = make_nnx_train_step(line_loss, precision="32-true")
    for batch in BATCHES:
        step(model, optimizer, batch)
    assert_close(model.w[...], params["w"], jnp.float32)
    assert_close(pure(optimizer.opt_state), state, jnp.float32)


# --- beside a step -------------------------------------------------------------------


def test_apply_gradients_hands_extra_arguments_on():
    """Also in a loop by hand; the gradients come along."""
    state = linear_state(watching(), W, precision="32-true", scaler=None)
    grads = {"w": jnp.ones(3)}
    extra = {"value": 1.0, "loss": 2.0, "grad_norm": 3.0}
    seen = state.apply_gradients(grads=grads, extra_args=extra).opt_state.inner_state
    assert seen.numbers.tolist() == [1, 2, 3] and (seen.grad["w"] == 1).all()


def test_the_numbers_are_those_of_the_step():
    """Averaged over micro-batches, and unscaled."""
    state = linear_state(watching(), W, precision="16-mixed")
    step = make_train_step(linear_loss, accum_steps=2, donate=False)
    new, metrics = step(state, linear_batch())
    seen = new.opt_state.inner_state
    expected = jnp.stack([metrics[key] for key in ("loss", "loss", "grad_norm")])
    assert (seen.numbers == expected).all()
    exact = jax.grad(linear_loss)({"w": W}, linear_batch())
    assert_close(seen.grad, exact, jnp.float16)


def test_integer_parameters_have_no_gradient():
    """The extra argument `grad` is a tree like the updates."""

    def update(updates, state, params=None, *, grad, **extra):
        return jax.tree.map(jnp.minimum, updates, grad), state

    tx = optax.GradientTransformationExtraArgs(lambda params: (), update)
    params = {"w": W, "order": jnp.array([2, 0, 1])}
    state = AmpTrainState.create(params=params, tx=tx)
    loss = lambda params, batch: params["w"][params["order"]].sum()  # noqa: E731
    new, _ = make_train_step(loss)(state, 0.0)
    assert (new.params["w"] == W + 1).all()


LINE_SEARCHES = [
    optax.lbfgs(),
    optax.chain(optax.sgd(0.1), optax.scale_by_backtracking_linesearch(3)),
]


@pytest.mark.parametrize("tx", LINE_SEARCHES)
@pytest.mark.parametrize("kind", ["state", "amp", "plain"])
def test_a_line_search_is_refused_by_name(tx, kind):
    def call():
        if kind == "state":
            state = linear_state(tx, W)
            return make_train_step(linear_loss)(state, linear_batch())
        model = Line()
        make = AmpOptimizer if kind == "amp" else nnx.Optimizer
        optimizer = make(model, tx, wrt=nnx.Param)
        return make_nnx_train_step(line_loss)(model, optimizer, linear_batch())

    advice = r"missing .*'value_fn'; expected an optimizer that takes only value"
    raised(call, TypeError, rf"train_step: .*{advice}.* A line search \(value_fn\)")
