"""Checkpoints made by other libraries, by other optimizers, and of other models."""

import functools

import jax
import jax.numpy as jnp
import jaxamp
import numpy as np
import optax
import pytest
from flax import nnx, serialization
from flax.training.dynamic_scale import DynamicScale
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from _foreign import by_manager, by_standard_checkpointer, image_state, run
from _models import changed, linen_state, make_batch, nnx_state, optimizer
from flax_amp import AmpTrainState, checkpoint, init_scaler, no_scaler, optim
from flax_amp._training.scaler import update_scaler
from helpers import assert_identical, assert_same_avals

pytestmark = pytest.mark.once

LIBRARIES = {
    "manager": by_manager,
    "checkpointer": by_standard_checkpointer,
    "msgpack": lambda _, x: serialization.msgpack_restore(serialization.to_bytes(x)),
    "memory": lambda _, x: x,
}


@pytest.mark.filterwarnings("ignore:Sharding info not provided")
@pytest.mark.parametrize("library", LIBRARIES)
def test_a_flax_state_goes_on_as_it_was(image, library, tmp_path):
    target = linen_state()
    state = checkpoint.migrate(LIBRARIES[library](tmp_path, image), target)
    assert isinstance(state, AmpTrainState)
    assert int(state.step) == 3
    assert_identical(state.params, image.params)
    assert_identical(state.opt_state.inner_state, image.opt_state)
    assert_identical(state.variables, {"batch_stats": image.batch_stats})
    assert_identical(state.rngs, target.rngs)
    assert float(state.scaler["scaler"]) == float(image.dynamic_scale.scale) == 2.0**15
    assert int(state.scaler["count"]) == int(image.dynamic_scale.fin_steps) == 1
    assert int(state.scaler["patience"]) == 2000  # Flax does not save its interval


# Scalers


def test_the_count_of_dynamic_scale_goes_on(image):
    """From any count, the two scalers grow on the same step."""
    theirs = image.dynamic_scale
    target = linen_state(scaler=init_scaler(patience=theirs.growth_interval))
    ours = checkpoint.migrate(image, target).scaler
    for i in range(12):
        w = jnp.float32(jnp.inf if i == 9 else 1.0)
        theirs, finite, _, _ = theirs.value_and_grad(lambda x: x * x)(w)
        ours = update_scaler(ours, finite)
        assert float(ours["scaler"]) == float(theirs.scale)
    assert float(ours["scaler"]) == 2.0**16  # grew twice, fell once


def test_the_scaler_of_jaxamp(tmp_path):
    saved = jaxamp.DynamicScalerState(patience=jnp.array(2))
    grad = jaxamp.dynamic_scale_value_and_grad(lambda w, x: jnp.sum(w * x))
    for i in range(5):
        x = jnp.full(3, jnp.inf if i == 0 else 1.0)
        saved, _ = grad(jnp.ones(3), x, dynamic_scaler_state=saved)
    params, tx = {"w": jnp.ones(3)}, optax.sgd(0.1)
    tree = dict(step=jnp.int32(5), params=params, my_scaler=saved)
    tree["opt_state"] = tx.init(params)
    target = AmpTrainState.create(params=params, tx=tx, precision="16-mixed")
    names = {"my_scaler": "scaler", "total_resets": None}
    names = {name: new for name, new in names.items() if new or hasattr(saved, name)}
    state = checkpoint.migrate(by_manager(tmp_path, tree), target, rename=names)
    for key in ("scaler", "count", "patience", "adjust_factor"):
        assert float(state.scaler[key]) == float(getattr(saved, key)), key


@pytest.mark.parametrize(
    "saved, expected",
    [(jnp.inf, 2.0**24), (0.0, 2.0**-24), (jnp.nan, 64.0), (3.0, 3.0)],
)
def test_a_scale_without_limits_is_brought_within_them(image, saved, expected):
    broken = image.replace(dynamic_scale=DynamicScale(scale=saved))
    state = checkpoint.migrate(broken, linen_state(scaler=init_scaler(scaler=64)))
    assert float(state.scaler["scaler"]) == expected


def test_between_float16_and_bfloat16(tmp_path, image):
    """The scale is what the new run was made with, and all else goes on."""
    half = linen_state(scaler=init_scaler(scaler=8, patience=9))
    fixed = linen_state(scaler=no_scaler())
    for i, (old, new) in enumerate([(half, fixed), (fixed, half)]):
        with checkpoint.manager(tmp_path / str(i)) as manager:
            checkpoint.save(manager, old.replace(step=old.step + 3))
        with pytest.warns(
            checkpoint.CheckpointWarning, match="one scale moves and"
        ) as told:
            state = checkpoint.restore(tmp_path / str(i), new)
        assert told[0].filename == __file__ and len(told) == 1
        assert int(state.step) == 3
        assert_identical(state.scaler, new.scaler)
    assert_identical(checkpoint.migrate(image, fixed).scaler, fixed.scaler)


# Names

TO_NNX = {
    "variables/batch_stats": "variables",
    "Dense_0": "first",
    "Dense_1": "last/0",
    "BatchNorm_0": "norm",
    "rngs": None,
    "variables/dropout": None,
}


@functools.cache
def linen_run():
    """A trained state, which all tests that migrate such a state share."""
    return run(linen_state(), 3)


def test_linen_into_nnx(tmp_path):
    linen = linen_run()
    state = checkpoint.migrate(by_manager(tmp_path, linen), nnx_state(), rename=TO_NNX)
    x = make_batch()["x"]
    model = state.merge_model()
    model.eval()
    variables = {"params": linen.params, **linen.variables}
    np.testing.assert_array_equal(model(x), linen.apply_fn(variables, x, train=False))
    moment = state.opt_state.inner_state[1][0].mu["last"][0]["kernel"]
    assert_identical(moment, linen.opt_state.inner_state[1][0].mu["Dense_1"]["kernel"])


def test_into_and_out_of_nnx_objects(tmp_path):
    """`nnx.state` of a model and its optimizer, with `value` at the end of paths."""

    def pair(seed):
        model = nnx.Linear(6, 3, rngs=nnx.Rngs(seed))
        return model, nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)

    (model, plain), new = pair(0), pair(1)
    tree = {"net": nnx.state(model), "optimizer": nnx.state(plain)}
    names = {"net": "0", "optimizer": "1"}
    found = checkpoint.migrate(by_manager(tmp_path, tree), new, rename=names)
    assert found is new
    assert_identical(nnx.to_pure_dict(nnx.state(new[0])), nnx.to_pure_dict(tree["net"]))
    params = nnx.state(pair(2)[0], nnx.Param)
    params = checkpoint.migrate(tmp_path, {"p": params}, rename={"net": "p"})["p"]
    assert_identical(nnx.to_pure_dict(params), nnx.to_pure_dict(tree["net"]))
    alone, _ = pair(3)
    checkpoint.migrate(tmp_path, (alone,), rename=names)
    assert_identical(nnx.to_pure_dict(nnx.state(alone)), nnx.to_pure_dict(tree["net"]))


def test_only_other_objects_are_left_out():
    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    linen = {"params": nnx.to_pure_dict(nnx.state(model)), "batch_stats": jnp.ones(2)}
    with pytest.raises(ValueError, match="batch_stats: .* not in the target"):
        checkpoint.migrate(linen, (model,), rename={"params": "0"})


def test_parameters_only(image):
    target = linen_state(tx=optax.sgd(0.1))
    found = checkpoint.migrate(image, {"params": target.params})
    assert_identical(found["params"], image.params)


def new_state(tx):
    params = {"w": jnp.full((2, 3), 0.3), "b": jnp.ones(2)}
    return AmpTrainState.create(params=params, tx=tx)


@jax.jit
def update(state):
    return state.apply_gradients(grads=jax.tree.map(jnp.ones_like, state.params))


def moved(tx):
    return update(new_state(tx))


def inner(state):
    return state.opt_state.inner_state


MOMENTUM, HALF = optax.sgd(0.1, momentum=0.5), jnp.bfloat16
COUNTERS = ("notfinite_count", "last_finite", "total_notfinite")
NOT_PLAIN = dict.fromkeys(("scaler", "dynamic_scale", "rngs", *COUNTERS))
WRAPPED = {"inner_state": "inner_state/inner_opt_state"}
WRAPPED |= dict.fromkeys(("mini_step", "gradient_step", "acc_grads"))
SMALL = {"inner_state": "inner_state/inner_state", "roundings": None}
# A checkpoint (`image` if there is none), a target, names, and what is equal in the
# result and in the checkpoint.
RENAMES = {
    "a new head": (
        None,
        linen_state,
        {"Dense_1": None, "dynamic_scale": None},
        lambda new, old: [(new.params["Dense_0"], old.params["Dense_0"])],
    ),
    "a plain state": (
        linen_run,
        lambda: image_state(dynamic_scale=DynamicScale()),
        {"variables/batch_stats": "batch_stats", "inner_state/1": "1", **NOT_PLAIN},
        lambda new, old: [
            (new.opt_state, inner(old)),
            (new.batch_stats, old.variables["batch_stats"]),
        ],
    ),
    "MultiSteps": (
        linen_run,
        lambda: linen_state(tx=optax.MultiSteps(optimizer(), 2)),
        WRAPPED,
        lambda new, old: [(inner(new).inner_opt_state, inner(old))],
    ),
    "into optim": (
        lambda: moved(optax.adam(0.1)),
        lambda: new_state(optim.adam(0.3)),
        {"inner_state": "inner_state/opt_state", "learning_rate": None},
        lambda new, old: [
            (inner(new).opt_state, inner(old)),
            (new.hyperparams["learning_rate"], jnp.float32(0.3)),  # of the target
        ],
    ),
    "out of optim": (
        lambda: moved(optim.adam(0.3)),
        lambda: new_state(optax.adam(0.1)),
        {"inner_state/opt_state": "inner_state", "learning_rate": None},
        lambda new, old: [(inner(new), inner(old).opt_state)],
    ),
    "into small_state": (
        lambda: moved(MOMENTUM),
        lambda: new_state(optim.small_state(MOMENTUM)),
        SMALL,
        lambda new, old: [(inner(new).inner_state[0].trace["w"].sum(), HALF(6))],
    ),
}


@pytest.mark.parametrize("name", RENAMES)
def test_names_lead_to_another_place(name, image):
    saved, target, rename, pairs = RENAMES[name]
    old, target = saved() if saved else image, target()
    new = checkpoint.migrate(old, target, rename=rename)
    assert_same_avals(new, target)
    assert int(new.step) == int(old.step)
    for found, expected in pairs(new, old):
        assert_identical(found, expected)
    stays = "Dense_1" if name == "a new head" else None
    assert_identical(new.params.get(stays), target.params.get(stays))


# Where arrays lie, and as what


def test_sharded_and_abstract_targets(image, mesh):
    rows, whole = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())
    target = linen_state()
    shardings = jax.tree.map(
        lambda x: rows if x.shape and x.shape[0] % 8 == 0 else whole, target
    )
    target = jax.device_put(target, shardings)
    state = checkpoint.migrate(image, target)
    assert_identical(state.params, image.params)
    for leaf, like in zip(jax.tree.leaves(state), jax.tree.leaves(target), strict=True):
        assert leaf.sharding == like.sharding and leaf.committed
    abstract = jax.eval_shape(linen_state)
    with pytest.raises(ValueError, match="rngs/dropout: to stay as in the target"):
        checkpoint.migrate(image, abstract)
    state = linen_state(scaler=init_scaler(scaler=64))
    assert not changed(checkpoint.migrate(state, abstract), state)


DTYPES = [  # a value, and a dtype that it is cast to, or not
    (np.int32(-1), jnp.uint32, False),
    (np.uint32(4_000_000_000), jnp.int32, False),
    (np.float32(0.5), jnp.int32, False),
    (np.float32(1e30), jnp.float16, False),
    (np.arange(3) / 7, jnp.float32, False),  # of float64
    (np.int64(3), jnp.int32, True),
    (np.float32([1, np.nan, -0.0]), jnp.bfloat16, True),
    (np.array([0.1, np.inf], jnp.bfloat16), jnp.float32, True),
    (0.1, jnp.float32, True),  # a Python number
]


@pytest.mark.parametrize("value, dtype, fits", DTYPES)
def test_a_dtype_is_cast_if_no_value_changes(value, dtype, fits):
    target = {"x": jnp.zeros(np.shape(value), dtype)}
    if not fits:
        with pytest.raises(ValueError, match=r"x: \w+\[3?\] on disk, \w+\[3?\] in the"):
            checkpoint.migrate({"x": value}, target)
        return
    found = checkpoint.migrate({"x": value}, target)["x"]
    assert found.dtype == dtype
    both = (np.asarray(x, np.float32) for x in (found, value))
    np.testing.assert_array_equal(*both)


# What must not happen in silence

TREE = {"step": 1, "params": {"w": jnp.ones(2)}}
TWO = {"params": {"0_": np.float32(0), "1_": np.float32(1)}}
ONE = {"params": {"w": np.float32(0)}}


def sgd_state():
    return AmpTrainState.create(params={"w": jnp.zeros(2)}, tx=optax.sgd(1))


MESSAGES = [  # source, target, rename, message
    ("nowhere", ONE, {}, "nowhere is not a directory"),
    (".", ONE, {}, r"holds the steps \[\]"),
    *((x, ONE, {}, "cannot read a .*; expected a path") for x in (3, None, {}, b"")),
    (ONE, "target", {}, "the whole of the target is a"),
    (
        ONE,
        lambda: {"m": nnx.Linear(2, 2, rngs=nnx.Rngs(0))},
        {},
        r"Linear; .*\(model,\)",
    ),
    *(
        (ONE, ONE, x, rf"rename is {seen}; expected a dict .* Pass {{old: new}} with")
        for x, seen in ((["w"], "a list"), ("w", "a str"), (3, r"int32\[\]"))
    ),
    (TWO, ONE, {"0_": "w", "1_": "w"}, "two arrays have the name params/w"),
    (ONE, ONE, {"head": "x"}, "'head', which is in no path on disk; .*'params/w'"),
    (ONE, ONE, {"para": "x"}, "'para', which is in no path on disk"),
    # Statistics are no scaler.
    (TREE | {"seen": {"scaler": 1.0}}, sgd_state, {}, "seen/scaler: .* not in the tar"),
    (TREE | {"rngs": {"a": jax.random.key(0)}}, sgd_state, {}, "rngs/a: .* not in the"),
    (
        TREE | {"config": {"name": "dense"}},
        sgd_state,
        {},
        r"config/name: str\d+\[\] on d",
    ),
]


@pytest.mark.parametrize("number", range(len(MESSAGES)))
def test_messages(number, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    source, target, rename, message = MESSAGES[number]
    target = target() if callable(target) else target
    with pytest.raises((ValueError, TypeError, OSError), match=message):
        checkpoint.migrate(source, target, rename=rename)
    if target is not ONE and isinstance(source, dict) and source is not ONE:
        left_out = dict.fromkeys(source.keys() - TREE.keys())
        assert int(checkpoint.migrate(source, target, rename=left_out).step) == 1


def test_all_that_does_not_fit_is_one_error(image):
    broken = image.replace(
        params={
            "Dense_0": image.params["Dense_0"] | {"kernel": jnp.ones((2, 2))},
            "Dense_2": image.params["Dense_1"],
        }
    )
    target = linen_state()
    copy = jax.tree.map(jnp.copy, target)
    with pytest.raises(ValueError, match="checkpoint.migrate: the tree does not") as e:
        checkpoint.migrate(broken, target)
    for line in [
        "params/Dense_0/kernel: float32[2, 2] on disk, float32[6, 8] in the target",
        "params/Dense_1/bias: not on disk, float32[3] in the target",
        "params/Dense_2/kernel: float32[8, 3] on disk, not in the target",
        "Map names on disk to names of the target with rename=",
    ]:
        assert line in str(e.value)
    assert "opt_state" not in str(e.value)
    assert not changed(copy, target)
