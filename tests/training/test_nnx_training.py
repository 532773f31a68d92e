"""Training NNX models of every kind with `make_train_step`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from _models import CLASSES, FEATURES, changed, cross_entropy, make_batch
from _steps import mapped
from flax_amp import AmpTrainState, amp, make_train_step, no_scaler
from helpers import assert_identical, dtypes_of

LAYERS = 3
SIZE = 8


class Block(nnx.Module):
    """Dense, BatchNorm and dropout: parameters, statistics and a random stream."""

    def __init__(self, rngs):
        self.dense = nnx.Linear(SIZE, SIZE, rngs=rngs)
        self.norm = nnx.BatchNorm(SIZE, momentum=0.9, rngs=rngs)
        self.dropout = nnx.Dropout(0.25, rngs=rngs)

    def __call__(self, x):
        return x + self.dropout(nnx.relu(self.norm(self.dense(x))))


class Net(nnx.Module):
    def __init__(self, rngs, kind):
        self.kind = kind
        self.first = nnx.Linear(FEATURES, SIZE, rngs=rngs)
        if kind == "list":
            self.blocks = nnx.List([Block(rngs) for _ in range(LAYERS)])
        else:
            self.blocks = nnx.split_rngs(splits=LAYERS)(nnx.vmap(Block))(rngs)
        self.last = nnx.Linear(SIZE, CLASSES, rngs=rngs)

    def __call__(self, x):
        return self.last(_RUN[self.kind](self.blocks, self.first(x)))


def run_list(blocks, x):
    for block in blocks:
        x = block(x)
    return x


def run_scan(blocks, x, call=lambda block, x: block(x)):
    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    def layers(x, block):
        return call(block, x)

    return layers(x, blocks)


def run_vmap(blocks, x):  # an ensemble
    return nnx.vmap(lambda block, x: block(x), in_axes=(0, None))(blocks, x).mean(0)


_RUN = {
    "list": run_list,
    "scan": run_scan,
    "remat": functools.partial(run_scan, call=nnx.remat(lambda block, x: block(x))),
    "vmap": run_vmap,
}


def loss_fn(model, batch):
    return cross_entropy(model(batch["x"]), batch["y"])


@pytest.mark.parametrize(
    "kind, dtype",
    [
        ("scan", jnp.float16),
        ("vmap", jnp.bfloat16),
        pytest.param("list", jnp.float16, marks=pytest.mark.slow),
        pytest.param("remat", jnp.bfloat16, marks=pytest.mark.slow),
    ],
)
def test_stacks(kind, dtype):
    """Every state of a stack moves, in half precision, and a bad step moves none."""
    model = Net(nnx.Rngs(0), kind)
    state = AmpTrainState.create(model=model, tx=optax.adam(1e-2), precision="16-mixed")
    step = make_train_step(loss_fn, compute_dtype=dtype, donate=False)

    after, metrics = step(state, make_batch())
    assert metrics["grads_finite"]
    unchanged = {
        path
        for path in paths(state.variables) - changed(state.variables, after.variables)
        if not path.endswith("['key']")
    }
    assert not unchanged
    assert changed(state.params, after.params) == paths(state.params)
    found = dtypes_of(step, state, make_batch())
    assert {name for names in found for name in names} == {jnp.dtype(dtype).name}

    skipped, metrics = step(after, make_batch(poisoned=True))
    assert not metrics["grads_finite"]
    assert_identical(skipped.params, after.params)
    assert_identical(skipped.variables, after.variables)


def paths(tree):
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path) for path, _ in leaves}


@pytest.mark.slow
def test_scanned_stack_equals_plain_flax():
    """Without lower precision the step is what nnx.Optimizer does.

    SGD, because Adam makes a step of the noise that is the gradient of a bias in front
    of a BatchNorm.
    """
    model = Net(nnx.Rngs(0), "scan")
    state = AmpTrainState.create(model=model, tx=optax.sgd(0.1), scaler=no_scaler())
    step = make_train_step(loss_fn, compute_dtype=jnp.float32)
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)

    @nnx.jit
    def plain(model, optimizer, batch):
        optimizer.update(model, nnx.grad(loss_fn)(model, batch))

    for seed in range(4):
        state, _ = step(state, make_batch(seed))
        plain(model, optimizer, make_batch(seed))

    trained = nnx.state(state.merge_model(), nnx.Param)
    for a, b in zip(
        jax.tree.leaves(trained),
        jax.tree.leaves(nnx.state(model, nnx.Param)),
        strict=True,
    ):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6)


def test_shared_parameters_get_the_gradients_of_all_uses():
    class Tied(nnx.Module):
        def __init__(self, rngs):
            self.encoder = nnx.Linear(4, 4, rngs=rngs)
            self.decoder = self.encoder

        def __call__(self, x):
            return self.decoder(self.encoder(x))

    model = Tied(nnx.Rngs(0))
    state = AmpTrainState.create(model=model, tx=optax.sgd(1.0), scaler=no_scaler())
    step = make_train_step(
        lambda model, x: model(x).mean(), compute_dtype=jnp.float32, donate=False
    )
    after, _ = step(state, jnp.ones((2, 4)))
    trained = after.merge_model()

    assert trained.encoder is trained.decoder
    assert set(after.params) == {"decoder"} or set(after.params) == {"encoder"}
    grads = nnx.grad(lambda model, x: model(x).mean())(model, jnp.ones((2, 4)))
    expected = model.encoder.kernel[...] - jax.tree.leaves(grads)[1]
    np.testing.assert_allclose(trained.encoder.kernel[...], expected, rtol=1e-6)


# Some parameters only


class Adapted(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.LoRALinear(FEATURES, SIZE, lora_rank=2, rngs=rngs)
        self.norm = nnx.BatchNorm(SIZE, rngs=rngs)
        self.last = nnx.Linear(SIZE, CLASSES, rngs=rngs)

    def __call__(self, x):
        return self.last(nnx.relu(self.norm(self.first(x))))


def adapted_state(wrt=nnx.LoRAParam, **options):
    model = Adapted(nnx.Rngs(0))
    return AmpTrainState.create(model=model, tx=optax.adam(1e-2), wrt=wrt, **options)


@pytest.mark.parametrize("accum_steps", [1, 2])
def test_only_what_is_selected_trains(accum_steps):
    """Only that has moments in the optimizer; what is frozen keeps its bits."""
    state = adapted_state()
    assert paths(state.params) == {
        "['first']['lora']['lora_a']",
        "['first']['lora']['lora_b']",
    }
    moments = [x for x in jax.tree.leaves(state.opt_state) if x.ndim]
    assert len(moments) == 2 * len(jax.tree.leaves(state.params))
    step = make_train_step(loss_fn, accum_steps=accum_steps, donate=False)
    after = state
    for seed in range(3):
        after, metrics = step(after, make_batch(seed))

    assert metrics["grads_finite"]
    assert changed(state.params, after.params) == paths(state.params)
    ends = ("['mean']", "['var']")
    statistics = {path for path in paths(state.variables) if path.endswith(ends)}
    assert statistics
    assert changed(state.variables, after.variables) == statistics
    assert after.merge_model()(make_batch()["x"]).shape == (8, CLASSES)


@pytest.mark.parametrize("wrap, accum_steps", [(None, 1), (nnx.jit, 2), (nnx.remat, 1)])
def test_frozen_parameters_keep_their_bits_on_three_devices(wrap, accum_steps):
    """Also those that come back from an inner jit: a third of the sum is not it."""

    class Wrapped(Adapted):
        __call__ = wrap(Adapted.__call__) if wrap else Adapted.__call__

    state = AmpTrainState.create(
        model=Wrapped(nnx.Rngs(0)), tx=optax.adam(1e-2), wrt=nnx.LoRAParam
    )
    options = dict(accum_steps=accum_steps, compute_dtype=jnp.bfloat16)
    step = make_train_step(loss_fn, axis_name="data", jit=False, **options)
    step = mapped(step, jax.sharding.Mesh(np.array(jax.devices()[:3]), ("data",)))
    after, metrics = step(state, make_batch(size=12))
    assert metrics["grads_finite"]
    moved = changed(state.variables, after.variables)
    assert moved and all("['norm']" in path for path in moved)
    if wrap is None:  # what is frozen is not averaged either
        averaged = str(jax.make_jaxpr(step)(state, make_batch(size=12))).count("psum")
        assert averaged < len(jax.tree.leaves((state.params, state.variables)))


# `amp` alone


def test_a_changed_mode_is_named_for_what_it_is():
    def evaluate(model, x):
        model.eval()
        return model(x)

    model = Net(nnx.Rngs(0), "list")
    with pytest.raises(ValueError, match="changed a static attribute .*model.eval"):
        amp(evaluate)(model, jnp.ones((2, FEATURES)))


def test_amp_inside_a_foreign_trace_reads_a_module_from_outside():
    """Flax lets a module of an outer trace be read, not changed."""
    model = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    forward = amp(lambda model, x: model(x), compute_dtype=jnp.bfloat16)

    out = jax.jit(lambda x: forward(model, x))(jnp.ones((2, 4)))
    assert out.dtype == jnp.float32
    kernel = model.kernel
    forward(model, jnp.ones((2, 4)))
    assert model.kernel is kernel
