"""The step over several devices, over core.py, passes.py and train_step.py.

The runs are data parallel, FSDP, tensor parallel, under `shard_map` and under `vmap`.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from _models import NnxNet, changed
from _steps import SKIP_LEAVES, copy, counting, mapped
from examples.sharded import (
    fully_sharded,
    make_mesh,
    replicated,
    shardings_of,
    tensor_parallel,
)
from flax_amp import AmpTrainState, dynamic_scale_grad, init_scaler, make_train_step
from helpers import assert_close, assert_identical

FEATURES, WIDTH, EXAMPLES = 16, 64, 32


class Network(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(FEATURES, WIDTH, rngs=rngs)
        self.norm = nnx.BatchNorm(WIDTH, rngs=rngs)
        self.down = nnx.Linear(WIDTH, FEATURES, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.gelu(self.norm(self.up(x))))


def loss_fn(model, batch):
    return ((model(batch["x"]) - batch["y"]) ** 2).mean()


def make():
    """A state of NNX; one of Linen is in `examples/sharded.py`, which has a test."""
    return AmpTrainState.create(
        model=Network(nnx.Rngs(0)),
        tx=optax.sgd(0.1, momentum=0.9),
        precision="16-mixed",
        scaler=init_scaler(scaler=2.0**8, patience=2),
    )


def make_batch(seed, poisoned=False):
    x, y = jax.random.normal(jax.random.key(seed), (2, EXAMPLES, FEATURES))
    x = x.at[-1, 0].set(jnp.inf) if poisoned else x  # the last device's
    return {"x": x, "y": y}


WAYS = {
    "data": ({"data": 8}, replicated),
    "fsdp": ({"data": 8}, fully_sharded),
    "tensor": ({"data": 2, "model": 4}, tensor_parallel),
}


def place(way):
    axes, rule = WAYS[way]
    mesh = make_mesh(**axes)
    return shardings_of(make, mesh, rule), NamedSharding(mesh, P("data"))


@functools.cache
def on_one_device():
    """The state at the start and after four steps, and which of them it took."""
    step = make_train_step(loss_fn, donate=False)
    start = state = make()
    taken = []
    for seed in range(4):
        state, metrics = step(state, make_batch(seed, poisoned=seed == 2))
        taken.append(bool(metrics["grads_finite"]))
    return start, state, taken


@pytest.mark.parametrize("way", WAYS)
def test_equals_one_device(way):
    """Parameters, statistics and every decision, also when one device overflows.

    No leaf moves, and the step is traced once.
    """
    shardings, examples = place(way)
    start, single, taken = on_one_device()
    state = jax.jit(make, out_shardings=shardings)()
    counted, traces = counting(loss_fn)
    step = make_train_step(counted, state_shardings=shardings)
    assert_close(state.params, start.params, jnp.float32)

    for seed in range(4):
        batch = make_batch(seed, poisoned=seed == 2)
        before = copy(state)
        state, metrics = step(state, jax.device_put(batch, examples))
        assert metrics["grads_finite"] == taken[seed] == (seed != 2)
        assert (changed(before, state) == SKIP_LEAVES) == (seed == 2)

    for kind in ("params", "variables"):
        pair = getattr(state, kind), getattr(single, kind)
        assert_close(*map(jax.tree.leaves, pair), jnp.float16, gradient=True)
    assert_identical(state.scaler, single.scaler)
    pairs = zip(*map(jax.tree.leaves, (state, shardings)), strict=True)
    assert all(leaf.sharding.is_equivalent_to(to, leaf.ndim) for leaf, to in pairs)
    assert len(traces) == step._cache_size() == 1


# Mapped axes


def masks(model, batch, *, rngs):
    noise = jax.random.normal(rngs["a"], (1,))
    mask = model.dropout(batch)
    return model.first.bias[...].sum() * 0, {"mask": mask, "noise": noise}


@pytest.mark.parametrize("check_vma", [True, False])
def test_devices_draw_differently(mesh, check_vma):
    """From the streams of a model, and from the keys of the state."""
    state = AmpTrainState.create(
        model=NnxNet(nnx.Rngs(0)), tx=optax.sgd(0.1), rngs={"a": jax.random.key(0)}
    )
    step = make_train_step(masks, has_aux=True, axis_name="data", jit=False)

    def drawn(state, batch):
        new, metrics = step(state, batch)
        return metrics["mask"], metrics["noise"], new

    run = mapped(drawn, mesh, check_vma, (P("data"), P("data"), P()))
    *values, after = run(state, jnp.ones((8, 64)))
    for value in values:
        assert len({row.tobytes() for row in np.asarray(value)}) == 8
    assert changed(state.variables, after.variables) == {"['dropout']['rngs']['count']"}


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("accum_steps", [1, 2])
def test_a_loss_that_is_reduced_over_devices(check_vma, accum_steps, mesh):
    """Such as a mean over the tokens of all devices that a mask leaves.

    Each micro-batch has a count of its own, which is its weight.
    """
    mask = jnp.arange(16) % 3 > 0
    rows = {"x": jax.random.normal(jax.random.key(0), (16, 4)), "mask": mask}

    def total(params, rows):
        return ((rows["x"] @ params["w"]) ** 2 * rows["mask"]).sum()

    def loss_fn(params, rows):
        count = jax.lax.psum(rows["mask"].sum(), "data")
        return jax.lax.psum(total(params, rows), "data") / count, {"weight": count}

    options = dict(has_aux=True, jit=False, accum_steps=accum_steps)
    step = make_train_step(loss_fn, axis_name="data", precision="32-true", **options)
    params = {"w": jnp.ones(4)}
    state = AmpTrainState.create(params=params, tx=optax.sgd(1.0))
    scaled = dynamic_scale_grad(loss_fn, has_aux=True, axis_name="data")

    def both(state, rows):
        _, (grads, _) = scaled(state.params, rows, dynamic_scaler_state=state.scaler)
        return step(state, rows)[0].params, grads

    new, grads = mapped(both, mesh, check_vma)(state, rows)
    exact = jax.grad(lambda p: total(p, rows) / mask.sum())(params)
    assert_close(grads, exact, jnp.float32)
    assert_close(jax.tree.map(jnp.subtract, params, new), exact, jnp.float32)


@pytest.mark.parametrize("check_vma", [True, False])
def test_frozen_parameters_keep_their_bits(check_vma):
    """Three devices: a mean of three equal float32 numbers may be another number."""
    mesh = make_mesh(data=3)
    base = nnx.Linear(64, 64, rngs=nnx.Rngs(0))
    model = nnx.LoRA(64, 4, 64, base_module=base, rngs=nnx.Rngs(1))
    state = AmpTrainState.create(model=model, tx=optax.sgd(0.1), wrt=nnx.LoRAParam)
    means = jax.tree.map(lambda x: (x + x + x) / 3, state.variables)
    assert changed(state.variables, means)  # so this test can fail

    def loss_fn(model, batch):
        kernel = model.base_module.kernel
        kernel[...] = kernel[...] * 1  # another array of the same values
        return (model(batch) ** 2).mean()

    step = make_train_step(loss_fn, axis_name="data", jit=False)
    new, _ = mapped(step, mesh, check_vma)(state, jnp.ones((3, 64)))
    assert_identical(new.variables, state.variables)
    assert changed(state.params, new.params)
