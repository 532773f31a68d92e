"""What people write in the wrong place: every error says what to write instead."""

import functools
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from _steps import (
    EmaState,
    linear_batch,
    linear_loss,
    linear_objects,
    linear_state,
    raised,
    sum_loss,
)
from flax_amp import (
    AmpTrainState,
    all_finite,
    dynamic_scale_grad,
    dynamic_scale_value_and_grad,
    init_scaler,
    make_eval_step,
    make_nnx_train_step,
    make_train_step,
    optim,
    scale_loss,
    unscale_grads,
    update_scaler,
)
from flax_amp._training.arguments import KEYWORDS

pytestmark = pytest.mark.once

X = jnp.ones((2, 3))
MAKERS = (make_train_step, make_eval_step)


# Arguments of a call


BY_POSITION = "Pass what else the loss takes by position, after the batch"


@pytest.mark.parametrize("jit", [True, False])
@pytest.mark.parametrize("make", MAKERS)
def test_arguments_that_a_step_does_not_take(make, jit):
    step, key = make(linear_loss, jit=jit), jax.random.key(0)
    state, batch = linear_state(), linear_batch()
    for call, seen in [
        (lambda: step(state, batch, rngs=key), "unexpected .* 'rngs'"),
        (lambda: step(state), "missing a required argument: 'batch'"),
    ]:
        expected = rf".*{seen}.*; expected the arguments \(state, batch, \*args\)"
        message = rf"^{make.__name__[5:]}: {expected}. {BY_POSITION}"
        raised(call, TypeError, message)
    step(state=state, batch=batch)


@pytest.mark.parametrize("jit", [True, False])
def test_arguments_that_an_nnx_step_does_not_take(jit):
    step, key = make_nnx_train_step(sum_loss, jit=jit), jax.random.key(0)
    args = (*linear_objects(), None, X)
    expected = r"the arguments \(model, optimizer, scaler, batch, \*args\)"
    for call in (lambda: step(*args, rngs=key), step):
        raised(call, TypeError, f"^train_step: .*{expected}. {BY_POSITION}")
    step(*args[:2], batch=X, scaler=None)


NOT_NUMERIC = {
    "a str": "name",
    "a object": object(),
    "a function": linear_loss,
    "a NumPy array of <U1": np.array(["a"]),
    "a NumPy array of object": np.array([None]),
    "a NumPy array of datetime64.*": np.array(["2020"], "datetime64"),
}


@pytest.mark.parametrize("kind", NOT_NUMERIC)
def test_leaves_that_are_no_arrays(kind):
    leaf = NOT_NUMERIC[kind]
    batch = linear_batch() | {"name": leaf}
    expected = rf"step: got batch\['name'\], {kind}; expected arrays and numbers"
    steps = {make: make(linear_loss) for make in MAKERS}
    for step in steps.values():
        raised(lambda s=step: s(linear_state(), batch), TypeError, expected)
    step = make_nnx_train_step(lambda model, batch: model(batch["x"]).sum())
    raised(lambda: step(*linear_objects(), None, batch), TypeError, expected)
    for fields, path in [
        ({"w": {"w": leaf}}, r"params\['w'\]"),
        ({"variables": {"a": leaf}}, r"variables\['a'\]"),
    ]:
        message = rf"AmpTrainState.create: got {path}.*, {kind}; expected arrays and"
        raised(lambda f=fields: linear_state(**f), TypeError, message)
    # What a compiled step returns.
    returned = rf"returned \['name'\], {kind}; expected .*can return"
    bare = make_eval_step(lambda params, batch: leaf)
    raised(lambda: bare(linear_state(), X), TypeError, f"returned {kind}; expected")
    step = make_eval_step(lambda params, batch: {"name": leaf})
    raised(lambda: step(linear_state(), X), TypeError, f"eval_step: .*{returned}")
    open_step = make_eval_step(lambda params, batch: {"name": leaf}, jit=False)
    assert open_step(linear_state(), X)["name"] is leaf


def test_a_model_where_a_state_is_expected():
    model, _ = linear_objects()
    for make in MAKERS:
        message = r"state is a Linear; .*make_nnx_train_step, .*nnx.jit\(flax_amp.amp"
        raised(lambda make=make: make(sum_loss)(model, X), TypeError, message)


# Keywords that the user has bound


def names(params, batch, *, state=None, rngs=None):
    """The parameters that it got, and the names of its streams."""
    return params["w"].sum() * state.params["w"].sum() * len(rngs)


class Owner:
    names = staticmethod(names)

    def method(self, params, batch, *, state=None, rngs=None):
        return names(params, batch, state=state, rngs=rngs)


def wrapped(fn):
    return functools.wraps(fn)(lambda *args, **kwargs: fn(*args, **kwargs))


partial = functools.partial
BINDERS = {
    "partial": lambda **bound: partial(names, **bound),
    "nested": lambda **bound: partial(partial(names, **bound)),
    "outside": lambda **bound: partial(partial(names), **bound),
    "jitted inside": lambda **bound: partial(jax.jit(names), **bound),
    "jitted": lambda **bound: jax.jit(partial(names, **bound)),
    "wrapped": lambda **bound: wrapped(partial(names, **bound)),
    "wrapped inside": lambda **bound: partial(wrapped(names), **bound),
    "method": lambda **bound: partial(Owner().method, **bound),
    "tree_util": lambda **bound: jax.tree_util.Partial(names, **bound),
}
BOUND = {"neither": (), "state": ("state",), "rngs": ("rngs",), "both": KEYWORDS}


@pytest.mark.parametrize("bound", BOUND)
@pytest.mark.parametrize("binder", BINDERS)
def test_keywords_that_the_user_has_bound(binder, bound):
    """A teacher of functools.partial stays what it is; the others are the step's."""
    teacher = linear_state(w=jnp.full(3, 2.0))
    streams = {name: jax.random.key(0) for name in "abc"}
    values = {"state": teacher, "rngs": streams}
    fn = BINDERS[binder](**{name: values[name] for name in BOUND[bound]})
    state = linear_state(rngs={"a": jax.random.key(0)}, w=jnp.ones(3))
    state = state.replace(precision="32-true")
    expected = 3.0 * (6 if "state" in BOUND[bound] else 3)
    expected *= 3 if "rngs" in BOUND[bound] else 1
    assert make_eval_step(fn)(state, 0.0) == expected
    assert make_train_step(fn, donate=False)(state, 0.0)[1]["loss"] == expected


# Random numbers


class Dropped(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dropout(0.5, deterministic=False)(nn.Dense(2)(x))


class NnxDropped(nnx.Module):
    def __init__(self):
        self.linear = nnx.Linear(3, 2, rngs=nnx.Rngs(0))

    def __call__(self, x, rngs):
        dropout = nnx.Dropout(0.5, deterministic=False, rngs=rngs)
        return nnx.view(dropout, deterministic=False)(self.linear(x)).mean()


def linen_dropped(**options):
    params = Dropped().init(
        {"params": jax.random.key(0), "dropout": jax.random.key(1)}, X
    )["params"]
    return AmpTrainState.create(params=params, tx=optax.sgd(0.1), **options)


def nnx_dropped(**options):
    return AmpTrainState.create(model=NnxDropped(), tx=optax.sgd(0.1), **options)


def noise(key):
    return jax.random.normal(key, (3,)).sum()


READERS = {
    "key": (linear_state, lambda p, b, rngs: p["w"].sum() * noise(rngs["dropout"])),
    "get": (linear_state, lambda p, b, rngs: noise(rngs.get("dropout"))),
    "linen": (
        linen_dropped,
        lambda p, b, rngs: Dropped().apply({"params": p}, X, rngs=rngs).mean(),
    ),
    "linen without the keyword": (
        linen_dropped,
        lambda p, b: Dropped().apply({"params": p}, X).mean(),
    ),
    "nnx": (nnx_dropped, lambda m, b, rngs: m(X, nnx.Rngs(**rngs))),
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("make", MAKERS)
def test_streams_that_the_state_lacks(make, reader):
    make_state, loss = READERS[reader]
    advice = r".*create\(rngs=\{'dropout': jax.random.key\(0\)\}\), declare the keyword"
    raised(lambda: make(loss)(make_state(), 0.0), Exception, "state has none" + advice)
    if reader != "get":  # which asks for no stream in particular
        state = make_state(rngs={"noise": jax.random.key(0)})
        found = r"state has \['noise'\]"
        raised(lambda: make(loss)(state, 0.0), Exception, found + advice)
    if "without" not in reader:
        make(loss)(make_state(rngs={"dropout": jax.random.key(0)}), 0.0)


def test_errors_that_are_not_for_want_of_a_stream():
    """A loss may declare `rngs` and use none; other errors have no note."""
    make_train_step(lambda p, b, rngs: p["w"].sum() * len(rngs))(linear_state(), 0.0)
    for loss in (lambda p, b: p["v"], lambda p, b, rngs: 1 / 0):
        state = linear_state(rngs={"dropout": jax.random.key(0)})
        with pytest.raises((KeyError, ZeroDivisionError)) as caught:
            make_train_step(loss)(state, 0.0)
        assert "flax_amp" not in str(getattr(caught.value, "__notes__", ""))


# Optimizers and states that do not belong together


class Deep(nnx.Module):
    def __init__(self):
        self.linear = linear_objects()[0]


def of_state(make, **changes):
    """A train state with the parameters or the optimizer of another one."""

    def call():
        state = make().replace(**changes)
        loss = lambda p, b: sum(map(jnp.sum, jax.tree.leaves(p)))  # noqa: E731
        make_train_step(loss)(state, X)

    return call


def of_objects(other, tx=None):
    """A model with the optimizer of another one."""

    def call():
        optimizer = nnx.Optimizer(other(), tx or optax.adam(0.1), wrt=nnx.Param)
        make_nnx_train_step(sum_loss)(linear_objects()[0], optimizer, None, X)

    return call


def too_many():
    return optax.apply_if_finite(optax.sgd(0.1), 2**31)


ADAM = functools.partial(linear_state, optax.adam(0.1))
NOT_ITS_OWN = {
    "parameters of other names": (
        of_state(ADAM, params={"v": X[0]}),
        r"make_train_step: .*mu\['v'\]: absent in its state, \(3,\) for these para",
    ),
    "another optimizer": (
        of_state(linear_state, tx=optax.adam(0.1)),
        "make_train_step: .*absent for these parameters",
    ),
    "a model of other names": (
        of_objects(Deep),
        r"make_nnx_.*\[0\].mu\['linear'\]\['bias'\]: \(1,\) in its state.* and 5 more",
    ),
}


@pytest.mark.parametrize("call, leaves", NOT_ITS_OWN.values(), ids=NOT_ITS_OWN)
def test_an_optimizer_of_another_model(call, leaves):
    message = "was made for another model or by another.*; expected.* anew"
    with pytest.raises(ValueError, match=leaves) as caught:
        call()
    assert re.search(message, str(caught.value))


TOO_MANY = {
    "state": of_state(lambda: linear_state(too_many())),
    "nnx": of_objects(lambda: linear_objects()[0], too_many()),
}


@pytest.mark.parametrize("call", TOO_MANY.values(), ids=TOO_MANY)
def test_an_update_that_fails(call):
    note = r"flax_amp: make_\w*train_step: the update .* failed. If .* make .*int32"
    raised(call, Exception, note)


def test_an_optimizer_inside_one_of_optax():
    state = linear_state(optax.chain(optax.clip(1.0), optim.adam(0.1)))
    message = r"no state.*Inside of optax.chain .*, pass tx.to_optax\(\)"
    step = make_train_step(linear_loss)
    raised(lambda: step(state, linear_batch()), RuntimeError, message)


BROADCASTS = {
    "state": (
        of_state(ADAM, params={"w": X[0, :1]}),
        r"make_train_step: .*params\['w'\]: \(1,\) before, \(3,\) now",
    ),
    "nnx": (
        of_objects(lambda: nnx.Linear(3, 2, rngs=nnx.Rngs(0))),
        r"make_nnx_train_step: .*\['kernel'\].*: \(3, 1\) before, \(3, 2\) now",
    ),
}


@pytest.mark.parametrize("call, message", BROADCASTS.values(), ids=BROADCASTS)
def test_an_update_that_broadcasts(call, message):
    raised(call, ValueError, f"{message}.*expected the same leaves and shapes.*anew")


REPLACED = [
    (dict(rngs=None), TypeError, "state.rngs is a NoneType; expected a dict"),
    (dict(rngs=jax.random.key(0)), TypeError, "state.rngs is a PRNGKeyArray; expected"),
    (dict(variables=None), TypeError, "state.variables is a NoneType; expected a dict"),
    (dict(params={"w": X[0].astype(jnp.float16)}), ValueError, r"\['w'\]: float16; ex"),
]


def test_a_precision_that_was_replaced():
    subclassed = EmaState.create(params={"w": X[0]}, tx=optax.sgd(0.1), ema={})
    for state in (linear_state(), subclassed):
        message = rf"^{type(state).__name__}.replace: precision is 'fp8'; expected one"
        raised(lambda s=state: s.replace(precision="fp8"), ValueError, message)


@pytest.mark.parametrize("changes, error, message", REPLACED)
@pytest.mark.parametrize("jit", [True, False])
def test_fields_that_were_replaced(changes, error, message, jit):
    step = make_train_step(linear_loss, jit=jit)
    state = linear_state().replace(**changes)
    raised(lambda: step(state, linear_batch()), error, f"train_step: .*{message}")


def test_wrt_is_for_modules():
    message = "got wrt=.*LoRAParam.* without model; .*nnx.Module"
    raised(lambda: linear_state(wrt=nnx.LoRAParam), TypeError, message)


@pytest.mark.parametrize(
    "other",
    [
        lambda state: state.replace_hyperparams(b1=0.8),
        lambda state: linear_state(optim.sgd(0.1)),
        lambda state: AmpTrainState.create(params={"v": X[0]}, tx=optim.adamw(0.1)),
    ],
    ids=["static number", "another tx", "other parameters"],
)
def test_shardings_of_another_state(other):
    mesh = jax.make_mesh((1,), ("data",), devices=jax.devices()[:1])
    place = functools.partial(
        jax.device_put, device=NamedSharding(mesh, PartitionSpec())
    )
    state = place(linear_state(optim.adamw(0.1)))
    shardings = jax.tree.map(lambda x: x.sharding, state)
    loss = lambda p, b: sum(map(jnp.sum, jax.tree.leaves(p)))  # noqa: E731
    step = make_train_step(loss, state_shardings=shardings)
    message = (
        "state_shardings do not fit the state: .*static numbers. Make the step anew"
    )
    raised(lambda: step(place(other(state)), X), ValueError, f"(?s){message}")
    state, _ = step(state.replace_hyperparams(learning_rate=0.2), X)
    for some in (jax.tree.leaves(shardings)[0], None, shardings.replace(params=None)):
        state, _ = make_train_step(loss, state_shardings=some)(state, X)


@pytest.mark.parametrize("leaf", ["data", 3, X])
def test_shardings_that_are_none(leaf):
    message = (
        r"state_shardings holds something that is not a sharding \(.*; expected one fo"
    )
    for shardings in (leaf, linear_state().replace(params={"w": leaf})):
        make = functools.partial(make_train_step, state_shardings=shardings)
        raised(
            lambda m=make: m(linear_loss), TypeError, f"(?s)make_train_step: {message}"
        )


# Models that sow


class Sows(nnx.Module):
    def __init__(self):
        self.linear = linear_objects()[0]

    def __call__(self, x):
        out = self.linear(x)
        self.sow(nnx.Intermediate, "out", out)
        return out.sum()


def popping(model, batch):
    return model(batch), nnx.pop(model, nnx.Intermediate)


@pytest.mark.filterwarnings("ignore:Using 'Module.sow:DeprecationWarning")
@pytest.mark.parametrize("steps", [1, 2])
def test_models_that_sow(steps):
    """The advice works, with both steps."""
    advice = r"return it: \(loss, nnx.pop\(model, nnx.Intermediate\)\), with has_aux"
    message = rf"\['out'\]\[0\]: absent before, float32.*{advice}"
    options = dict(compute_dtype=jnp.float32, accum_steps=steps)

    def on_objects(loss, **more):
        model = Sows()
        optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
        step = make_nnx_train_step(loss, **options, **more)
        return [step(model, optimizer, None, X)[1] for _ in range(2)]

    def on_state(loss, **more):
        state = AmpTrainState.create(model=Sows(), tx=optax.sgd(0.1))
        return [make_train_step(loss, **options, **more)(state, X)[1]]

    for run in (on_objects, on_state):
        raised(lambda r=run: r(lambda m, b: m(b)), ValueError, message)
        metrics = run(popping, has_aux=True)[-1]
        (out,) = jax.tree.leaves(metrics["out"])
        assert out.size == 2


# The scaler in loops of the user's own


@pytest.mark.parametrize(
    "flag", [{"w": X}, X > 0, X[0, 0], 1, 0.0, None, "yes"], ids=str
)
def test_flags_that_are_no_flags(flag):
    for name, call in [
        ("grads_finite", lambda: update_scaler(init_scaler(), flag)),
        ("loss_finite", lambda: update_scaler({}, True, loss_finite=flag)),
    ]:
        advice = rf"Pass flax_amp.all_finite\({name[:5].rstrip('_')}\)"
        message = f"update_scaler: {name} is .*; expected True, False or bool.*{advice}"
        raised(call, TypeError, message)


def test_flags():
    update = functools.partial(update_scaler, init_scaler())
    for yes in (True, np.True_, np.array(True), jnp.array(True)):
        for no in (False, np.False_, jnp.array(False)):
            assert update(yes)["count"] == 1
            for skipped in (update(no), update(yes, loss_finite=no)):
                assert (skipped["count"], skipped["total_resets"]) == (0, 1)


@pytest.mark.parametrize("loss", [None, "a", (X, {}), {"loss": X}])
def test_losses_that_are_no_numbers(loss):
    kind = type(loss).__name__
    message = f"scale_loss: loss is a {kind}; expected a number.* without aux"
    raised(lambda: scale_loss(loss, init_scaler()), TypeError, message)


@pytest.mark.parametrize("number", [float, np.float32, np.float64, np.array, jnp.array])
@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: {"a": x}, lambda x: [0, x]])
def test_numbers_are_leaves(wrap, number):
    """A float of Python is a gradient or a loss like an array of it."""
    unscaled = unscale_grads(wrap(number(8.0)), init_scaler(scaler=4))
    assert jax.tree.leaves(unscaled)[-1] == 2 and all_finite(wrap(number(8.0)))
    for broken in (jnp.nan, jnp.inf, -jnp.inf):
        assert not all_finite(wrap(number(broken)))
    assert not all_finite(complex("nan"))


def test_arguments_of_the_scaler_that_are_swapped():
    raised(
        lambda: scale_loss(init_scaler(), X[0, 0]), TypeError, "scaler is a Arr.*exp"
    )
    for transform in (dynamic_scale_grad, dynamic_scale_value_and_grad):
        for fun in (None, 3, linear_state(), {"w": X}):
            message = f"{transform.__name__}: fun is a .*; expected a function"
            raised(lambda t=transform, f=fun: t(f), TypeError, message)
        message = f"{transform.__name__}: got holomorphic=True; expected a real loss"
        raised(lambda t=transform: t(jnp.sin, holomorphic=True), TypeError, message)
