"""Loops of four public programs that train language models; see `_loops`."""

import functools
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax import nnx, struct, traverse_util
from flax.training.train_state import TrainState
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from _loops import PRECISIONS, WIDTH, Attention, Loop, init, scaler_of
from flax_amp import AmpTrainState, amp, dynamic_scale_value_and_grad, make_train_step

VOCAB, LENGTH, DEVICES = 16, 8, 2


def sentences(seed, empty=False):
    """Sentences that a rule continues, of several lengths, padded with zeros."""
    rng = np.random.default_rng(seed)
    tokens = [rng.integers(1, VOCAB, 8)]
    while len(tokens) < LENGTH:
        tokens.append(tokens[-1] * 3 % (VOCAB - 1) + 1)
    lengths = rng.integers(LENGTH // 2, LENGTH + 1, 8) * (not empty)
    return np.where(np.arange(LENGTH) < lengths[:, None], np.stack(tokens, 1), 0)


def pmap(step):
    devices = jax.devices()[:DEVICES]
    return jax.pmap(step, axis_name="batch", devices=devices, donate_argnums=0)


def on_devices(stacked):
    """Places copies where `pmap` leaves them; otherwise it traces the step twice."""
    mesh = Mesh(jax.devices()[:DEVICES], ("batch",))
    return jax.device_put(stacked, NamedSharding(mesh, P("batch")))


def replicate(state):
    return on_devices(jax.tree.map(lambda x: jnp.stack([x] * DEVICES), state))


def shard(batch):
    return jax.tree.map(lambda x: x.reshape(DEVICES, -1, *x.shape[1:]), batch)


class Decoder(nn.Module):
    """A language model of one block, which records its activations on request."""

    dropout: float = 0.0

    @nn.compact
    def __call__(self, tokens, attention_mask=None, train=False):
        mask = nn.make_causal_mask(tokens)[:, 0] > 0
        if attention_mask is not None:
            mask &= attention_mask[:, None, :] > 0
        x = nn.Embed(VOCAB, WIDTH, name="embed")(tokens)
        x += self.param("pos_embed", nn.initializers.normal(0.1), (1, LENGTH, WIDTH))
        y = nn.LayerNorm(name="ln_1")(x)
        y = Attention(name="attn")(y, y, mask)
        x += nn.Dropout(self.dropout, deterministic=not train)(y)
        y = nn.Dense(2 * WIDTH)(nn.LayerNorm(name="ln_2")(x))
        x += nn.Dense(WIDTH)(nn.gelu(y))
        self.sow("acts", "rms", jnp.sqrt((x**2).mean()))
        return nn.Dense(VOCAB, use_bias=False, name="head")(x)


def rsqrt_schedule(peak, warmup):
    def rsqrt(count):
        return peak * (count + warmup) ** -0.5 * warmup**0.5

    warm = optax.linear_schedule(peak / warmup, peak, warmup)
    return optax.join_schedules([warm, rsqrt], [warmup])


def weighted_cross_entropy(logits, targets, weights, smoothing):
    """Returns the sum of the losses, and that of the weights."""
    low = smoothing / (VOCAB - 1)
    soft = jax.nn.one_hot(targets, VOCAB) * (1 - smoothing - low) + low
    lowest = -(1 - smoothing) * np.log(1 - smoothing) - smoothing * np.log(low)
    losses = -(soft * nn.log_softmax(logits)).sum(-1) - lowest
    return (losses * weights).sum(), weights.sum()


# Flax's WMT: pmapped; a normalizer that is summed over devices; `aux` with `loss`.


class Translator(nn.Module):
    config: Any

    @nn.compact
    def __call__(self, inputs, targets):
        embed = nn.Embed(VOCAB, WIDTH, embedding_init=nn.initializers.normal(1.0))
        encoded = nn.relu(nn.Dense(WIDTH)(embed(inputs)))
        x = embed(jnp.pad(targets, ((0, 0), (1, 0)))[:, :-1])
        x += Attention()(x, x, nn.make_causal_mask(targets)[:, 0] > 0)
        x += Attention()(nn.LayerNorm()(x), encoded, (inputs > 0)[:, None, :])
        x = nn.Dropout(self.config.dropout_rate, deterministic=False)(x)
        return embed.attend(nn.LayerNorm()(x)) / WIDTH**0.5


def wmt(dtype):
    traced = []
    config = SimpleNamespace(dropout_rate=0.1, label_smoothing=0.1)
    model = Translator(config)

    def loss_fn(params, batch, *, config, rngs):
        traced.append(None)
        inputs, targets = batch["inputs"], batch["targets"]
        weights = jnp.where(targets > 0, 1, 0).astype(jnp.float32)
        logits = Translator(config).apply(
            {"params": params}, inputs, targets, rngs=rngs
        )
        loss, weight_sum = weighted_cross_entropy(
            logits, targets, weights, config.label_smoothing
        )
        correct = ((logits.argmax(-1) == targets) * weights).sum()
        metrics = {"loss": loss, "accuracy": correct, "denominator": weight_sum}
        metrics = jax.lax.psum(metrics, "batch")
        return metrics["loss"] / metrics["denominator"], metrics

    loss_fn = functools.partial(loss_fn, config=config)
    p_train_step = pmap(
        make_train_step(loss_fn, has_aux=True, axis_name="batch", jit=False)  # amp
    )

    def step(state, batch):
        state, metrics = p_train_step(state, batch)
        return state, metrics["aux/loss"][0] / metrics["denominator"][0]

    def translations(*args, **options):
        tokens = sentences(*args, **options)
        return shard({"inputs": tokens, "targets": tokens * 5 % VOCAB})

    tokens, keys = sentences(0), dict.fromkeys(("params", "dropout"), jax.random.key(0))
    state = AmpTrainState.create(  # amp
        apply_fn=model.apply,
        params=jax.jit(model.init)(keys, tokens, tokens)["params"],
        tx=optax.adamw(rsqrt_schedule(2e-2, 4), b2=0.98, weight_decay=1e-4),
        rngs={"dropout": jax.random.key(1)},
        precision=PRECISIONS[dtype],
    )
    batches = [translations(seed) for seed in range(10)]
    bad = translations(0, empty=True)  # no token has a weight: 0 / 0
    return Loop(replicate(state), step, batches, traced, bad, replicated=True)


# Flax's Gemma: NNX; a module merged inside of the loss; a jit with shardings;
# hyper-parameters injected, moments in bfloat16.


def rotated(x, positions):
    angles = positions[..., None] / 10.0 ** jnp.arange(WIDTH // 2)[None, None]
    even, odd, cos, sin = x[..., ::2], x[..., 1::2], jnp.cos(angles), jnp.sin(angles)
    return jnp.concatenate([even * cos - odd * sin, even * sin + odd * cos], -1)


class Transformer(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.qkv = nnx.Einsum("bld,dnh->nblh", (WIDTH, 3, WIDTH), rngs=rngs)
        self.gate = nnx.Linear(WIDTH, 2 * WIDTH, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=rngs)

    def __call__(self, tokens, positions, attention_mask):
        x = self.embed(tokens) * WIDTH**0.5
        q, k, v = self.qkv(self.norm(x))
        q, k = rotated(q, positions), rotated(k, positions)
        logits = jnp.einsum("bqd,bkd->bqk", q, k) / WIDTH**0.5
        weights = jax.nn.softmax(jnp.where(attention_mask, logits, -2.3819763e38))
        x += jnp.einsum("bqk,bkd->bqd", weights, v)
        gate, up = jnp.split(self.gate(self.norm(x)), 2, -1)
        x += self.down(jax.nn.gelu(gate) * up)
        return 30 * jnp.tanh(self.embed.attend(self.norm(x)) / 30)


def gemma(dtype):
    traced = []
    schedule = rsqrt_schedule(1e-2, 4)

    def train_step(state, batch, learning_rate_fn, label_smoothing=0.0, pad_id=0):
        inputs, targets = batch["inputs"], batch["targets"]
        weights = jnp.where(targets > pad_id, 1, 0).astype(jnp.float32)
        causal = nn.make_causal_mask(inputs)[:, 0] > 0
        attention_mask = causal & (inputs > pad_id)[:, None]

        def loss_fn(params):
            traced.append(None)
            module = nnx.merge(state.graphdef, params)
            logits = module(inputs, batch["inputs_position"], attention_mask)
            loss, weight_sum = weighted_cross_entropy(
                logits, targets, weights, label_smoothing
            )
            return loss / weight_sum, logits

        loss_fn = amp(loss_fn, compute_dtype=dtype)  # amp
        grad_fn = dynamic_scale_value_and_grad(loss_fn, has_aux=True)  # amp
        scaler, ((loss, logits), grads) = grad_fn(  # amp
            state.params, dynamic_scaler_state=state.scaler
        )
        new_state = state.apply_gradients(grads=grads, scaler=scaler)  # amp
        correct = ((logits.argmax(-1) == targets) * weights).sum()
        metrics = {"learning_rate": learning_rate_fn(state.step)}
        return new_state, metrics | {"loss": loss, "accuracy": correct}

    adamw = optax.inject_hyperparams(optax.adamw, static_args="mu_dtype")
    tx = optax.chain(
        optax.clip_by_global_norm(1.0),
        adamw(schedule, b2=0.98, mu_dtype=jnp.bfloat16),
    )
    mesh = Mesh(jax.devices()[:DEVICES], ("data",))
    whole, data = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))

    def create():
        model = Transformer(nnx.Rngs(0))
        return AmpTrainState.create(  # amp
            model=model, tx=tx, precision=PRECISIONS[dtype]
        )

    state = jax.jit(create, out_shardings=whole)()
    shardings = jax.tree.map(lambda x: x.sharding, state)
    jit_train_step = jax.jit(
        train_step,
        in_shardings=(shardings, data),
        out_shardings=(shardings, None),
        static_argnames=("learning_rate_fn", "label_smoothing", "pad_id"),
        donate_argnums=0,
    )

    def step(state, batch):
        state, metrics = jit_train_step(state, batch, schedule, 0.1)
        return state, metrics["loss"]

    def batch_of(*args, **options):
        tokens = sentences(*args, **options)
        targets = np.pad(tokens, ((0, 0), (0, 1)))[:, 1:]
        positions = np.tile(np.arange(LENGTH), (len(tokens), 1))
        return {"inputs": tokens, "targets": targets, "inputs_position": positions}

    batches = [batch_of(seed) for seed in range(10)]
    return Loop(state, step, batches, traced, batch_of(0, empty=True))


# nanodo: a loss made for each batch; a dataclass as `aux`; `MultiSteps`; the norms of
# gradients and updates, tensor by tensor.


@struct.dataclass
class LossAux:
    ntokens: jax.Array
    state: Any
    log_perplexity: jax.Array


def get_loss_fn(tokens, apply_fn, config, traced):
    def loss_fn(params):
        traced.append(None)
        inputs = jnp.pad(tokens, ((0, 0), (1, 0)))[:, :-1]
        weights = jnp.where(tokens > 0, 1.0, 0.0)
        logits, state = apply_fn({"params": params}, inputs, mutable=config.mutable)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens)
        mean = jnp.sum(losses * weights) / weights.sum()
        return mean, LossAux(weights.sum(), state, mean)

    return loss_fn


def rms(prefix, tree):
    flat = traverse_util.flatten_dict(tree, sep="_")
    return {f"{prefix}/{k}/rms": jnp.sqrt((x**2).mean()) for k, x in flat.items()}


def except_biases(params):
    def decays(path, _):
        return path[-1].key not in ("bias", "scale")

    return jax.tree_util.tree_map_with_path(decays, params)


class ScaledState(TrainState):
    scaler: Any  # amp


def nanodo(dtype):
    traced = []
    config = SimpleNamespace(mutable=("acts",), accumulate=2)
    schedule = optax.warmup_cosine_decay_schedule(0.0, 2e-2, 2, 20)

    @functools.partial(jax.jit, donate_argnames="state")
    def train_step(state, tokens):
        loss_fn = get_loss_fn(tokens, state.apply_fn, config, traced)
        loss_fn = amp(loss_fn, compute_dtype=dtype)  # amp
        grad_fn = dynamic_scale_value_and_grad(loss_fn, has_aux=True)  # amp
        scaler, ((loss, aux), grads) = grad_fn(  # amp
            state.params, dynamic_scaler_state=state.scaler
        )
        old = state.opt_state
        updates, opt_state = state.tx.update(grads, old, state.params)
        new_state = state.replace(
            step=old.gradient_step + 1,
            params=optax.apply_updates(state.params, updates),
            opt_state=opt_state,
            scaler=scaler,  # amp
        )
        mean = jax.tree.map(
            lambda mean, g: mean + (g - mean) / (old.mini_step + 1),
            old.acc_grads,
            grads,
        )
        metrics = {"train_loss": loss, "ntokens": aux.ntokens, "acts": aux.state}
        metrics["learning_rate"] = schedule(old.gradient_step)
        return new_state, metrics | rms("grads", mean) | rms("updates", updates)

    tx = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(schedule, eps=1e-9, weight_decay=1e-3, mask=except_biases),
    )
    tx = optax.MultiSteps(
        tx,
        config.accumulate,
        should_skip_update_fn=optax.skip_not_finite,  # amp
    )
    model, batches = Decoder(), [sentences(seed) for seed in range(20)]
    state = ScaledState.create(
        apply_fn=model.apply,
        params=init(model, batches[0]),
        tx=tx,
        scaler=scaler_of(dtype),  # amp
    )
    state = state.replace(step=jnp.int32(0))  # which Flax makes a Python number

    def step(state, batch):
        state, metrics = train_step(state, batch)
        return state, metrics["train_loss"]

    return Loop(state, step, batches, traced, sentences(0, empty=True))


# Hugging Face's causal language model: a model object; a loss that takes the labels out
# of the batch; keys of the old kind in the state; pmap.


class PreTrained:
    def __init__(self, module, tokens):
        self.module, self.params = module, init(module, tokens)

    def __call__(self, input_ids, attention_mask, params, dropout_rng, train=False):
        rngs = {"dropout": dropout_rng}
        args = input_ids, attention_mask, train
        return (self.module.apply({"params": params}, *args, rngs=rngs),)


class DropoutState(AmpTrainState):  # amp
    dropout_rng: jax.Array


def decay_mask_fn(params):
    norms = ("ln_1", "ln_2")
    flat = traverse_util.flatten_dict(params)
    mask = {path: path[-1] != "bias" and path[0] not in norms for path in flat}
    return traverse_util.unflatten_dict(mask)


def shifted_loss(logits, labels, padding):
    labels, padding = jax.nn.one_hot(labels[..., 1:], VOCAB), padding[..., 1:]
    losses = optax.softmax_cross_entropy(logits[..., :-1, :], labels)
    return (losses * padding).sum() / padding.sum()


def hugging_face(dtype):
    traced = []
    model = PreTrained(Decoder(dropout=0.1), sentences(0))
    schedule = optax.linear_schedule(2e-2, 1e-3, 20)

    def train_step(state, batch):
        dropout_rng, new_dropout_rng = jax.random.split(state.dropout_rng)

        def compute_loss(params):
            traced.append(None)
            labels = batch.pop("labels")
            logits = state.apply_fn(
                **batch, params=params, dropout_rng=dropout_rng, train=True
            )[0]
            return shifted_loss(logits, labels, batch["attention_mask"])

        compute_loss = amp(compute_loss, compute_dtype=dtype)  # amp
        # It averages the gradients over the devices.
        grad_fn = dynamic_scale_value_and_grad(compute_loss, axis_name="batch")  # amp
        scaler, (loss, grads) = grad_fn(  # amp
            state.params, dynamic_scaler_state=state.scaler
        )
        new_state = state.apply_gradients(
            grads=grads,
            dropout_rng=new_dropout_rng,
            scaler=scaler,  # amp
        )
        metrics = {"loss": loss, "learning_rate": schedule(state.step)}
        return new_state, jax.lax.pmean(metrics, axis_name="batch")

    state = DropoutState.create(  # amp
        apply_fn=model.__call__,
        params=model.params,
        tx=optax.adamw(schedule, weight_decay=1e-3, mask=decay_mask_fn),
        dropout_rng=jax.random.PRNGKey(1),
        precision=PRECISIONS[dtype],
    )
    keys = on_devices(jax.random.split(state.dropout_rng, DEVICES))
    state = replicate(state).replace(dropout_rng=keys)
    p_train_step = pmap(train_step)

    def step(state, batch):
        state, metrics = p_train_step(state, batch)
        return state, metrics["loss"][0]

    def batch_of(*args, **options):
        ids = sentences(*args, **options)
        mask = (ids > 0).astype(np.int32)
        return shard({"input_ids": ids, "attention_mask": mask, "labels": ids.copy()})

    batches, bad = [batch_of(seed) for seed in range(15)], batch_of(0, empty=True)
    return Loop(state, step, batches, traced, bad, replicated=True)
