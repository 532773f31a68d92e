"""The metrics that a step reports, over core.py, loss.py and optimizer.py.

The metrics come from `aux` of the loss, `metrics_fn`, and hyper-parameters.
"""

import collections
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from clu import metrics as clu_metrics
from flax import core, nnx, struct

from _steps import (
    linear_batch,
    linear_loss,
    linear_objects,
    linear_state,
    mapped,
    raised,
    run,
    sum_loss,
)
from flax_amp import (
    init_scaler,
    make_nnx_train_step,
    make_train_step,
    no_scaler,
    optim,
)
from helpers import assert_close, assert_identical

# What a loss returns beside the loss


@struct.dataclass
class Measured:
    mean: jax.Array
    each: jax.Array
    name: str = struct.field(pytree_node=False, default="x")


class Pair(NamedTuple):
    mean: jax.Array
    each: jax.Array


def values(x):
    return {"mean": x.mean(), "each": x.sum(1), "count": jnp.int32(len(x))}


def average(x):
    return clu_metrics.Average.from_model_output(values=x.sum(1))


# How a loss makes its aux of the inputs of its examples.
KINDS = {
    "nothing": lambda x: None,
    "array": lambda x: x.sum(1),
    "tuple": lambda x: (x.mean(), [{"each": x.sum(1)}], None, Pair(x.mean(), x[0])),
    "struct": lambda x: Measured(x.mean(), x.sum(1)),
    "tuple of metrics": lambda x: (average(x), x.mean()),
}
DICTS = {
    "dict": values,
    "ordered": lambda x: collections.OrderedDict(values(x)),
    "frozen": lambda x: core.FrozenDict(values(x)),
    "nested": lambda x: {"of_x": {0: x.mean()}, "metric": average(x)},
}
OPTIONS = {"plain": {}, "accumulated and redone": {"accum_steps": 2, "redo_on_nan": 2}}
OWN = {"loss", "grads_finite", "scaler", "grad_norm", "skipped_total"}


def has_reduce(node):
    return hasattr(node, "reduce")


def expected_of(kind, x, accum_steps):
    """What arrives: means of scalars, reduced metrics, other leaves in a stack."""
    parts = [kind(x[i::accum_steps]) for i in range(accum_steps)]
    if accum_steps == 1:
        return parts[0]

    def join(*leaves):
        stacked = jax.tree.map(lambda *xs: jnp.stack([*map(jnp.asarray, xs)]), *leaves)
        if has_reduce(stacked):
            return stacked.reduce()
        is_scalar = stacked.ndim == 1 and stacked.dtype == jnp.float32
        return stacked.mean() if is_scalar else stacked

    return jax.tree.map(join, *parts, is_leaf=has_reduce)


def assert_arrived(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for got, wanted in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-5)


def loss_of(kind):
    return lambda p, b: (linear_loss(p, b), kind(b["x"]))


# A plain step hands on what an accumulated step reduces, so that the kinds with all
# sorts of leaves are enough there.
ARRIVES = [(name, "accumulated and redone") for name in [*KINDS, *DICTS]]
ARRIVES += [("tuple", "plain"), ("tuple of metrics", "plain"), ("nested", "plain")]


@pytest.mark.parametrize("name, way", ARRIVES)
@pytest.mark.once
def test_any_pytree_arrives(name, way):
    """A dict of names is metrics, everything else is one, also of a redone step."""
    kind, batch, options = (KINDS | DICTS)[name], linear_batch(), OPTIONS[way]
    step = make_train_step(loss_of(kind), has_aux=True, **options)
    _, found = step(linear_state(scaler=init_scaler(scaler=2.0**24)), batch)
    accum_steps = options.get("accum_steps", 1)
    expected = jax.jit(lambda x: expected_of(kind, x, accum_steps))(batch["x"])
    seen = {key: value for key, value in found.items() if key not in OWN}
    assert_arrived(seen, dict(expected) if name in DICTS else {"aux": expected})


def test_a_tree_over_devices(mesh):
    """Scalars are means over the devices, other leaves those of each device."""

    def kind(x):
        return Measured(x.mean(), {"each": x.sum(1)})

    options = dict(has_aux=True, axis_name="data", jit=False, precision="32-true")
    step = make_train_step(loss_of(kind), **options)
    spec = jax.sharding.PartitionSpec
    specs = Measured(spec(), {"each": spec("data")})
    of_device = lambda state, batch: step(state, batch)[1]["aux"]  # noqa: E731
    found = mapped(of_device, mesh, out_specs=specs)(linear_state(), linear_batch(16))
    assert_arrived(found, kind(linear_batch(16)["x"]))


def pair(aux):
    return lambda params, batch: (params["w"].sum(), aux)


def test_an_entry_with_the_name_of_another_metric():
    """The step's own value keeps its name."""
    rate = "hyperparams/learning_rate"
    own = ["loss", "grads_finite", "grad_norm", "skipped_total", rate]
    state = functools.partial(linear_state, optim.sgd(0.1))
    _, alone = run(lambda p, b: p["w"].sum(), state)()
    aux = dict.fromkeys(own, 7.0) | {"aux": 8.0}
    _, found = run(pair(aux), state, has_aux=True)()
    assert found == alone | {f"aux/{name}": 7.0 for name in own} | {"aux": 8.0}
    # A name that the step does not report is the user's.
    assert run(pair({rate: 1.0}), has_aux=True)()[1][rate] == 1
    measured = dict(has_aux=True, metrics_fn=lambda *_: {"loss": 2.0, "mine": 3.0})
    _, found = run(pair({"loss": 1.0, "mine": 4.0}), **measured)()
    assert (found["metrics_fn/loss"], found["aux/loss"]) == (2, 1)
    assert (found["mine"], found["aux/mine"]) == (3, 4)


def test_no_metric_takes_the_place_of_another():
    """JAX sorts the keys of `aux`, so that the longer name comes first."""
    _, found = run(pair({"loss": 1.0, "aux/loss": 2.0}), has_aux=True)()
    assert (found["aux/loss"], found["aux/aux/loss"]) == (2, 1)


# What users measure of gradients and updates, inside of the step


def everything(state, grads, updates):
    """What each argument holds, by name, to compare with what is expected."""
    return {"before": state.params, "grads": grads, "updates": updates}


def measured(state, batch, **options):
    step = make_train_step(linear_loss, metrics_fn=everything, donate=False, **options)
    return step(state, batch)


def clipped():
    return optax.chain(optax.clip(0.01), optax.sgd(0.5))


@pytest.mark.parametrize(
    "precision, options",
    [("16-mixed", {}), ("bf16-mixed", {"accum_steps": 2, "redo_on_nan": 2})],
)
def test_gradients_are_unscaled_and_updates_are_applied(precision, options):
    """In a skipped step, they are those that it did not apply."""
    scaler = init_scaler(scaler=2.0**10) if precision == "16-mixed" else None
    state = linear_state(clipped(), precision=precision, scaler=scaler)
    new, found = measured(state, linear_batch(), **options)
    expected = jax.grad(linear_loss)(state.params, linear_batch())
    dtype = {"bf": jnp.bfloat16, "16": jnp.float16}[precision[:2]]
    assert_close(found["grads"], expected, dtype)
    assert_identical(found["before"], state.params)
    difference = jax.tree.map(jnp.subtract, new.params, state.params)
    assert_identical(found["updates"], difference)
    assert float(jnp.abs(difference["w"]).max()) <= 0.005 + 1e-7  # clipped
    new, found = measured(state, linear_batch(poisoned=True), **options)
    assert not found["grads_finite"] and not jnp.isfinite(found["updates"]["w"]).all()
    assert_identical(new.params, state.params)


def test_metrics_of_an_nnx_model():
    model, optimizer = linear_objects(tx=clipped())
    before, x = nnx.state(nnx.clone(model), nnx.Param), jnp.ones((2, 3))

    def parts(model, grads, updates):
        return {"before": nnx.state(model, nnx.Param), "g": grads, "u": updates}

    options = dict(precision="32-true", metrics_fn=parts, donate=False)
    step = make_nnx_train_step(sum_loss, **options)
    expected = nnx.grad(sum_loss)(nnx.clone(model), x)
    found = step(model, optimizer, x)
    assert_close(nnx.to_pure_dict(found["g"]), nnx.to_pure_dict(expected), jnp.float32)
    after = nnx.state(model, nnx.Param)
    assert_identical(found["u"], jax.tree.map(jnp.subtract, after, before))
    assert_identical(found["before"], before)


# Hyper-parameters

FALL = optax.linear_schedule(0.1, 0.0, 10)
ADAM = optax.inject_hyperparams(optax.adam)
SGD = optax.inject_hyperparams(optax.sgd)
LABELS = {"w": "a"}
RATE = "learning_rate"


@optax.inject_hyperparams
def clipping(max_norm):
    """Hyper-parameters of an optimizer that holds another such one."""
    return optax.chain(optax.clip_by_global_norm(max_norm), SGD(FALL))


@optax.inject_hyperparams
def micro_stepping(rate):
    return optax.MultiSteps(optax.sgd(rate), 2).gradient_transformation()


IN_STATE = optim.sgd(1.0).to_optax(in_state=True)
# name -> an optimizer, the name of its rate, and how many steps make an update
OPTIMIZERS = {
    "chain": (optax.chain(optax.clip(1.0), ADAM(FALL)), RATE, 1),
    "masked": (optax.masked(ADAM(FALL), {"w": True}), RATE, 1),
    "two": (
        optax.multi_transform({"a": ADAM(FALL), "b": SGD(0.5)}, LABELS),
        f"a/{RATE}",
        1,
    ),
    "micro-steps": (optax.MultiSteps(ADAM(FALL), 2), RATE, 2),
    "around micro-steps": (micro_stepping(FALL), "rate", 1),
    "nested": (clipping(1.0), f"1/{RATE}", 1),
    "optim beside": (optax.chain(IN_STATE, ADAM(FALL)), f"1/{RATE}", 1),
    "guarded": (optax.apply_if_finite(ADAM(FALL), 2**31 - 1), RATE, 1),
}


@pytest.mark.parametrize("tx, name, every", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.once
def test_the_rate_of_each_update(tx, name, every):
    """It is that of a count of updates, which a skipped step does not raise."""
    step = make_train_step(linear_loss, precision="32-true")
    state = linear_state(tx, scaler=no_scaler())
    assert state.hyperparams[name] == np.float32(FALL(0))
    kept, updates = state.hyperparams, 0
    for i in range(5):
        state, found = step(state, linear_batch(poisoned=i == 2))
        if i != 2:
            updates = ((i if i < 2 else i - 1) + 1) // every
        rate = found[f"hyperparams/{name}"]
        assert rate == np.float32(FALL(max(updates - 1, 0))) == state.hyperparams[name]
    assert kept[name] == np.float32(FALL(0))  # a copy, which no step deletes


def test_a_hyperparameter_of_a_sweep():
    """Arrays that are no scalars are in the state, and no metrics."""
    state = jax.vmap(lambda rate: linear_state(SGD(rate)))(jnp.float32([0.1, 0.2]))
    assert state.hyperparams[RATE].shape == (2,)
    step = jax.vmap(make_train_step(linear_loss, jit=False), in_axes=(0, None))
    _, found = step(state, linear_batch())
    np.testing.assert_allclose(found[f"hyperparams/{RATE}"], [0.1, 0.2])


def test_they_are_not_replaced():
    """Optax would overwrite that of a schedule."""
    state = linear_state(OPTIMIZERS["optim beside"][0])
    assert state.replace_hyperparams(**{f"0/{RATE}": 0.5}).step == 0
    message = f"got 1/{RATE}; .*values that optax.inject_hyperparams keeps cannot"
    call = lambda: state.replace_hyperparams(**{f"1/{RATE}": 0.5})  # noqa: E731
    raised(call, TypeError, message)
    call = lambda: linear_state(ADAM(0.1)).replace_hyperparams(eps=0.5)  # noqa: E731
    raised(call, TypeError, "got eps; the optimizer has")


def test_the_state_of_the_optimizer_is_found_as_without_the_wrapper():
    """Loops read and set what is inside, by the labels of the user."""
    tx = optax.multi_transform({"a": ADAM(0.1), "b": SGD(0.5)}, LABELS)
    state = linear_state(tx, precision="32-true")
    inside = state.opt_state.inner_states["a"].inner_state
    assert inside.hyperparams[RATE] == np.float32(0.1)
    inside.hyperparams[RATE] = jnp.float32(0.2)
    state, found = make_train_step(linear_loss)(state, linear_batch())
    assert found[f"hyperparams/a/{RATE}"] == np.float32(0.2)
    assert set(state.hyperparams) >= {f"a/{RATE}", f"b/{RATE}"}
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        state.opt_state.nothing  # noqa: B018
