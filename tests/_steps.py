"""Small states, their steps and batches, and what a skipped step changes."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from _models import MODELS, make_batch
from flax_amp import (
    AmpOptimizer,
    AmpTrainState,
    init_scaler,
    make_nnx_train_step,
    make_train_step,
)

DTYPES = [jnp.float16, jnp.bfloat16, jnp.float32]
# The word for a run that computes in a dtype.
WORDS = dict(zip(DTYPES, ("16-mixed", "bf16-mixed", "32-true"), strict=True))

# What a step that is skipped for its loss changes, and nothing else.
SKIP_LEAVES = {
    ".step",
    ".opt_state.notfinite_count",
    ".opt_state.last_finite",
    ".opt_state.total_notfinite",
}


class EmaState(AmpTrainState):
    """Averages the parameters, with a counter, at every update."""

    ema: Any

    def apply_gradients(self, *, grads, **kwargs):
        new = super().apply_gradients(grads=grads, **kwargs)
        mean = jax.tree.map(lambda e, p: 0.9 * e + 0.1 * p, self.ema["p"], new.params)
        return new.replace(ema={"p": mean, "n": self.ema["n"] + 1})


def setup(name, *, cls=AmpTrainState, **options):
    """Returns a state that has taken two steps, and its training step."""
    state, step = _setup(name, cls, **options)
    return copy(state), step


@functools.cache
def _setup(name, cls, **options):
    """All states of a name share what is static, and so a compiled step."""
    make, loss = MODELS[name]
    extra = {}
    if cls is EmaState:
        extra["ema"] = {"p": make().params, "n": 0}
    state = make(cls=cls, scaler=init_scaler(scaler=16), **extra)
    step = make_train_step(loss, has_aux=True, **options)
    for seed in (1, 2):
        state, _ = step(state, make_batch(seed))
    return state, step


def linear_loss(params, batch):
    return ((batch["x"] @ params["w"] - batch["y"]) ** 2).mean()


def linear_state(tx=None, w=None, **options):
    params = {"w": jnp.array([1.0, -2.0, 0.5]) if w is None else w}
    # 2**15 is too much here.
    scaler = init_scaler(scaler=16)
    options = {"precision": "16-mixed", "scaler": scaler} | options
    return AmpTrainState.create(params=params, tx=tx or optax.sgd(0.1), **options)


def linear_batch(size=8, poisoned=False):
    generator = np.random.default_rng(0)
    x = generator.integers(-4, 5, (size, 3)).astype(np.float32)
    if poisoned:
        x[size // 2] = np.inf
    return {"x": x, "y": generator.integers(-4, 5, size).astype(np.float32)}


def counting(fn):
    """Returns `fn`, its signature kept, and a list that grows with every trace."""
    traces = []

    @functools.wraps(fn)
    def counted(*args, **kwargs):
        traces.append(None)
        return fn(*args, **kwargs)

    return counted, traces


def copy(state):
    return jax.tree.map(jnp.copy, state)


def raised(call, error, message):
    """Asserts that a call raises an error with a message."""
    with pytest.raises(error, match=message):
        call()


def linear_objects(wrt=nnx.Param, tx=None, precision="bf16-mixed", **options):
    """Returns a linear NNX model of 3 features, and its optimizer."""
    model = nnx.Linear(3, 1, rngs=nnx.Rngs(0), **options)
    tx = tx or optax.sgd(0.1)
    return model, AmpOptimizer(model, tx, wrt=wrt, precision=precision)


def sum_loss(model, batch):
    return model(batch).sum()


def run(loss, state=linear_state, batch=linear_batch, **options):
    """Returns a call that makes a step and takes it."""
    return lambda: make_train_step(loss, **options)(state(), batch())


def run_nnx(loss=sum_loss, make=linear_objects, **options):
    """The same for the step on an optimizer."""
    step = make_nnx_train_step(loss, **options)
    return lambda: step(*make(), np.ones(3, np.float32))


def mapped(step, mesh, check_vma=True, out_specs=None):
    """Returns a step over the devices of a mesh, each with its part of the batch."""
    spec = jax.sharding.PartitionSpec
    return jax.jit(
        jax.shard_map(
            step,
            mesh=mesh,
            in_specs=(spec(), spec("data")),
            out_specs=spec() if out_specs is None else out_specs,
            check_vma=check_vma,
        )
    )


def assert_same_on_every_device(tree):
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            copies = [np.asarray(shard.data) for shard in leaf.addressable_shards]
            assert all((c == copies[0]).all() for c in copies), path


def arrays(*nodes):
    """Returns copies of the arrays of NNX objects, as plain dicts."""
    return jax.tree.map(jnp.copy, nnx.to_pure_dict(nnx.state(nodes)))
