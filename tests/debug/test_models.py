"""The models of the benchmarks in full size: exact, and on one screen."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from test_walk import emitted, explained

import flax_amp
from benchmarks.models import problem, vit
from flax_amp import explain


@pytest.fixture(autouse=True)
def _as_a_user_has_it():
    with jax.numpy_rank_promotion("allow"):
        yield


def linen(name, size):
    task = problem(name, size)
    return task.loss, task.shapes()


def nnx_vit(_, size):
    config = vit.CONFIGS["vit_s16"][size]
    model = nnx.eval_shape(lambda: vit.NNXViT(config, None, nnx.Rngs(0)))
    shape = (config.batch, config.image, config.image, 3)
    images = jax.ShapeDtypeStruct(shape, jnp.float32)
    return lambda model, x: jnp.mean(model(x) ** 2), (model, images)


# name: how it is made, a line of its report
MODELS = {
    "resnet50": (linen, "Bottleneck_8..12  x5"),
    "gpt_scan": (linen, "ScanCheckpointStep_0  loop x12"),
    "gpt_unroll": (linen, "CheckpointStep_1..11  x11"),
    "nnx_vit": (nnx_vit, "0..11  x12"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_full_size(name, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    make, line = MODELS[name]
    fun, args = make(name, "full")
    found = explain(fun, compute_dtype=jnp.bfloat16)(*args)
    assert line in str(found), found
    assert len(str(found).splitlines()) < 45
    assert found.totals.low_share == 1 and not found.problems
    jaxpr = jax.make_jaxpr(
        lambda *xs: flax_amp.amp(fun, compute_dtype=jnp.bfloat16)(*xs)
    )
    assert explained(found) == emitted(jaxpr(*args))
