"""`half_params`: what is stored in half precision, and that no bit of a result changes.

Each program is compiled for the parameters in float32 and for those in half precision,
and the results are compared bit for bit.
"""

import functools
import itertools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

import flax_amp
from benchmarks import models
from flax_amp import (
    AmpTrainState,
    amp,
    default_amp_policy,
    half_params,
    make_train_step,
)
from helpers import HALVES, assert_identical, jit, run_all

pytestmark = pytest.mark.usefixtures("promotes_ranks")

SIZE = 4
HALF, FLOAT32 = "half", "float32"


@pytest.fixture
def promotes_ranks():
    """As users have it, and the models of the benchmarks."""
    with jax.numpy_rank_promotion("allow"):
        yield


def make_params():
    rng = np.random.default_rng(0)
    shapes = dict(w=(SIZE, SIZE), v=(SIZE, SIZE), b=(SIZE,), stack=(3, SIZE, SIZE))
    return {
        name: jnp.asarray(rng.normal(size=shape) / 2, jnp.float32)
        for name, shape in shapes.items()
    }


X = jnp.asarray(np.random.default_rng(1).normal(size=(3, SIZE)), jnp.float32)
IDS = jnp.array([2, 0, 2, 1])


def stored(fun, params, *args, **options):
    """Returns the parameters, some in half; asserts that the bits do not change."""
    half = half_params(fun, **options)(params, *args)
    # The backward pass has no part in the bits: nor has what it stores.
    run = run_all(amp(fun, **options), amp(fun, recompute=False, **options))
    assert_identical(run(half, *args), run(params, *args))
    return half


def in_turn(names):
    """Each name with one of the two halves, which differ in no decision."""
    return pytest.mark.parametrize(
        "name, dtype",
        [
            pytest.param(name, dtype, marks=marks, id=f"{name}-{dtype.__name__}")
            for name, (dtype, marks) in zip(
                names,
                itertools.cycle([(jnp.bfloat16, ()), (jnp.float16, pytest.mark.once)]),
                strict=False,
            )
        ],
    )


def halves(tree, dtype):
    """Returns the names of the arrays in half precision."""
    leaves = jax.tree.leaves_with_path(tree)
    return {
        jax.tree_util.keystr(path, simple=True, separator="/")
        for path, x in leaves
        if x.dtype == dtype
    }


# --- uses of a parameter --------------------------------------------------------------


def conv(w, x):
    dims = ("NHWC", "HWIO", "NHWC")
    window = w[:3, :3, None, None]
    x = x[None, :, :, None]
    return jax.lax.conv_general_dilated(x, window, (1, 1), "SAME", None, None, dims)


# How a function reads `w`, and whether `w` is stored in half precision then.
USES = {
    "matmul": (lambda w, x: x @ w, HALF),
    "two matmuls": (lambda w, x: jnp.tanh(x @ w) @ w, HALF),
    "a derivative of the function": (
        lambda w, x: jax.grad(lambda x: jnp.sum(jnp.tanh(x @ w)))(x) @ w,
        HALF,
    ),
    "transpose": (lambda w, x: x @ w.T, HALF),
    "reshape": (lambda w, x: x[:, :2] @ w.reshape(2, 8), HALF),
    "slice": (lambda w, x: x[:, :2] @ w[1:3], HALF),
    "dynamic slice": (
        lambda w, x: x[:, :2] @ jax.lax.dynamic_slice_in_dim(w, x.argmax() % 3, 2),
        HALF,
    ),
    "rows": (lambda w, x: x @ w[IDS], HALF),
    "rows that may be missing": (
        lambda w, x: x @ w.at[IDS + 1].get(mode="fill", fill_value=0.0),
        HALF,
    ),
    "missing rows of NaNs": (
        lambda w, x: x @ w.at[IDS + 2].get(mode="fill", fill_value=jnp.nan),
        HALF,
    ),
    "missing rows of a number that half precision lacks": (
        lambda w, x: x @ w.at[IDS + 2].get(mode="fill", fill_value=0.1),
        FLOAT32,
    ),
    "reversed": (lambda w, x: x @ w[::-1], HALF),
    "repeated": (lambda w, x: x @ jnp.tile(w, (1, 2)), HALF),
    "batch": (lambda w, x: jnp.einsum("bd,bdk->bk", x, jnp.stack([w] * 3)), HALF),
    "negative": (lambda w, x: x @ -w, HALF),
    "parts": (lambda w, x: [x @ part for part in jnp.split(w, 2, axis=1)], HALF),
    "padded": (lambda w, x: x @ jnp.pad(w, ((0, 0), (0, 3))), HALF),
    "chosen": (lambda w, x: x @ jnp.where(x[:1].T > 0, w, w.T), HALF),
    # The zeros are an array, of which nothing is known.
    "masked": (lambda w, x: x @ jnp.where(x[:1].T > 0, w, 0.0), FLOAT32),
    "cast by the user": (lambda w, x: x @ w.astype(jnp.bfloat16), None),
    "scale": (lambda w, x: x * w[0], FLOAT32),
    "sum": (lambda w, x: (x @ w) * w.sum(), FLOAT32),
    "result": (lambda w, x: (x @ w, w), FLOAT32),
    "part of a result": (lambda w, x: {"y": x @ w, "row": w[0]}, FLOAT32),
    "sign": (lambda w, x: x @ jnp.sign(w), FLOAT32),
    "maximum": (lambda w, x: x @ w + w.max(), FLOAT32),
    "padded with a number that half precision lacks": (
        lambda w, x: x @ jnp.pad(w, 1, constant_values=0.1)[1:5],
        FLOAT32,
    ),
    "exact": (
        lambda w, x: jnp.dot(x @ x.T @ x, w, precision="highest"),
        FLOAT32,
    ),
    "half and back": (
        lambda w, x: x * w[0].astype(jnp.bfloat16).astype(jnp.float32),
        FLOAT32,
    ),
    "nothing": (lambda w, x: x, FLOAT32),
    "shape": (lambda w, x: x * w.shape[0], FLOAT32),
    "conv": (lambda w, x: conv(w, x), None),
}


@in_turn(USES)
def test_uses(name, dtype):
    fun, expected = USES[name]
    half = stored(fun, make_params()["w"], X, compute_dtype=dtype)
    if expected is not None:
        assert (half.dtype == dtype) == (expected == HALF)


def test_what_the_user_casts():
    fun, _ = USES["cast by the user"]
    w = make_params()["w"]
    assert stored(fun, w, X).dtype == jnp.bfloat16
    # bfloat16 is no cast to float16.
    assert stored(fun, w, X, precision="16-mixed").dtype == jnp.float32


# --- transforms around it -------------------------------------------------------------


def layer(w, x):
    return jnp.tanh(x @ w)


def scan_over_layers(p, x):
    return jax.lax.scan(lambda x, w: (layer(w, x), None), x, p["stack"])[0] @ p["w"]


def scan_with_constants(p, x):
    def step(h, row):
        h = jnp.tanh(h @ p["w"] + row @ p["v"])
        return h, h

    return jax.lax.scan(step, jnp.zeros(SIZE), x)


def scan_with_a_carry(p, x):
    """The loop carries its parameters, and does not change them."""

    def step(carry, _):
        w, v, x = carry
        return (w, v, layer(w, x) * v[0]), x.sum()

    return jax.lax.scan(step, (p["w"], p["v"], x), None, 3)[0][2]


def scan_that_swaps(p, x):
    """Each parameter is read in float32 in every second iteration."""

    def step(carry, _):
        w, v, x = carry
        return (v, w, layer(w, x) * v[0]), None

    return jax.lax.scan(step, (p["w"], p["v"], x), None, 3)[0][2]


def while_with_a_carry(p, x):
    def step(_, carry):
        w, v, x = carry
        return w, v, layer(w, x) * v[0]

    return jax.lax.fori_loop(0, x.argmax() + 1, step, (p["w"], p["v"], x))[2]


def nested_scans(p, x):
    def outer(x, w):
        inner = lambda y, u: (layer(u, y) + layer(w, y), y)  # noqa: E731
        return jax.lax.scan(inner, x, p["stack"])

    return jax.lax.scan(outer, x, p["stack"])


def while_loop(p, x):
    def step(carry):
        i, x = carry
        return i + 1, layer(p["w"], x)

    def is_on(carry):
        i, x = carry
        return (i < 3) & ((x @ p["v"]).sum() < 1e3)

    return jax.lax.while_loop(is_on, step, (0, x))[1]


def cond(p, x):
    branches = lambda x: layer(p["w"], x), lambda x: layer(p["v"], x) * p["b"]  # noqa: E731
    return jax.lax.cond(x.sum() > 0, *branches, x)


def custom_jvp(p, x):
    fun = jax.custom_jvp(layer)
    fun.defjvp(lambda primals, tangents: jax.jvp(layer, primals, tangents))
    return fun(p["w"], x)


def custom_vjp(p, x):
    fun = jax.custom_vjp(layer)
    fun.defvjp(lambda w, x: jax.vjp(layer, w, x), lambda vjp, g: vjp(g))
    return fun(p["w"], x)


def vmap(p, x):
    per_example = jax.vmap(layer, in_axes=(None, 0))(p["w"], x)
    return per_example @ jax.vmap(lambda w: w.T)(p["stack"]).reshape(SIZE, -1)


def shard_map(p, x):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    P = PartitionSpec

    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=(P("data"), P(None, "data")), out_specs=P()
    )
    def product(w, x):
        return jax.lax.psum(layer(w, x), "data")

    return product(p["w"], x)


def gathered_weights(p, x):
    """Each device has a part of the weights, as with FSDP."""
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    P = PartitionSpec

    @functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(P("data"), P()),
        out_specs=P(),
        check_vma=False,
    )
    def product(w, x):
        return layer(jax.lax.all_gather(w, "data", tiled=True), x)

    return product(p["w"], x)


# The programs, and the parameters that are stored in half precision.
AROUND = {
    "jit": (lambda p, x: jax.jit(layer)(p["w"], x), "w"),
    "jit of many": (
        lambda p, x: jax.jit(lambda p, x: layer(p["w"], x) * p["b"])(p, x),
        "w",
    ),
    "checkpoint": (lambda p, x: jax.checkpoint(layer)(p["w"], x), "w"),
    "scan over layers": (scan_over_layers, "stack w"),
    "scan with constants": (scan_with_constants, "w v"),
    "scan with a carry": (scan_with_a_carry, "w"),
    "scan that swaps": (scan_that_swaps, ""),
    "while with a carry": (while_with_a_carry, "w"),
    "nested scans": (nested_scans, "stack"),
    "while": (while_loop, "w v"),
    "cond": (cond, "w v"),
    "custom_jvp": (custom_jvp, "w"),
    "custom_vjp": (custom_vjp, "w"),
    "vmap": (vmap, "w stack"),
    "shard_map": (shard_map, "w"),
    "gathered weights": (gathered_weights, "w"),
}


@in_turn(AROUND)
def test_transforms(name, dtype):
    fun, expected = AROUND[name]
    half = stored(fun, make_params(), X, compute_dtype=dtype)
    assert halves(half, dtype) == {*expected.split()}


# --- where stored halves would make another program -----------------------------------


def asks_for_the_dtype(p, x):
    """In half precision, the `tanh` would be one of halves."""
    return jnp.tanh(x.astype(p["w"].dtype) @ p["w"]) @ p["v"]


def branches_on_the_dtype(p, x):
    factor = 1 if p["w"].dtype == jnp.float32 else 2
    return factor * jnp.tanh(x @ p["w"]) @ p["v"]


def refuses_two_dtypes(p, x):
    y = jax.lax.dot_general(x, p["v"], (((1,), (0,)), ((), ())))
    return jax.lax.add(y, jax.lax.mul(x, jax.lax.full_like(p["w"][:3], 2.0))) @ p["w"]


def compares_with_a_half(p, x):
    y = x @ p["w"]
    return jnp.where(y.astype(p["v"].dtype) == y, y, 0) @ p["v"]


PITFALLS = {
    "asks for the dtype": (asks_for_the_dtype, "v"),
    "branches on the dtype": (branches_on_the_dtype, "v"),
    "refuses two dtypes": (refuses_two_dtypes, "v"),
    "compares with a half": (compares_with_a_half, ""),
    "a matmul of two": (lambda p, x: x @ (p["w"] @ p["v"]), None),
    "a sum of two": (lambda p, x: x @ (p["w"] + p["v"]), ""),
    "a choice of two": (
        lambda p, x: x @ jnp.where(x[:1].T > 0, p["w"], p["v"]),
        "w v",
    ),
    "two in one array": (
        lambda p, x: x @ jnp.concatenate([p["w"], p["v"]], axis=1),
        "w v",
    ),
    "one in an array with a computed one": (
        lambda p, x: x @ jnp.concatenate([p["w"], jnp.exp(p["v"])], axis=1),
        "",
    ),
    "rows that are added up": (
        lambda p, x: (p["w"][IDS[:3]] + p["v"][:3]) @ p["stack"][0],
        "stack",
    ),
    # Of both in half precision, the user's matmul would give half precision.
    "a matmul of parameters alone": (
        lambda p, x: jnp.tanh(p["w"][IDS] @ p["v"][:, :2]),
        "w",
    ),
}


@in_turn(PITFALLS)
def test_pitfalls(name, dtype):
    fun, expected = PITFALLS[name]
    half = stored(fun, make_params(), X, compute_dtype=dtype)
    if expected is not None:
        assert halves(half, dtype) == {*expected.split()}


@pytest.mark.parametrize("adds", [False, True], ids=["attended", "added as well"])
def test_a_tied_embedding(adds):
    class Net(nn.Module):
        @nn.compact
        def __call__(self, tokens):
            embed = nn.Embed(8, SIZE)
            x = embed(tokens)
            x = x + 1 if adds else x
            return embed.attend(nn.Dense(SIZE)(x))

    net, tokens = Net(), IDS[None]
    params = net.init(jax.random.key(0), tokens)
    half = stored(lambda p, t: net.apply(p, t), params, tokens)["params"]
    assert half["Dense_0"]["kernel"].dtype == jnp.bfloat16
    assert half["Embed_0"]["embedding"].dtype == (jnp.float32 if adds else jnp.bfloat16)


def test_callbacks_and_prints_do_not_hinder(capsys):
    def fun(p, x):
        y = layer(p["w"], x)
        jax.debug.print("sum {}", y.sum())
        shape = jax.ShapeDtypeStruct((), jnp.float32)
        return y * jax.pure_callback(lambda: np.float32(2), shape)

    assert halves(half_params(fun)(make_params(), X), jnp.bfloat16) == {"w"}


def test_a_print_of_a_parameter_reads_it():
    def fun(p, x):
        jax.debug.print("w {}", p["w"])
        return layer(p["w"], x) @ p["v"]

    assert halves(half_params(fun)(make_params(), X), jnp.bfloat16) == {"v"}


def test_a_kernel_of_references():
    def fun(p, x):
        ref = jax.new_ref(x)
        ref[...] = layer(p["w"], ref[...])
        first = ref[...]
        ref[...] = layer(p["v"], first)
        return first, ref[...]

    assert halves(stored(fun, make_params(), X), jnp.bfloat16) == {"w", "v"}


# --- arguments and results ------------------------------------------------------------


def predict(p, x):
    return jnp.tanh(x @ p["w"]) * p["b"]


def test_other_leaves_stay_as_they_are():
    params = make_params() | {
        "count": jnp.arange(3),
        "half": jnp.ones((SIZE, SIZE), jnp.float16),
        "name": "net",
        "none": None,
        "numpy": np.ones((SIZE, SIZE), np.float32),
    }

    def fun(p, x):
        return predict(p, x) @ p["half"] @ p["numpy"] + p["count"][0]

    half = half_params(fun)(params, X)
    for name in ("v", "b", "stack", "count", "half", "name"):
        assert half[name] is params[name]
    assert (half["w"].dtype, half["numpy"].dtype) == (jnp.bfloat16, jnp.bfloat16)
    run = jit(lambda arrays: amp(fun)(params | arrays, X))
    arrays = {name: half[name] for name in ("w", "numpy")}
    assert_identical(run(arrays), run({name: params[name] for name in arrays}))


def test_several_arguments():
    fun = lambda x, p, q: x @ p @ q["w"] * q["b"]  # noqa: E731
    params = make_params()
    p, q = half_params(fun, argnums=(1, 2))(X, params["v"], params)
    assert (p.dtype, q["w"].dtype, q["b"].dtype) == ("bfloat16", "bfloat16", "float32")
    # Data is rounded in the same way: it is an argument like any other.
    assert half_params(fun)(X, params["v"], params).dtype == jnp.bfloat16


def test_abstract_arguments_and_export():
    params = make_params()
    shapes = jax.eval_shape(lambda: (params, X))
    half_shapes = half_params(predict)(*shapes)
    assert half_shapes["w"] == jax.ShapeDtypeStruct((SIZE, SIZE), jnp.bfloat16)
    half = half_params(predict)(params, X)
    assert jax.tree.map(lambda x: x.dtype, half) == jax.tree.map(
        lambda x: x.dtype, half_shapes
    )
    exported = jax.export.export(jit(amp(predict)))(half_shapes, X)
    called = jax.export.deserialize(exported.serialize()).call
    assert_identical(called(half, X), jit(amp(predict))(params, X))


def test_symbolic_batches():
    (batch,) = jax.export.symbolic_shape("b")
    x = jax.ShapeDtypeStruct((batch, SIZE), jnp.float32)
    assert halves(half_params(predict)(make_params(), x), jnp.bfloat16) == {"w"}


def test_shardings_stay(mesh):
    sharding = NamedSharding(mesh, PartitionSpec("data"))
    params = {"w": jnp.ones((8, SIZE)), "b": jnp.ones(SIZE)}
    params = jax.device_put(
        params, {"w": sharding, "b": NamedSharding(mesh, PartitionSpec())}
    )
    half = half_params(predict)(params, jnp.ones((3, 8)))
    assert half["w"].dtype == jnp.bfloat16
    assert half["w"].sharding == sharding
    assert half["b"] is params["b"]


def test_under_jit():
    run = jit(lambda p, x: amp(predict)(half_params(predict)(p, x), x))
    assert_identical(run(make_params(), X), jit(amp(predict))(make_params(), X))


def test_keywords():
    fun = lambda p, *, x, name: predict(p, x)  # noqa: E731
    half = half_params(fun)(make_params(), x=X, name="a string")
    assert halves(half, jnp.bfloat16) == {"w"}


class Net(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(SIZE, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.last = nnx.List([nnx.Linear(8, 8, rngs=rngs)])

    def __call__(self, x):
        x = nnx.relu(self.norm(self.first(x)))
        return self.last[0](self.last[0](x))


@in_turn(["train", "eval"])
def test_a_module_of_nnx(name, dtype):
    model = Net(nnx.Rngs(0))
    getattr(model, name)()
    before = nnx.state(model)
    fun = lambda model, x: model(x)  # noqa: E731
    half = half_params(fun, compute_dtype=dtype)(model, X)
    assert isinstance(half, Net) and half is not model
    assert_identical(nnx.state(model), before)
    found = halves(nnx.to_pure_dict(nnx.state(half)), dtype)
    assert found == {"first/kernel", "last/0/kernel"}
    run = nnx.jit(amp(fun, compute_dtype=dtype))
    assert_identical(run(half, X), run(model, X))
    # What the model updates is float32 in both.
    assert_identical(half.norm.mean[...], model.norm.mean[...])


def test_an_abstract_module_of_nnx():
    model = nnx.eval_shape(lambda: Net(nnx.Rngs(0)))
    half = half_params(lambda model, x: model(x))(model, X)
    assert half.first.kernel.get_value().dtype == jnp.bfloat16
    assert model.first.kernel.get_value().dtype == jnp.float32


def test_layers_of_nnx_in_a_scan():
    @nnx.vmap(in_axes=0)
    def make(key):
        return nnx.Linear(SIZE, SIZE, rngs=nnx.Rngs(key))

    model = make(jax.random.split(jax.random.key(0), 3))

    def fun(model, x):
        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        def run(layer, x):
            return jnp.tanh(layer(x))

        return run(model, x)

    half = half_params(fun)(model, X)
    assert (half.kernel[...].dtype, half.bias[...].dtype) == ("bfloat16", "float32")
    run = nnx.jit(amp(fun))
    assert_identical(run(half, X), run(model, X))


# --- options, and what is refused -----------------------------------------------------


def test_float32_returns_the_arguments():
    params = make_params()
    half = half_params(predict, precision="32-true")(params, X)
    assert all(half[name] is params[name] for name in params)


def test_what_the_policy_keeps_in_float32_stays():
    def fun(p, x):
        with jax.named_scope("head"):
            y = x @ p["w"]
        with flax_amp.amp_stop():
            y = y @ p["v"]
        return y @ p["stack"][0]

    policy = default_amp_policy | {"head": jnp.float32}
    half = stored(fun, make_params(), X, amp_policy=policy)
    assert halves(half, jnp.bfloat16) == {"stack"}


def test_a_third_dtype_of_the_policy():
    def fun(p, x):
        with jax.named_scope("head"):
            return x @ p["w"]

    policy = default_amp_policy | {"head": jnp.float16}
    half = stored(fun, make_params(), X, amp_policy=policy)
    assert half["w"].dtype == jnp.float32


def test_fp8_is_proven_or_left():
    params = {"w": jnp.ones((512, 512)), "b": jnp.ones(512)}
    fun = lambda p, x: jnp.tanh(jnp.tanh(x @ p["w"]) @ p["w"]) * p["b"]  # noqa: E731
    x = jnp.ones((512, 512))
    half = half_params(fun, precision="fp8-mixed")(params, x)
    assert half["b"].dtype == jnp.float32


def test_errors():
    with pytest.raises(TypeError, match=r"half_params: predict is already rewritten"):
        half_params(amp(predict))
    with pytest.raises(ValueError, match=r"got argnums=2 for a call with 2 positional"):
        half_params(predict, argnums=2)(make_params(), X)
    with pytest.raises(ValueError, match=r"argnums=-1 for a call"):
        half_params(predict, argnums=-1)(make_params(), X)
    with pytest.raises(TypeError, match="half_params: got both precision="):
        half_params(predict, precision="bf16", compute_dtype=jnp.float16)
    with pytest.raises(TypeError, match="dot_general requires contracting dimensions"):
        half_params(predict)(make_params(), X[:, :2])


# --- models ---------------------------------------------------------------------------

# The bytes of the parameters, as a share of float32's, at most: norms and biases are
# small. The LSTM adds up rows of its table, and the towers multiply theirs.
MODELS = dict.fromkeys(models.COMPARED, 0.56) | {"lstm": 0.71, "towers": 0.67}
QUICK = ["lstm"]  # which adds up rows of its table
# Two compiled runs of these take most of the time of all models. Their forward passes
# have the equations of the models that run.
NOT_RUN = "conformer dit efficientnet perceiver postnorm swin unet vit_s16".split()


@pytest.mark.parametrize(
    "name, dtype",
    [
        pytest.param(
            name, HALVES[i % 2], marks=[pytest.mark.slow] * (name not in QUICK)
        )
        for i, name in enumerate(MODELS)
    ],
)
def test_models_of_the_benchmarks(name, dtype):
    problem = models.problem(name, "tiny")
    params, others = jit(problem.init)(jax.random.key(0))
    batch = jit(problem.batch)(jax.random.key(1))
    half = half_params(problem.loss, compute_dtype=dtype)(params, others, batch)
    if name not in NOT_RUN:
        run = jit(amp(problem.loss, compute_dtype=dtype))
        assert_identical(run(half, others, batch), run(params, others, batch))
    sizes = [sum(x.nbytes for x in jax.tree.leaves(tree)) for tree in (half, params)]
    assert sizes[0] <= MODELS[name] * sizes[1]


def test_a_step_beside_a_half_base_is_that_of_float32():
    """Losses and gradients have the same bits, if no clip reads all gradients."""
    params, batch = make_params(), X

    def fun(p, x):
        return jnp.mean((scan_over_layers(p, x) * p["b"]) ** 2)

    half = half_params(fun)(params, batch)
    is_half = jax.tree.map(lambda x: x.dtype == jnp.bfloat16, half)
    by_label = {True: optax.set_to_zero(), False: optax.adam(1e-2)}
    tx = optax.multi_transform(by_label, is_half)
    found = []
    for start in (half, params):
        state = AmpTrainState.create(params=start, tx=tx)
        step = make_train_step(fun)
        for _ in range(2):
            state, metrics = step(state, batch)
        trained = jax.tree.map(
            lambda x, frozen: None if frozen else x, state.params, is_half
        )
        found.append((metrics["loss"], trained))
    assert jax.tree.leaves(found[0][1])
    assert_identical(*found)
