"""Which products run in fp8, by whose word, and on which devices."""

import functools
import re
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from flax.linen import fp8_ops

from _programs import normal
from flax_amp import (
    AmpTrainState,
    PolicyWarning,
    amp,
    amp_stop,
    checkpoint,
    compare_precision,
    default_amp_policy,
    explain,
    find_nonfinite,
    make_eval_step,
    make_nnx_train_step,
    make_train_step,
    optim,
    use_fp8,
    use_precision,
)
from flax_amp._rewriter.fp8_dot import FORWARD, fp8_dot_p
from flax_amp._rewriter.fp8_rule import has_fp8
from flax_amp.policy import Policy, without_fp8
from helpers import (
    MATMULS,
    assert_close,
    assert_identical,
    dtypes_of,
    equations_of,
)

pytestmark = [
    pytest.mark.once,
    pytest.mark.filterwarnings("ignore:amp. no matrix product of this"),
]

FP8 = use_fp8(emulate=True, any_shape=True)
DOT = jax.lax.dot_general_p


def fp8_policy(recipe=FP8, **scopes):
    return default_amp_policy | {DOT: recipe} | scopes


def count(fn, *args):
    """Returns how many products run in fp8 in `fn(*args)`, and how many others."""
    return tuple(
        len(equations_of(fn, *args, primitive=name))
        for name in (fp8_dot_p.name, MATMULS)
    )


# --- which products ------------------------------------------------------------------

W, X = normal(1, 3, 16, 16) / 4, normal(2, 8, 16)


def mlp(w, x):
    x = jnp.tanh(x @ w[0])
    with jax.named_scope("middle"):
        x = jnp.tanh(x @ w[1])
    return x @ w[2]


def attention(w, x):
    x = jnp.tanh(x @ w[0])
    scores = jax.nn.softmax((x @ w[1]) @ (x @ w[2]).T)
    return (scores @ x) @ w[0] @ w[1]


def experts(w, x):
    routed = jnp.tanh(x @ w[0]).reshape(3, -1, 16)[:, :2]
    return jnp.einsum("ebi,eij->ebj", routed, w).reshape(-1, 16) @ w[1]


def lookup(w, x):
    rows = w[0][jnp.argmax(x, 1)]  # made of arguments alone
    rows = rows / jnp.linalg.norm(rows)
    return jnp.tanh(rows @ w[1]) @ w[2]


def convolved(w, x):
    y = jnp.tanh(x @ w[0])[None, :, :]
    kernel = w[:1].reshape(1, 16, 16)
    y = jax.lax.conv_general_dilated(
        y, kernel, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")
    )
    return y[0] @ w[1]


def one_hot(w, x):
    y = jnp.tanh(x @ w[0])
    picked = jax.nn.one_hot(jnp.argmax(y, 0), 8)
    return jnp.tanh(picked @ y) @ w[1]


def masked(w, x):
    y = jnp.tanh(x @ w[0])
    mask = (y > 0).astype(jnp.float32)
    return jnp.tanh(mask.T @ y) @ w[1]


def cast(w, x):
    return jnp.tanh(jnp.tanh(x @ w[0]) @ w[1].astype(jnp.bfloat16)) @ w[2]


class Row(NamedTuple):
    fn: Any
    in_fp8: int
    others: tuple[str, ...]  # reasons of the other products, in order


FIRST, LAST = (
    "not in fp8: computed from arguments and constants alone",
    "not in fp8: no product in half precision behind it",
)
PAIR = "not in fp8: neither factor is an argument"
ROWS = {
    "first and last": Row(mlp, 1, (FIRST, LAST)),
    "attention": Row(attention, 3, (FIRST, PAIR, PAIR, LAST)),
    "experts": Row(lambda w, x: experts(w, jnp.tile(x, (3, 1))), 1, (FIRST, LAST)),
    "a lookup": Row(lookup, 1, (LAST,)),
    "one-hot": Row(one_hot, 0, (FIRST, PAIR, LAST)),
    "a mask": Row(masked, 0, (FIRST, PAIR, LAST)),
    "a scaled weight": Row(
        lambda w, x: jnp.tanh(jnp.tanh(x @ w[0]) @ (2 * w[1])) @ w[2],
        0,
        (FIRST, PAIR, LAST),
    ),
    "a first layer behind a norm": Row(
        lambda w, x: jnp.tanh((x - x.mean(1, keepdims=True)) @ w[0]) @ w[1], 1, (LAST,)
    ),
    "a convolution": Row(convolved, 0, (FIRST, "primitive conv_general_dilated", LAST)),
    "a user's cast": Row(cast, 0, (FIRST, "not in fp8: a factor is not float32", LAST)),
    "precision": Row(
        lambda w, x: jnp.matmul(jnp.tanh(x @ w[0]), w[1], precision="highest") @ w[2],
        0,
        (FIRST, "precision=", LAST),
    ),
    "inner products": Row(
        lambda w, x: jnp.einsum("bi,bi->b", jnp.tanh(x @ w[0]), x)[:, None] * x @ w[1],
        0,
        (FIRST, "an inner product is a sum", LAST),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ROWS)
def test_products(name):
    row = ROWS[name]
    assert count(amp(row.fn, matmul_dtype=FP8), W, X)[0] == row.in_fp8
    found = explain(row.fn, matmul_dtype=FP8, backward=False)(W, X)
    rows = [x for x in found.equations if x.primitive in MATMULS]
    reasons = [x.reason for x in rows if "float8_e4m3fn" not in x.after.operands]
    assert len(reasons) == len(row.others)
    for seen, wanted in zip(reasons, row.others, strict=True):
        assert seen.startswith(wanted)


SIZES = {
    (16384, 4096, 4096): True,
    (2048, 4096, 4096): False,  # few rows
    (16384, 2048, 8192): True,
    (16384, 8192, 2048): True,
    (16384, 1024, 4096): True,
    (16384, 768, 3072): False,
    (8, 4096, 4096): False,
}


@pytest.mark.parametrize("weight_first", [False, True])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_small_products_stay_in_half_precision(sizes, weight_first):
    rows, terms, columns = sizes
    struct = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)

    def fn(w, v, x):
        y = jnp.tanh(jnp.sin(x[0, 0]) * (x @ v))
        z = jnp.einsum("kn,mk->nm", w, y).T if weight_first else y @ w
        return jnp.sin(z) @ w.T

    args = struct((terms, columns)), struct((4, terms)), struct((rows, 4))
    found = count(amp(fn, matmul_dtype=use_fp8(emulate=True)), *args)
    assert found == ((1, 2) if SIZES[sizes] else (0, 3))
    told = explain(fn, matmul_dtype="fp8", backward=False)(*args)
    reasons = [row.reason for row in told.equations if row.primitive == "dot_general"]
    small = f"not in fp8: too small, {rows} x {terms} x {columns}"
    assert (small in reasons) == (not SIZES[sizes])


def test_a_symbolic_size_is_not_known_to_pay():
    fn = jax.jit(amp(lambda w, x: jnp.tanh(jnp.tanh(x @ w) @ w) @ w,
                     matmul_dtype=use_fp8(emulate=True)))  # fmt: skip
    (rows,) = jax.export.symbolic_shape("rows")
    x = jax.ShapeDtypeStruct((rows, 4096), jnp.float32)
    w = jax.ShapeDtypeStruct((4096, 4096), jnp.float32)
    assert "f8E4M3FN" not in jax.export.export(fn)(w, x).mlir_module()


def test_arrays_with_explicit_shardings_stay_in_half_precision():
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))
    with jax.set_mesh(mesh):
        x = jax.device_put(X, jax.P("data"))
        found = explain(mlp, matmul_dtype=FP8, backward=False)(W, x)
        assert "not in fp8: its sharding is explicit" in str(
            [row.reason for row in found.equations]
        )
        assert count(amp(mlp, matmul_dtype=FP8), W, x)[0] == 0


# --- by whose word -------------------------------------------------------------------


def test_a_word_is_a_key_of_the_policy():
    word, key = amp(mlp, matmul_dtype=FP8), amp(mlp, amp_policy=fp8_policy())
    assert str(jax.make_jaxpr(word)(W, X)) == str(jax.make_jaxpr(key)(W, X))


def test_the_class_means_the_recipe_without_options():
    for value in ("fp8", use_fp8, use_fp8()):
        assert Policy({DOT: value}).fp8_recipes == {use_fp8()}
        found = explain(mlp, matmul_dtype=value, backward=False)(W, X)
        assert "not in fp8: too small, 8 x 16 x 16" in str(
            [row.reason for row in found.equations]
        )


def with_last(w, x):
    y = mlp(w, x)
    with jax.named_scope("last"):
        return jnp.sin(y) @ w[0]


SCOPES = {
    "a scope alone": (mlp, default_amp_policy | {"middle": FP8}, (1, 2)),
    "a small product that is named": (
        mlp,
        default_amp_policy | {"middle": use_fp8(emulate=True)},
        (1, 2),
    ),
    "the last one, which is named": (with_last, fp8_policy(last=FP8), (3, 1)),
    "a scope left out": (mlp, fp8_policy(middle=jnp.bfloat16), (0, 3)),
    "a scope in float32": (mlp, fp8_policy(middle=jnp.float32), (0, 3)),
}


@pytest.mark.parametrize("name", SCOPES)
def test_scopes(name):
    fn, policy, expected = SCOPES[name]
    assert count(amp(fn, amp_policy=policy), W, X) == expected


def test_a_scope_lowers_its_products_and_nothing_else():
    """Other arithmetic inside is that of `amp`, not of a scope in half precision."""

    def fn(w, x):
        x = jnp.tanh(x @ w[0])
        with jax.named_scope("norm"):
            y = x @ w[1]
            y = (y - y.mean(-1, keepdims=True)) / y.std(-1, keepdims=True)
        return y @ w[2]

    in_fp8 = explain(fn, amp_policy={"norm": FP8} | default_amp_policy)(W, X)
    plain = explain(fn)(W, X)
    for mine, other in zip(in_fp8.equations, plain.equations, strict=True):
        if mine.primitive != "dot_general":
            assert (mine.after, mine.kept) == (other.after, other.kept)


def test_stopped_code_stays_in_float32():
    def fn(w, x):
        x = jnp.tanh(x @ w[0])
        with amp_stop():
            x = jnp.tanh(x @ w[1])
        return x @ w[2]

    assert ("float32", "float32") in dtypes_of(amp(fn, matmul_dtype=FP8), W, X)
    assert count(amp(fn, matmul_dtype=FP8), W, X)[0] == 0


def test_a_key_of_the_user_for_products_is_theirs():
    policy = fp8_policy(jnp.float32)
    with pytest.warns(PolicyWarning, match="nothing in this program runs in bfloat16"):
        found = count(amp(mlp, amp_policy=policy, matmul_dtype="fp8"), W, X)
    assert found == (0, 3)


def test_in_float32_nothing_is_rounded():
    clz = {jax.lax.clz_p: jnp.bfloat16}  # makes `amp` rewrite what it need not
    for policy in (fp8_policy(), fp8_policy() | clz):
        fn = amp(mlp, compute_dtype=jnp.float32, amp_policy=policy)
        assert count(fn, W, X) == (0, 3)
        assert_identical(fn(W, X), mlp(W, X))


@pytest.mark.parametrize(
    "value, seen", [("fp9", "'fp9'"), (jnp.bfloat16, "bfloat16"), (True, "True")]
)
def test_wrong_matmul_dtype(value, seen):
    message = "expected 'fp8', or flax_amp.use_fp8(...) with options, or None"
    with pytest.raises(TypeError, match=re.escape(message)) as error:
        amp(mlp, matmul_dtype=value)
    assert str(error.value).startswith("matmul_dtype: got ") and seen in str(error)


@pytest.mark.parametrize(
    "options, error, message",
    [
        (
            {"scaling": "column"},
            ValueError,
            "scaling is 'column'; expected 'tensor' or",
        ),
        ({"weight_gradients": 8}, ValueError, "weight_gradients is 8; expected 'fp8'"),
        ({"any_shape": 1}, TypeError, "any_shape is 1; expected True or False."),
        ({"emulate": "no"}, TypeError, "emulate is 'no'; expected True, False or None"),
    ],
)
def test_wrong_options(options, error, message):
    with pytest.raises(error, match=re.escape(f"use_fp8: {message}")):
        use_fp8(**options)


def test_called_on_its_own_it_casts():
    (x,), params = FP8(jnp.bfloat16, [jnp.float32], X, axis=0)
    assert x.dtype == jnp.bfloat16 and params == {"axis": 0}


@pytest.mark.parametrize("key", [jax.lax.exp_p, jax.lax.conv_general_dilated_p])
def test_fp8_is_for_matrix_products(key):
    message = "flax_amp.use_fp8 for scopes and for jax.lax.dot_general_p alone"
    with pytest.raises(TypeError, match=message):
        amp(mlp, amp_policy=default_amp_policy | {key: use_fp8})


@pytest.mark.parametrize("dtype", [jnp.float8_e4m3fn, "float8_e5m2"])
def test_8_bit_floats_are_no_dtype_of_a_policy(dtype):
    """They have to be scaled."""
    with pytest.raises(
        TypeError, match="which have to be scaled, use flax_amp.use_fp8"
    ):
        use_precision(dtype)
    with pytest.raises(TypeError, match="wrong entries"):
        amp(mlp, amp_policy=fp8_policy(dtype))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("emulate", [True, False])
def test_a_program_without_products_in_fp8_warns(emulate):
    recipe = use_fp8(emulate=emulate)
    message = (
        "amp: no matrix product of this program runs in fp8: computed from arguments "
        "and constants alone (1); too small, 8 x 16 x 16 (1); no product in half "
        "precision behind it (1). Expected one by a weight, an argument of the "
        "function, that is large enough (docs/fp8.md)."
    )
    with pytest.warns(PolicyWarning, match=re.escape(message)):
        jax.eval_shape(amp(mlp, matmul_dtype=recipe), W, X)
    with pytest.warns(PolicyWarning, match="it has none that could"):
        jax.eval_shape(amp(jnp.sin, matmul_dtype=recipe), X)
    jax.eval_shape(jax.grad(lambda w: amp(mlp, matmul_dtype=FP8)(w, X).sum()), W)


# --- devices -------------------------------------------------------------------------


class Device(NamedTuple):
    platform: str
    device_kind: str
    compute_capability: str = ""


DEVICES = [
    (Device("cpu", "cpu"), False),
    (Device("tpu", "TPU v5 lite"), False),
    (Device("tpu", "TPU v6 lite"), False),
    (Device("tpu", "TPU7x"), True),
    (Device("gpu", "NVIDIA A100", "8.0"), False),
    (Device("gpu", "NVIDIA L4", "8.9"), True),
    (Device("gpu", "NVIDIA H100", "9.0"), True),
    (Device("gpu", "NVIDIA B200", "10.0"), True),
    (Device("gpu", "MI300", "gfx942"), False),
]


@pytest.mark.parametrize("device, expected", DEVICES, ids=str)
def test_devices_with_fp8(device, expected):
    assert has_fp8(device) == expected


REFUSED = re.escape(
    "fp8: the device 'cpu' has no matrix products in fp8, as GPUs of NVIDIA from "
    "compute capability 8.9 on and TPUs from generation 7 on have. Expected "
    "precision='bf16-mixed' (or no matmul_dtype). To run the same numbers without the "
    "speed, pass matmul_dtype=flax_amp.use_fp8(emulate=True)"
)


def test_a_device_without_fp8_is_refused():
    with pytest.raises(ValueError, match=REFUSED):
        jax.eval_shape(amp(mlp, matmul_dtype="fp8"), W, X)
    amp(mlp, matmul_dtype=use_fp8(emulate=False))(W, X)  # who compiles for another one


def test_no_device_is_asked_in_float32():
    amp(mlp, compute_dtype=jnp.float32, matmul_dtype="fp8")(W, X)


@pytest.mark.parametrize("device", ["cpu", "object"])
def test_the_default_device_is_asked(device):
    device = jax.devices()[0] if device == "object" else device
    with jax.default_device(device), pytest.raises(ValueError, match=REFUSED):
        amp(mlp, matmul_dtype="fp8")(W, X)


# --- with the rest -------------------------------------------------------------------


def loss_fn(params, batch):
    return jnp.mean(jnp.square(mlp(params["w"], batch) - 1.0))


def create(**options):
    options = {"tx": optax.adam(1e-2), "precision": "fp8-mixed"} | options
    return AmpTrainState.create(params={"w": W}, **options)


def test_a_state_in_fp8_steps_in_fp8():
    for make in (make_train_step, make_eval_step):
        step = make(loss_fn, matmul_dtype=FP8, jit=False)
        assert count(step, create(), X)[0] == (3 if make is make_train_step else 1)
    for alias in ("fp8", "fp8-mixed"):
        state = create(precision=alias)
        assert state.precision == "fp8-mixed" and state.scaler["scaler"] == 1.0
    with pytest.raises(ValueError, match=REFUSED):
        make_train_step(loss_fn)(create(), X)


OPTIONS: dict[str, Any] = {
    "plain": ({}, {}),
    "accumulation": ({}, {"accum_steps": 2}),
    "redo": ({}, {"redo_on_nan": 2}),
    "wide gradients": ({}, {"reduce_dtype": jnp.float32}),
    "small states": (
        {"tx": optim.small_state(optax.adam(1e-2)), "param_dtype": jnp.bfloat16},
        {},
    ),
    "rows": ({}, {"matmul_dtype": use_fp8("row", "half", True, True)}),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_training(name):
    """The loss falls as it does in bfloat16."""
    of_state, of_step = OPTIONS[name]
    ends = []
    for precision in ("fp8-mixed", "bf16-mixed"):
        options = dict(of_step)
        if precision == "fp8-mixed":
            options = {"matmul_dtype": FP8} | options
        else:
            options.pop("matmul_dtype", None)
        step = make_train_step(loss_fn, **options)
        state = create(precision=precision, **of_state)
        for _ in range(40):
            state, metrics = step(state, X)
        assert bool(metrics["grads_finite"])
        ends.append(float(metrics["loss"]))
    assert ends[0] < 0.3 * float(loss_fn({"w": W}, X))
    assert abs(ends[0] - ends[1]) < 0.05


def test_a_step_that_is_not_finite_is_skipped():
    step = make_train_step(loss_fn, matmul_dtype=FP8, donate=False)
    state = create()
    new, metrics = step(state, X.at[0, 0].set(jnp.inf))
    assert not metrics["grads_finite"]
    assert_identical(new.params, state.params)


def test_nnx():
    class Net(nnx.Module):
        def __init__(self):
            rngs = nnx.Rngs(0)
            self.layers = nnx.List([nnx.Linear(16, 16, rngs=rngs) for _ in range(3)])

        def __call__(self, x):
            for layer in self.layers:
                x = jnp.tanh(layer(x))
            return x

    model = Net()
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    step = make_nnx_train_step(
        lambda model, x: jnp.mean(model(x) ** 2),
        precision="fp8-mixed",
        matmul_dtype=FP8,
    )
    scaler, metrics = step(model, optimizer, None, X)
    assert bool(metrics["grads_finite"])


@pytest.mark.parametrize("pair", [("bf16-mixed", "fp8-mixed"), ("fp8-mixed", "bf16")])
def test_a_run_goes_on_in_another_precision(tmp_path, pair):
    first, second = (create(precision=word) for word in pair)
    step = make_train_step(loss_fn, matmul_dtype=FP8, donate=False)
    state, _ = step(first, X)
    with checkpoint.manager(tmp_path) as manager:
        checkpoint.save(manager, state)
        restored = checkpoint.restore(manager, second)
    assert restored.precision == second.precision
    assert_identical(restored.params, state.params)
    step(restored, X)


def test_layers_of_flax_in_fp8_stay_as_they_are():
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.Dense(16, dot_general_cls=fp8_ops.Fp8DotGeneral)(x)
            return nn.Dense(16)(jnp.tanh(nn.Dense(16)(jnp.tanh(nn.Dense(16)(x)))))

    net = Net()
    variables = net.init(jax.random.key(0), X)
    plain = dtypes_of(net.apply, variables, X)
    fn = amp(net.apply, matmul_dtype=FP8)
    in_fp8, others = count(fn, variables, X)
    assert in_fp8 == 1
    assert plain[0] in dtypes_of(fn, variables, X)
    assert_close(fn(variables, X), net.apply(variables, X), FORWARD)


def test_explain_tells_fp8():
    report = explain(mlp, matmul_dtype=FP8)(W, X)
    rows = [x for x in report.equations if x.primitive == "dot_general"]
    row = next(x for x in rows if "f8" in str(x.after))
    assert str(row.after) == "f8_e4m3fn -> bf16"
    assert report.totals.low_share == 1.0
    wanted = (
        "33% of them, not: computed from arguments and constants alone (1); no product "
        "in half precision behind it (1)"
    )
    assert wanted in " ".join(str(report).split())
    assert "in fp8" not in str(explain(mlp)(W, X))
    state = create()
    told = explain(state, loss_fn, X)
    assert "not in fp8: too small, 8 x 16 x 16" in str(
        [row.reason for row in told.equations]
    )


def test_find_nonfinite_in_fp8():
    found = find_nonfinite(
        lambda w, x: jnp.mean(jnp.log(mlp(w, x) * 0)), matmul_dtype=FP8
    )(W, X)
    assert found.verdict == "mathematics"


def test_find_nonfinite_names_fp8_if_bfloat16_would_do():
    def fn(w, x):
        x = jnp.tanh(x @ w[0]) * jnp.geomspace(1, 1e-8, 8)[:, None]
        y = x @ w[1]
        return jnp.mean(jnp.log(jnp.abs(y).sum(-1))) + jnp.sum(y @ w[2])

    found = find_nonfinite(fn, matmul_dtype=FP8)(W, X)
    assert found.verdict == "precision"
    assert found.advice == (
        "In bfloat16 without products in fp8 it is finite. In fp8, numbers below about "
        "1/300,000 of the largest of their array become zeros. Keep the layers before "
        "this one out of fp8, as in flax_amp.default_amp_policy | "
        '{"*/layer": jnp.bfloat16}, or leave out fp8.'
    )
    assert find_nonfinite(fn)(W, X).verdict == "nothing"


def test_compare_precision_tries_it_without_fp8():
    """With a budget, that may be the cheapest program."""

    def fn(w, x):
        return jnp.mean(jnp.square(mlp(w, x)))

    half = compare_precision(fn)(W, X).settings[0]
    found = compare_precision(fn, matmul_dtype=FP8, budget=2 * half.gradient_error)
    found = found(W, X)
    assert found.settings[0].gradient_error > 3 * half.gradient_error
    assert found.cheapest.name == "without fp8"
    assert found.cheapest.gradient_error == half.gradient_error
    others = [run.name for run in compare_precision(fn)(W, X).remedies]
    assert "without fp8" not in others


def test_a_scope_without_fp8_is_that_of_amp():
    """Its softmax is not lowered with its products."""

    def fn(w, x):
        x = jnp.tanh(x @ w[0])
        with jax.named_scope("mlp"):
            y = jax.nn.softmax(x @ w[1]) @ w[2]
        return jnp.mean(jnp.square(y @ w[0]))

    policy = without_fp8(default_amp_policy | {"mlp": FP8})
    found, plain = (
        [(row.primitive, row.after, row.kept) for row in told.equations]
        for told in (explain(fn, amp_policy=policy)(W, X), explain(fn)(W, X))
    )
    assert found == plain
    compared = compare_precision(fn, amp_policy=default_amp_policy | {"mlp": FP8})
    half = compare_precision(fn)(W, X).settings[0]
    (without,) = [r for r in compared(W, X).remedies if r.name == "without fp8"]
    assert without.gradient_error == half.gradient_error


def test_products_with_sparse_arrays_stay_float32():
    from jax.experimental import sparse

    def fn(w, x):
        for each in w:
            x = jnp.tanh(x @ each)
        return x

    weights = [W[0], sparse.BCOO.fromdense(W[1]), W[2], W[0]]
    found = sparse.sparsify(amp(fn, matmul_dtype=FP8))(weights, X)
    assert_close(found, fn([W[0], W[1], W[2], W[0]], X), FORWARD)
