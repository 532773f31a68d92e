"""Modules, models, kernels and optimizers of other libraries."""

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
    lazily,
    normal,
    of_product,
    total,
)

# --- modules of Linen, NNX, equinox, haiku -------------------------------------------

_SEQUENCE, _IMAGE = (4, 12, 16), (2, 16, 16, 4)


def _linen() -> Programs:
    def case(given: Any) -> Case:
        make, shape = given
        x = normal(*shape)
        variables = make().init(jax.random.key(0), x)

        def loss_of(module: nn.Module) -> Loss:
            return lambda variables, x: total(module.apply(variables, x))

        return Case(
            loss_of(make()), variables, (x,), lambda dtype: loss_of(make(dtype=dtype))
        )

    def rnn(cell: Any) -> Any:
        return (lambda **set: nn.RNN(cell(16, **set))), _SEQUENCE

    P = functools.partial
    table = {
        "Dense": (P(nn.Dense, 8), _SEQUENCE),
        "DenseGeneral": (P(nn.DenseGeneral, (4, 2)), _SEQUENCE),
        "Einsum": (P(nn.Einsum, (16, 8), "bti,io->bto"), _SEQUENCE),
        "Conv": (P(nn.Conv, 8, (3, 3)), _IMAGE),
        "Conv(depthwise)": (P(nn.Conv, 4, (3, 3), feature_group_count=4), _IMAGE),
        "Conv(dilated)": (P(nn.Conv, 8, (3, 3), kernel_dilation=2), _IMAGE),
        "ConvLocal": (P(nn.ConvLocal, 8, (3, 3)), _IMAGE),
        "ConvTranspose": (P(nn.ConvTranspose, 8, (3, 3), strides=(2, 2)), _IMAGE),
        "SelfAttention": (P(nn.SelfAttention, 4), _SEQUENCE),
        "MultiHeadDotProductAttention(qk norm)": (
            P(nn.MultiHeadDotProductAttention, 4, normalize_qk=True),
            _SEQUENCE,
        ),
        "LayerNorm": (nn.LayerNorm, _SEQUENCE),
        "GroupNorm": (P(nn.GroupNorm, 2), _IMAGE),
        "RNN(LSTMCell)": rnn(nn.LSTMCell),
        "RNN(OptimizedLSTMCell)": rnn(nn.OptimizedLSTMCell),
        "RNN(GRUCell)": rnn(nn.GRUCell),
        "RNN(MGUCell)": rnn(nn.MGUCell),
        "RNN(SimpleCell)": rnn(nn.SimpleCell),
        "Bidirectional": (
            lambda **s: nn.Bidirectional(
                nn.RNN(nn.GRUCell(8, **s)), nn.RNN(nn.GRUCell(8, **s))
            ),
            _SEQUENCE,
        ),
        "RNN(ConvLSTMCell)": (
            lambda **s: nn.RNN(nn.ConvLSTMCell(4, (3, 3), **s)),
            (2, 5, 8, 8, 4),
        ),
    }
    return lazily(case, table)


def _nnx_case(given: Any) -> Case:
    make, shape, has_dtype = given
    x = normal(*shape)

    def loss_of(model: Any) -> tuple[Loss, Any]:
        parts: Any = nnx.split(model, nnx.Param, ...)
        graph, params, rest = parts

        def loss(params: Any, x: Any) -> Any:
            return total(nnx.merge(graph, params, rest, copy=True)(x))

        return loss, params

    loss, params = loss_of(make())
    hand = (lambda dtype: loss_of(make(dtype=dtype))[0]) if has_dtype else None
    return Case(loss, params, (x,), hand)


def _nnx() -> Programs:
    def make(cls: Any, *args: Any, **set: Any) -> Callable[..., Any]:
        return lambda **dtype: cls(*args, **set, **dtype, rngs=nnx.Rngs(0))

    def rnn(cell: Any) -> Any:
        return lambda **s: nnx.RNN(
            cell(16, 16, **s, rngs=nnx.Rngs(0)), rngs=nnx.Rngs(0)
        )

    attention = functools.partial(make, nnx.MultiHeadAttention, 4, 16, decode=False)
    table = {
        "Linear": (make(nnx.Linear, 16, 8), _SEQUENCE),
        "LinearGeneral": (make(nnx.LinearGeneral, 16, (4, 2)), _SEQUENCE),
        "Einsum": (make(nnx.Einsum, "bti,io->bto", (16, 8)), _SEQUENCE),
        "Conv": (make(nnx.Conv, 4, 8, (3, 3)), _IMAGE),
        "ConvTranspose": (make(nnx.ConvTranspose, 4, 8, (3, 3), strides=2), _IMAGE),
        "LayerNorm": (make(nnx.LayerNorm, 16), _SEQUENCE),
        "RMSNorm": (make(nnx.RMSNorm, 16), _SEQUENCE),
        "GroupNorm": (make(nnx.GroupNorm, 4, 2), _IMAGE),
        "BatchNorm": (make(nnx.BatchNorm, 16), _SEQUENCE),
        "MultiHeadAttention": (attention(), _SEQUENCE),
        "MultiHeadAttention(qk norm)": (attention(normalize_qk=True), _SEQUENCE),
        "LoRALinear": (make(nnx.LoRALinear, 16, 8, lora_rank=2), _SEQUENCE),
        "RNN(LSTMCell)": (rnn(nnx.LSTMCell), _SEQUENCE),
        "RNN(OptimizedLSTMCell)": (rnn(nnx.OptimizedLSTMCell), _SEQUENCE),
        "RNN(GRUCell)": (rnn(nnx.GRUCell), _SEQUENCE),
        "RNN(SimpleCell)": (rnn(nnx.SimpleCell), _SEQUENCE),
    }
    return lazily(_nnx_case, {name: (*given, True) for name, given in table.items()})


def _jaxkan() -> Programs:
    def make(layer: str, **required: Any) -> Any:
        def model() -> Any:
            from jaxkan.models.KAN import KAN

            return KAN([4, 8, 2], layer, required or None)

        return model, (16, 4), False

    table = {
        "KAN(base)": make("base", k=3, G=4),
        "KAN(spline)": make("spline", k=3, G=4),
        "KAN(chebyshev)": make("chebyshev", D=4),
        "KAN(legendre)": make("legendre", D=4),
        "KAN(fourier)": make("fourier", D=4),
        "KAN(rbf)": make("rbf", D=4),
        "KAN(sine)": make("sine", D=4),
    }
    return lazily(_nnx_case, table)


def _equinox_case(given: Any) -> Case:
    import equinox as eqx

    make, shape = given
    params, static = eqx.partition(make(jax.random.key(0)), eqx.is_inexact_array)

    def loss(params: Any, x: Any) -> Any:
        model = eqx.combine(params, static)
        return total(jax.vmap(lambda x: model(x))(x))

    return Case(loss, params, (normal(*shape),))


def _equinox() -> Programs:
    import equinox as eqx

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

    e, image = eqx.nn, (2, 4, 16, 16)
    norm = lambda k: e.Sequential(  # noqa: E731
        [e.Linear(16, 16, key=k), e.LayerNorm(16), e.Linear(16, 4, key=k)]
    )
    table = {
        "MLP": (lambda k: e.MLP(16, 4, 32, 3, key=k), (64, 16)),
        "LSTMCell": (lambda k: Scanned(e.LSTMCell(16, 8, key=k)), _SEQUENCE),
        "GRUCell": (lambda k: Scanned(e.GRUCell(16, 8, key=k)), _SEQUENCE),
        "MultiheadAttention": (
            lambda k: Attend(e.MultiheadAttention(4, 16, key=k)),
            _SEQUENCE,
        ),
        "Conv2d": (lambda k: e.Conv2d(4, 8, 3, key=k), image),
        "ConvTranspose2d": (lambda k: e.ConvTranspose2d(4, 8, 3, key=k), image),
        "Conv1d": (lambda k: e.Conv1d(12, 8, 3, key=k), _SEQUENCE),
        "LayerNorm": (norm, (64, 16)),
        "GroupNorm": (
            lambda k: e.Sequential([e.Conv2d(4, 8, 3, key=k), e.GroupNorm(2, 8)]),
            image,
        ),
        "WeightNorm": (lambda k: e.WeightNorm(e.Linear(16, 8, key=k)), (64, 16)),
        "PReLU": (
            lambda k: e.Sequential(
                [e.Linear(16, 8, key=k), e.Lambda(lambda x: e.PReLU()(x))]
            ),
            (64, 16),
        ),
        "MaxPool2d": (
            lambda k: e.Sequential([e.Conv2d(4, 8, 3, key=k), e.MaxPool2d(2, 2)]),
            image,
        ),
        "AdaptiveAvgPool2d": (
            lambda k: e.Sequential([e.Conv2d(4, 8, 3, key=k), e.AdaptiveAvgPool2d(3)]),
            image,
        ),
    }
    return lazily(_equinox_case, table)


def _haiku() -> Programs:
    def case(given: Any) -> Case:
        import haiku as hk

        function, shape = given
        net = hk.without_apply_rng(hk.transform_with_state(lambda x: function(hk, x)))
        x = normal(*shape)
        params, state = net.init(jax.random.key(0), x)

        def loss(params: Any, x: Any) -> Any:
            return total(net.apply(params, state, x)[0])

        return Case(loss, params, (x,))

    def unrolled(core: str, size: int = 8) -> Any:
        def run(hk: Any, x: Any) -> Any:
            cell = getattr(hk, core)(size)
            xs = x.swapaxes(0, 1)
            return hk.dynamic_unroll(cell, xs, cell.initial_state(len(x)))[0]

        return run, _SEQUENCE

    attend = lambda hk, x: hk.MultiHeadAttention(  # noqa: E731
        4, 8, w_init=hk.initializers.VarianceScaling()
    )(x, x, x)
    resnet = lambda hk, x: hk.nets.ResNet(  # noqa: E731
        [1, 1, 1, 1], 5, channels_per_group=[8, 8, 16, 16], bottleneck=False
    )(x, is_training=True)
    table = {
        "nets.MLP": (lambda hk, x: hk.nets.MLP([32, 8])(x), (8, 16)),
        "nets.ResNet": (resnet, (4, 32, 32, 3)),
        "nets.VectorQuantizer": (
            lambda hk, x: hk.nets.VectorQuantizer(8, 9, 0.25)(
                hk.Linear(8)(x), is_training=True
            )["loss"],
            (8, 16),
        ),
        "MultiHeadAttention": (attend, _SEQUENCE),
        "LSTM": unrolled("LSTM"),
        "GRU": unrolled("GRU"),
        "VanillaRNN": unrolled("VanillaRNN"),
        "SeparableDepthwiseConv2D": (
            lambda hk, x: hk.SeparableDepthwiseConv2D(2, 3)(x),
            _IMAGE,
        ),
        "InstanceNorm": (
            lambda hk, x: hk.InstanceNorm(True, True)(hk.Conv2D(8, 3)(x)),
            _IMAGE,
        ),
        "LayerNorm": (
            lambda hk, x: hk.LayerNorm(-1, True, True)(hk.Linear(8)(x)),
            (8, 16),
        ),
    }
    return lazily(case, table)


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

    table = {
        "ResNet18": ("ResNet18", dict(num_classes=5, output="logits")),
        "VGG16": (
            "VGG16",
            dict(include_head=False, output="activations", num_classes=5),
        ),
    }
    return lazily(case, table)


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

    table = {
        "llama": {},
        "llama(layer stack)": {"use_layer_stack": True},
        "gemma": dict(
            mlp_variant="geglu_approx",
            tie_embedder_and_logits=True,
            final_logit_softcap=30.0,
            attn_logits_soft_cap=50.0,
        ),
    }
    return lazily(case, table)


def _jraph() -> Programs:
    def case(make: Any) -> Case:
        import jraph

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

            found = make(jraph, layer)(graph)
            return total((found.nodes, found.edges))

        return Case(loss, params, (graph,))

    linear = {
        "GraphConvolution": lambda j, f: j.GraphConvolution(f("n")),
        "GraphConvolution(self edges)": lambda j, f: j.GraphConvolution(
            f("n"), add_self_edges=True
        ),
        "GraphNetwork": lambda j, f: j.GraphNetwork(f("e"), f("n"), f("g")),
        "GraphNetwork(softmax)": lambda j, f: j.GraphNetwork(
            f("e"),
            f("n"),
            f("g"),
            attention_logit_fn=lambda e, *_: f("q")(e)[:, :1],
            attention_normalize_fn=j.segment_softmax,
            attention_reduce_fn=lambda e, w: e * w,
        ),
        "GraphNetwork(mean)": lambda j, f: j.GraphNetwork(
            f("e"), f("n"), f("g"), aggregate_edges_for_nodes_fn=j.segment_mean
        ),
        "GraphNetwork(max)": lambda j, f: j.GraphNetwork(
            f("e"), f("n"), f("g"), j.segment_max_or_constant
        ),
        "InteractionNetwork": lambda j, f: j.InteractionNetwork(f("e"), f("n")),
        "RelationNetwork": lambda j, f: (
            lambda g: g._replace(
                edges=None,
                globals=None,
                nodes=j.RelationNetwork(f("e"), f("g"))(g).globals,
            )
        ),
        "DeepSets": lambda j, f: (
            lambda g: g._replace(nodes=j.DeepSets(f("n"), f("g"))(g).globals)
        ),
        "GAT": lambda j, f: j.GAT(
            f("n"), lambda s, r, e: f("q")(s, r)[:, :1], lambda n: n
        ),
    }
    return lazily(case, linear)


def _e3nn() -> Programs:
    def case(function: Any) -> Case:
        import e3nn_jax as e3nn

        def of_irreps(w: Any, x: Any) -> Any:
            return function(e3nn, e3nn.IrrepsArray("0e + 1o + 2e", x @ w)).array

        return of_product(of_irreps, normal(9, 9) / 3, normal(16, 9, seed=1))

    table = {
        "tensor_product": lambda e, a: e.tensor_product(a, a),
        "elementwise_tensor_product": lambda e, a: e.elementwise_tensor_product(a, a),
        "spherical_harmonics": lambda e, a: e.spherical_harmonics(
            "0e + 1o + 2e", a.filter("1o"), True
        ),
        "norm": lambda e, a: e.norm(a),
        "scatter_sum": lambda e, a: e.scatter_sum(
            a, dst=jnp.arange(16) % 4, output_size=4
        ),
        "to_s2grid": lambda e, a: e.from_s2grid(
            e.to_s2grid(a, 16, 11, quadrature="gausslegendre"), "0e + 1o + 2e"
        ),
    }
    return lazily(case, table)


# --- Pallas kernels, interpreted ----------------------------------------------------


def _pallas() -> Programs:
    def attend(w: Any, x: Any, causal: bool) -> Any:
        from jax.experimental.pallas.ops.gpu import attention

        q = (x @ w).reshape(1, 64, 2, 16)
        blocks = attention.BlockSizes(
            block_q=32,
            block_k=32,
            block_q_dkv=32,
            block_kv_dkv=32,
            block_q_dq=32,
            block_kv_dq=32,
        )
        return attention.mha(
            q, q, q, None, causal=causal, block_sizes=blocks, interpret=True
        )

    def layer_norm(w: Any, x: Any) -> Any:
        from jax.experimental.pallas.ops.gpu import layer_norm

        return layer_norm.layer_norm(
            (x @ w)[None], jnp.ones(32), jnp.zeros(32), interpret=True
        )

    def rms_norm(w: Any, x: Any) -> Any:
        from jax.experimental.pallas.ops.gpu import rms_norm

        return rms_norm.rms_norm(
            (x @ w)[None], jnp.ones(32), jnp.zeros(32), interpret=True
        )

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

    table = {
        "ops.gpu.attention": functools.partial(attend, causal=False),
        "ops.gpu.attention(causal)": functools.partial(attend, causal=True),
        "ops.gpu.layer_norm": layer_norm,
        "ops.gpu.rms_norm": rms_norm,
        "pallas_call(gelu)": kernel(jax.nn.gelu),
        "pallas_call(softmax)": kernel(lambda x: jax.nn.softmax(x, -1)),
    }
    return lazily(case, table)


# --- optimizers: three steps, with the loss under amp, as in a train step -----------


def _optimizers() -> Programs:
    c = optax.contrib
    made = {
        name: functools.partial(getattr(c, name), 1e-2)
        for name in "acprop ademamix adopt dadapt_adamw madgrad momo momo_adam muon "
        "prodigy simplified_ademamix schedule_free_adamw schedule_free_sgd".split()
    } | {
        "cocob": c.cocob,
        "dog": c.dog,
        "dowg": c.dowg,
        "galore": lambda: optax.chain(c.scale_by_galore(2), optax.scale(-1e-2)),
        "mechanize": lambda: c.mechanize(optax.adam(1e-2)),
        "sam": lambda: c.sam(optax.sgd(1e-2), c.normalize(), opaque_mode=False),
        "reduce_on_plateau": lambda: optax.chain(
            optax.adam(1e-2), c.reduce_on_plateau()
        ),
        "schedule_free": lambda: c.schedule_free(optax.sgd(1e-2), 1e-2),
        "split_real_and_imaginary": lambda: c.split_real_and_imaginary(
            optax.adam(1e-2)
        ),
    }
    made |= {
        name: functools.partial(getattr(optax, name), 1e-2)
        for name in "adabelief adadelta adafactor adagrad adam adamax adamw adan "
        "amsgrad fromage lamb lars lion nadam nadamw novograd polyak_sgd radam rmsprop "
        "rprop sgd sign_sgd sm3 yogi".split()
        if hasattr(optax, name)
    }

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

    return lazily(case, made)


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
