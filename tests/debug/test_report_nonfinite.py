"""`report_nonfinite`: it explains the steps that are skipped, of Linen and of NNX."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import flax_amp
from flax_amp import AmpTrainState
from flax_amp.debug import NonfiniteReport, report_nonfinite

X = jnp.ones((4, 8))


def new_state(**options):
    params = {"w": jnp.full((8, 3), 0.25)}
    options = {"precision": "16-mixed", **options}
    return AmpTrainState.create(params=params, tx=optax.sgd(0.1), **options)


def squares(params, batch):
    return ((batch @ params["w"]) ** 2).sum()


def noisy(params, batch, rngs):
    noise = jax.random.normal(rngs["noise"], batch.shape)
    return jnp.log(batch + 0 * noise).mean() * params["w"].mean() + noise.mean()


def root(params, batch):
    return jnp.sqrt((batch @ params["w"]) ** 2).sum()


def reporting(loss_fn, **options):
    reports: list[NonfiniteReport] = []
    step = flax_amp.make_train_step(loss_fn)
    return report_nonfinite(step, loss_fn, report=reports.append, **options), reports


def test_reports_of_skipped_steps():
    state = new_state(rngs={"noise": jax.random.key(0)})
    step, reports = reporting(noisy, limit=2)
    bad = X.at[2, 3].set(0.0)
    for batch, count in ((X, 0), (bad, 1), (X, 1), (bad, 2), (bad, 2), (X, 2)):
        state, metrics = step(state, batch)
        assert len(reports) == count
    assert [x.verdict for x in reports] == ["mathematics"] * 2
    assert reports[0].examples == (2,) and int(state.step) == 6


def test_the_search_for_a_scale_is_no_fault():
    state = new_state(scaler=flax_amp.init_scaler(scaler=2.0**24))
    step, reports = reporting(squares)
    for _ in range(8):
        assert not reports
        state, _ = step(state, X)
    # So many in a row are worth a look.
    assert [x.verdict for x in reports] == ["scale"] and reports[0].scale == 2.0**17


@pytest.mark.parametrize("loss_fn, bad", [(root, 0.0), (squares, 60.0)])
def test_a_skip_after_a_finite_step_of_the_same_scale(loss_fn, bad):
    """The scale falls for a NaN of the gradients, too."""
    state = new_state(scaler=flax_amp.init_scaler(scaler=2.0**3))
    step, reports = reporting(loss_fn)
    for i in range(5):
        state = state.replace(params=new_state().params)
        state, _ = step(state, X.at[0].set(bad) if i % 2 else X)
    assert [x.verdict for x in reports] == ["mathematics"] * 2 * (loss_fn is root)


def test_further_arguments():
    def loss_fn(params, batch, offset):
        return jnp.log((batch @ params["w"]) ** 2 + offset).sum()

    step, reports = reporting(loss_fn)
    state = new_state(scaler=flax_amp.init_scaler(scaler=8.0))
    for value in (1, 0):
        batch, offset = (np.full(s, value, np.float32) for s in ((4, 8), (4, 1)))
        state, metrics = step(state, batch, offset)
    assert [x.verdict for x in reports] == ["mathematics"]


def test_a_failure_of_the_search_does_not_end_the_training():
    def fails(params, batch):
        raise RuntimeError("no such file")

    step = report_nonfinite(flax_amp.make_train_step(root), fails)
    with pytest.warns(UserWarning, match="find_nonfinite failed: .* no such file"):
        step(new_state(scaler=flax_amp.init_scaler(scaler=8.0)), X * jnp.nan)
    reports: list[NonfiniteReport] = []
    step = flax_amp.make_train_step(root)  # of another loss
    step = report_nonfinite(step, squares, report=reports.append)
    state, _ = step(new_state(scaler=flax_amp.init_scaler(scaler=8.0)), X)
    step(state.replace(params=new_state().params), X * 0)
    assert "the step was skipped, which this run does not show" in str(*reports)


def test_inside_of_a_trace():
    step, _ = reporting(squares)
    with pytest.raises(TypeError, match="the step got a .*Tracer among its arguments"):
        jax.jit(step)(new_state(), X)
    with pytest.raises(TypeError, match="argument 'dtype'"):
        reporting(squares, dtype=1)
    with pytest.raises(ValueError, match="scale is -1; expected a positive"):
        reporting(squares, scale=-1)


def model_loss(model, batch):
    return jnp.log(model(batch)).sum()


def test_a_step_of_nnx():
    """A stand-in for the step: it skips each batch."""
    model = nnx.Linear(8, 3, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    reports: list[NonfiniteReport] = []

    def skip(model, optimizer, batch):
        return {"grads_finite": jnp.array(False)}

    step = report_nonfinite(skip, model_loss, report=reports.append)
    assert not step(model, optimizer, X * 0)["grads_finite"]
    assert reports[0].verdict == "mathematics" and reports[0].finding.primitive == "log"
