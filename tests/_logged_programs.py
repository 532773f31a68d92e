"""Programs that may log: each takes `log`, and returns a loss and what was logged.

`log(metric, value)` is `()` where nothing is logged. The values are those that people
log: probabilities, gates, activations, logits, norms.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax import nnx
from jax import lax

from _metrics import entropy, histogram, length, saturated, silent, spread

BATCH, TIME, DIM, HEADS = 3, 5, 8, 2


def normal(seed, *shape):
    values = np.random.default_rng(seed).normal(size=shape) / 2
    return jnp.asarray(values, jnp.float32)


# --- programs ------------------------------------------------------------------------

X = normal(0, BATCH, TIME, DIM)
IMAGE = normal(1, 2, 6, 6, 4)
LABELS = jnp.array([0, 2, 1])


def mean_square(x):
    return jnp.mean(jnp.square(x))


def cross_entropy(logits):
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits), LABELS[:, None], -1)
    return -picked.mean()


def layer_norm(x):
    mean = x.mean(-1, keepdims=True)
    return (x - mean) * lax.rsqrt(x.var(-1, keepdims=True) + 1e-6)


def split_heads(x):
    return x.reshape(*x.shape[:-1], HEADS, -1)


def attend(log, w, x):
    q, k, v = (split_heads(x @ w[name]) for name in "qkv")
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / 2
    mask = jnp.tri(x.shape[1], dtype=bool)[None, None]
    scores = jnp.where(mask, scores, -1e9)
    p = jax.nn.softmax(scores)
    out = jnp.einsum("bhqk,bkhd->bqhd", p, v).reshape(x.shape)
    return out @ w["o"], [log(entropy, p), log(spread, scores), log(length, out)]


def attention(log, w, x):
    y, logs = attend(log, w, x)
    return mean_square(y), logs


def attention_of_jax(log, w, x):
    q, k, v = (split_heads(x @ w[name]) for name in "qkv")
    out = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    logs = [log(length, q), log(histogram, k), log(spread, out)]
    return mean_square(out.reshape(x.shape) @ w["o"]), logs


def pooling(log, w, x):
    h = jnp.tanh(x @ w["q"])
    p = jax.nn.softmax(h @ w["k"][:, 0], -1)
    pooled = jnp.einsum("bt,btd->bd", p, h)
    return cross_entropy(pooled @ w["v"]), [log(entropy, p), log(length, pooled)]


def gates(log, w, h, x):
    z = x @ w["k"] + h @ w["q"]
    f, i, o = (jax.nn.sigmoid(z + b) for b in (0.0, 1.0, -1.0))
    return f, i, o, jnp.tanh(z * 2), [log(saturated, f), log(entropy, i)]


def lstm_step(log, w, state, x):
    h, c = state
    f, i, o, g, logs = gates(log, w, h, x)
    c = f * c + i * g
    h = o * jnp.tanh(c)
    return (h, c), [*logs, log(length, h), log(length, c)]


def zeros(*shape):
    return (jnp.zeros(shape),) * 2


def lstm(log, w, x):
    step = lambda state, x: lstm_step(log, w, state, x)  # noqa: E731
    (h, _), logs = lax.scan(step, zeros(BATCH, DIM), x.swapaxes(0, 1))
    return cross_entropy(h @ w["o"]), logs


def unrolled_lstm(log, w, x):
    state, logs = zeros(BATCH, DIM), []
    for t in range(TIME):
        state, more = lstm_step(log, w, state, x[:, t])
        logs += more
    return cross_entropy(state[0] @ w["o"]), logs


def gru(log, w, x):
    def step(h, x):
        z = jax.nn.sigmoid(x @ w["q"] + h @ w["k"])
        r = jax.nn.sigmoid(x @ w["k"] + h @ w["v"])
        new = jnp.tanh(x @ w["v"] + (r * h) @ w["o"])
        h = (1 - z) * h + z * new
        return h, (h, log(saturated, z), log(spread, r), log(length, new))

    _, (hs, *logs) = lax.scan(step, jnp.zeros((BATCH, DIM)), x.swapaxes(0, 1))
    return mean_square(hs @ w["o"]), logs


def mlp(activation):
    def program(log, w, x):
        h = activation(x @ w["q"] + w["b"])
        h2 = activation(h @ w["k"])
        y = h2 @ w["v"]
        logs = [log(spread, h), log(histogram, h2), log(length, y)]
        return mean_square(y), logs

    return program


def feed_forward(log, w, x):
    h = jax.nn.gelu(x @ w["up"])
    return h @ w["down"], [log(histogram, h)]


def pre_norm(log, w, x):
    x = x @ w["o"]
    for _ in range(2):
        normed = layer_norm(x)
        y, logs = attend(log, w, normed)
        x = x + y
        y, more = feed_forward(log, w, layer_norm(x))
        x = x + y
        logs += [*more, log(spread, normed), log(length, x)]
    return cross_entropy(layer_norm(x).mean(1) @ w["v"]), logs


def post_norm(log, w, x):
    for _ in range(2):
        y, logs = attend(log, w, x)
        x = layer_norm(x + y)
        y, more = feed_forward(log, w, x)
        x = layer_norm(x + y)
        logs += [*more, log(length, y), log(histogram, x)]
    return cross_entropy(x[:, 0] @ w["v"]), logs


def conv(kernel, x):
    dims = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=dims)


def group_norm(log, w, x):
    logs = []
    for kernel in (w["c1"], w["c2"]):
        x = conv(kernel, x)
        groups = x.reshape(*x.shape[:3], 2, -1)
        mean = groups.mean((1, 2, 4), keepdims=True)
        variance = groups.var((1, 2, 4), keepdims=True)
        normed = ((groups - mean) * lax.rsqrt(variance + 1e-5)).reshape(x.shape)
        logs += [log(spread, x), log(length, variance), log(histogram, normed)]
        x = jax.nn.silu(normed)
    return mean_square(x.mean((1, 2)) @ w["p"]), logs


class Linen(nn.Module):
    @nn.compact
    def __call__(self, log, x):
        h = nn.Conv(6, (3, 3))(x)
        normed = nn.BatchNorm(use_running_average=False)(h)
        y = nn.Dense(3)(jax.nn.relu(normed).mean((1, 2)))
        return y, [log(spread, h), log(histogram, normed), log(length, y)]


LINEN = Linen()


def linen(log, params, x):
    variables = {"params": params, "batch_stats": STATISTICS}
    (y, logs), _ = LINEN.apply(variables, log, x, mutable=["batch_stats"])
    return mean_square(y), logs


VARIABLES = LINEN.init(jax.random.key(0), silent, IMAGE)
STATISTICS = VARIABLES["batch_stats"]


class OfNnx(nnx.Module):
    def __init__(self, rngs):
        self.conv = nnx.Conv(4, 6, (3, 3), rngs=rngs)
        self.norm = nnx.BatchNorm(6, rngs=rngs)
        self.head = nnx.Linear(6, 3, rngs=rngs)

    def __call__(self, log, x):
        h = self.conv(x)
        normed = self.norm(h)
        y = self.head(jax.nn.relu(normed).mean((1, 2)))
        return y, [log(spread, h), log(histogram, normed), log(length, y)]


NNX = nnx.split(OfNnx(nnx.Rngs(0)), nnx.Param, ...)


def of_nnx(log, params, x):
    graph, _, rest = NNX
    rest = jax.tree.map(jnp.copy, rest)  # variables of this trace
    y, logs = nnx.merge(graph, params, rest)(log, x)
    return mean_square(y), logs


def unet(log, w, x):
    skip = jax.nn.relu(conv(w["c1"], x))
    down = skip.reshape(2, 3, 2, 3, 2, 4).mean((2, 4))
    deep = jax.nn.relu(conv(w["c2"], down))
    up = jnp.repeat(jnp.repeat(deep, 2, 1), 2, 2)
    both = jnp.concatenate([skip, up], -1)
    y = both @ jnp.concatenate([w["p"], w["p"]])
    return mean_square(y), [log(spread, skip), log(length, up), log(histogram, both)]


def experts(log, w, x):
    logits = x @ w["v"][:, :4]
    p = jax.nn.softmax(logits)
    chosen, index = lax.top_k(p, 2)
    chosen = chosen / chosen.sum(-1, keepdims=True)
    hidden = jax.nn.gelu(jnp.einsum("btd,edf->btef", x, w["experts"]))
    parts = jnp.take_along_axis(hidden, index[..., None], 2)
    y = jnp.einsum("btk,btkf->btf", chosen, parts)
    load = p.mean((0, 1))
    logs = [log(entropy, p), log(spread, logits), log(entropy, load)]
    return mean_square(y @ w["o"]) + 0.01 * jnp.sum(load * load), logs


def squeeze_excite(log, w, x):
    h = jax.nn.relu(conv(w["c1"], x))
    gate = jax.nn.sigmoid(jax.nn.relu(h.mean((1, 2)) @ w["p"]) @ w["p"].T)
    y = conv(w["c2"], h * gate[:, None, None])
    return mean_square(y), [log(saturated, gate), log(entropy, gate), log(spread, h)]


SENDERS = jnp.array([0, 1, 2, 3, 4, 0, 2, 4, 1])
RECEIVERS = jnp.array([1, 2, 0, 4, 3, 2, 1, 0, 4])


def graph_attention(log, w, x):
    h, logs = x[0], []
    for _ in range(2):
        z = h @ w["q"]
        left, right = z @ w["k"][:, 0], z @ w["k"][:, 1]
        scores = jax.nn.leaky_relu(left[SENDERS] + right[RECEIVERS])
        largest = jax.ops.segment_max(scores, RECEIVERS, TIME)
        e = jnp.exp(scores - largest[RECEIVERS])
        alpha = e / jax.ops.segment_sum(e, RECEIVERS, TIME)[RECEIVERS]
        h = jax.ops.segment_sum(alpha[:, None] * z[SENDERS], RECEIVERS, TIME)
        h = jax.nn.elu(h)
        logs += [log(entropy, alpha), log(spread, scores), log(length, h)]
    return mean_square(h @ w["o"]), logs


def contrastive(log, w, x):
    a, b = x[:, 0] @ w["q"], jnp.tanh(x[:, 1] @ w["k"]) @ w["v"]
    a, b = (z / jnp.linalg.norm(z, axis=-1, keepdims=True) for z in (a, b))
    logits = a @ b.T * 10
    p = jax.nn.softmax(logits)
    loss = optax_like(logits) + optax_like(logits.T)
    return loss, [log(entropy, p), log(length, a), log(histogram, logits)]


def optax_like(logits):
    return -jnp.diagonal(jax.nn.log_softmax(logits)).mean()


def ordinal(log, w, x):
    y = jnp.tanh(x[:, 0] @ w["q"]) @ w["k"]
    cumulative = jax.nn.sigmoid(jnp.cumsum(jax.nn.softplus(y[:, :4]), -1) - y[:, 4:5])
    p = jnp.diff(cumulative, axis=-1)
    picked = jnp.take_along_axis(p, LABELS[:, None], -1)
    logs = [log(saturated, cumulative), log(entropy, p), log(spread, y)]
    return -jnp.log(picked + 1e-3).mean(), logs


def jensen_shannon(log, w, x):
    p, q = (jax.nn.softmax(x[:, i] @ w["q"] @ w["k"]) for i in (0, 1))
    middle = (p + q) / 2
    parts = [jnp.sum(a * (jnp.log(a) - jnp.log(middle)), -1) for a in (p, q)]
    logs = [log(entropy, p), log(entropy, middle), log(length, q)]
    return (parts[0] + parts[1]).mean(), logs


def poincare(log, w, x):
    u, v = (0.1 * jnp.tanh(x[:, i] @ w["q"] @ w["k"]) for i in (0, 1))
    nu, nv, apart = (jnp.linalg.norm(z, axis=-1) for z in (u, v, u - v))
    ratio = 1 + 2 * apart**2 / ((1 - nu**2) * (1 - nv**2))
    logs = [log(length, u), log(spread, nu), log(histogram, ratio)]
    return jnp.arccosh(ratio).mean(), logs


def vector_quantized(log, w, x):
    z = jax.nn.relu(x @ w["q"]) @ w["k"]
    apart = jnp.sum((z[..., None, :] - w["v"][None, None]) ** 2, -1)
    code = w["v"][jnp.argmin(apart, -1)]
    y = (z + lax.stop_gradient(code - z)) @ w["o"]
    commit = mean_square(z - lax.stop_gradient(code))
    embed = mean_square(code - lax.stop_gradient(z))
    logs = [log(spread, apart), log(length, z), log(histogram, code)]
    return mean_square(y) + commit + embed, logs


def gan_penalty(log, w, x):
    critic = lambda x: jnp.sum(jnp.tanh(x @ w["q"]) @ w["v"][:, 0])  # noqa: E731
    score, slope = jax.value_and_grad(critic)(x @ w["k"])
    size = jnp.sqrt(jnp.sum(slope**2, -1) + 1e-9)
    logs = [log(spread, slope), log(histogram, size)]
    return score + 10 * jnp.mean((size - 1) ** 2), logs


def neural_ode(log, w, x):
    field = lambda y: jnp.tanh(y @ w["q"]) @ w["k"]  # noqa: E731

    def step(y, t):
        k1 = field(y)
        k2 = field(y + 0.1 * k1)
        y = y + 0.05 * (k1 + k2)
        return y, [log(length, k1), log(spread, y)]

    y, logs = lax.scan(step, x[:, 0] @ w["o"], jnp.arange(4.0))
    return mean_square(y @ w["v"]), logs


def checkpointed(log, w, x):
    block = jax.checkpoint(lambda w, x: attend(log, w, x))
    y, logs = block(w, x)
    y, more = block(w, layer_norm(x + y))
    return mean_square(y @ w["v"]), logs + more


def branches(log, w, x):
    h = x @ w["q"]

    def first(h):
        p = jax.nn.softmax(h)
        return p @ w["k"], log(entropy, p)

    def second(h):
        g = jax.nn.sigmoid(h)
        return (g * h) @ w["v"], log(entropy, g)

    y, logs = lax.cond(x[0, 0, 0] > 0, first, second, h)
    return mean_square(y @ w["o"]), [logs, log(spread, y)]


@jax.custom_jvp
def bent(x):
    return x * jax.nn.sigmoid(1.5 * x)


@bent.defjvp
def _bent_jvp(primals, tangents):
    (x,), (t,) = primals, tangents
    s = jax.nn.sigmoid(1.5 * x)
    return bent(x), t * (s + 1.5 * x * s * (1 - s))


def shared_embedding(log, w, x):
    table = w["table"]
    h = table[jnp.array([[1, 4, 2], [0, 3, 5], [5, 1, 1]])]
    h = jax.nn.gelu(h @ w["q"]) @ w["k"]
    logits = layer_norm(h.mean(1)) @ table.T
    p = jax.nn.softmax(logits)
    return cross_entropy(logits), [log(entropy, p), log(spread, h), log(length, logits)]


def mixture_density(log, w, x):
    y = jnp.tanh(x[:, 0] @ w["q"]) @ w["k"]
    logits, mean, scale = y[:, :2], y[:, 2:4], jax.nn.softplus(y[:, 4:6]) + 1e-2
    parts = -0.5 * ((1.0 - mean) / scale) ** 2 - jnp.log(scale)
    logs = [log(entropy, jax.nn.softmax(logits)), log(spread, scale), log(length, mean)]
    return -jax.nn.logsumexp(jax.nn.log_softmax(logits) + parts, -1).mean(), logs


def linear_attention(log, w, x):
    q, k, v = (x @ w[name] for name in "qkv")
    q, k = jax.nn.elu(q) + 1, jax.nn.elu(k) + 1
    state = jnp.einsum("btd,bte->bde", k, v)
    total = jnp.einsum("btd,bd->bt", q, k.sum(1))[..., None]
    y = jnp.einsum("btd,bde->bte", q, state) / total
    logs = [log(spread, total), log(length, state), log(histogram, q)]
    return mean_square(y @ w["o"]), logs


def wavenet(log, w, x):
    skips, logs = 0.0, []
    for shift in (1, 2):
        past = jnp.pad(x, ((0, 0), (shift, 0), (0, 0)))[:, :TIME]
        z = x @ w["q"] + past @ w["k"]
        gate = jax.nn.sigmoid(x @ w["v"] + past @ w["o"])
        h = jnp.tanh(z) * gate
        skips = skips + h @ w["o"]
        x = x + h @ w["k"]
        logs += [log(saturated, gate), log(entropy, gate), log(histogram, h)]
    return mean_square(jax.nn.relu(skips) @ w["v"]), logs


def reversible_norm(log, w, x):
    mean, scale = x.mean(1, keepdims=True), jnp.sqrt(x.var(1, keepdims=True) + 1e-5)
    h = jax.nn.gelu(((x - mean) / scale) @ w["q"]) @ w["k"]
    y = h * scale + mean
    logs = [log(length, mean), log(spread, scale), log(histogram, h), log(spread, y)]
    return mean_square(y - 1.0), logs


def capsules(log, w, x):
    u = jnp.einsum("btd,edf->btef", x, w["experts"])
    b, logs = jnp.zeros((BATCH, TIME, 4)), []
    for _ in range(2):
        c = jax.nn.softmax(b)
        s = jnp.einsum("bte,btef->bef", c, u)
        square = jnp.sum(s**2, -1, keepdims=True)
        v = square / (1 + square) * s / jnp.sqrt(square + 1e-7)
        b = b + jnp.einsum("btef,bef->bte", u, v)
        logs += [log(entropy, c), log(length, v), log(spread, square)]
    return mean_square(jnp.linalg.norm(v, axis=-1) - 0.9), logs


W = {name: normal(i, DIM, DIM) for i, name in enumerate("qkvo", 2)} | {
    "b": normal(6, 1, 1, DIM),
    "up": normal(7, DIM, 12),
    "down": normal(8, 12, DIM),
    "experts": normal(9, 4, DIM, DIM),
    "table": normal(10, 6, DIM),
}
KERNELS = {"c1": normal(11, 3, 3, 4, 4), "c2": normal(12, 3, 3, 4, 4)} | {
    "p": normal(13, 4, 3)
}

PROGRAMS = {  # name: program, parameters, data
    "attention": (attention, W, X),
    "attention of jax.nn": (attention_of_jax, W, X),
    "pooling": (pooling, W, X),
    "LSTM": (lstm, W, X),
    "unrolled LSTM": (unrolled_lstm, W, X),
    "GRU": (gru, W, X),
    "MLP with gelu": (mlp(jax.nn.gelu), W, X),
    "MLP with silu": (mlp(jax.nn.silu), W, X),
    "MLP with relu": (mlp(jax.nn.relu), W, X),
    "MLP with a custom_jvp": (mlp(bent), W, X),
    "pre-norm": (pre_norm, W, X),
    "post-norm": (post_norm, W, X),
    "GroupNorm": (group_norm, KERNELS, IMAGE),
    "BatchNorm of Linen": (linen, VARIABLES["params"], IMAGE),
    "BatchNorm of NNX": (of_nnx, NNX[1], IMAGE),
    "U-Net": (unet, KERNELS, IMAGE),
    "experts": (experts, W, X),
    "squeeze-excite": (squeeze_excite, KERNELS, IMAGE),
    "graph attention": (graph_attention, W, X),
    "contrastive": (contrastive, W, X),
    "ordinal": (ordinal, W, X),
    "Jensen-Shannon": (jensen_shannon, W, X),
    "Poincare": (poincare, W, X),
    "vector quantization": (vector_quantized, W, X),
    "gradient penalty": (gan_penalty, W, X),
    "neural ODE": (neural_ode, W, X),
    "checkpoint": (checkpointed, W, X),
    "cond": (branches, W, X),
    "shared embedding": (shared_embedding, W, X),
    "mixture density": (mixture_density, W, X),
    "linear attention": (linear_attention, W, X),
    "WaveNet": (wavenet, W, X),
    "reversible norm": (reversible_norm, W, X),
    "capsules": (capsules, W, X),
}
