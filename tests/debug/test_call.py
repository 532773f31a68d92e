"""The one way to call the tools: what they take, what they refuse, how they name it."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import flax_amp
from flax_amp import AmpTrainState, amp, compare_precision, explain, find_nonfinite
from flax_amp.debug._record import module_path

TOOLS = (explain, find_nonfinite, compare_precision)
X, W = jnp.full((2, 4), 0.3), jnp.eye(4)


class Enc(nn.Module):
    def setup(self):
        self.inner = nn.Embed(4, 4)

    def attend(self, x):
        return self.inner.attend(x)

    rematted = nn.remat(attend)
    jitted = nn.jit(attend)


class Model(nn.Module):
    method: str = "attend"

    def setup(self):
        self.enc = Enc()

    def __call__(self, x):
        return getattr(self.enc, self.method)(x).mean()


class NNXEnc(nnx.Module):
    def __init__(self):
        self.inner = nnx.Embed(4, 4, rngs=nnx.Rngs(0))

    def attend(self, x):
        return self.inner.attend(x)

    rematted = nnx.remat(attend)


class NNXModel(nnx.Module):
    def __init__(self, method="attend"):
        self.enc, self.method = NNXEnc(), method

    def __call__(self, x):
        return getattr(self.enc, self.method)(x).mean()


@functools.cache
def linen(method):
    model = Model(method)
    return model.apply, jax.jit(model.init)(jax.random.key(0), X)


def of_nnx(method):
    return lambda model, x: model(x), NNXModel(method)


@pytest.mark.parametrize(
    "make, method",
    [(linen, name) for name in ("attend", "rematted", "jitted")]
    + [(of_nnx, name) for name in ("attend", "rematted")],
)
def test_every_tool_names_the_module(make, method):
    fun, first = make(method)
    path = f"{'Model' if make is linen else 'NNXModel'}/enc/inner"
    found = explain(fun, backward=False)(first, X)
    matmuls = [e for e in found.equations if e.primitive == "dot_general"]
    assert {e.path for e in matmuls} == {path}
    first = jax.tree.map(lambda x: jnp.full_like(x, 6e4), first)
    fault = find_nonfinite(fun, compute_dtype=jnp.float16)(first, X)
    assert fault.finding.path == path
    # A key for the module would hold for all of the program.
    assert fault.lines or fault.policy


@pytest.mark.parametrize(
    "scopes, path",
    [
        (("Model", "enc.attend", "inner"), "Model/enc/inner"),
        (("Model/enc.a", "enc.b"), "Model/enc"),
        (("enc", "enc"), "enc/enc"),
        (("eqx.nn.MLP", "eqx.nn.Linear"), "eqx.nn.MLP/eqx.nn.Linear"),
        (("layer.0", "layer.1.attend"), "layer.0/layer.1"),
        (("layers.<lambda>", "ij,jk->ik", "x"), "layers.<lambda>/x"),
    ],
)
def test_paths(scopes, path):
    assert module_path(scopes) == path


# --- the ways to call ----------------------------------------------------------------


def state_of(precision="16-mixed", **options):
    if "model" not in options:
        model, params = Model(), linen("attend")[1]["params"]
        options = dict(apply_fn=model.apply, params=params, **options)
    return AmpTrainState.create(tx=optax.sgd(0.1), precision=precision, **options)


def pair_of(model):
    return model, nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)


def linen_loss(params, batch, weight=1.0, others=None, *, state, rngs):
    noise = jax.random.normal(rngs["noise"], ())
    loss = state.apply_fn({"params": params}, batch) + 0 * noise
    return loss * weight * (others or {"more": 1.0})["more"]


def nnx_loss(model, batch, weight=1.0, others=None):
    return model(batch) * weight * (others or {"more": 1.0})["more"]


@functools.cache
def ways():
    state = state_of(rngs={"noise": jax.random.key(1)})
    of_model, model = state_of(model=NNXModel()), NNXModel()
    return [
        (state, linen_loss, "float16", "params"),
        (of_model, nnx_loss, "float16", "params"),
        (pair_of(model), nnx_loss, "bfloat16", "params"),
        (nnx_loss, None, "bfloat16", "model"),
    ]


@pytest.mark.once
@pytest.mark.parametrize("i", range(4), ids=["linen", "nnx", "pair", "function"])
def test_each_way_has_precision_names_and_further_arguments(i):
    first, loss, dtype, name = ways()[i]
    more = jnp.float32(2), {"more": jnp.float32(3)}

    def use(tool, *args, **options):
        if loss is None:
            return tool(first, **options)(NNXModel(), X, *args)
        return tool(first, loss, X, *args, **options)

    explained = use(explain)
    assert explained.compute_dtype == dtype and explained.name.endswith("_loss")
    assert explained.stored is not None
    found = use(compare_precision, *more, remedies=0)
    assert found.as_it_is.scale == (2.0**15 if dtype == "float16" else 1)
    assert [group.path.split("/")[0] for group in found.gradients] == [name]
    fun, given = linen("attend") if i == 0 else of_nnx("attend")
    assert found.loss[0] == pytest.approx(6 * float(fun(given, X)), rel=1e-6)
    bad = use(find_nonfinite, jnp.float32(jnp.nan), more[1])
    assert bad.verdict == "inputs" and bad.reached == ("loss",)
    assert [*bad.inputs] == ["weight" if loss is None else "args/0"]


@pytest.mark.once
def test_shapes_do_for_explain():
    for state, loss, *_ in ways()[:2]:
        shapes = jax.eval_shape(lambda s=state: s)
        found = explain(shapes, loss, jax.ShapeDtypeStruct(X.shape, X.dtype))
        with_values = explain(state, loss, X)
        assert found.stored == with_values.stored and found.flops == with_values.flops
    model = nnx.eval_shape(NNXModel)
    assert explain(nnx_loss)(model, X).flops == 2 * 2 * 4 * 4


def test_a_module_is_left_alone():
    model = nnx.BatchNorm(4, rngs=nnx.Rngs(0))
    before = nnx.state(model)
    for tool in TOOLS:
        tool(lambda m, x: jnp.mean(m(x) ** 2))(model, X)
    assert jax.tree.all(jax.tree.map(lambda x, y: x is y, nnx.state(model), before))


class Shared(nnx.Module):
    def __init__(self, rngs):
        self.block = nnx.Linear(4, 4, rngs=rngs)
        self.again = self.block

    def __call__(self, x):
        return self.block(x)


def test_a_shared_module_has_the_first_path_by_the_alphabet():
    policy = flax_amp.default_amp_policy | {"Shared/again": jnp.float32}
    found = explain(lambda m, x: m(x), amp_policy=policy)(Shared(nnx.Rngs(0)), X)
    assert {row.path for row in found.equations} - {""} == {"Shared/again"}
    assert found.low_share == 0


def test_modules_that_must_be_equal():
    class Two(nnx.Module):
        def __init__(self):
            self.one, self.two = (nnx.Linear(4, 4, rngs=nnx.Rngs(i)) for i in (0, 1))

    def averaged(model, x):
        layer = jax.tree.map(lambda a, b: (a + b) / 2, model.one, model.two)
        return jnp.mean(layer(x) ** 2)

    with pytest.raises(ValueError, match="different pytree metadata") as error:
        explain(averaged)(Two(), X)
    assert "can use their states" in "".join(error.value.__notes__)


# --- what is refused -----------------------------------------------------------------


def arrays(w, x):
    return (x @ w).sum()


WRONG = {
    "no function": ((3,), {}, "got int; expected .*loss_fn"),
    "a batch": ((arrays, X), {}, r"expected .*\(\(model, optimizer\), loss_fn, batch"),
    "no batch": ((state_of, arrays), {}, "got AmpTrainState, function; expected"),
    "no loss": ((state_of, 3, X), {}, "got AmpTrainState, int, ArrayImpl; expected"),
    "precision": ((arrays,), {"precision": "half"}, "expected one of 'bf16-mixed'"),
    "both": (
        (arrays,),
        {"precision": "fp16", "compute_dtype": jnp.float16},
        "got both precision='fp16' and compute_dtype=",
    ),
    "policy": ((arrays,), {"amp_policy": 1}, "expected a dict"),
    "option": ((arrays,), {"dtype": 1}, "unexpected keyword argument 'dtype'"),
}
RUN = {
    "scale": ((arrays,), {"scale": 0.0}, (W, X), "scale is 0.0; expected a positive"),
    "no floats": ((lambda n: n * 1.0,), {}, (3,), "has no float arrays"),
    "no scalar": ((jnp.matmul,), {}, (W, X.T), "expected a scalar float. Reduce"),
    "tuple": ((lambda w: (w.sum(), w, w),), {}, (W,), "expected a scalar float. Red"),
}


@pytest.mark.parametrize("given, options, message", WRONG.values(), ids=WRONG)
def test_wrong_arguments(given, options, message):
    given = [x() if x is state_of else x for x in given]
    for tool in TOOLS:
        with pytest.raises((TypeError, ValueError), match=message):
            tool(*given, **options)


@pytest.mark.parametrize("given, options, args, message", RUN.values(), ids=RUN)
def test_what_cannot_be_run(given, options, args, message):
    for tool in TOOLS[1:]:
        with pytest.raises((TypeError, ValueError), match=message):
            tool(*given, **options)(*args)


@pytest.mark.parametrize("tool", TOOLS)
def test_what_raises(tool):
    with pytest.raises(ZeroDivisionError):
        tool(lambda x: x / (1 // 0))(X)


@pytest.mark.parametrize("tool", TOOLS)
def test_an_argument_that_a_step_has_deleted(tool):
    state, name = state_of(model=NNXModel()), tool.__name__
    flax_amp.make_train_step(nnx_loss)(state, X)
    with pytest.raises(RuntimeError, match=f"^{name}: state.* was deleted"):
        tool(state, nnx_loss, X)
    with pytest.raises(RuntimeError, match=f"^{name}: <lambda>: .* was deleted"):
        tool(lambda params: jnp.mean(jax.tree.leaves(params)[0]))(state.params)


@pytest.mark.parametrize("tool", TOOLS)
def test_the_function_before_amp_is_asked_for(tool):
    called = tool.__name__
    match = f"^{called}: .* expected .*before amp: {called}.loss., not {called}.amp"
    for fun in (functools.partial(amp(arrays)), flax_amp.make_train_step(arrays)):
        with pytest.raises(TypeError, match=match):
            tool(fun)(W, X)
        with pytest.raises(TypeError, match=match):
            tool(state_of(), fun, X)


@pytest.mark.parametrize("tool", TOOLS)
def test_an_optimizer_with_names_of_its_own(tool):
    class Own(nnx.Optimizer):
        def __init__(self, model):
            super().__init__(model, optax.sgd(0.1), wrt=nnx.Param)
            self.precision, self.scaler = "highest", "standard"

    model = NNXModel()
    for optimizer in (Own(model), optax.sgd(0.1)):
        assert tool((model, optimizer), nnx_loss, X).compute_dtype == "bfloat16"
