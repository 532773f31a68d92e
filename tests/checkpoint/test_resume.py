"""What a run that is resumed is told: whose settings win, and what it is not."""

import warnings

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

from flax_amp import AmpTrainState, checkpoint, init_scaler, optim

TOLD = checkpoint.CheckpointWarning


def state(tx, **options):
    return AmpTrainState.create(params={"w": jnp.ones(2)}, tx=tx, **options)


def save(directory, saved):
    with checkpoint.manager(directory) as manager:
        assert checkpoint.save(manager, saved)


@pytest.mark.parametrize(
    "make", [optim.sgd, optax.inject_hyperparams(optax.sgd)], ids=["optim", "inject"]
)
def test_a_learning_rate_that_was_changed_is_named(make, tmp_path):
    save(tmp_path, state(make(0.1)))
    with pytest.warns(TOLD, match="rate is 0.1 on disk and 0.5 in the") as told:
        restored = checkpoint.restore(tmp_path, state(make(0.5)))
    assert len(told) == 1 and "those on disk" in str(told[0].message)
    assert told[0].filename == __file__
    assert float(restored.hyperparams["learning_rate"]) == pytest.approx(0.1)


def test_one_warning_names_all_settings(tmp_path):
    fp16 = {"precision": "16-mixed"}
    save(tmp_path, state(optim.sgd(0.1), scaler=init_scaler(patience=7), **fp16))
    with pytest.warns(TOLD) as told:
        checkpoint.restore(tmp_path, state(optim.sgd(0.5), **fp16))
    assert len(told) == 1
    for text in ("learning_rate is 0.1", "scaler/patience is 7 on disk and 2000 in"):
        assert text in str(told[0].message)


def test_what_is_no_setting_or_not_known_is_not_named(tmp_path):
    """Schedules, whose values are of a step; the code's rate of plain optax."""
    schedule = optax.linear_schedule(0.1, 0.0, 10)
    cases = [
        (optax.sgd(0.1), optax.sgd(0.5)),
        (optim.sgd(schedule), optim.sgd(schedule)),
        (optax.inject_hyperparams(optax.sgd)(schedule),) * 2,
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for i, (old, new) in enumerate(cases):
            trained = state(old).apply_gradients(grads={"w": jnp.ones(2)})
            save(tmp_path / str(i), trained)
            checkpoint.restore(tmp_path / str(i), state(new))
        save(tmp_path / "a", state(optim.sgd(0.1)))
        abstract = jax.eval_shape(lambda: state(optim.sgd(0.5)))
        checkpoint.restore(tmp_path / "a", abstract)


@pytest.mark.parametrize("of", [optax, optim])
def test_another_optimizer_with_the_same_arrays_is_named(of, tmp_path):
    save(tmp_path, state(of.adam(0.1)))
    with pytest.warns(TOLD, match="adam on disk and .*adamax in the target"):
        checkpoint.restore(tmp_path, state(of.adamax(0.1)))
    clipped = optax.chain(optax.clip(1.0), optax.adam(0.1))
    save(tmp_path / "clipped", state(clipped))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        checkpoint.restore(tmp_path, state(of.adam(0.1)))
        checkpoint.restore(tmp_path / "clipped", state(clipped))


def test_names_that_fall_together_on_disk_are_refused(tmp_path):
    params = {"enc.w": jnp.ones(2), "enc": {"w": jnp.zeros(2)}}
    with (
        checkpoint.manager(tmp_path) as manager,
        pytest.raises(ValueError, match="params.enc.w.*expected names that differ"),
    ):
        checkpoint.save(manager, AmpTrainState.create(params=params, tx=optax.sgd(1)))
    assert not checkpoint.verify(tmp_path)


def test_directories_that_are_none(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="directory ''; expected"):
        checkpoint.manager("")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere" / "deep")
    with pytest.raises(NotADirectoryError, match="link is a file, or a link that lea"):
        checkpoint.manager(tmp_path / "link")
    assert not (tmp_path / "nowhere").exists()


def test_a_manager_that_only_reads_saves_nothing(tmp_path):
    save(tmp_path, state(optax.sgd(0.1)))
    with checkpoint.manager(tmp_path, read_only=True) as manager:
        assert int(checkpoint.restore(manager, state(optax.sgd(0.1))).step) == 0
        with pytest.raises(ValueError, match="read_only=True; expected a manager that"):
            checkpoint.save(manager, state(optax.sgd(0.1)))
    assert sorted(x.name for x in tmp_path.iterdir() if x.name.isdigit()) == ["0"]


# NNX


def pair(rate=0.1, width=3):
    model = nnx.Linear(2, width, rngs=nnx.Rngs(0))
    tx = optim.adam(rate).to_optax(in_state=True)
    return model, nnx.Optimizer(model, tx, wrt=nnx.Param)


def trained(model, optimizer, steps):
    @nnx.jit
    def step(model, optimizer, x):
        grads = nnx.grad(lambda m: jnp.mean((m(x) - 1) ** 2))(model)
        optimizer.update(model, grads)

    for i in range(steps):
        step(model, optimizer, jnp.full((4, 2), 1.0 + i))
    return model, optimizer


def test_a_model_and_its_optimizer_go_on_as_they_were(tmp_path):
    model, optimizer = trained(*pair(), 3)
    with checkpoint.manager(tmp_path) as manager:
        assert checkpoint.save(manager, (model, optimizer))
        assert manager.all_steps() == [3]
    new = pair()
    restored = checkpoint.restore(tmp_path, new)
    assert restored[0] is new[0] and restored[1] is new[1]
    for objects in ((model, optimizer), new):
        trained(*objects, 2)
    both = [jax.tree.leaves(nnx.state(x)) for x in ((model, optimizer), new)]
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), *both))
    with pytest.warns(TOLD, match="learning_rate.* is 0.1 on disk and 0.5"):
        checkpoint.restore(tmp_path, pair(0.5))


def test_nnx_objects_stay_as_they_are_if_the_checkpoint_does_not_fit(tmp_path):
    with checkpoint.manager(tmp_path) as manager:
        checkpoint.save(manager, trained(*pair(), 1))
    other = pair(width=5)
    before = jax.tree.map(jnp.copy, nnx.state(other))
    with pytest.raises(ValueError, match=r"0/kernel/value: float32\[2, 3\] on disk"):
        checkpoint.restore(tmp_path, other)
    assert jax.tree.all(
        jax.tree.map(lambda a, b: bool((a == b).all()), before, nnx.state(other))
    )
    with pytest.raises(TypeError, match="expected an AmpTrainState, or NNX objects"):
        checkpoint.save(checkpoint.manager(tmp_path), other[:1])
