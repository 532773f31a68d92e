"""The state with plain Orbax calls: everything comes back, in other processes too."""

import json
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
import pytest

import _resume
from _models import MODELS, changed, make_batch
from flax_amp import AmpTrainState, checkpoint, make_train_step


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


@pytest.mark.parametrize("name", MODELS)
def test_restores_into_every_kind_of_target_and_is_not_traced_again(half, name):
    directory, states = half
    traces = []

    def counted(*args, **kwargs):
        traces.append(None)
        return MODELS[name][1](*args, **kwargs)

    counted.__wrapped__ = MODELS[name][1]  # with its signature
    step = make_train_step(counted, has_aux=True, donate=False)
    fresh = _resume.new_state(name)
    step(fresh, make_batch())
    abstract = jax.eval_shape(lambda: fresh)
    with_shardings = jax.tree.map(
        lambda x, leaf: x.update(sharding=leaf.sharding), abstract, fresh
    )
    with _resume.open_manager(directory / name) as manager:
        for target in (abstract, with_shardings, fresh):
            restored = manager.restore(3, args=ocp.args.StandardRestore(target))
            assert isinstance(restored, AmpTrainState)
            assert not changed(states[name], restored)
            for leaf in jax.tree.leaves(restored):
                assert isinstance(leaf, jax.Array) and not leaf.aval.weak_type
    step(restored, make_batch())
    assert len(traces) == 1


def test_a_scaler_of_others_may_have_strings(tmp_path):
    tree = {"scaler": {"kind": "dynamic", "scale": jnp.float32(2)}}
    with ocp.CheckpointManager(tmp_path) as manager:
        manager.save(1, args=ocp.args.PyTreeSave(tree))
    (report,) = checkpoint.verify(tmp_path)
    assert not report.problem and report.scaler == {"scale": 2.0}
