"""Writes of a loss into its model, over loss.py, loss_checks.py, passes.py, core.py.

The writes are kept, as plain NNX keeps writes, or put back.

All numbers are small integers and powers of two, so that every order of the operations
gives the same bits.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from jax.sharding import PartitionSpec as P

from _steps import arrays, mapped, raised
from examples.sharded import make_mesh
from flax_amp import (
    AmpOptimizer,
    AmpTrainState,
    amp,
    init_scaler,
    make_nnx_train_step,
    make_train_step,
)
from helpers import assert_close, assert_identical, equations

RATE = 2.0**-6
W = np.float32([0.5, -2.0, 0.25])
# A cotangent of this times 2**24 overflows in float32; times 2**17 it does not.
LARGE = 2.0**110


class Own(nnx.Variable):
    """A kind of variable that only the user knows."""


class Net(nnx.Module):
    """Clips its weights, and writes two variables."""

    def __init__(self):
        self.w = nnx.Param(jnp.array(W))
        self.rest = nnx.Param(jnp.float32(1))  # which nothing writes
        self.statistic = nnx.BatchStat(jnp.float32(0))
        self.own = Own(jnp.float32(0))

    def __call__(self, x):
        self.w[...] = jnp.clip(self.w[...], -1.0, 1.0)
        self.statistic[...] = 0.5 * self.statistic[...] + x.max()
        self.own[...] += 1.0
        return x @ self.w[...] + self.rest[...]


class LinenNet(nn.Module):
    """Writes a variable."""

    @nn.compact
    def __call__(self, x):
        statistic = self.variable("stats", "statistic", lambda: jnp.float32(0))
        statistic.value = 0.5 * statistic.value + x.max()
        return x @ self.param("w", lambda key: jnp.array(W))


def loss_of(model, x):
    return (model(x) ** 2).sum()


def overflowing(loss, x):
    """The same loss, whose backward pass multiplies by `LARGE` and divides by it."""
    large = LARGE + 0 * x[0, 0]  # XLA would fold a constant
    return loss / large * large


def large_loss(model, x):
    return overflowing(loss_of(model, x), x)


REWRITTEN = amp(loss_of, precision="32-true")


def rows(bad=False):
    x = np.float32(np.arange(12).reshape(4, 3) % 5 - 2)
    x[1, 0] = np.nan if bad else x[1, 0]
    return jnp.asarray(x)


# --- plain NNX, by hand --------------------------------------------------------------


def parts_of(x, count):
    return [x[i::count] for i in range(count)]


def by_hand(loss, parts, together):
    """Trains on the mean gradient of some parts with plain NNX.

    Each part starts with what the one before has written; if they are `together`, all
    start alike, and what they write is averaged.
    """
    model = Net()
    optimizer = nnx.Optimizer(model, optax.sgd(RATE), wrt=nnx.Param)
    grads, left = [], []
    for part in parts:
        own = nnx.clone(model) if together else model
        grads.append(nnx.grad(loss)(own, part))
        left.append(nnx.state(own))
    mean = jax.tree.map(lambda *xs: sum(xs) / len(xs), *grads)
    if together:
        nnx.update(model, jax.tree.map(lambda *xs: sum(xs) / len(xs), *left))
    optimizer.update(model, mean)
    return nnx.to_pure_dict(nnx.state(model))


# --- the steps -----------------------------------------------------------------------


def on_objects(loss, x, precision="32-true", scaler=None, mesh=None, **options):
    model = Net()
    made = dict(precision=precision, scaler=scaler)
    optimizer = AmpOptimizer(model, optax.sgd(RATE), **made)
    step = make_nnx_train_step(loss, **options)
    if mesh:
        specs = dict(in_specs=(P(), P(), P("data")), out_specs=P())
        step = nnx.jit(nnx.shard_map(step, mesh=mesh, **specs))
    metrics = step(model, optimizer, x)
    return nnx.to_pure_dict(nnx.state(model)), metrics


def on_plain_optimizer(loss, x, precision="32-true", scaler=None, **options):
    model = Net()
    optimizer = nnx.Optimizer(model, optax.sgd(RATE), wrt=nnx.Param)
    precision = None if loss is REWRITTEN else precision
    step = make_nnx_train_step(loss, precision=precision, **options)
    metrics = step(model, optimizer, x)
    return nnx.to_pure_dict(nnx.state(model)), metrics


def on_state(loss, x, precision="32-true", scaler=None, mesh=None, **options):
    made = dict(model=Net(), tx=optax.sgd(RATE), precision=precision, scaler=scaler)
    state = AmpTrainState.create(**made)
    step = make_train_step(loss, **options)
    new, metrics = (mapped(step, mesh) if mesh else step)(state, x)
    return nnx.to_pure_dict(nnx.state(new.merge_model())), metrics


def pair():
    """Two devices, whose mean is exact."""
    return make_mesh(data=2)


# way -> what the step is given, and the parts that plain NNX sees
WAYS = {
    "jit": ({}, 1),
    "eager": ({"jit": False}, 1),
    "skipped": ({"x": rows(bad=True)}, 0),
    "skipped, eager": ({"x": rows(bad=True), "jit": False}, 0),
    "retried": ({"scaler": 2.0**24, "redo_on_nan": 30, "loss": large_loss}, 1),
    "micro-batches": ({"accum_steps": 2}, 2),
    "micro-batches, skipped": ({"accum_steps": 2, "x": rows(bad=True)}, 0),
    "devices": ({"axis_name": "data", "jit": False}, 2),
    "amp already": ({"loss": REWRITTEN}, 1),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", [on_objects, on_state, on_plain_optimizer])
def test_the_model_is_left_as_plain_nnx_leaves_it(kind, way):
    """Bit for bit: what the loss wrote, and the update of it."""
    options, count = WAYS[way]
    options = {"loss": loss_of, "x": rows()} | options
    if kind is on_plain_optimizer and way in ("retried", "devices"):
        pytest.skip("it has no scaler, and the devices are those of the other steps")
    together = way == "devices"
    if together:
        options["mesh"] = pair()
    if "scaler" in options:
        options["scaler"] = init_scaler(scaler=options["scaler"])
    found, metrics = kind(**options)
    assert bool(metrics["grads_finite"]) == (count > 0)
    if count == 0:
        expected = nnx.to_pure_dict(nnx.state(Net()))
    else:
        parts = parts_of(rows(), count)
        parts = [rows()[:2], rows()[2:]] if together else parts
        expected = by_hand(loss_of, parts, together)
    assert_identical(found, expected)
    if way == "retried":
        assert metrics["scaler"] < 2.0**24


@pytest.mark.parametrize("way", [way for way in WAYS if way != "amp already"])
def test_linen_variables_are_left_as_by_hand(way):
    options, count = WAYS[way]
    options = {"x": rows()} | options
    options.pop("loss", None)
    model, x = LinenNet(), options.pop("x")

    def loss_fn(params, batch, *, state):
        variables = {"params": params, **state.variables}
        out, updates = model.apply(variables, batch, mutable=["stats"])
        loss = (out**2).sum()
        loss = overflowing(loss, batch) if way == "retried" else loss
        return loss, {"variables": updates}

    scaler = options.pop("scaler", None)
    state = AmpTrainState.create(
        params={"w": jnp.array(W)},
        variables={"stats": {"statistic": jnp.float32(0)}},
        tx=optax.sgd(RATE),
        precision="32-true",
        scaler=scaler and init_scaler(scaler=scaler),
    )
    step = make_train_step(loss_fn, has_aux=True, **options)
    step = mapped(step, pair()) if way == "devices" else step
    new, _ = step(state, x)
    found = new.variables["stats"]["statistic"]
    values = [part.max() for part in parts_of(rows(), count)] if count else []
    if way == "devices":
        expected = sum(part.max() for part in (rows()[:2], rows()[2:])) / 2
    else:
        expected = np.float32(0)
        for value in values:
            expected = 0.5 * expected + value
    assert found == expected


# --- what is written, and what is not ------------------------------------------------


class TwoLayers(nnx.Module):
    """Its layers are called through `around`."""

    def __init__(self, around=lambda call: call):
        rngs = nnx.Rngs(0)
        self.first = nnx.Linear(3, 3, rngs=rngs)
        self.last = nnx.Linear(3, 3, rngs=rngs)
        self.around = around

    def __call__(self, x):
        call = self.around(lambda layer, x: layer(x))
        return call(self.last, call(self.first, x))


def reduced_elements(around):
    """How many numbers a step adds up over two devices."""
    model = TwoLayers(around)
    state = AmpTrainState.create(model=model, tx=optax.sgd(RATE))
    step = make_train_step(loss_of, axis_name="data", jit=False)
    found = equations(jax.make_jaxpr(mapped(step, pair()))(state, rows()))
    sums = (eqn for _, eqn in found if eqn.primitive.name.startswith("psum"))
    return sum(v.aval.size for eqn in sums for v in eqn.invars)


@pytest.mark.parametrize("around", [nnx.remat, nnx.jit])
def test_parameters_that_a_call_hands_on_are_not_written(around):
    """Nothing is averaged over devices for them."""
    assert reduced_elements(around) == reduced_elements(lambda call: call)


def test_a_loss_may_swap_parameters():
    """Each is the other as it was, and so written."""

    def swap(model, x):
        first, last = model.first.kernel[...], model.last.kernel[...]
        model.first.kernel[...], model.last.kernel[...] = last, first
        return (x.sum() + 0 * model.first.bias[...]).sum()

    for options in ({}, {"accum_steps": 3}):
        model = TwoLayers()
        first, last = (np.asarray(x.kernel[...]) for x in (model.first, model.last))
        optimizer = AmpOptimizer(model, optax.sgd(RATE), precision="32-true")
        make_nnx_train_step(swap, **options)(model, optimizer, jnp.ones((3, 3)))
        assert (np.asarray(model.first.kernel[...]) == last).all()
        assert (np.asarray(model.last.kernel[...]) == first).all()


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed"])
def test_spectral_norm_of_flax(precision):
    """It writes the kernel; plain NNX around `amp` trains on the same trajectory."""

    def loss_fn(model, x):
        return (model(x, update_stats=True) ** 2).mean()

    def make():
        linear = nnx.Linear(3, 3, rngs=nnx.Rngs(0))
        return nnx.SpectralNorm(linear, rngs=nnx.Rngs(1))

    model, plain = make(), make()
    scaler = init_scaler(scaler=16)
    made = dict(precision=precision, scaler=scaler)
    optimizer = AmpOptimizer(model, optax.sgd(0.1), **made)
    step = make_nnx_train_step(loss_fn)
    plain_optimizer = nnx.Optimizer(plain, optax.sgd(0.1), wrt=nnx.Param)
    in_precision = amp(loss_fn, precision=precision)
    dtype = {"32": jnp.float32, "bf": jnp.bfloat16, "16": jnp.float16}[precision[:2]]
    for _ in range(4):
        metrics = step(model, optimizer, rows())
        loss, grads = nnx.value_and_grad(in_precision)(plain, rows())
        plain_optimizer.update(plain, grads)
        assert_close(metrics["loss"], loss, dtype, gradient=True)
    assert_close(arrays(model), arrays(plain), dtype, gradient=True)


def test_written_parameters_that_are_stored_in_half():
    """They are rounded as every new parameter is."""

    class Clips(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(jnp.full((2, 2), 3.0))

    def loss_fn(model, x):
        model.w[...] = jnp.minimum(model.w[...], 1.0)
        return x.sum() + 0 * model.w[...].sum()

    made = dict(tx=optax.sgd(RATE), param_dtype=jnp.bfloat16)
    state = AmpTrainState.create(model=Clips(), **made)
    new, _ = make_train_step(loss_fn)(state, rows())
    assert new.params["w"].dtype == jnp.bfloat16 and (new.params["w"] == 1).all()


def writes(change):
    def loss_fn(model, x):
        loss = loss_of(model, x)
        change(model)
        return loss

    return loss_fn


def grow(model):
    model.w = nnx.Param(jnp.ones(4))


def lose(model):
    del model.w


def halve(model):
    model.w = nnx.Param(jnp.ones(3, jnp.float16))


@pytest.mark.parametrize(
    "change, seen",
    [
        (grow, r"\['w'\]: float32\[3\] before, float32\[4\] now"),
        (halve, r"\['w'\]: float32\[3\] before, float16\[3\] now"),
        (lose, r"\['w'\]: float32\[3\] before, absent now"),
    ],
)
@pytest.mark.parametrize("kind", [on_objects, on_state])
def test_what_cannot_be_kept_is_an_error(kind, change, seen):
    raised(lambda: kind(writes(change), rows()), ValueError, seen)


def test_a_micro_batch_without_weight_writes_nothing():
    """Plain NNX on the others does the same."""

    def loss_fn(model, x):
        return loss_of(model, x), {"weight": x.max()}

    x = rows().at[1::2].set(0)
    found, metrics = on_objects(loss_fn, x, has_aux=True, accum_steps=2)
    assert metrics["weight"] == x.max()
    assert_identical(found, by_hand(loss_of, [x[::2]], together=False))
