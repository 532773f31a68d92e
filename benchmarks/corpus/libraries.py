"""Modules, models, kernels and optimizers of other libraries.

In a row, `s` is a dict with the dtype of a hand-set module, or an empty one, and `k` is
a random key.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax import nnx

from benchmarks.corpus.program import (
    Case,
    Loss,
    Programs,
    normal,
    of_product,
    rows,
    table,
    total,
)

# --- modules of Linen, NNX, equinox, haiku -------------------------------------------

# Shapes of inputs
_SHAPES: dict[str, Any] = {
    "SEQUENCE": (4, 12, 16),
    "IMAGE": (2, 16, 16, 4),
    "CHANNELS": (2, 4, 16, 16),
    "VIDEO": (2, 5, 8, 8, 4),
    "WIDE": (64, 16),
    "NARROW": (16, 4),
    "FEW": (8, 16),
    "PHOTO": (4, 32, 32, 3),
}

Make = Callable[[dict[str, Any]], Any]  # from a dict with a dtype, or with nothing


def _modules(case: Callable[[Any], Case], text: str, names: dict[str, Any]) -> Programs:
    """Returns programs of rows `NAMES: MODULE | SHAPE`; `case` takes both."""

    def make(code: str) -> Case:
        expression, shape = code.split(" | ")
        lines = f"lambda {names['arguments']}: {expression}"
        return case((eval(lines, dict(names)), _SHAPES[shape]))

    return {name: functools.partial(make, code) for name, code in rows(text)}


def _linen() -> Programs:
    def case(given: tuple[Make, Any]) -> Case:
        make, shape = given
        x = normal(*shape)
        variables = make({}).init(jax.random.key(0), x)

        def loss_of(s: dict[str, Any]) -> Loss:
            module = make(s)
            return lambda variables, x: total(module.apply(variables, x))

        return Case(loss_of({}), variables, (x,), lambda d: loss_of({"dtype": d}))

    text = """
Dense: nn.@(8, **s) | SEQUENCE
DenseGeneral: nn.@((4, 2), **s) | SEQUENCE
Einsum: nn.@((16, 8), "bti,io->bto", **s) | SEQUENCE
Conv ConvLocal: nn.@(8, (3, 3), **s) | IMAGE
Conv(depthwise): nn.Conv(4, (3, 3), feature_group_count=4, **s) | IMAGE
Conv(dilated): nn.Conv(8, (3, 3), kernel_dilation=2, **s) | IMAGE
ConvTranspose: nn.@(8, (3, 3), strides=(2, 2), **s) | IMAGE
SelfAttention: nn.@(4, **s) | SEQUENCE
MultiHeadDotProductAttention(qk~norm): nn.MultiHeadDotProductAttention(
    4, normalize_qk=True, **s) | SEQUENCE
LayerNorm: nn.@(**s) | SEQUENCE
GroupNorm: nn.@(2, **s) | IMAGE
RNN(LSTMCell) RNN(OptimizedLSTMCell) RNN(GRUCell) RNN(MGUCell) RNN(SimpleCell): (
    rnn("@", s)) | SEQUENCE
Bidirectional: nn.@(nn.RNN(nn.GRUCell(8, **s)), nn.RNN(nn.GRUCell(8, **s))) | SEQUENCE
RNN(ConvLSTMCell): nn.RNN(nn.ConvLSTMCell(4, (3, 3), **s)) | VIDEO
"""

    def rnn(name: str, s: dict[str, Any]) -> nn.Module:
        return nn.RNN(getattr(nn, name[4:-1])(16, **s))

    return _modules(case, text, {"nn": nn, "rnn": rnn, "arguments": "s"})


def _nnx_case(given: tuple[Make, Any], has_dtype: bool) -> Case:
    make, shape = given

    def loss_of(s: dict[str, Any]) -> tuple[Loss, Any]:
        parts: Any = nnx.split(make(s), nnx.Param, ...)
        graph, params, rest = parts

        def loss(params: Any, x: Any) -> Any:
            return total(nnx.merge(graph, params, rest, copy=True)(x))

        return loss, params

    loss, params = loss_of({})
    hand = (lambda dtype: loss_of({"dtype": dtype})[0]) if has_dtype else None
    return Case(loss, params, (normal(*shape),), hand)


def _nnx() -> Programs:
    def make(cls: Any, *args: Any, **options: Any) -> Any:
        return cls(*args, **options, rngs=nnx.Rngs(0))

    def rnn(name: str, s: dict[str, Any]) -> Any:
        return make(nnx.RNN, make(getattr(nnx, name[4:-1]), 16, 16, **s))

    text = """
Linear: make(nnx.@, 16, 8, **s) | SEQUENCE
LinearGeneral: make(nnx.@, 16, (4, 2), **s) | SEQUENCE
Einsum: make(nnx.@, "bti,io->bto", (16, 8), **s) | SEQUENCE
Conv: make(nnx.@, 4, 8, (3, 3), **s) | IMAGE
ConvTranspose: make(nnx.@, 4, 8, (3, 3), strides=2, **s) | IMAGE
LayerNorm RMSNorm BatchNorm: make(nnx.@, 16, **s) | SEQUENCE
GroupNorm: make(nnx.@, 4, 2, **s) | IMAGE
MultiHeadAttention: make(nnx.@, 4, 16, decode=False, **s) | SEQUENCE
MultiHeadAttention(qk~norm): make(
    nnx.MultiHeadAttention, 4, 16, decode=False, normalize_qk=True, **s) | SEQUENCE
LoRALinear: make(nnx.@, 16, 8, lora_rank=2, **s) | SEQUENCE
RNN(LSTMCell) RNN(OptimizedLSTMCell) RNN(GRUCell) RNN(SimpleCell): (
    rnn("@", s)) | SEQUENCE
"""
    names = {"nnx": nnx, "make": make, "rnn": rnn, "arguments": "s"}
    return _modules(functools.partial(_nnx_case, has_dtype=True), text, names)


def _jaxkan() -> Programs:
    from jaxkan.models.KAN import KAN

    text = """
KAN(base) KAN(spline): kan("@", k=3, G=4) | NARROW
KAN(chebyshev) KAN(legendre) KAN(fourier) KAN(rbf) KAN(sine): kan("@", D=4) | NARROW
"""

    def kan(name: str, **required: Any) -> Any:
        return KAN([4, 8, 2], name[4:-1], required)

    case = functools.partial(_nnx_case, has_dtype=False)
    return _modules(case, text, {"kan": kan, "arguments": "s"})


def _equinox() -> Programs:
    import equinox as eqx

    def case(given: Any) -> Case:
        make, shape = given
        params, static = eqx.partition(make(jax.random.key(0)), eqx.is_inexact_array)

        def loss(params: Any, x: Any) -> Any:
            model = eqx.combine(params, static)
            return total(jax.vmap(lambda x: model(x))(x))

        return Case(loss, params, (normal(*shape),))

    class Scanned(eqx.Module):
        cell: Any

        def __call__(self, xs: Any) -> Any:
            size = self.cell.hidden_size
            lstm = isinstance(self.cell, eqx.nn.LSTMCell)
            start = (jnp.zeros(size), jnp.zeros(size)) if lstm else jnp.zeros(size)
            return jax.lax.scan(lambda h, x: (self.cell(x, h), None), start, xs)[0]

    class Attend(eqx.Module):
        attention: Any

        def __call__(self, x: Any) -> Any:
            return self.attention(x, x, x)

    text = """
MLP: e.@(16, 4, 32, 3, key=k) | WIDE
LSTMCell GRUCell: Scanned(e.@(16, 8, key=k)) | SEQUENCE
MultiheadAttention: Attend(e.@(4, 16, key=k)) | SEQUENCE
Conv2d ConvTranspose2d: e.@(4, 8, 3, key=k) | CHANNELS
Conv1d: e.@(12, 8, 3, key=k) | SEQUENCE
LayerNorm: e.Sequential(
    [e.Linear(16, 16, key=k), e.@(16), e.Linear(16, 4, key=k)]) | WIDE
GroupNorm: e.Sequential([e.Conv2d(4, 8, 3, key=k), e.@(2, 8)]) | CHANNELS
WeightNorm: e.@(e.Linear(16, 8, key=k)) | WIDE
PReLU: e.Sequential(
    [e.Linear(16, 8, key=k), e.Lambda(lambda x: e.@()(x))]) | WIDE
MaxPool2d: e.Sequential([e.Conv2d(4, 8, 3, key=k), e.@(2, 2)]) | CHANNELS
AdaptiveAvgPool2d: e.Sequential([e.Conv2d(4, 8, 3, key=k), e.@(3)]) | CHANNELS
"""
    names = {"e": eqx.nn, "Scanned": Scanned, "Attend": Attend, "arguments": "k"}
    return _modules(case, text, names)


def _haiku() -> Programs:
    import haiku as hk

    def case(given: Any) -> Case:
        function, shape = given
        net = hk.without_apply_rng(hk.transform_with_state(function))
        x = normal(*shape)
        params, state = net.init(jax.random.key(0), x)

        def loss(params: Any, x: Any) -> Any:
            return total(net.apply(params, state, x)[0])

        return Case(loss, params, (x,))

    def unrolled(cell: Any, x: Any) -> Any:
        xs = x.swapaxes(0, 1)
        return hk.dynamic_unroll(cell, xs, cell.initial_state(len(x)))[0]

    text = """
nets.MLP: hk.@([32, 8])(x) | FEW
nets.ResNet: hk.@([1, 1, 1, 1], 5, channels_per_group=[8, 8, 16, 16],
    bottleneck=False)(x, is_training=True) | PHOTO
nets.VectorQuantizer: hk.@(8, 9, 0.25)(hk.Linear(8)(x), is_training=True)["loss"] | FEW
MultiHeadAttention: hk.@(4, 8, w_init=hk.initializers.VarianceScaling())(
    x, x, x) | SEQUENCE
LSTM GRU VanillaRNN: unrolled(hk.@(8), x) | SEQUENCE
SeparableDepthwiseConv2D: hk.@(2, 3)(x) | IMAGE
InstanceNorm: hk.@(True, True)(hk.Conv2D(8, 3)(x)) | IMAGE
LayerNorm: hk.@(-1, True, True)(hk.Linear(8)(x)) | FEW
"""
    return _modules(case, text, {"hk": hk, "unrolled": unrolled, "arguments": "x"})


# --- whole models --------------------------------------------------------------------


def _flaxmodels() -> Programs:
    def case(given: Any) -> Case:
        import flaxmodels

        name, settings = given
        make = functools.partial(getattr(flaxmodels, name), pretrained=None, **settings)
        x = jax.nn.sigmoid(normal(2, 64, 64, 3))
        call = {"train": True} if name == "ResNet18" else {"train": False}
        variables = jax.jit(functools.partial(make().init, **call))(
            jax.random.key(0), x
        )

        def loss_of(module: Any) -> Loss:
            def loss(params: Any, rest: Any, x: Any) -> Any:
                found, _ = module.apply(
                    {"params": params} | rest, x, mutable=["batch_stats"], **call
                )
                return total(found)

            return loss

        rest = {k: v for k, v in variables.items() if k != "params"}
        return Case(
            loss_of(make()),
            variables["params"],
            (rest, x),
            lambda dtype: loss_of(make(dtype=jnp.dtype(dtype).name)),
        )

    settings_of = {
        "ResNet18": ("ResNet18", dict(num_classes=5, output="logits")),
        "VGG16": (
            "VGG16",
            dict(include_head=False, output="activations", num_classes=5),
        ),
    }
    return {name: functools.partial(case, given) for name, given in settings_of.items()}


def _penzai() -> Programs:
    def case(settings: dict[str, Any]) -> Case:
        from penzai import pz
        from penzai.models.transformer.variants import llamalike_common as common

        config = common.LlamalikeTransformerConfig(
            num_kv_heads=2,
            query_head_multiplier=settings.pop("queries", 2),
            embedding_dim=32,
            projection_dim=8,
            mlp_hidden_dim=64,
            num_decoder_blocks=2,
            vocab_size=99,
            **(dict(mlp_variant="swiglu", tie_embedder_and_logits=False) | settings),
        )

        def build(config: Any) -> Any:
            return common.build_llamalike_transformer(
                config, init_base_rng=jax.random.key(0)
            )

        model = build(config)
        body, variables = pz.unbind_params(model)
        params = {v.label: v.value for v in variables}
        tokens = jnp.asarray(np.random.default_rng(0).integers(0, 99, (2, 12)))

        def loss_of(body: Any) -> Loss:
            def loss(params: Any, tokens: Any) -> Any:
                bound = pz.bind_variables(
                    body,
                    [pz.ParameterValue(label=k, value=v) for k, v in params.items()],
                )
                named = pz.nx.wrap(tokens).tag("batch", "seq")
                found = bound(named, token_positions=pz.nx.arange("seq", 12))
                return total(found.unwrap("batch", "seq", "vocabulary"))

            return loss

        return Case(loss_of(body), params, (tokens,))

    settings_of: dict[str, dict[str, Any]] = {
        "llama": {},
        "llama(layer stack)": {"use_layer_stack": True},
        "gemma": dict(
            mlp_variant="geglu_approx",
            tie_embedder_and_logits=True,
            final_logit_softcap=30.0,
            attn_logits_soft_cap=50.0,
        ),
    }
    return {name: functools.partial(case, given) for name, given in settings_of.items()}


def _jraph() -> Programs:
    import jraph

    def case(make: Any) -> Case:
        rng = np.random.default_rng(0)
        graph = jraph.GraphsTuple(
            nodes=normal(24, 8),
            edges=normal(60, 8, seed=1),
            globals=normal(3, 8, seed=2),
            senders=jnp.asarray(rng.integers(0, 24, 60)),
            receivers=jnp.asarray(rng.integers(0, 24, 60)),
            n_node=jnp.asarray([8, 8, 8]),
            n_edge=jnp.asarray([20, 20, 20]),
        )
        params = {name: normal(40, 8, seed=i) / 5 for i, name in enumerate("engq")}

        def loss(params: Any, graph: Any) -> Any:
            def layer(name: str) -> Any:
                def apply(*features: Any) -> Any:
                    x = jnp.concatenate(jax.tree.leaves(features), -1)
                    return jax.nn.relu(x @ params[name][: x.shape[-1]])

                return apply

            found = make(layer, graph)
            return total((found.nodes, found.edges))

        return Case(loss, params, (graph,))

    text = """
GraphConvolution: j.@(f("n"))(g)
GraphConvolution(self~edges): j.GraphConvolution(f("n"), add_self_edges=True)(g)
GraphNetwork: j.@(f("e"), f("n"), f("g"))(g)
GraphNetwork(softmax): j.GraphNetwork(f("e"), f("n"), f("g"),
    attention_logit_fn=lambda e, *_: f("q")(e)[:, :1],
    attention_normalize_fn=j.segment_softmax,
    attention_reduce_fn=lambda e, w: e * w)(g)
GraphNetwork(mean): j.GraphNetwork(f("e"), f("n"), f("g"),
    aggregate_edges_for_nodes_fn=j.segment_mean)(g)
GraphNetwork(max): j.GraphNetwork(f("e"), f("n"), f("g"), j.segment_max_or_constant)(g)
InteractionNetwork: j.@(f("e"), f("n"))(g)
RelationNetwork: g._replace(edges=None, globals=None,
    nodes=j.@(f("e"), f("g"))(g).globals)
DeepSets: g._replace(nodes=j.@(f("n"), f("g"))(g).globals)
GAT: j.@(f("n"), lambda s, r, e: f("q")(s, r)[:, :1], lambda n: n)(g)
"""
    lines = {name: f"lambda f, g: {code}" for name, code in rows(text)}
    return {
        name: functools.partial(lambda code: case(eval(code, {"j": jraph})), code)
        for name, code in lines.items()
    }


def _e3nn() -> Programs:
    import e3nn_jax as e3nn

    def case(function: Any) -> Case:
        def of_irreps(w: Any, x: Any) -> Any:
            return function(e3nn.IrrepsArray("0e + 1o + 2e", x @ w)).array

        return of_product(of_irreps, normal(9, 9) / 3, normal(16, 9, seed=1))

    text = """
tensor_product elementwise_tensor_product: lambda a: e.@(a, a)
spherical_harmonics: lambda a: e.@("0e + 1o + 2e", a.filter("1o"), True)
norm: lambda a: e.@(a)
scatter_sum: lambda a: e.@(a, dst=jnp.arange(16) % 4, output_size=4)
to_s2grid: lambda a: e.from_s2grid(
    e.@(a, 16, 11, quadrature="gausslegendre"), "0e + 1o + 2e")
"""
    return table(case, text, {"e": e3nn, "jnp": jnp})


# --- Pallas kernels, interpreted ----------------------------------------------------


def _pallas() -> Programs:
    from jax.experimental.pallas.ops.gpu import attention, layer_norm, rms_norm

    def attend(w: Any, x: Any, causal: bool) -> Any:
        q = (x @ w).reshape(1, 64, 2, 16)
        sizes = "block_q block_k block_q_dkv block_kv_dkv block_q_dq block_kv_dq"
        blocks = attention.BlockSizes(**dict.fromkeys(sizes.split(), 32))
        return attention.mha(
            q, q, q, None, causal=causal, block_sizes=blocks, interpret=True
        )

    def norm(function: Any, w: Any, x: Any) -> Any:
        return function((x @ w)[None], jnp.ones(32), jnp.zeros(32), interpret=True)

    def kernel(body: Any) -> Any:
        """A kernel with a rule of its own, as Pallas has no derivative by itself."""
        from jax.experimental import pallas as pl

        @jax.custom_vjp
        def apply(x: Any) -> Any:
            def run(x_ref: Any, o_ref: Any) -> None:
                o_ref[...] = body(x_ref[...])

            shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
            return pl.pallas_call(run, out_shape=shape, interpret=True)(x)

        def backward(x: Any, g: Any) -> Any:
            return jax.vjp(body, x)[1](g)

        apply.defvjp(lambda x: (apply(x), x), backward)
        return lambda w, x: apply(x @ w)

    def case(function: Any) -> Case:
        return of_product(function, normal(32, 32) / 6, normal(64, 32, seed=1))

    made = {
        "ops.gpu.attention": functools.partial(attend, causal=False),
        "ops.gpu.attention(causal)": functools.partial(attend, causal=True),
        "ops.gpu.layer_norm": functools.partial(norm, layer_norm.layer_norm),
        "ops.gpu.rms_norm": functools.partial(norm, rms_norm.rms_norm),
        "pallas_call(gelu)": kernel(jax.nn.gelu),
        "pallas_call(softmax)": kernel(lambda x: jax.nn.softmax(x, -1)),
    }
    return {name: functools.partial(case, function) for name, function in made.items()}


# --- optimizers: three steps, with the loss under amp, as in a train step -----------


def _optimizers() -> Programs:
    text = """
acprop ademamix adopt dadapt_adamw madgrad momo momo_adam muon prodigy
    simplified_ademamix schedule_free_adamw schedule_free_sgd: lambda: c.@(1e-2)
cocob dog dowg: c.@
galore: lambda: optax.chain(c.scale_by_galore(2), optax.scale(-1e-2))
mechanize: lambda: c.@(optax.adam(1e-2))
sam: lambda: c.@(optax.sgd(1e-2), c.normalize(), opaque_mode=False)
reduce_on_plateau: lambda: optax.chain(optax.adam(1e-2), c.@())
schedule_free: lambda: c.@(optax.sgd(1e-2), 1e-2)
split_real_and_imaginary: lambda: c.@(optax.adam(1e-2))
adabelief adadelta adafactor adagrad adam adamax adamw adan amsgrad fromage lamb lars
    lion nadam nadamw novograd polyak_sgd radam rmsprop rprop sgd sign_sgd sm3
    yogi: lambda: optax.@(1e-2)
"""

    def case(make: Any) -> Case:
        params = {"a": normal(16, 32) / 4, "b": normal(32, 4, seed=1) / 5}

        def objective(params: Any, x: Any) -> Any:
            return total(jnp.tanh(x @ params["a"]) @ params["b"] - 1.0)

        def steps(objective: Loss) -> Loss:
            def loss(params: Any, x: Any) -> Any:
                optimizer = make()
                state = optimizer.init(params)
                for _ in range(3):
                    value, grads = jax.value_and_grad(objective)(params, x)
                    given = inspect.signature(optimizer.update).parameters
                    extra = {"value": value} if "extra_args" in given else {}
                    updates, state = optimizer.update(grads, state, params, **extra)
                    # The gradient at the end, not through the steps.
                    updates = jax.lax.stop_gradient(updates)
                    params = optax.apply_updates(params, updates)
                return objective(params, x)

            return loss

        return Case(objective, params, (normal(24, 16, seed=2),), around=steps)

    return table(case, text, {"optax": optax, "c": optax.contrib})


TABLES = {
    "flax.linen": _linen,
    "flax.nnx": _nnx,
    "equinox": _equinox,
    "haiku": _haiku,
    "optax": _optimizers,
    "pallas": _pallas,
    "penzai": _penzai,
    "jraph": _jraph,
    "e3nn-jax": _e3nn,
    "jaxkan": _jaxkan,
    "flaxmodels": _flaxmodels,
}
