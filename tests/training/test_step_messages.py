"""Bad input to the steps and their state: one error that says what to do."""

import copy
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from flax_amp import (
    AmpTrainState,
    dynamic_scale_grad,
    init_scaler,
    make_eval_step,
    make_nnx_train_step,
    make_train_step,
    optim,
    scale_loss,
    update_scaler,
)
from flax_amp._training.scaler import check_scaler

B = np.ones(3, np.float32)


def loss_fn(params, batch):
    return (params["w"] * batch).sum()


def make_state(**options):
    options = dict(params={"w": jnp.ones(3)}, tx=optax.sgd(0.1)) | options
    return AmpTrainState.create(**options)


def with_aux(aux):
    return lambda params, batch: (loss_fn(params, batch), aux)


@pytest.mark.parametrize(
    "tx, names",
    [
        (optax.lbfgs(0.1), "value, grad, value_fn"),
        (optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau()), "value"),
    ],
    ids=["lbfgs", "reduce_on_plateau"],
)
def test_optimizers_that_need_the_loss_are_named(tx, names):
    message = f"the optimizer's update asks for {names} too.*optax.adamw"
    with pytest.raises(TypeError, match=f"make_train_step: {message}"):
        make_train_step(loss_fn)(make_state(tx=tx), B)
    model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    step = make_nnx_train_step(lambda model, batch: model(batch).sum())
    with pytest.raises(TypeError, match=f"make_nnx_train_step: {message}"):
        step(model, optimizer, init_scaler(), B)


def test_other_errors_of_an_optimizer_are_its_own():
    def update(grads, state, params=None):
        raise TypeError("mine")

    tx = optax.GradientTransformation(lambda params: (), update)
    with pytest.raises(TypeError, match="^mine"):
        make_train_step(loss_fn)(make_state(tx=tx), B)


def test_a_donated_state_is_named():
    state = make_state()
    step = make_train_step(loss_fn)
    step(state, B)
    for again in (step, make_eval_step(loss_fn)):
        with pytest.raises(
            RuntimeError, match=r"step: state.* was deleted.*donate=Fal"
        ):
            again(state, B)


def test_a_donated_scaler_is_named():
    model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    step = make_nnx_train_step(lambda model, batch: model(batch).sum())
    scaler = init_scaler()
    step(model, optimizer, scaler, B)
    with pytest.raises(RuntimeError, match=r"train_step: scaler\['\w+'\] was deleted"):
        step(model, optimizer, scaler, B)


def test_other_errors_of_a_step_are_their_own():
    def bad(params, batch):
        raise ValueError("mine")

    with pytest.raises(ValueError, match="^mine"):
        make_train_step(bad)(make_state(), B)


def test_a_compiled_step_is_still_one_of_jax():
    step, state = make_train_step(loss_fn, donate=False), make_state()
    assert step.__name__ == "train_step"
    _, metrics = step.lower(state, B).compile()(state, B)
    assert metrics["loss"] == 3
    assert jax.eval_shape(step, state, B)[1]["loss"].shape == ()
    for twin in (copy.copy(step), copy.deepcopy(step)):
        assert twin.__name__ == "train_step" and twin(state, B)[1]["loss"] == 3


@pytest.mark.parametrize(
    "loss, message",
    [
        (lambda params: 0.0, r"signature \(params\) \(too many positional"),
        (lambda p, b, c: 0.0, r"signature \(p, b, c\) .*'c'.*functools.partial"),
        (lambda p, b, *, key: 0.0, "keywords state and rngs"),
    ],
)
def test_losses_of_other_arguments_are_named(loss, message):
    for make in (make_train_step, make_eval_step):
        with pytest.raises(TypeError, match=f"{make.__name__}: .*{message}"):
            make(loss)


def test_losses_that_can_be_called_are_taken():
    def scaled(params, batch, factor):
        return loss_fn(params, batch) * factor

    @functools.wraps(scaled)
    def wrapped(params, batch):
        return scaled(params, batch, 2.0)

    class Loss:
        def __call__(self, params, batch):
            return loss_fn(params, batch)

    for loss in (
        functools.partial(scaled, factor=2.0),
        wrapped,
        Loss(),
        Loss().__call__,
        jax.jit(loss_fn),
        lambda *args: loss_fn(*args),
        lambda params, batch, flag=True: loss_fn(params, batch),
        lambda params, batch, rngs, state: loss_fn(params, batch),
    ):
        _, metrics = make_train_step(loss)(make_state(), B)
        assert metrics["loss"] in (3, 6)


def test_the_step_on_an_optimizer_has_no_keywords():
    with pytest.raises(TypeError, match=r"make_nnx_train_step.*'rngs'.*into the batch"):
        make_nnx_train_step(lambda model, batch, rngs: 0.0)


@pytest.mark.parametrize("params", [jnp.ones(3), 3.0, "w", nnx.Rngs(0)])
def test_parameters_that_are_no_dict_are_named(params):
    with pytest.raises(TypeError, match=r"params is a .*expected a dict.*{'w': array}"):
        make_state(params=params)


@pytest.mark.parametrize(
    "aux, error, message",
    [
        ({0: 1.0}, TypeError, r"aux with the keys \[0\]; expected strings"),
        ({"name": "resnet"}, TypeError, r"returned aux\['name'\], a str; expected arr"),
        ({"a": {"f": jnp.tanh}}, TypeError, r"aux\['a'\]\['f'\], a "),
        ({"skipped_total": 1}, ValueError, r"reserved names \['skipped_total'\]"),
        (
            {"hyperparams/learning_rate": 1.0},
            ValueError,
            r"reserved names \['hyperparams/learning_rate'\]",
        ),
    ],
)
@pytest.mark.parametrize("jit", [True, False])
def test_bad_metrics_are_named(aux, error, message, jit):
    step = make_train_step(with_aux(aux), has_aux=True, jit=jit)
    with pytest.raises(error, match=message):
        step(make_state(tx=optim.sgd(0.1)), B)


def test_names_that_nobody_reports_are_free():
    step = make_train_step(with_aux({"hyperparams/learning_rate": 1.0}), has_aux=True)
    assert step(make_state(), B)[1]["hyperparams/learning_rate"] == 1


def test_an_axis_that_is_not_mapped_is_named():
    message = "axis_name='data' is not the axis of a map around this call"
    with pytest.raises(NameError, match=f"make_train_step: {message}"):
        make_train_step(loss_fn, axis_name="data")(make_state(), B)
    with pytest.raises(NameError, match=f"dynamic_scale_grad: {message}"):
        dynamic_scale_grad(loss_fn, axis_name="data")(
            {"w": jnp.ones(3)}, B, dynamic_scaler_state={}
        )


@pytest.mark.parametrize("missing", ["scaler", "count", "max_scaler"])
def test_a_state_without_a_key_of_its_scaler_is_named(missing):
    scaler = init_scaler()
    del scaler[missing]
    message = rf"step: state.scaler, a dict, lacks \['{missing}'\]; expected every key"
    for make in (make_train_step, make_eval_step):
        with pytest.raises(ValueError, match=message):
            make(loss_fn)(make_state().replace(scaler=scaler), B)


# Scalers


BAD_SCALERS = {
    "nan": (dict(scaler=np.nan), "scaler=nan"),
    "negative": (dict(scaler=-1.0), "scaler=-1.0"),
    "zero": (dict(scaler=0), "scaler=0"),
    "too large": (dict(scaler=2.0**30), "scaler=1073741824.0 .*max_scaler=16777216.0"),
    "factor": (dict(adjust_factor=1.0), "adjust_factor=1.0 .*above 1"),
    "rounded factor": (dict(adjust_factor=1 + 1e-9), "adjust_factor=1.0"),
    "patience": (dict(patience=-1), "patience=-1"),
    "half": (dict(patience=1.5), "patience=1.5"),
    "limits": (
        dict(min_scaler=8.0, max_scaler=4.0),
        "scaler=32768.0 .*min_scaler=8.0 and max_scaler=4.0",
    ),
    "count": (dict(count=-5), "count=-5"),
}


@pytest.mark.parametrize("values, message", BAD_SCALERS.values(), ids=BAD_SCALERS)
def test_scalers_are_checked_wherever_they_are_given(values, message):
    def as_arrays(values):
        return {key: jnp.asarray(value) for key, value in values.items()}

    model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    step = make_nnx_train_step(lambda model, batch: model(batch).sum())
    grad_fn = dynamic_scale_grad(loss_fn)
    given = {
        "AmpTrainState.create: scaler": lambda s: make_state(scaler=s),
        "dynamic_scaler_state": lambda s: grad_fn(
            {"w": jnp.ones(3)}, B, dynamic_scaler_state=s
        ),
        "train_step: scaler": lambda s: step(model, optimizer, s, B),
    }
    for where, use in given.items():
        for scaler in (values, as_arrays(values)):
            with pytest.raises(ValueError, match=f"{where}: .*{message}"):
                use(scaler)
    with pytest.raises(ValueError, match=message):
        update_scaler(values, True)


PARTLY = {
    "factor": (dict(adjust_factor=-2.0), "adjust_factor=-2.0"),
    "numpy": (dict(patience=np.int32(-1)), "patience=-1"),
    "scale": (dict(scaler=-1.0), "scaler=-1.0 .*min_scaler="),
    "limits": (dict(scaler=8.0, max_scaler=4.0), "scaler=8.0 .*max_scaler=4.0"),
}


@pytest.mark.parametrize("values, message", PARTLY.values(), ids=PARTLY)
def test_numbers_beside_arrays_are_checked(values, message):
    """What is on the device is not waited for; what is not costs nothing to check."""
    for update in (
        lambda state: update_scaler(state | values, False),
        jax.jit(lambda state: update_scaler(state | values, False)),
    ):
        with pytest.raises(ValueError, match=message):
            update(init_scaler())


def test_numbers_are_not_judged_by_arrays_beside_them():
    given = init_scaler(scaler=2.0**21)
    assert update_scaler(given | {"min_scaler": 2.0**20}, False)["scaler"] == 2.0**20
    given = init_scaler(scaler=2.0, max_scaler=4.0)
    assert update_scaler(given | {"min_scaler": 2.0}, False)["scaler"] == 2.0


def test_scalers_are_not_waited_for_later_on(monkeypatch):
    """On the way from step to step they are arrays; nobody fetches them."""
    state = init_scaler()
    monkeypatch.setattr("flax_amp._training.scaler.values_out_of_range", None)
    for finite in (True, False):
        state = update_scaler(state, finite)
    assert scale_loss(jnp.float32(1), state) == 2.0**14


def test_traced_scalers_are_not_checked():
    jax.jit(lambda x: check_scaler({"scaler": x}, "here"))(-1.0)
    jax.eval_shape(lambda x: make_state(scaler={"scaler": x}), jnp.float32(-1))


def test_create_names_its_own_argument():
    with pytest.raises(
        TypeError, match="create: scaler: got int; expected a dict.*no_s"
    ):
        make_state(scaler=3)


# Accumulation


@pytest.mark.parametrize(
    "batch, message",
    [
        ({"x": B[:2], "y": np.ones(4)}, r"\['x'\] has shape \(2,\); batch\['y'\] has"),
        ({"x": np.ones((4, 2)), "w": np.ones(2)}, r"\['w'\] has shape \(2,\)"),
        ({"x": np.ones(4), "n": np.float32(1)}, r"\['n'\] has shape \(\)"),
        ({"x": np.ones(3), "y": np.ones(3)}, r"\['x'\] has shape \(3,\)"),
    ],
)
def test_leaves_that_do_not_split_alike_are_named(batch, message):
    def loss(params, batch):
        return params["w"].sum() * sum(x.mean() for x in batch.values())

    with pytest.raises(ValueError, match=f"{message}.*the same for all.*accum_steps=2"):
        make_train_step(loss, accum_steps=2)(make_state(), batch)


def test_updates_in_the_place_of_aux_are_named():
    """`return loss, updates` would leave the statistics as they are."""

    def loss_fn(params, batch):
        return (params["w"] ** 2).sum(), {"batch_stats": {"mean": jnp.ones(2)}}

    state = AmpTrainState.create(
        params={"w": jnp.ones(2)},
        variables={"batch_stats": {"mean": jnp.zeros(2)}},
        tx=optax.sgd(0.1),
    )
    with pytest.raises(ValueError, match=r"\['batch_stats'\].*aux\['variables'\]"):
        make_train_step(loss_fn, has_aux=True)(state, None)


def test_a_key_among_the_parameters_is_named():
    params = {"w": jnp.ones(2), "key": jax.random.key(0)}
    with pytest.raises(ValueError, match=r"\['key'\] is a PRNG key; expected arrays"):
        AmpTrainState.create(params=params, tx=optax.sgd(0.1))
