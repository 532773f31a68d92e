"""What steps report, gathered on the device: skipped steps enter no mean."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from clu import metrics as clu_metrics
from flax import nnx

import flax_amp
from flax_amp.metrics import StepMetrics

NAN, INF = math.nan, math.inf


def report(loss, finite=True, scale=8.0, **more):
    return dict(
        loss=jnp.float32(loss),
        grads_finite=jnp.bool_(finite),
        scaler=jnp.float32(scale),
        grad_norm=jnp.float32(2 * loss),
        **more,
    )


def computed(window):
    return {name: float(value) for name, value in window.compute().items()}


def gather(steps):
    window = StepMetrics.empty()
    for step in steps:
        window = window.add(step)
    return window


def mean(values):
    return sum(values) / len(values) if values else NAN


# Against the same numbers, computed on the host


def linear_loss(prediction, batch):
    error = prediction(batch["x"]) - 1.0
    return (error**2).mean(), {"error": jnp.abs(error).max(), "all": error}


def linen_steps(tx, batches):
    state = flax_amp.AmpTrainState.create(
        params={"w": jnp.ones((3, 1))}, tx=tx, precision="16-mixed"
    )
    step = flax_amp.make_train_step(
        lambda params, batch: linear_loss(lambda x: x @ params["w"], batch),
        has_aux=True,
    )
    for batch in batches:
        state, metrics = step(state, batch)
        yield metrics


def nnx_steps(tx, batches):
    model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
    optimizer = flax_amp.AmpOptimizer(model, tx, precision="16-mixed")
    step = flax_amp.make_nnx_train_step(linear_loss, has_aux=True)
    for batch in batches:
        yield step(model, optimizer, batch)


RATE = optax.linear_schedule(0.1, 0.0, 10)
STEPS = {
    "linen": (linen_steps, optax.sgd(0.1)),
    "linen, optim": (linen_steps, flax_amp.optim.sgd(RATE)),
    "nnx": (nnx_steps, optax.sgd(0.1)),
}
WINDOWS = ["....", "x.x.", ".x.x", "xx..", "xxxx"]  # x: a step that is skipped


@pytest.mark.once
@pytest.mark.parametrize("name", STEPS)
def test_a_window_is_what_its_steps_reported(name):
    """One run, window by window."""
    make, tx = STEPS[name]
    kinds = "".join(WINDOWS)
    batches = [
        {"x": np.full((2, 3), 0.1 * (i % 4) if kind == "." else NAN, np.float32)}
        for i, kind in enumerate(kinds)
    ]
    run = list(make(tx, batches))
    assert [bool(s["grads_finite"]) for s in run] == [k == "." for k in kinds]
    for i, window in enumerate(WINDOWS):
        steps = run[4 * i :][:4]
        finite = [s for s in steps if s["grads_finite"]]
        names = ("loss", "grad_norm", "error")
        expected = {k: mean([float(s[k]) for s in finite]) for k in names}
        expected["scale"] = float(steps[-1]["scaler"])
        expected["skip_rate"] = window.count("x") / 4
        expected["skipped_total"] = "".join(WINDOWS[: i + 1]).count("x")
        if name == "linen, optim":
            rate = steps[-1]["hyperparams/learning_rate"]
            expected["learning_rate"] = float(rate)
        found = computed(gather(steps))
        assert found == pytest.approx(expected, rel=1e-6, nan_ok=True), window


def clu_aux(value):
    """Metrics of clu, as a step returns them in `aux`."""
    logits, labels = jnp.float32([[value, 0.6]]), jnp.int32([0])
    single = clu_metrics.Collection.create_collection(
        loss=clu_metrics.Average.from_model_output(jnp.float32(value)),
        last=clu_metrics.LastValue.from_model_output(jnp.float32(value)),
    )
    accuracy = clu_metrics.Accuracy.from_model_output(logits=logits, labels=labels)
    return {"accuracy": accuracy, "eval": single}


CLU = type(clu_aux(0.0)["eval"])  # each create_collection makes a class


def test_metrics_of_clu_skip_steps_too():
    for finite in itertools.product([True, False], repeat=3):
        values = np.where(finite, [0.25, 0.5, 0.75], [NAN, 7.0, INF]).tolist()
        steps = []
        for value, ok in zip(values, finite, strict=True):
            aux = clu_aux(value)
            aux["eval"] = CLU(**vars(aux["eval"]))
            steps.append(report(value, ok, **aux))
        good = [v for v, ok in zip(values, finite, strict=True) if ok]
        expected = {
            "loss": mean(good),
            "grad_norm": 2 * mean(good),
            "accuracy": mean([float(v > 0.6) for v in good]),
            "eval/loss": mean(good),
            "eval/last": good[-1] if good else NAN,
            "scale": 8.0,
            "skip_rate": mean([not ok for ok in finite]),
        }
        for cut in range(4):  # merging windows is gathering all of their steps
            both = gather(steps[:cut]).merge(gather(steps[cut:]))
            assert computed(both) == pytest.approx(expected, nan_ok=True)


def test_a_step_is_one_dispatch_and_waits_for_nothing(count_traces, monkeypatch):
    window = gather([report(1.0)])
    for fun in (lambda w: w.add(report(2.0)), lambda w: w.compute()):
        equations = jax.make_jaxpr(fun)(window).eqns
        assert [e.primitive.name for e in equations] == ["jit"]
    merge, traces = count_traces(StepMetrics.merge)
    monkeypatch.setattr(StepMetrics, "merge", merge)
    for _ in range(3):  # an empty window, and one with steps
        gather([report(1.0, own=1.0), report(2.0, own=1.0), report(3.0, own=1.0)])
    assert traces() == 2


def test_it_is_a_collection_of_clu():
    window = gather([report(1.0), report(3.0)])
    assert isinstance(window, clu_metrics.Collection)
    values = [float(v.value) for v in window.compute_values().values()]
    assert values == [*computed(window).values()]
    jitted = jax.jit(lambda w: w.merge(w).compute())(window)
    assert float(jitted["loss"]) == 2.0
    assert next(iter(window.compute())) == "loss"
    assert StepMetrics.empty().compute() == {}
    single = StepMetrics.single_from_model_output
    first, second = report(1.0, own=5.0), report(3.0, own=7.0)
    for order in (first, dict(reversed(first.items()))):
        both = single(**order).merge(single(**second))
        assert float(both.compute()["loss"]) == 2.0


def test_stacked_steps_of_a_scan_and_of_devices():
    stacked = jax.tree.map(
        lambda *x: jnp.stack(x),
        *[report(1.0), report(3.0, scale=2.0), report(NAN, False, 1.0)],
    )
    expected = {"loss": 2.0, "scale": 1.0, "grad_norm": 4.0, "skip_rate": 1 / 3}
    make = StepMetrics.single_from_model_output
    windows = jax.vmap(lambda metrics: make(**metrics))(stacked)
    assert computed(windows.reduce()) == pytest.approx(expected)
    with pytest.raises(ValueError, match=r"axis of 3 steps.*expected none.*reduce\(\)"):
        windows.compute()
    of_devices = StepMetrics.gather_from_model_output
    gathered = jax.vmap(lambda m: of_devices(axis_name="d", **m), axis_name="d")(
        stacked
    )
    assert computed(gathered.unreplicate()) == pytest.approx(expected)
    with pytest.raises(ValueError, match=r"expected the metrics of one step.*jax.vmap"):
        StepMetrics.empty().add(stacked)


def test_numbers_of_ones_own_and_what_is_left_out():
    own = {"hyperparams/b1": 0.9, "tokens": np.int32(3), "learning_rate": 0.5}
    own |= dict(ok=jnp.bool_(True), cls=2.0, self=3.0, metrics=4.0)  # as good as others
    left_out = {"grid": jnp.ones((2, 2)), "key": jax.random.key(0), "none": None}
    left_out |= {"complex": jnp.complex64(1)}
    left_out |= flax_amp.metrics.finite_by_leaf(None, {"w": jnp.ones(2)})  # always are
    steps = [report(1.0, **own, **left_out)]
    steps += [{**steps[0], "learning_rate": 0.25}]
    expected = {**own, **computed(gather([report(1.0)])), "learning_rate": 0.25}
    expected = {name: float(value) for name, value in expected.items()}
    assert computed(gather(steps)) == pytest.approx(expected)


@pytest.mark.parametrize(("value", "steps"), [(0.1, 200_001), (2e38, 5)])
def test_equal_values_neither_drift_nor_overflow(value, steps):
    step = report(value / 2)
    window, _ = jax.lax.scan(
        lambda w, _: (w.add(step), None), gather([step]), length=steps - 1
    )
    assert computed(window)["grad_norm"] == pytest.approx(value, rel=1e-6)
    assert computed(window.merge(window))["grad_norm"] == pytest.approx(value, rel=1e-6)
    with jax.debug_nans(True):  # NaN is an answer
        assert math.isnan(computed(gather([report(0.0, False)]))["loss"])


MESSAGES = [
    (
        lambda: gather([{"loss": 1.0}]),
        r"\['loss'\]; expected the metrics of one step, w",
    ),
    (
        lambda: gather([report(1.0) | {"scale": 3.0}]),
        "two metrics have the same name.*'scaler': 'sc",
    ),
    (lambda: gather([report(1.0, skip_rate=1.0)]), "'skip_rate'. Rename them"),
    (
        lambda: gather([report(1), report(1, own=1.0)]),
        r"\['own'\] are not in all steps",
    ),
    (lambda: gather([report(1.0, note="x")]), r"at path metrics\['note'\]"),
    (lambda: flax_amp.metrics.nothing, "no attribute 'nothing'"),
]


@pytest.mark.parametrize("number", range(len(MESSAGES)))
def test_messages(number):
    call, message = MESSAGES[number]
    with pytest.raises((ValueError, TypeError, AttributeError), match=message):
        call()
