"""Parameters in half precision that no step changes are read as they are."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import flax_amp
from flax_amp import (
    AmpOptimizer,
    AmpTrainState,
    checkpoint,
    make_eval_step,
    make_nnx_train_step,
    make_train_step,
    optim,
)
from helpers import assert_identical, bits

HALVES = {"bf16": jnp.bfloat16, "fp16": jnp.float16, "fp32": jnp.bfloat16}
LABELS = {"base": "base", "a": "lora", "b": "lora"}
IS_LORA = {name: label == "lora" for name, label in LABELS.items()}


def labels(params):
    """Labels of a dict, and of the `nnx.State` that an optimizer of NNX gets."""

    def label(path, _):
        return LABELS[jax.tree_util.keystr(path[:1], simple=True)]

    return jax.tree_util.tree_map_with_path(label, params)


def params_of(dtype=jnp.bfloat16):
    """A matrix in half, with one -0.0, and two small factors in float32."""
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = {"base": (8, 8), "a": (8, 2), "b": (2, 8)}
    draw = jax.random.normal
    pairs = zip(shapes.items(), keys, strict=True)
    params = {name: 0.3 * draw(key, shape) for (name, shape), key in pairs}
    params["base"] = params["base"].at[0, 0].set(-0.0).astype(dtype)
    return params


def loss_fn(params, x):
    y = jnp.tanh(x @ params["base"] + (x @ params["a"]) @ params["b"])
    return jnp.mean((y @ params["base"].T) ** 2)


def frozen(tx=None, zero=None, multi=optax.multi_transform):
    """An optimizer of the two factors only."""
    by_label = {"lora": tx or optax.adam(1e-2), "base": zero or optax.set_to_zero()}
    return multi(by_label, labels)


def state_of(dtype=jnp.bfloat16, tx=None, **options):
    tx = tx or frozen()
    return AmpTrainState.create(params=params_of(dtype), tx=tx, **options)


def batch():
    return jax.random.normal(jax.random.key(9), (8, 8))


def trained(step, state, steps=3):
    for _ in range(steps):
        state, metrics = step(state, batch())
    return state, metrics


class Net(nnx.Module):
    def __init__(self, dtype):
        params = params_of(dtype)
        self.base = nnx.Param(params["base"])
        self.a, self.b = nnx.LoRAParam(params["a"]), nnx.LoRAParam(params["b"])


def nnx_loss(model, x):
    names = "base", "a", "b"
    return loss_fn({name: getattr(model, name)[...] for name in names}, x)


# --- which optimizers leave a parameter as it is -------------------------------------


def in_every_other_step(updates, step, params=None):
    """Updates or zeros, by a select."""
    moves = jax.tree.map(lambda x: jnp.where(step % 2, 0, x), updates)
    return moves, step + 1


LEAVES_IT = {
    "in a call": lambda: optax.GradientTransformation(
        frozen().init, jax.jit(frozen().update)
    ),
    "by a select": lambda: optax.chain(
        frozen(),
        optax.GradientTransformation(lambda _: jnp.int32(0), in_every_other_step),
    ),
    "multi_transform": frozen,
    "behind a clip": lambda: optax.chain(optax.clip_by_global_norm(1.0), frozen()),
    "before a schedule": lambda: optax.chain(
        frozen(), optax.scale_by_schedule(lambda i: 1 / (i + 1.0))
    ),
    "MultiSteps": lambda: optax.MultiSteps(frozen(), 2),
    "apply_if_finite": lambda: optax.apply_if_finite(frozen(), 3),
    "injected": lambda: optax.inject_hyperparams(
        lambda learning_rate: frozen(optax.adam(learning_rate))
    )(learning_rate=1e-2),
    "flax_amp.optim": lambda: frozen(
        optim.adam(1e-2), optim.set_to_zero(), optim.multi_transform
    ),
    "masked zeros": lambda: optax.chain(
        optax.masked(optax.adam(1e-2), IS_LORA),
        optax.masked(optax.set_to_zero(), {k: not x for k, x in IS_LORA.items()}),
    ),
    "an average of the others": lambda: optax.chain(frozen(), optax.ema(0.9)),
}
TRAINS_IT = {
    "adam": lambda: optax.adam(1e-2),
    "masked": lambda: optax.masked(optax.adam(1e-2), IS_LORA),  # it passes gradients
    "a rate of zero that may change": lambda: frozen(
        zero=optax.inject_hyperparams(optax.sgd)(learning_rate=0.0)
    ),
    "decayed afterwards": lambda: optax.chain(
        frozen(), optax.add_decayed_weights(1e-3)
    ),
    "noise": lambda: optax.chain(frozen(), optax.add_noise(0.1, 0.1, 0)),
}
# An average of zeros is zeros, but its state is not known to be: nothing is proven.
UNPROVEN = {"an average of the others"}


@pytest.mark.parametrize("name", sorted(LEAVES_IT.keys() - UNPROVEN))
def test_a_parameter_that_no_step_changes_may_be_half(name):
    state, metrics = trained(make_train_step(loss_fn), state_of(tx=LEAVES_IT[name]()))
    assert bits(state.params["base"]) == bits(params_of()["base"])  # -0.0, too
    assert bool(metrics["grads_finite"])
    assert bits(state.params["a"]) != bits(params_of()["a"])


@pytest.mark.parametrize("name", sorted(TRAINS_IT.keys() | UNPROVEN))
def test_a_half_parameter_that_may_train_is_refused(name):
    told = r"1 parameters that train are not float32: \['base'\]: bfloat16.*set_to_zero"
    with pytest.raises(ValueError, match=told):
        state_of(tx=(TRAINS_IT | LEAVES_IT)[name]())
    # The state of a checkpoint, say.
    tx = (TRAINS_IT | LEAVES_IT)[name]()
    state = AmpTrainState.create(params=params_of(jnp.float32), tx=tx)
    state = state.replace(params=params_of())
    with pytest.raises(ValueError, match="train_step: " + told):
        make_train_step(loss_fn)(state, batch())


def test_an_error_names_the_dtypes_to_choose():
    with pytest.raises(ValueError, match=re.escape("create(param_dtype=jnp.bfloat16)")):
        state_of(tx=optax.sgd(0.1))
    state = state_of(tx=optax.sgd(0.1), param_dtype=jnp.bfloat16)  # which trains it
    state, _ = trained(make_train_step(loss_fn), state)
    assert bits(state.params["base"]) != bits(params_of()["base"])


# --- the numbers ---------------------------------------------------------------------


# Each option with one precision, and each precision with some option: whether a
# parameter is half is decided when the step is traced, before precision and options
# count.
OPTIONS = [
    ("bf16", {}),
    ("fp16", {"redo_on_nan": 2}),
    ("fp32", {"jit": False}),
    ("bf16", {"accum_steps": 2}),
    ("fp16", {"donate": False}),
]


@pytest.mark.parametrize("precision, options", OPTIONS, ids=str)
def test_training_is_that_of_the_rounded_base_in_float32(precision, options):
    half = HALVES[precision]
    step = make_train_step(loss_fn, precision=precision, **options)
    state, metrics = trained(step, state_of(half, precision=precision))
    wide = params_of(half)
    wide["base"] = wide["base"].astype(jnp.float32)
    expected = AmpTrainState.create(params=wide, tx=frozen(), precision=precision)
    expected, metrics_of_wide = trained(step, expected)
    for name in ("a", "b"):
        np.testing.assert_allclose(
            state.params[name], expected.params[name], rtol=1e-6, atol=1e-7
        )
    assert bits(metrics["loss"]) == bits(metrics_of_wide["loss"])
    assert state.params["base"].dtype == half
    # Its gradient counts neither for the norm nor for what is finite.
    assert metrics["grad_norm"] < metrics_of_wide["grad_norm"]


@functools.cache
def trained_linen(precision):
    step = make_train_step(loss_fn, precision=precision)
    return trained(step, state_of(HALVES[precision], precision=precision))[0]


@pytest.mark.parametrize(
    "way, precision",
    [("wrt", "bf16"), ("zeros", "fp16"), ("pair", "fp32"), ("pair of all", "bf16")],
)
def test_nnx_models(way, precision):
    half, linen = HALVES[precision], trained_linen(precision)
    tx = optax.adam(1e-2) if way in ("wrt", "pair") else frozen()
    wrt = nnx.LoRAParam if way in ("wrt", "pair") else nnx.Param
    model = Net(half)
    if way in ("wrt", "zeros"):
        state = AmpTrainState.create(model=model, tx=tx, wrt=wrt, precision=precision)
        state, _ = trained(make_train_step(nnx_loss), state)
        model = state.merge_model()
    else:
        optimizer = AmpOptimizer(model, tx, wrt=wrt, precision=precision)
        step = make_nnx_train_step(nnx_loss)
        for _ in range(3):
            step(model, optimizer, batch())
    for name, expected in linen.params.items():
        assert bits(getattr(model, name)[...]) == bits(expected), name


def test_over_devices():
    step = make_train_step(loss_fn, axis_name="data", jit=False)
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    run = jax.jit(
        jax.shard_map(step, mesh=mesh, in_specs=(P(), P("data")), out_specs=(P(), P()))
    )
    expected, _ = trained(make_train_step(loss_fn), state_of())
    assert_identical(trained(run, state_of())[0].params, expected.params)


def test_a_stack_of_states():
    step = make_train_step(loss_fn, jit=False)
    stack = jax.tree.map(lambda x: jnp.stack([x, x]), state_of())
    new, _ = jax.jit(jax.vmap(step, (0, None)))(stack, batch())
    assert new.params["base"].dtype == jnp.bfloat16
    assert bits(new.params["base"]) == bits(stack.params["base"])


def test_the_new_state_holds_the_same_array():
    """A step neither copies the base nor writes it."""
    big = {name: jnp.tile(x, (32, 32)) for name, x in params_of().items()}
    big["a"], big["b"] = big["a"][:, :2], big["b"][:2]
    state = AmpTrainState.create(params=big, tx=frozen())
    step = make_train_step(loss_fn)
    x = jnp.ones((4, 256))
    jaxpr = jax.make_jaxpr(make_train_step(loss_fn, jit=False))(state, x).jaxpr
    large = [v for v in jaxpr.outvars if v.aval.size == 256 * 256]
    assert large == [v for v in jaxpr.invars if v.aval.size == 256 * 256]
    compiled = step.lower(state, x).compile()
    assert compiled.memory_analysis().alias_size_in_bytes >= 2 * 256 * 256


def test_skipped_steps_and_metrics_of_the_user():
    seen = {}

    def metrics_fn(state, grads, updates):
        seen.update(jax.tree.map(lambda x: x.shape, updates))
        return {"moved": jnp.abs(updates["base"]).max(), "of": grads["base"].max()}

    step = make_train_step(loss_fn, metrics_fn=metrics_fn)
    state, metrics = step(state_of(), batch().at[0, 0].set(jnp.nan))
    assert not metrics["grads_finite"]
    assert_identical(state.params, params_of())
    assert (float(metrics["moved"]), float(metrics["of"])) == (0, 0)
    assert seen["base"] == (8, 8)


# --- beside the step -----------------------------------------------------------------


def test_evaluation_and_tools_read_it_as_it_is():
    seen = []

    def observing(params, x):
        seen.append(params["base"].dtype)
        return loss_fn(params, x)

    value = make_eval_step(observing)(state_of(), batch())
    assert bits(value) == bits(make_train_step(loss_fn)(state_of(), batch())[1]["loss"])
    found = flax_amp.explain(state_of(), observing, batch())
    assert set(seen) == {jnp.dtype(jnp.bfloat16)}
    assert found.stored is not None
    compared = flax_amp.compare_precision(state_of(), loss_fn, batch())
    assert {x.path for x in compared.gradients} == {"params/a", "params/b"}
    assert not compared.remedies


def test_a_checkpoint_has_it_in_half(tmp_path):
    state, _ = trained(make_train_step(loss_fn), state_of())
    with checkpoint.manager(tmp_path) as manager:
        checkpoint.save(manager, state)
        restored = checkpoint.restore(manager, state_of())
    assert_identical(jax.tree.leaves(restored), jax.tree.leaves(state))


@pytest.mark.parametrize("kind", ["linen", "nnx"])
def test_migrate_rounds_the_base_of_a_float32_run(kind, tmp_path):
    if kind == "linen":
        old = AmpTrainState.create(params=params_of(jnp.float32), tx=optax.adam(1e-2))
        target = state_of()
        found = checkpoint.migrate({"params": old.params}, {"params": target.params})[
            "params"
        ]
    else:
        model = Net(jnp.bfloat16)
        checkpoint.migrate((Net(jnp.float32),), (model,))
        found = {name: getattr(model, name)[...] for name in LABELS}
    assert_identical(found, params_of())


def test_migrate_does_not_round_moments_nor_to_infs():
    old = {"params": {"w": jnp.full(2, 1e6)}, "opt_state": {"nu": jnp.full(2, 1 / 3)}}
    target = jax.tree.map(jnp.zeros_like, old)
    half = functools.partial(jax.tree.map, lambda x: x.astype(jnp.float16))
    with pytest.raises(ValueError, match=r"params/w.*1e\+06 would be an inf"):
        checkpoint.migrate(old, target | {"params": half(target["params"])})
    with pytest.raises(ValueError, match="opt_state/nu"):
        checkpoint.migrate(old, target | {"opt_state": half(target["opt_state"])})
