"""The state of a sweep, which `jax.vmap` makes, is one checkpoint."""

import jax
import jax.numpy as jnp
import optax
import pytest

from _models import changed
from flax_amp import AmpTrainState, checkpoint, init_scaler, make_train_step


def sweep(rates=(0.1, 0.2, 0.4)):
    def create(rate):
        return AmpTrainState.create(
            params={"w": jnp.full(2, rate)},
            tx=TX,
            precision="16-mixed",
            scaler=init_scaler(patience=1),
        )

    return jax.vmap(create)(jnp.array(rates))


TX = optax.adam(0.1)
STEP = make_train_step(lambda params, batch: jnp.sum(params["w"] * batch), jit=False)


def run(state, steps):
    step = jax.jit(jax.vmap(STEP, in_axes=(0, None)))
    for i in range(steps):
        state, _ = step(state, jnp.float32([1, i]))
    return state


def test_a_sweep_goes_on_as_it_was(tmp_path):
    state = run(sweep(), 3)
    assert state.step.tolist() == [3, 3, 3]
    with checkpoint.manager(tmp_path) as manager:
        assert checkpoint.save(manager, state)
        assert manager.all_steps() == [3]
    (report,) = checkpoint.verify(tmp_path)
    assert not report.problem and report.has_checksums
    for read in (checkpoint.restore, checkpoint.migrate):
        for target in (sweep(), jax.eval_shape(sweep)):
            restored = read(tmp_path, target)
            assert not changed(state, restored)
    assert not changed(run(state, 2), run(restored, 2))


def test_another_number_of_runs_is_named(tmp_path):
    with checkpoint.manager(tmp_path) as manager:
        checkpoint.save(manager, sweep())
    for read in (checkpoint.restore, checkpoint.migrate):
        for target in (sweep([0.1, 0.2]), AmpTrainState.create(params={}, tx=TX)):
            with pytest.raises(ValueError, match=r"scaler/scaler: float32\[3\] on dis"):
                read(tmp_path, target)


def test_scaler_keys_that_a_sweep_lacks_are_named(tmp_path):
    state = sweep()
    few = {key: state.scaler[key] for key in ("scaler", "count")}
    with checkpoint.manager(tmp_path) as manager:
        checkpoint.save(manager, state.replace(scaler=few))
    for read in (checkpoint.restore, checkpoint.migrate):
        with pytest.raises(ValueError, match=r"scaler/patience: not on disk, int32\[3"):
            read(tmp_path, jax.eval_shape(sweep))
