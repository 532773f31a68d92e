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
    checkpoint,
    dynamic_scale_value_and_grad,
    init_scaler,
    make_nnx_train_step,
    make_train_step,
    no_scaler,
    optim,
)

# It counts steps; the example in its docstring runs on each JAX.
pytestmark = pytest.mark.once


def loss_fn(params, batch):
    return (params["w"] * batch).sum()


GOOD, BAD = jnp.ones(2), jnp.array([1.0, jnp.nan])


def run(state, *batches):
    metrics = None
    for batch in batches:
        state, metrics = step_of(loss_fn)(state, batch)
    return state, metrics


TX = optax.sgd(0.1)


def make_state(scaler, **options):
    params = {"w": jnp.ones(2)}
    return AmpTrainState.create(params=params, tx=TX, scaler=scaler, **options)


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
    return make_train_step(loss, has_aux=has_aux, compute_dtype=jnp.float32)


def skipping(loss, batch, steps, scaler=None, state=None):
    state = state or make_state(scaler, variables={"stats": {"mean": jnp.float32(0)}})
    for _ in range(steps):
        state, metrics = step_of(loss)(state, jnp.float32(batch))
    return state, metrics


SLOW = init_scaler(adjust_factor=1.1)
LOW = init_scaler(scaler=4.0, min_scaler=1.0)
LOWEST = init_scaler(scaler=2.0**-14)


# What is said of each kind of run, and what is not.
FORWARD, AT_ZERO = "Look for inf or NaN in the batch", "Look for a sqrt, norm or div"
BFLOAT16, STOP, LOWER = "use bfloat16", "amp_stop", "lower min_scaler"
LESS, CLIP, FROZEN = "start with a lower one", "no clipping mends", "stop_gradient"
WHICH, NO_SCALE = "metrics_fn=flax_amp.metrics.finite_by_leaf", "No loss scale helps"
GRADS = {AT_ZERO, CLIP, FROZEN, WHICH}
HALF = {BFLOAT16, STOP}
RUNS = [
    (grads_loss, jnp.nan, "16-mixed", None, 20, "loss is", {FORWARD, NO_SCALE} | HALF),
    (grads_loss, jnp.nan, "bf16-mixed", None, 20, "loss is not fin", {FORWARD, STOP}),
    (stats_loss, jnp.inf, "32-true", None, 20, "updated variables", {FORWARD}),
    (sqrt_loss, 1.0, "16-mixed", None, 29, "no lower scale", GRADS | HALF),
    (sqrt_loss, 1.0, "bf16-mixed", None, 20, "the gradients are not", GRADS | {STOP}),
    (sqrt_loss, 1.0, "32-true", None, 20, "the gradients are not", GRADS),
    (sqrt_loss, 1.0, "16-mixed", LOW, 20, "no lower scale", GRADS | HALF | {LOWER}),
    (sqrt_loss, 1.0, "16-mixed", SLOW, 50, "has not ended", GRADS | HALF | {LESS}),
    (sqrt_loss, 1.0, "16-mixed", no_scaler(), 20, "the lowest", GRADS | {STOP}),
    (sqrt_loss, 1.0, "16-mixed", LOWEST, 20, "no lower scale", GRADS | HALF),
]


@pytest.mark.parametrize("loss, batch, word, scaler, steps, told, advice", RUNS)
def test_says_which_of_the_two_it_is(loss, batch, word, scaler, steps, told, advice):
    """And what to try: nothing that the precision or the cause makes useless."""
    state = make_state(
        scaler, precision=word, variables={"stats": {"mean": jnp.float32(0)}}
    )
    state, metrics = skipping(loss, batch, steps - 1, state=state)
    check_progress(state, metrics)
    state, metrics = skipping(loss, batch, 1, state=state)
    with pytest.raises(StuckError, match=told) as caught:
        check_progress(state, metrics)
    message = str(caught.value)
    assert f"the last {steps} steps were skipped" in message
    everything = GRADS | {FORWARD, BFLOAT16, STOP, LOWER, LESS, NO_SCALE}
    assert {text for text in everything if text in message} == advice
    with pytest.raises(StuckError, match="steps were skipped.*If it is the gradients"):
        check_progress(state, max_skips=steps)
    check_progress(state, metrics, max_skips=steps + 1)
    assert jnp.isfinite(state.params["w"]).all()


def frozen_loss(params, batch):
    """Its gradient in `frozen` is infinite, that in `w` is finite."""
    frozen = params["layers"][1]["frozen"]
    return (params["w"].sum() + jnp.sqrt(frozen * 0).sum()) * batch


def test_names_the_gradients_that_are_not_finite():
    """Also in a sweep, and those of a parameter that its optimizer freezes."""
    params = {"w": jnp.ones(2), "layers": [{}, {"frozen": jnp.ones(2)}]}
    labels = {"w": "on", "layers": "off"}
    tx = optax.multi_transform({"on": TX, "off": optax.set_to_zero()}, labels)
    state = AmpTrainState.create(params=params, tx=tx, precision="bf16-mixed")
    grads = jax.grad(frozen_loss)(params, 1.0)
    flags = jax.jit(flax_amp.metrics.finite_by_leaf)(state, grads, grads)
    assert {name: bool(flag) for name, flag in flags.items()} == {
        "grads_finite/w": True,
        "grads_finite/layers/1/frozen": False,
    }
    for _ in range(20):
        state, metrics = step_of(frozen_loss)(state, jnp.float32(1))
    told = r"Not finite are the gradients of layers/1/frozen\. A parameter that the opt"
    with pytest.raises(StuckError, match=told):
        check_progress(state, metrics | flags)
    runs = jax.tree.map(lambda x: jnp.stack([x, x]), (state, metrics | flags))
    with pytest.raises(StuckError, match=f"of run 0 .*{told}"):
        check_progress(*runs)
    several = {f"grads_finite/{i}": jnp.bool_(i == 3) for i in range(9)}
    with pytest.raises(StuckError, match="gradients of 0, 1, 2, 4, 5 and 3 more. A"):
        check_progress(state, metrics | several)
    # The advice: what does not train is not differentiated.
    mended = AmpTrainState.create(params=params, tx=tx, precision="bf16-mixed")

    def loss(params, batch):
        return frozen_loss(jax.lax.stop_gradient(params) | {"w": params["w"]}, batch)

    assert step_of(loss)(mended, jnp.float32(1))[1]["grads_finite"]


def test_paths_of_nnx_and_leaves_without_a_gradient():
    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    grads = nnx.grad(lambda m: m(GOOD[None]).sum())(model)
    found = flax_amp.metrics.finite_by_leaf(None, grads)
    assert set(found) == {"grads_finite/bias", "grads_finite/kernel"}
    assert flax_amp.metrics.finite_by_leaf(None, {"n": jnp.int32(1), "m": None}) == {}


def test_a_state_that_a_later_step_has_deleted():
    state, metrics = run(make_state(no_scaler(), precision="bf16-mixed"), GOOD)
    step_of(loss_fn)(state, GOOD)
    told = r"^check_progress: state\..* was deleted .*Expected the state that the last"
    with pytest.raises(RuntimeError, match=told):
        check_progress(state, metrics)


def test_a_search_from_the_highest_to_the_lowest_scale_is_no_alarm():
    """2**24 to 2**-13, where the gradient fits: 37 steps, looked at after each."""
    state = make_state(init_scaler(scaler=2.0**24))
    for _ in range(37):
        state, metrics = skipping(grads_loss, 2.0**28, 1, state=state)
        assert not metrics["grads_finite"]
        check_progress(state, metrics)
        check_progress(state)
    state, metrics = skipping(grads_loss, 2.0**28, 1, state=state)
    assert metrics["grads_finite"] and metrics["scaler"] == 2.0**-13
    check_progress(state, metrics)


def test_tells_step_scale_and_loss():
    """The loss only if it is known, and also a scaler that cannot work."""
    state, metrics = run(make_state(no_scaler()), GOOD, *[BAD] * 25)
    # As plain Orbax calls restore it, unchecked.
    broken = state.replace(scaler=state.scaler | {"adjust_factor": jnp.float32(1.0)})
    for told, *seen in [
        (r"last 25 steps were skipped.* \(step 26, loss nan, 25 steps", state, metrics),
        (r"\(step 26, 25 steps skipped in all\)", state),
        (r"adjust_factor=1.0 \(expected finite, above", broken, metrics),
    ]:
        with pytest.raises(StuckError, match=told):
            check_progress(*seen)


@pytest.mark.parametrize(
    "scaler, batches",
    [
        (init_scaler(), []),
        (LOW, [BAD] * 19),
        (LOW, [*[BAD] * 25, GOOD]),
        (no_scaler(), [BAD, GOOD] * 20),  # every other one trains
    ],
    ids=["new", "few", "recovered", "alternating"],
)
def test_is_silent_otherwise(scaler, batches):
    state, metrics = run(make_state(scaler), *batches)
    check_progress(state, metrics)


@pytest.mark.parametrize("scanned", [False, True])
def test_one_of_several_runs(scanned):
    """A sweep by vmap: the first stuck run is told, of the metrics of the last step.

    An epoch in one scan gives the metrics of all steps: [steps, runs].
    """
    step = jax.vmap(make_train_step(loss_fn, jit=False))
    states = jax.tree.map(lambda x: jnp.stack([x] * 3), make_state(no_scaler()))
    batches = jnp.stack([jnp.stack([GOOD, BAD, GOOD])] * 20)
    if scanned:
        states, metrics = jax.lax.scan(step, states, batches)
        assert metrics["loss"].shape == (20, 3)
    else:
        step = jax.jit(step)
        for batch in batches:
            states, metrics = step(states, batch)
    told = "last 20 steps of run 1 .*step 20, loss nan.*The loss"
    with pytest.raises(StuckError, match=told):
        check_progress(states, metrics)
    check_progress(states, metrics, max_skips=21)


GUARDED = optax.apply_if_finite(optax.adam(0.1), 2**31 - 1)


@pytest.mark.parametrize("tx", [optax.adam(0.1), GUARDED], ids=["adam", "guarded"])
def test_loops_that_keep_their_optimizer(tx):
    """The scaler counts, or `apply_if_finite` in the optimizer."""
    model, optimizer = linear_objects(tx=tx)
    step = make_nnx_train_step(lambda m, x: m(x).mean(), precision="bf16-mixed")
    scaler, metrics = step(model, optimizer, None, jnp.ones(3))
    for _ in range(20):
        check_progress((optimizer, scaler), metrics)
        scaler, metrics = step(model, optimizer, scaler, jnp.full(3, jnp.nan))
    with pytest.raises(StuckError, match="last 20 steps .*step 1, loss nan, 20 steps"):
        check_progress((optimizer, scaler), metrics)
    old = optimizer, scaler
    scaler, metrics = step(model, optimizer, scaler, jnp.ones(3))
    check_progress((optimizer, scaler), metrics)
    with pytest.raises(RuntimeError, match=r"check_progress: state\[1\].* was deleted"):
        check_progress(old)


@pytest.mark.parametrize("optimizer", [optax, optim], ids=["optax", "optim"])
def test_loops_without_a_state(optimizer):
    """The state of an `apply_if_finite` of optax counts, and has no step."""
    grad_fn = dynamic_scale_value_and_grad(loss_fn)
    tx = optimizer.apply_if_finite(optimizer.sgd(0.1), 2**31 - 1)
    tx = tx.to_optax() if optimizer is optim else tx
    params, scaler = {"w": jnp.ones(2)}, no_scaler()
    opt_state = tx.init(params)
    for _ in range(20):
        check_progress((opt_state, scaler))
        scaler, (loss, grads) = grad_fn(params, BAD, dynamic_scaler_state=scaler)
        _, opt_state = tx.update(grads, opt_state, params)
    for metrics, told in [({"loss": loss}, "(loss nan, 20 steps"), ({}, "(20 steps")]:
        with pytest.raises(StuckError, match=re.escape(told)):
            check_progress((opt_state, scaler), metrics)
    check_progress((opt_state, scaler), max_skips=21)


def test_is_called_outside_of_jit():
    for state in (make_state(no_scaler()), (make_state(None).opt_state, no_scaler())):
        with pytest.raises(TypeError, match="the state is traced; .* outside of jit"):
            jax.jit(check_progress)(state)


def test_a_restored_scaler_is_checked(tmp_path):
    state = make_state(init_scaler())
    broken = state.scaler | {"adjust_factor": jnp.float32(0.5)}
    with checkpoint.manager(tmp_path) as manager:
        checkpoint.save(manager, state.replace(scaler=broken))
    with pytest.raises(ValueError, match="restore: step 0 .*scaler: adjust_factor=0.5"):
        checkpoint.restore(tmp_path, state)


def test_a_nan_that_no_step_made_is_told():
    params = {"w": jnp.array([1.0, jnp.nan])}
    state = AmpTrainState.create(params=params, tx=optax.sgd(1e-2))
    step = make_train_step(lambda params, x: ((x * params["w"]) ** 2).sum())
    for _ in range(22):
        state, metrics = step(state, jnp.ones(2))
    with pytest.raises(StuckError, match="an inf or a NaN, which no training step"):
        check_progress(state, metrics)
