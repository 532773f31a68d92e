"""The state with plain Orbax calls: everything comes back, in other processes too."""

import json
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp
import pytest

import _resume
from _models import MODELS, changed, make_batch
from flax_amp import checkpoint
from flax_amp._training.scaler import init_scaler
from flax_amp._training.train_state import AmpTrainState
from flax_amp._training.train_step import make_train_step


@pytest.fixture(scope="module")
def half(tmp_path_factory):
    """A folder, and each model's state after three steps, which was saved there."""
    directory, states = tmp_path_factory.mktemp("plain"), {}
    for name in MODELS:
        state = _resume.new_state(name)
        states[name], _ = _resume.trained(name, state, range(_resume.HALF))
        with _resume.open_manager(directory / name) as manager:
            args = ocp.args.StandardSave(states[name])
            manager.save(_resume.HALF, args=args)
    return directory, states


@pytest.mark.slow
def test_resuming_in_another_process_changes_no_bit(half, tmp_path):
    directory, states = half
    report = tmp_path / "report.json"
    subprocess.run(
        [sys.executable, _resume.__file__, directory, report],
        check=True,
        timeout=240,  # a hang of Orbax would last 300 seconds
        cwd=Path(_resume.__file__).parents[1],
    )
    resumed = json.loads(report.read_text())
    for name, state in states.items():
        steps = range(_resume.HALF, _resume.STEPS)
        whole = _resume.trained(name, state, steps)[1]
        assert whole["skipped"] == 2  # one in each half
        assert whole["scale"] != 64
        assert resumed[name] == whole


@pytest.fixture(params=MODELS)
def trained(request, half):
    """A model's name, its state after three steps, and a manager that reads it."""
    directory, states = half
    with _resume.open_manager(directory / request.param) as manager:
        yield request.param, states[request.param], manager


@pytest.mark.parametrize("kind", ["concrete", "abstract", "abstract with shardings"])
def test_restores_into_every_kind_of_target(trained, kind):
    name, state, manager = trained
    make, _ = MODELS[name]
    fresh = make()
    target = fresh if kind == "concrete" else jax.eval_shape(lambda: fresh)
    if kind == "abstract with shardings":
        target = jax.tree.map(
            lambda shape, leaf: jax.ShapeDtypeStruct(
                shape.shape, shape.dtype, sharding=leaf.sharding
            ),
            target,
            fresh,
        )
    restored = manager.restore(3, args=ocp.args.StandardRestore(target))
    assert isinstance(restored, AmpTrainState)
    assert not changed(state, restored)
    for path, leaf in jax.tree_util.tree_leaves_with_path(restored):
        assert isinstance(leaf, jax.Array) and not leaf.aval.weak_type, path


def test_a_restored_state_is_not_traced_again(trained):
    name, state, manager = trained
    _, loss = MODELS[name]
    traces = []

    def counted(*args, **kwargs):
        traces.append(None)
        return loss(*args, **kwargs)

    counted.__wrapped__ = loss  # with its signature
    step = make_train_step(counted, has_aux=True, donate=False)
    target = _resume.new_state(name)
    step(target, make_batch())
    restored = manager.restore(3, args=ocp.args.StandardRestore(target))
    step(restored, make_batch())
    assert len(traces) == 1


def test_a_state_without_collections_saves(tmp_path):
    state = AmpTrainState.create(
        params={"w": jax.numpy.ones(2)}, tx=optax.sgd(0.1), scaler=init_scaler()
    )
    with _resume.open_manager(tmp_path) as manager:
        manager.save(0, args=ocp.args.StandardSave(state))
        restored = manager.restore(0, args=ocp.args.StandardRestore(state))
    assert not changed(state, restored)
    assert (restored.variables, restored.rngs) == ({}, {})


def test_a_scaler_of_others_may_have_strings(tmp_path):
    tree = {"scaler": {"kind": "dynamic", "scale": jnp.float32(2)}}
    with ocp.CheckpointManager(tmp_path) as manager:
        manager.save(1, args=ocp.args.PyTreeSave(tree))
    (report,) = checkpoint.verify(tmp_path)
    assert not report.problem and report.scaler == {"scale": 2.0}
