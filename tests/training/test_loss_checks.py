"""What a step says of a loss: divided by a total, or a weight with a derivative."""

import functools
import inspect
import warnings

import _losses
import jax
import jax.numpy as jnp
import optax
import pytest
from _losses import BATCH, OTHERS, PARAMS, QUOTIENTS

from _steps import WORDS as PRECISIONS
from _steps import mapped, raised
from flax_amp import AmpTrainState, amp, make_train_step

# --- losses that should return a weight ----------------------------------------------


def warnings_of(loss, state=None, **options):
    """The warnings of a step that is traced, and never run."""
    state = state or AmpTrainState.create(params=PARAMS, tx=optax.sgd(0.1))
    step = make_train_step(loss, donate=False, **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        jax.eval_shape(step, state, BATCH)
    return caught


def line_of(loss, part="/"):
    """The numbers of the lines of a function that hold a division."""
    lines, first = inspect.getsourcelines(loss)
    return [first + i for i, line in enumerate(lines) if part in line]


@pytest.mark.parametrize("name", QUOTIENTS)
def test_a_mean_over_a_total_warns_once(name):
    """The warning has the line of the division."""
    (warning,) = warnings_of(QUOTIENTS[name], accum_steps=2)
    assert warning.filename == _losses.__file__
    parts = dict(mean_where="jnp.mean", average="jnp.average", power="**")
    parts["nanmean"] = "jnp.nanmean"
    source = _losses.mask if name == "in_a_checkpoint" else QUOTIENTS[name]
    assert warning.lineno in line_of(source, parts.get(name, "/"))
    text = str(warning.message)
    assert f"make_train_step: {name} is divided at " in text
    assert "With accum_steps=2, the step averages the losses of the parts as if" in text
    assert '(loss, {"weight": total}), with has_aux=True' in text


@pytest.mark.parametrize("name", OTHERS)
def test_no_other_loss_warns(name):
    assert not warnings_of(OTHERS[name], accum_steps=2)


@pytest.mark.parametrize("precision", [*PRECISIONS.values(), "amp"])
def test_in_each_precision(precision):
    """Also a loss that is rewritten already."""
    loss = amp(_losses.mask) if precision == "amp" else _losses.mask
    word = None if precision == "amp" else precision
    assert len(warnings_of(loss, accum_steps=2, redo_on_nan=2, precision=word)) == 1
    loss = amp(_losses.mean) if precision == "amp" else _losses.mean
    assert not warnings_of(loss, accum_steps=2, precision=word)


def test_only_where_something_is_averaged():
    def counted(params, batch):
        return _losses.mask(params, batch), {"weight": 1.0}

    assert not warnings_of(_losses.mask)
    assert not warnings_of(counted, has_aux=True, accum_steps=2)


def over_axis(loss, mesh, **options):
    """The texts of the warnings of a step over the devices of a mesh."""
    state = AmpTrainState.create(params=PARAMS, tx=optax.sgd(0.1))
    step = make_train_step(loss, axis_name="data", jit=False, **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        jax.eval_shape(mapped(step, mesh), state, BATCH)
    return [str(warning.message) for warning in caught]


def test_over_devices(mesh):
    """A total over all devices does not differ from device to device."""

    def whole(params, batch):
        total, count = _losses.masked(params, batch), batch["mask"].sum()
        return jax.lax.psum(total, "data") / jax.lax.psum(count, "data")

    def gathered(params, batch):
        total, count = _losses.masked(params, batch), batch["mask"].sum()
        return jax.lax.psum(total, "data") / jax.lax.all_gather(count, "data").sum()

    (text,) = over_axis(_losses.mask, mesh)
    assert "With axis_name='data', the step averages" in text
    assert not over_axis(_losses.mean, mesh)
    assert not over_axis(whole, mesh)
    assert not over_axis(gathered, mesh)


def test_a_mean_of_jax_at_another_line():
    """JAX keeps the trace of its own functions; each call has its line."""

    def first(params, batch):
        return jnp.average(_losses.cross_entropy(params, batch), weights=batch["mask"])

    def second(params, batch):
        losses = _losses.cross_entropy(params, batch)
        return jnp.average(losses, weights=batch["mask"])

    for loss in (first, second):
        (warning,) = warnings_of(loss, accum_steps=2)
        assert [warning.lineno] == line_of(loss, "jnp.average")


BY_VALUE = {
    "stopped": lambda p: jax.lax.stop_gradient(p["head"].sum()),
    "counted": lambda p: (p["head"] > 0).sum(),
    "rounded": lambda p: jnp.floor(p["head"].sum()),
    "of a branch": lambda p: jnp.where(p["head"].sum() > 0, 2.0, 1.0),
}
BY_DERIVATIVE = {
    "sum": lambda p: p["head"].sum(),
    "in a branch": lambda p: jax.lax.cond(True, jnp.sum, jnp.max, p["head"]),
    "in a loop": lambda p: jax.lax.fori_loop(
        0, 2, lambda i, x: x + p["head"][0, 0], jnp.float32(1)
    ),
    "in a scan": lambda p: jax.lax.scan(
        lambda c, row: (c + row.sum(), None), 0.0, p["head"]
    )[0],
    "in a checkpoint": lambda p: jax.checkpoint(jnp.sum)(p["head"]),
}


@pytest.mark.parametrize("accum_steps", [1, 2])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed"])
@pytest.mark.parametrize("name", [*BY_VALUE, *BY_DERIVATIVE])
def test_a_weight_has_no_derivative(name, precision, accum_steps):
    weight = (BY_VALUE | BY_DERIVATIVE)[name]

    def loss_fn(params, batch):
        return _losses.mean(params, batch), {"weight": weight(params)}

    state = AmpTrainState.create(params=PARAMS, tx=optax.sgd(0.1), precision=precision)
    step = make_train_step(loss_fn, has_aux=True, accum_steps=accum_steps)
    call = functools.partial(jax.eval_shape, step, state, BATCH)
    if name in BY_VALUE:
        call()
    else:
        message = r"loss_fn returned an aux\['weight'\] that depends on the parameters"
        raised(call, ValueError, message)
