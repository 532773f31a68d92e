"""`small_state`: moments and parameters in bfloat16, rounded stochastically."""

import zlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from flax_amp import (
    AmpTrainState,
    checkpoint,
    make_eval_step,
    make_nnx_train_step,
    make_train_step,
    optim,
)
from flax_amp.optim._small_state import key_of, random_bits, round_stochastically
from helpers import assert_identical

PARAMS = {"kernel": jnp.ones((16, 8)), "bias": jnp.zeros(8)}
BATCH = jnp.linspace(-1.0, 1.0, 64).reshape(4, 16)


def loss_fn(params, batch):
    out = batch @ params["kernel"] + params["bias"][None]
    return ((out - 2.0) ** 2).mean()


ADAM = optax.adamw(1e-2)


def small_adam(**options):
    return optim.small_state(ADAM, **options)


def create(**options):
    options = {"tx": small_adam(), "param_dtype": jnp.bfloat16} | options
    return AmpTrainState.create(params=PARAMS, **options)


def dtypes(tree):
    return {x.dtype.name for x in jax.tree.leaves(tree)}


# What is stored


NU = dict(where=lambda path, leaf: "/nu/" in path)
STORED = {  # an optimizer, options, and what is stored in bfloat16
    "adamw": (optax.adamw(1e-2), {}, "0/mu/kernel 0/nu/kernel"),
    "optim": (optim.adamw(1e-2), {}, "0/mu/kernel 0/nu/kernel"),
    "where": (optax.adamw(1e-2), NU, "0/nu/bias 0/nu/kernel"),
    "MultiSteps": (
        optax.MultiSteps(optax.adam(1e-2), 2),
        {},
        "inner_opt_state/0/mu/kernel inner_opt_state/0/nu/kernel",
    ),
    "apply_every": (optax.apply_every(4), {}, ""),
    "no state": (optax.sgd(1e-2), {}, ""),
}


@pytest.mark.parametrize("name", STORED)
def test_what_is_stored_in_bfloat16(name):
    """What belongs to a matrix, and is no sum of gradients."""
    tx, options, expected = STORED[name]
    state = optim.small_state(tx, **options).init(PARAMS)
    inner = getattr(state, "opt_state", state).inner_state
    leaves = jax.tree_util.tree_leaves_with_path(inner)
    half = [
        jax.tree_util.keystr(path, simple=True, separator="/")
        for path, leaf in leaves
        if leaf.dtype == jnp.bfloat16
    ]
    assert half == expected.split()


@pytest.mark.parametrize(
    "around",
    [
        lambda tx: tx,
        lambda tx: optax.MultiSteps(tx, 2),
        lambda tx: optax.apply_if_finite(tx, 5),
        lambda tx: optax.inject_hyperparams(lambda learning_rate: tx)(1e-2),
    ],
    ids=["itself", "MultiSteps", "apply_if_finite", "inject_hyperparams"],
)
def test_a_moment_that_the_optimizer_stores_in_bfloat16_stays(around):
    """The branches of a `cond` inside of the optimizer have to agree."""
    tx = optim.small_state(around(optax.adam(1e-2, mu_dtype=jnp.bfloat16)))
    state, step = create(tx=tx), make_train_step(loss_fn)
    before = jax.tree.map(lambda x: x.dtype, state)
    for _ in range(3):
        state, _ = step(state, BATCH)
    assert jax.tree.map(lambda x: x.dtype, state) == before


def test_all_arithmetic_is_float32():
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), PARAMS)
    tx = small_adam()
    jaxpr = jax.make_jaxpr(tx.update)(PARAMS, tx.init(params), params)
    reads_half = {
        eqn.primitive.name
        for eqn in jaxpr.eqns
        if any(getattr(v.aval, "dtype", None) == jnp.bfloat16 for v in eqn.invars)
    }
    assert reads_half == {"convert_element_type"}


def test_the_loss_sees_float32_parameters():
    seen = []

    def loss(params, batch):
        seen.append(dtypes(params))
        return loss_fn(params, batch)

    state = create()
    assert state.params["kernel"].dtype == jnp.bfloat16
    assert state.params["bias"].dtype == jnp.float32
    assert "bfloat16" not in dtypes(create(tx=ADAM).opt_state)  # parameters alone
    make_eval_step(loss)(state, BATCH)
    make_train_step(loss, donate=False)(state, BATCH)
    assert seen == [{"float32"}, {"float32"}]


# The rounding


def python_bits(size, count, name):
    """The random bits of a flat array, by a model in integers of Python."""

    def mixed(x):
        x = ((x ^ (x >> 16)) * 0x7FEB352D) % 2**32
        x = ((x ^ (x >> 15)) * 0x846CA68B) % 2**32
        return x ^ (x >> 16)

    key = mixed((count + 1) * 0x9E3779B9 % 2**32)
    of_leaf = key * (zlib.crc32(name.encode()) | 1) % 2**32
    return [mixed((mixed(i ^ of_leaf) + key) % 2**32) for i in range(size)]


def rounded_by_model(x, bits):
    """Rounds up if the random bits are at least the distance to the upper number."""
    bits = np.asarray(bits, np.uint64) & 0xFFFF
    word = np.asarray(x, np.float32).view(np.uint32).astype(np.uint64)
    lower = word & 0xFFFF0000
    up = (word & 0xFFFF) >= 0x10000 - bits
    return (lower + np.where(up, 0x10000, 0)).astype(np.uint32).view(np.float32)


@pytest.mark.parametrize("count", [0, 1, 1999])
def test_the_rounding_matches_the_model(count, rng):
    x = rng.normal(size=(8, 32)).astype(np.float32)
    bits = random_bits(x.shape, key_of(jnp.int32(count)), "0/mu/kernel")
    expected = python_bits(x.size, count, "0/mu/kernel")
    np.testing.assert_array_equal(np.ravel(bits), expected)
    rounded = round_stochastically(jnp.asarray(x), bits).astype(jnp.float32)
    np.testing.assert_array_equal(
        np.ravel(rounded), rounded_by_model(x.ravel(), expected)
    )


NUMBERS = {
    "between": 1.0021,
    "just above": 1.0 + 2.0**-23,
    "just below": 2.0 - 2.0**-23,
    "middle": 1.0 + 2.0**-8,
    "negative": -3.3,
    "small": 1.2345e-30,
    "large": 2.7e38,
}


@pytest.mark.parametrize("x", NUMBERS.values(), ids=NUMBERS)
def test_roundings_are_unbiased(x):
    x = np.float32(x)

    def rounded(count):
        bits = random_bits((64,), key_of(count), "name")
        return round_stochastically(jnp.full(64, x), bits).astype(jnp.float32)

    found = np.asarray(jax.lax.map(rounded, jnp.arange(2000)), np.float64)
    # Between two neighbours, the variance is that of one draw.
    values = np.unique(found)
    step = np.ptp(values) if len(values) > 1 else abs(float(x)) * 2.0**-8
    share = abs(float(x) - min(values, key=abs)) / step
    error = step * np.sqrt(max(share * (1 - share), 2.0**-16) / found.size)
    assert abs(found.mean() - float(x)) <= 3 * error
    if 0.01 < share < 0.99:  # Each element and each update is unbiased by itself.
        for axis, draws in enumerate(found.shape):
            means = abs(found.mean(axis) - float(x))
            assert means.max() < 4.5 * error * np.sqrt(found.size / draws)


LARGEST = float(jnp.finfo(jnp.float32).max)  # bfloat16 has no number as large


@pytest.mark.parametrize("x", [0.0, -0.0, 1.0, -1.5, np.inf, -np.inf, np.nan, LARGEST])
def test_what_bfloat16_has_stays_and_no_finite_number_becomes_an_inf(x):
    bits = jnp.full((1,), 0xFFFF, jnp.uint32)
    (found,) = round_stochastically(jnp.full(1, x, jnp.float32), bits)
    bounded = float(jnp.finfo(jnp.bfloat16).max) if x == LARGEST else x
    np.testing.assert_array_equal(np.float32(found), np.float32(bounded))


@pytest.mark.parametrize(
    ("rounding", "moves"), [("stochastic", True), ("nearest", False)]
)
def test_a_second_moment_moves_only_with_the_stochastic_rounding(rounding, moves):
    tx = optim.small_state(optax.adam(1e-3), rounding=rounding)
    params = {"w": jnp.ones((32, 32))}
    state = tx.init(params)
    update = jax.jit(tx.update)
    _, state = update(params, state, params)
    start = state.inner_state[0].nu["w"].astype(jnp.float32)
    for _ in range(300):
        _, state = update(jax.tree.map(jnp.zeros_like, params), state, params)
    nu = state.inner_state[0].nu["w"].astype(jnp.float32)
    expected = start.mean() * (0.999**300 if moves else 1)
    np.testing.assert_allclose(nu.mean(), expected, rtol=0.01 if moves else 0)


# Every way to train: the bits are those of the plain loop


def plain_loop(steps=3, **options):
    state = create(**options)
    step = make_train_step(loss_fn)
    for _ in range(steps):
        state, _ = step(state, BATCH)
    return state


def scanned(step, _):
    body = lambda s, _: (make_train_step(loss_fn, jit=False)(s, BATCH)[0], None)  # noqa: E731
    return jax.jit(lambda s: jax.lax.scan(body, s, length=3)[0])(create())


def resumed(step, tmp_path):
    with checkpoint.manager(tmp_path) as manager:
        checkpoint.save(manager, plain_loop(2))
    return step(checkpoint.restore(tmp_path, create()), BATCH)[0]


def skipping(step, _):
    state = plain_loop(2)
    before = jax.device_get(state)
    after, metrics = step(state, BATCH * jnp.nan)
    assert not metrics["grads_finite"]
    assert_identical(after.params, before.params)
    after, _ = step(after, BATCH)
    # A skipped step draws nothing. It counts as a step, and as a skip.
    counted = after.opt_state._replace(total_notfinite=jnp.int32(0))
    scaler = plain_loop(3).scaler
    return after.replace(step=jnp.int32(3), opt_state=counted, scaler=scaler)


@pytest.mark.parametrize("way", [scanned, resumed, skipping])
def test_every_way_gives_the_same_bits(way, tmp_path):
    assert_identical(way(make_train_step(loss_fn), tmp_path), plain_loop())


TX = small_adam()


@jax.jit
def update(grads, state, params):
    updates, state = TX.update(grads, state, params)
    return optax.apply_updates(params, updates), state


def arguments():
    """Fixed gradients: a product would sum in another order on other devices."""
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), PARAMS)
    wave = lambda x: jnp.sin(jnp.arange(x.size) + 1.0).reshape(x.shape)  # noqa: E731
    return jax.tree.map(wave, PARAMS), TX.init(params), params


@pytest.mark.parametrize("spec", [jax.P("data"), jax.P(None, "data")])
def test_the_bits_do_not_depend_on_the_sharding(spec, mesh):
    def place(leaf):
        return jax.NamedSharding(mesh, spec if leaf.ndim == 2 else jax.P())

    placed = jax.device_put(arguments(), jax.tree.map(place, arguments()))
    assert_identical(update(*placed), update(*arguments()))


def test_a_run_of_a_sweep_has_the_bits_of_a_run_alone():
    stacked = jax.tree.map(lambda x: jnp.stack([0 * x, x]), arguments())
    found = jax.tree.map(lambda x: x[1], jax.vmap(update)(*stacked))
    assert_identical(found, update(*arguments()))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_model_of_nnx_with_its_own_optimizer(dtype):
    model = nnx.Linear(16, 8, param_dtype=dtype, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, small_adam(), wrt=nnx.Param)
    step = make_nnx_train_step(lambda model, x: ((model(x) - 2.0) ** 2).mean())
    losses = []
    for _ in range(150):
        metrics = step(model, optimizer, BATCH)
        losses.append(float(metrics["loss"]))
    assert losses[-1] < 0.1 * losses[0]
    assert model.kernel.dtype == dtype
    state = nnx.to_pure_dict(nnx.state(optimizer.opt_state))
    assert state["inner_state"][0]["nu"]["kernel"].dtype == jnp.bfloat16


LABELS = {"kernel": "small", "bias": "rest"}
SPLIT = {"small": optim.small_state(optax.sgd(1e-4)), "rest": optax.sgd(1e-4)}


@pytest.mark.parametrize(
    "tx",
    [
        optax.sgd(1e-4),
        optim.sgd(1e-4),
        optim.small_state(optax.sgd(1e-4)),
        optim.small_state(optim.sgd(1e-4)),
        optax.chain(optax.identity(), optim.small_state(optax.sgd(1e-4))),
        optax.chain(optim.small_state(optax.sgd(2e-4)), optax.scale(0.5)),
        optax.MultiSteps(optim.small_state(optax.sgd(1e-4)), 1),
        optax.inject_hyperparams(optax.sgd)(1e-4),
        optax.apply_if_finite(optim.small_state(optax.sgd(1e-4)), 5),
        optax.multi_transform(SPLIT, LABELS),
        optax.multi_transform({"small": SPLIT["rest"], "rest": SPLIT["small"]}, LABELS),
    ],
    ids=range(11),
)
def test_wherever_it_stands_parameters_learn(tx):
    """Each update is 1e-4, where 1 and the number below are 2^-8 apart."""
    state = create(tx=tx)
    step = make_train_step(lambda params, batch: (params["kernel"] * batch).sum())
    for _ in range(200):
        state, _ = step(state, jnp.float32(1.0))
    kernel = state.params["kernel"].astype(jnp.float32)
    np.testing.assert_allclose(kernel.mean(), 0.98, atol=0.005)


@pytest.mark.parametrize(
    "tx",
    [
        optax.chain(small_adam(), optax.scale(0.5)),
        optax.chain(small_adam(), optax.sgd(1e-2)),
        optax.partition({"a": small_adam(), "b": optax.sgd(1.0)}, lambda p: "a"),
        optax.masked(small_adam(), lambda p: True),
    ],
    ids=["before scale", "before sgd", "in a part", "masked"],
)
def test_a_half_model_of_nnx_needs_it_outermost(tx):
    model = nnx.Linear(16, 8, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    step = make_nnx_train_step(lambda model, x: (model(x) ** 2).mean())
    with pytest.raises(ValueError, match="small_state for an optimizer of NNX"):
        step(model, optimizer, BATCH)


def test_derivatives_through_an_update_are_those_of_the_mean():
    def after(rate, params):
        tx = optim.small_state(optax.sgd(rate))
        updates, _ = tx.update(PARAMS, tx.init(params), params)
        return optax.apply_updates(params, updates)["kernel"].astype(jnp.float32).sum()

    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), PARAMS)
    assert jax.grad(after)(0.1, half) == -PARAMS["kernel"].size


# Messages


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (dict(dtype=jnp.float16), "dtype=.*float16.*; expected bfloat16"),
        (dict(dtype=None), "dtype=None; expected bfloat16"),
        (dict(rounding="up"), "rounding='up'; expected 'stochastic'"),
    ],
)
def test_wrong_arguments(options, text):
    assert optim.small_state(optax.adam(1e-3), "bf16")
    with pytest.raises(ValueError, match=f"flax_amp.optim.small_state: .*{text}"):
        optim.small_state(optax.adam(1e-3), **options)
