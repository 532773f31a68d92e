"""`reduce_in_float32`: gradients of weights are the float32 sums of their matmuls."""

import functools
import itertools
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from _programs import (
    DERIVATIVES,
    PROGRAMS,
    WITHIN,
    loss_of,
    normal,
    over_devices,
    squares,
)
from flax_amp import (
    AmpOptimizer,
    AmpTrainState,
    amp,
    default_amp_policy,
    explain,
    find_nonfinite,
    init_scaler,
    make_nnx_train_step,
    make_train_step,
    use_fp8,
)
from flax_amp._rewriter.primitives import walk
from helpers import (
    MATMULS,
    assert_close,
    both_halves,
    equations_of,
    exact_jit,
    relative_error,
)

pytestmark = pytest.mark.once

wide = functools.partial(amp, reduce_in_float32=True)
OWN = "flax_amp_weight_matmul"
W, X = normal(0, 16, 8), normal(1, 32, 16)


def rounded(dtype, tree):
    return jax.tree.map(lambda x: x.astype(dtype).astype(jnp.float32), tree)


def cotangents(run, w, *args):
    """The cotangent of `w` for a random one of the result, and that one."""
    y, pullback = jax.vjp(lambda w: run(w, *args), w)
    return pullback(normal(7, *y.shape))[0]


def matmuls(fn, *args):
    """The primitive and the dtype of the result of each matmul."""
    visits = walk(jax.make_jaxpr(fn)(*args))
    found = [visit.eqn for visit in visits]
    return [
        (eqn.primitive.name, str(eqn.outvars[0].aval.dtype))
        for eqn in found
        if eqn.primitive.name in (OWN, *MATMULS)
    ]


# --- one matmul, in any place --------------------------------------------------------


def convolution(w, x, groups=1):
    window = w.reshape(4, 4 // groups, 8 * groups)
    dims = ("NWC", "WIO", "NWC")
    image = x.reshape(4, 32, 4)
    return jax.lax.conv_general_dilated(
        image, window, (2,), "SAME", dimension_numbers=dims, feature_group_count=groups
    )


class Linear(nnx.Module):
    def __init__(self, kernel):
        self.kernel = nnx.Param(kernel)

    def __call__(self, x):
        return x @ self.kernel[...]


KINDS = {
    "plain": lambda w, x: x @ w,
    "transposed": lambda w, x: x @ w.reshape(8, 16).T,
    "on the left": lambda w, x: w.T @ x.T,
    "a slice": lambda w, x: x[:, :8] @ w[8:],
    "of a stack": lambda w, x: x[:, :4] @ w.reshape(4, 4, 8)[2],
    "experts": lambda w, x: jnp.einsum(
        "etd,edf->etf", x.reshape(4, 32, 4), w.reshape(4, 4, 8)
    ),
    "ragged": lambda w, x: jax.lax.ragged_dot(
        x[:, :8], w.reshape(2, 8, 8), jnp.array([12, 20])
    ),
    "convolution": convolution,
    "grouped convolution": functools.partial(convolution, groups=2),
    "computed from arguments": lambda w, x: x @ (w / jnp.linalg.norm(w)),
    "shared": lambda w, x: x @ w + (x[::-1] @ w) * 2,
    "linen": lambda w, x: nn.Dense(8, use_bias=False).apply(
        {"params": {"kernel": w}}, x
    ),
    "attend": lambda w, x: nn.Embed(8, 16).apply(
        {"params": {"embedding": w.reshape(8, 16)}}, x, method="attend"
    ),
    "nnx": lambda w, x: Linear(w)(x),
}


def stacked(w, x):
    """A scan over weights."""
    layer = lambda carry, w: (carry, x[:, :4] @ w)  # noqa: E731
    return jax.lax.scan(layer, 0, w.reshape(4, 4, 8))[1]


def of_layers(w, x):
    return jax.vmap(lambda w: x[:, :4] @ w)(w.reshape(4, 4, 8))


def plain(w, x):
    return x @ w


save_dots = functools.partial(
    jax.checkpoint, policy=jax.checkpoint_policies.dots_saveable
)
PLACES = {
    **{name: place(plain) for name, place in WITHIN.items()},
    "save dots": save_dots(plain),
    "scan over weights": stacked,
    "vmap over weights": of_layers,
    "checkpoint in scan": lambda w, x: jax.lax.scan(
        lambda c, w: (c, jax.checkpoint(jnp.matmul)(x[:, :4], w)),
        0,
        w.reshape(4, 4, 8),
    )[1],
    "custom_vjp in scan": lambda w, x: jax.lax.scan(
        lambda c, w: (c, WITHIN["custom_vjp"](plain)(w, x[:, :4])),
        0,
        w.reshape(4, 4, 8),
    )[1],
    "shard_map": over_devices(plain, (P(), P("data"))),
    "shard_map without checks": over_devices(plain, (P(), P("data")), check_vma=False),
}
WAYS = {
    "bfloat16": dict(compute_dtype=jnp.bfloat16),
    "float16": dict(compute_dtype=jnp.float16),
    "stored": dict(compute_dtype=jnp.bfloat16, recompute=False),
}
CASES = KINDS | PLACES


# No way depends on the kind or the place: each case runs in one way, and every second
# case in another way, too.
CASES_AND_WAYS = [(case, "bfloat16") for case in CASES]
CASES_AND_WAYS += [(case, "float16") for case in list(CASES)[1::4]]
CASES_AND_WAYS += [(case, "stored") for case in list(CASES)[3::4]]


@pytest.mark.parametrize("case, way", CASES_AND_WAYS)
def test_float32_sums(case, way):
    """The cotangent is linear in halves: the same as of a float32 matmul of them."""
    fn, options = CASES[case], WAYS[way]
    dtype = options["compute_dtype"]
    x = rounded(dtype, X)

    def exact(w):
        # Its cotangent is rounded where a matmul in half precision reads it.
        y, pullback = jax.vjp(lambda w: fn(w, x), w)
        return pullback(rounded(dtype, normal(7, *y.shape)))[0]

    def all_three(w, x):
        plain = cotangents(amp(fn, **options), w, x)
        return exact(w), cotangents(wide(fn, **options), w, x), plain

    expected, found, plain = exact_jit(all_three)(W, x)
    assert relative_error(found, expected) < 2e-6
    assert relative_error(plain, expected) > 1e-4


@both_halves
def test_the_matmuls_of_other_devices_read_halves(dtype):
    """XLA for the CPU has not all of these matmuls, and gets float32 ones."""
    run = jax.jit(jax.grad(loss_of(wide(plain, compute_dtype=dtype)), (0, 1)))
    half = {"bfloat16": "bf16", "float16": "f16"}[dtype.__name__]
    for platform in ("tpu", "cuda"):
        text = run.trace(W, X).lower(lowering_platforms=(platform,)).as_text()
        found = re.findall(r"dot_general.*\(tensor<.*x(\w+)>, tensor<.*x(\w+)>\)", text)
        results = re.findall(r"dot_general.* -> tensor<.*x(\w+)>", text)
        assert found == [(half, half)] * 3
        # `x` is an argument as `w` is, and may be a weight.
        assert sorted(results) == sorted([half, "f32", "f32"])


def test_activations_have_gradients_in_half_precision():
    def loss(ws, x):
        for w in ws:
            x = jnp.tanh(x @ w)
        return jnp.mean(x**2)

    ws = [W[:8], W[8:], W[:8]]
    found = matmuls(jax.grad(wide(loss)), ws, X[:, :8])
    assert sorted(found) == [(OWN, "bfloat16")] * 5 + [(OWN, "float32")] * 3


# Each derivative of one of two programs, and three derivatives of the other as well.
OF_PROGRAMS = [
    *zip(DERIVATIVES, itertools.cycle(["mlp", "convolution"]), strict=False),
    *((name, "mlp") for name in ("jvp", "vmap of grad", "grad of grad")),
]


@pytest.mark.parametrize("derivative, program", OF_PROGRAMS)
def test_derivatives(derivative, program):
    w, x = normal(0, 4, 4) / 2, normal(1, 8, 4)
    fn, derive = loss_of(PROGRAMS[program]), DERIVATIVES[derivative]
    closed = jax.make_jaxpr(derive(wide(fn)))(w, x)
    eqns = [visit.eqn for visit in walk(closed)]
    # No matmul of its derivatives is a plain one, which could read float32.
    plain = [eqn for eqn in eqns if eqn.primitive.name in MATMULS]
    assert not plain or "float32" not in {
        str(v.aval.dtype) for eqn in plain for v in eqn.invars[:2]
    }
    assert any(eqn.primitive.name in (OWN, *MATMULS) for eqn in eqns)
    run = exact_jit(lambda *args: (derive(wide(fn))(*args), derive(fn)(*args)))
    found, expected = run(w, x)
    assert_close(found, expected, jnp.bfloat16, gradient=True)


def test_the_gradient_of_a_table():
    """A lookup has a sum for its gradient, in float32 as what it adds up is."""
    tokens = jnp.arange(32) % 4

    def fn(table, w):
        return table[tokens] @ w

    run = functools.partial(cotangents, wide(fn))
    c = rounded(jnp.bfloat16, normal(7, 32, 8)) @ rounded(jnp.bfloat16, W).T
    expected = jnp.zeros((4, 16)).at[tokens].add(c)
    assert relative_error(exact_jit(run)(X[:4], W), expected) < 2e-6


# --- devices -------------------------------------------------------------------------


@pytest.mark.parametrize("is_sharded", [False, True], ids=["replicated", "fsdp"])
def test_devices_add_up_in_float32(is_sharded):
    """XLA for the CPU adds up bfloat16 in float32, and float16 as it is."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = NamedSharding(mesh, P("data"))
    of_weights = rows if is_sharded else NamedSharding(mesh, P())

    def loss(w, x):
        return jnp.mean((jnp.tanh(x @ w) @ w.T) ** 2)

    w, x = jax.device_put(W, of_weights), jax.device_put(X, rows)

    def dtypes(run):
        grad = jax.jit(jax.grad(run(loss, precision="fp16")), out_shardings=of_weights)
        text = grad.lower(w, x).compile().as_text()
        pattern = r"= \(?(\w+)\[[\d,]+\].* (?:all-reduce|reduce-scatter)\("
        return set(re.findall(pattern, text))

    assert dtypes(amp) == {"f16"}
    assert dtypes(wide) == {"f32"}


# --- what stays ----------------------------------------------------------------------


def test_weights_in_bfloat16_stay():
    w = W.astype(jnp.bfloat16)
    grads = (jax.grad(loss_of(run(plain))) for run in (amp, wide))
    first, second = (str(jax.make_jaxpr(grad)(w, X)) for grad in grads)
    assert first.count("dot_general") == second.count("of=dot_general") == 2
    found = exact_jit(jax.grad(loss_of(wide(plain))))(w, X)
    assert found.dtype == jnp.bfloat16


def test_in_float32_it_changes_nothing():
    run = wide(plain, precision="32-true")
    assert str(jax.make_jaxpr(run)(W, X)) == str(jax.make_jaxpr(plain)(W, X))


@pytest.mark.filterwarnings("ignore:amp. no matmul of this")
def test_matmuls_in_fp8_stay():
    def loss(w, x):
        with jax.named_scope("net"):
            return jnp.mean(jnp.tanh(jnp.tanh(x @ w) @ w.T) ** 2)

    policy = default_amp_policy | {"net": use_fp8(emulate=True)}
    first, second = (
        equations_of(
            jax.grad(run(loss, amp_policy=policy)), W, X, primitive="flax_amp_fp8_dot"
        )
        for run in (amp, wide)
    )
    assert len(first) == len(second) > 0


def test_a_policy_of_a_checkpoint_sees_plain_matmuls():
    def loss(w, x):
        return squares(save_dots(lambda w, x: jnp.sin(x @ w) @ w.T)(w, x))

    counts = [len(matmuls(jax.grad(run(loss)), W, X)) for run in (amp, wide)]
    assert counts[0] == counts[1] == 5


def test_explain_tells_the_same():
    def loss(w, x):
        return jnp.mean(jnp.tanh(x @ w) ** 2)

    first, second = (
        explain(loss, reduce_in_float32=flag)(W, X) for flag in (False, True)
    )
    assert first.to_dict()["equations"] == second.to_dict()["equations"]


# --- steps ---------------------------------------------------------------------------


def linear_loss(params, batch):
    x, c = batch
    return jnp.sum((x @ params["w"]) * c)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("parts", [1, 4])
def test_a_step(precision, parts):
    dtype = {"bf16": jnp.bfloat16, "fp16": jnp.float16}[precision]
    batch = rounded(dtype, (X, normal(7, 32, 8)))
    expected = np.float64(batch[0]).T @ np.float64(batch[1]) / parts

    def error(**options):
        state = AmpTrainState.create(
            params={"w": jnp.zeros((16, 8))},
            tx=optax.sgd(1.0),
            precision=precision,
            scaler=init_scaler(scaler=4.0) if precision == "fp16" else None,
        )
        step = make_train_step(linear_loss, accum_steps=parts, **options)
        state, metrics = step(state, batch)
        assert metrics["grads_finite"]
        return relative_error(-state.params["w"], expected)

    assert error(reduce_in_float32=True) < 2e-6
    assert error() > 1e-4


def test_a_step_of_nnx():
    batch = rounded(jnp.bfloat16, (X, normal(7, 32, 8)))
    expected = np.float64(batch[0]).T @ np.float64(batch[1])
    model = Linear(jnp.zeros((16, 8)))
    optimizer = AmpOptimizer(model, optax.sgd(1.0))
    step = make_nnx_train_step(
        lambda model, batch: jnp.sum(model(batch[0]) * batch[1]),
        reduce_in_float32=True,
    )
    step(model, optimizer, batch)
    assert relative_error(-model.kernel[...], expected) < 2e-6


def test_wrong_arguments():
    with pytest.raises(TypeError, match="reduce_in_float32: got 1; expected True or"):
        amp(plain, reduce_in_float32=1)
    for make in (make_train_step, make_nnx_train_step):
        with pytest.raises(TypeError, match="reduce_in_float32 is a str"):
            make(linear_loss, reduce_in_float32="yes")
        with pytest.raises(ValueError, match="reduce_in_float32 is given"):
            make(amp(linear_loss), reduce_in_float32=True)


# --- tools ---------------------------------------------------------------------------


def test_tools_name_the_matmuls_that_users_wrote():
    """`explain` counts them, and `find_nonfinite` shows which one overflowed."""

    def loss(w, x):
        return jnp.mean((1e4 * x) @ (1e4 * w))

    w, x = normal(0, 16, 16), normal(1, 4, 16)
    options = dict(precision="16-mixed", reduce_in_float32=True)
    assert "100 % in half precision" in str(explain(loss, **options)(w, x))
    found = str(find_nonfinite(loss, **options)(w, x))
    assert "dot_general made" in found and "flax_amp_weight_matmul" not in found
