"""What a loss may return beside the loss, and under which name it is reported."""

import collections
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from clu import metrics as clu_metrics
from flax import core, struct

from _steps import (
    linear_batch,
    linear_loss,
    linear_objects,
    linear_state,
    mapped,
    raised,
    run,
)
from flax_amp import (
    AmpOptimizer,
    init_scaler,
    make_nnx_train_step,
    make_train_step,
    optim,
)


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
    "empty": lambda x: (),
    "array": lambda x: x.sum(1),
    "number": lambda x: 3.0,
    "tuple": lambda x: (x.mean(), [{"each": x.sum(1)}], None, Pair(x.mean(), x[0])),
    "struct": lambda x: Measured(x.mean(), x.sum(1)),
    "numbers": lambda x: {0: x.mean(), 1: x.sum(1)},
    "tuple of metrics": lambda x: (average(x), x.mean()),
}
DICTS = {
    "dict": values,
    "ordered": lambda x: collections.OrderedDict(values(x)),
    "frozen": lambda x: core.FrozenDict(values(x)),
    "no entries": lambda x: {},
    "nested": lambda x: {"of_x": {0: x.mean()}, "metric": average(x)},
}
OPTIONS = {"plain": {}, "accumulated and redone": {"accum_steps": 2, "redo_on_nan": 2}}
OWN = {"loss", "grads_finite", "scaler", "grad_norm", "skipped_total"}
ROWS = [("state", name, option) for name in [*KINDS, *DICTS] for option in OPTIONS]
# The step on an optimizer hands on what the same code collects.
ROWS += [("nnx", "nested", "plain"), ("nnx", "tuple", "accumulated and redone")]


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


def assert_arrived(metrics, expected):
    assert jax.tree.structure(metrics) == jax.tree.structure(expected)
    for got, wanted in zip(*map(jax.tree.leaves, (metrics, expected)), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-5)


def loss_of(kind):
    return lambda p, b: (linear_loss(p, b), kind(b["x"]))


def nnx_loss_of(kind):
    return lambda m, b: (((m(b["x"])[:, 0] - b["y"]) ** 2).mean(), kind(b["x"]))


@pytest.mark.parametrize("api, name, option", ROWS)
@pytest.mark.once
def test_any_pytree_arrives(api, name, option):
    """A dict of names is metrics, everything else is one, also of a redone step."""
    kind, options = (KINDS | DICTS)[name], OPTIONS[option]
    scaler = init_scaler(scaler=2.0**24)
    both = options | dict(has_aux=True, precision="16-mixed")
    if api == "state":
        step = make_train_step(loss_of(kind), **both)
        _, metrics = step(linear_state(scaler=scaler), linear_batch())
    else:
        step = make_nnx_train_step(nnx_loss_of(kind), **both)
        model, _ = linear_objects()
        word = both["precision"]
        optimizer = AmpOptimizer(model, optax.sgd(0.1), precision=word, scaler=scaler)
        metrics = step(model, optimizer, linear_batch())
    x = jnp.asarray(linear_batch()["x"])
    expected = expected_of(kind, x, options.get("accum_steps", 1))
    seen = {key: value for key, value in metrics.items() if key not in OWN}
    assert_arrived(seen, dict(expected) if name in DICTS else {"aux": expected})


def test_a_tree_over_devices(mesh):
    """Scalars are means over the devices, other leaves those of each device."""

    def kind(x):
        return Measured(x.mean(), {"each": x.sum(1)})

    step = make_train_step(
        loss_of(kind),
        has_aux=True,
        axis_name="data",
        jit=False,
        precision="32-true",
    )
    spec = jax.sharding.PartitionSpec

    def of_device(state, batch):
        _, metrics = step(state, batch)
        return metrics["aux"]

    specs = Measured(spec(), {"each": spec("data")})
    found = mapped(of_device, mesh, out_specs=specs)(linear_state(), linear_batch(16))
    x = linear_batch(16)["x"]
    assert_arrived(found, Measured(x.mean(), {"each": x.sum(1)}))


# Names


def pair(aux):
    return lambda params, batch: (params["w"].sum(), aux)


def test_an_entry_with_the_name_of_another_metric():
    """The step's own value keeps its name."""
    rate = "hyperparams/learning_rate"
    own = ["loss", "grads_finite", "grad_norm", "skipped_total", rate]
    state = functools.partial(linear_state, optim.sgd(0.1))
    _, alone = run(lambda p, b: p["w"].sum(), state)()
    aux = dict.fromkeys(own, 7.0) | {"aux": 8.0}
    _, metrics = run(pair(aux), state, has_aux=True)()
    assert metrics == alone | {f"aux/{name}": 7.0 for name in own} | {"aux": 8.0}
    # A name that the step does not report is the user's.
    assert run(pair({rate: 1.0}), has_aux=True)()[1][rate] == 1
    twice = pair({"loss": 1.0, "aux/loss": 2.0})
    message = r"aux \['aux/loss', 'loss'\]; expected no two .*one name.*Rename"
    raised(run(twice, has_aux=True), ValueError, message)
    measured = dict(has_aux=True, metrics_fn=lambda *_: {"aux/loss": 2.0})
    raised(run(pair({"loss": 1.0}), **measured), ValueError, r"aux \['loss'\]; exp")
