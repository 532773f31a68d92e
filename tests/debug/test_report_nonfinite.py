"""`report_nonfinite`: it explains the steps that are skipped, of Linen and of NNX."""

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import flax_amp
from flax_amp import AmpTrainState
from flax_amp.debug import NonfiniteReport, report_nonfinite

X = jnp.ones((4, 8))


def new_state(scale=8.0):
    return AmpTrainState.create(
        params={"w": jnp.full((8, 3), 0.25)},
        tx=optax.sgd(0.1),
        precision="16-mixed",
        rngs={"noise": jax.random.key(0)},
        scaler=flax_amp.init_scaler(scaler=scale),
    )


def squares(params, batch):
    return ((batch @ params["w"]) ** 2).sum()


def noisy(params, batch, offset, rngs):
    noise = jax.random.normal(rngs["noise"], batch.shape)
    return jnp.log(batch + offset + 0 * noise).mean() * params["w"].mean()


def reporting(loss_fn, of_step=None, **options):
    reports: list[NonfiniteReport] = []
    step = flax_amp.make_train_step(of_step or loss_fn)
    return report_nonfinite(step, loss_fn, report=reports.append, **options), reports


def test_reports_of_skipped_steps():
    state, bad = new_state(), X.at[2, 3].set(0.0)
    step, reports = reporting(noisy, limit=2)
    for batch, count in ((X, 0), (bad, 1), (X, 1), (bad, 2), (bad, 2), (X, 2)):
        state, metrics = step(state, batch, jnp.zeros(()))
        assert len(reports) == count
    assert [x.verdict for x in reports] == ["mathematics"] * 2
    assert reports[0].examples == (2,) and int(state.step) == 6


def test_the_search_for_a_scale_is_no_fault():
    state = new_state(2.0**24)
    step, reports = reporting(squares)
    for _ in range(4):
        state, metrics = step(state, X)
        assert not metrics["grads_finite"] and not reports


def test_a_failure_of_the_search_does_not_end_the_training():
    def fails(params, batch):
        raise RuntimeError("no such file")

    step, _ = reporting(fails, squares)
    with pytest.warns(UserWarning, match="find_nonfinite failed: .* no such file"):
        step(new_state(), X * jnp.nan)
    step, reports = reporting(squares, lambda params, x: jnp.log(squares(params, x)))
    step(new_state(), X * 0)
    assert "the step was skipped, which this run does not show" in str(*reports)


def test_what_is_refused():
    with pytest.raises(TypeError, match="argument 'dtype'"):
        reporting(squares, dtype=1)


def test_a_step_of_nnx():
    def loss_fn(model, batch):
        return jnp.log(model(batch)).sum()

    model = nnx.Linear(8, 3, rngs=nnx.Rngs(0))
    optimizer = flax_amp.AmpOptimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    reports: list[NonfiniteReport] = []
    step = flax_amp.make_nnx_train_step(loss_fn)
    step = report_nonfinite(step, loss_fn, report=reports.append)
    assert not step(model, optimizer, X * 0)["grads_finite"]
    assert reports[0].verdict == "mathematics" and reports[0].finding.primitive == "log"
