"""A run that is stuck is told, one that looks for its scale is not."""

import functools
import re

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import flax_amp
from _steps import linear_objects
from flax_amp import (
    AmpTrainState,
    StuckError,
    check_progress,
    init_scaler,
    make_nnx_train_step,
    make_train_step,
    no_scaler,
)

# It counts steps; the example in its docstring runs on each JAX.
pytestmark = pytest.mark.once


def loss_fn(params, batch):
    return (params["w"] * batch).sum()


GOOD, BAD = jnp.ones(2), jnp.array([1.0, jnp.nan])


def run(state, *batches, loss=loss_fn):
    metrics = None
    for batch in batches:
        state, metrics = step_of(loss)(state, batch)
    return state, metrics


TX = optax.sgd(0.1)


def make_state(scaler, **options):
    made = dict(params={"w": jnp.ones(2)}, tx=TX, scaler=scaler)
    made |= dict(variables={"stats": {"mean": jnp.float32(0)}})
    return AmpTrainState.create(**made | options)


def grads_loss(params, batch):
    """Its gradient is beyond float16 from a certain scale on; its loss is finite."""
    return (params["w"].astype(jnp.float16)).astype(jnp.float32).sum() * batch


def sqrt_loss(params, batch):
    """Its gradient is infinite at every scale; its loss is finite."""
    return jnp.sqrt(params["w"] * 0).sum() * batch


def stats_loss(params, batch, *, state):
    """Its loss and gradients are finite; its variables are not."""
    mean = state.variables["stats"]["mean"] + batch
    return params["w"].sum(), {"variables": {"stats": {"mean": mean}}}


@functools.cache
def step_of(loss):
    has_aux = loss is stats_loss
    return make_train_step(loss, has_aux=has_aux, precision="32-true")


SLOW = init_scaler(adjust_factor=1.1)
LOW = init_scaler(scaler=2.0**-22)

# What is said of each kind of run.
RUNS = [
    (grads_loss, jnp.nan, "16-mixed", None, 20, "loss is not finite, .* scale changes"),
    (stats_loss, jnp.inf, "32-true", None, 20, "updated variables"),
    (sqrt_loss, 1.0, "16-mixed", None, 50, "gradients of a sqrt, .*stop_gradient"),
    (sqrt_loss, 1.0, "bf16-mixed", None, 20, "gradients of a sqrt, .*stop_gradient"),
    (sqrt_loss, 1.0, "16-mixed", LOW, 20, "gradients of a sqrt"),
    (sqrt_loss, 1.0, "16-mixed", SLOW, 50, "has not ended"),
]


@pytest.mark.parametrize("loss, batch, word, scaler, steps, told", RUNS)
def test_says_which_of_the_two_it_is(loss, batch, word, scaler, steps, told):
    """And names `find_nonfinite`, with a call that runs."""
    state, batch = make_state(scaler, precision=word), jnp.float32(batch)
    if scaler is None and loss is sqrt_loss and word == "16-mixed":
        steps = 39  # where the lowest scale is reached
    state, metrics = run(state, *[batch] * (steps - 1), loss=loss)
    check_progress(state, metrics)
    state, metrics = run(state, batch, loss=loss)
    with pytest.raises(StuckError, match=told) as caught:
        check_progress(state, metrics)
    message = str(caught.value)
    assert f"the last {steps} steps were skipped" in message
    assert ("scale" in message.partition("skipped in all")[0]) == (word == "16-mixed")
    check_progress(state, metrics, max_skips=steps + 1)
    assert jnp.isfinite(state.params["w"]).all()
    (call,) = re.findall(r"print\((flax_amp.find_nonfinite\(.*\))\) with the", message)
    assert call == "flax_amp.find_nonfinite(state, loss_fn, batch)"
    names = {"flax_amp": flax_amp, "state": state, "loss_fn": loss}
    assert eval(call, names | {"batch": batch}).verdict != "nothing"


def frozen_loss(params, batch):
    """Its gradient in `frozen` is infinite, that in `w` is finite."""
    frozen = params["layers"][1]["frozen"]
    return (params["w"].sum() + jnp.sqrt(frozen * 0).sum()) * batch


def test_names_the_gradients_that_are_not_finite():
    """Also those of a parameter that its optimizer freezes."""
    params = {"w": jnp.ones(2), "layers": [{}, {"frozen": jnp.ones(2)}]}
    labels = {"w": "on", "layers": "off"}
    tx = optax.multi_transform({"on": TX, "off": optax.set_to_zero()}, labels)
    made = dict(params=params, tx=tx, precision="bf16-mixed")
    start = AmpTrainState.create(**made)
    grads = jax.grad(frozen_loss)(params, 1.0)
    flags = jax.jit(flax_amp.metrics.finite_by_leaf)(start, grads, grads)
    assert {name: bool(flag) for name, flag in flags.items()} == {
        "grads_finite/w": True,
        "grads_finite/layers/1/frozen": False,
    }
    state, metrics = run(start, *[jnp.float32(1)] * 20, loss=frozen_loss)
    told = r"stop_gradient .* Not finite are the gradients of layers/1/frozen\."
    with pytest.raises(StuckError, match=told):
        check_progress(state, metrics | flags)


def test_a_state_that_a_later_step_has_deleted():
    state, metrics = run(make_state(no_scaler(), precision="bf16-mixed"), GOOD)
    step_of(loss_fn)(state, GOOD)
    told = r"^check_progress: state\..* was deleted .*Expected the arrays that the last"
    with pytest.raises(RuntimeError, match=told):
        check_progress(state, metrics)


def test_a_search_from_the_highest_to_the_lowest_scale_is_no_alarm():
    """2**24 to 2**-23, where the gradient fits: 47 steps, looked at after each."""
    state = make_state(init_scaler(scaler=2.0**24), precision="16-mixed")
    batch = jnp.float32(2.0**38)
    for _ in range(47):
        state, metrics = run(state, batch, loss=grads_loss)
        assert not metrics["grads_finite"]
        check_progress(state, metrics)
        check_progress(state)
    state, metrics = run(state, batch, loss=grads_loss)
    assert metrics["grads_finite"] and metrics["scaler"] == 2.0**-23
    check_progress(state, metrics)


def test_tells_step_and_loss_if_it_is_known():
    state, metrics = run(make_state(no_scaler()), GOOD, *[BAD] * 25)
    for told, *seen in [
        (r"last 25 steps were skipped.* \(step 26, loss nan, 25 steps", state, metrics),
        (r"\(step 26, 25 steps skipped in all\). Pass the metrics", state),
    ]:
        with pytest.raises(StuckError, match=told):
            check_progress(*seen)


@pytest.mark.parametrize("start", [init_scaler(), LOW, no_scaler()], ids=["", "l", "n"])
def test_is_silent_otherwise(start):
    """When it is new, skips a few, has recovered, or trains with every other batch."""
    for batches in ([], [BAD] * 19, [*[BAD] * 25, GOOD], [BAD, GOOD] * 20):
        check_progress(*run(make_state(start), *batches))


def test_an_epoch_in_a_scan_and_one_of_several_runs():
    """The metrics are those of all steps, of which the last one counts."""
    step = make_train_step(loss_fn, jit=False)
    epoch = functools.partial(jax.lax.scan, step, make_state(no_scaler()))
    state, metrics = epoch(jnp.stack([GOOD] + [BAD] * 20))
    with pytest.raises(StuckError, match="last 20 steps .*step 21, loss nan.*The loss"):
        check_progress(state, metrics)
    check_progress(state, metrics, max_skips=21)
    runs = jax.tree.map(lambda x: jnp.stack([x, x]), state)
    with pytest.raises(StuckError, match="step 21, 20 steps skipped in all"):
        check_progress(runs)


@pytest.mark.parametrize("scaled", [True, False])
def test_objects_of_nnx(scaled):
    model, optimizer = linear_objects(precision="16-mixed" if scaled else "bf16")
    step = make_nnx_train_step(lambda m, x: m(x).mean())
    metrics = step(model, optimizer, jnp.ones(3))
    for _ in range(20):
        check_progress(optimizer, metrics)
        check_progress((model, optimizer), metrics)
        metrics = step(model, optimizer, jnp.full(3, jnp.nan))
    seen = "step 21, loss nan, " + ("scale 32768, 20" if scaled else "20")
    for what in (optimizer, (model, optimizer)):
        with pytest.raises(StuckError, match=f"last 20 .*{seen}") as caught:
            check_progress(what, metrics)
        call = "find_nonfinite((model, optimizer), loss_fn, batch)"
        assert call in str(caught.value)
    check_progress(optimizer, step(model, optimizer, jnp.ones(3)))


def test_paths_of_nnx_and_leaves_without_a_gradient():
    grads = nnx.grad(lambda m: m(jnp.ones((1, 3))).sum())(linear_objects()[0])
    found = flax_amp.metrics.finite_by_leaf(None, grads)
    assert set(found) == {"grads_finite/bias", "grads_finite/kernel"}
    assert flax_amp.metrics.finite_by_leaf(None, {"n": jnp.int32(1), "m": None}) == {}


def test_a_nan_that_no_step_made_is_told():
    start = make_state(None, params={"w": jnp.array([1.0, jnp.nan])})
    with pytest.raises(StuckError, match="parameters hold an inf or a NaN: restore"):
        check_progress(*run(start, *[GOOD] * 22))
