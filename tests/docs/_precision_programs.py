"""Small programs whose equations `docs/precisions.md` lists, one by one."""

import jax
import jax.numpy as jnp


def vit_block(w, x):
    """A pre-norm block; `x @ w["patch"]` stands for what comes before it."""
    x = x @ w["patch"]
    h = layer_norm(x) * w["scale"] + w["shift"]
    q, k, v = (h @ w[name] for name in "qkv")
    p = jax.nn.softmax(q @ k.T * 0.25)
    x = x + (p @ v) @ w["out"]
    return x + jax.nn.gelu(layer_norm(x) @ w["up"] + w["bias"]) @ w["down"]


def layer_norm(x):
    mean = x.mean(-1, keepdims=True)
    variance = (x * x).mean(-1, keepdims=True) - mean * mean
    return (x - mean) * jax.lax.rsqrt(variance + 1e-6)


def lstm_step(w, h, c, x):
    """One step, as the body of a `scan` whose carry starts with zeros."""

    def step(carry, x):
        h, c = carry
        gates = x @ w["x"] + h @ w["h"] + w["bias"]
        i, f, g, o = jnp.split(gates, 4, -1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        return (jax.nn.sigmoid(o) * jnp.tanh(c), c), h

    start = jnp.zeros_like(h), jnp.zeros_like(c)
    return jax.lax.scan(step, start, x)[1] @ w["head"]


def unet_block(w, x, skip):
    """A convolution, a GroupNorm and a SiLU, with the skip of the way down."""

    def conv(x, w):
        numbers = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(
            x, w, (1, 1), "SAME", dimension_numbers=numbers
        )

    x = jnp.concatenate([conv(x, w["in"]), conv(skip, w["skip"])], -1)
    groups = x.reshape(*x.shape[:3], 2, -1)
    mean = groups.mean((1, 2, 4), keepdims=True)
    variance = jnp.square(groups - mean).mean((1, 2, 4), keepdims=True)
    normed = (groups - mean) / jnp.sqrt(variance + 1e-5)
    return conv(jax.nn.silu(normed.reshape(x.shape) * w["scale"]), w["out"])


def attention(w, x):
    """An attention by hand, with a mask, and a logged entropy."""
    q, k, v = (x @ w[name] for name in "qkv")
    mask = jnp.tril(jnp.ones((len(x), len(x)), bool))
    s = jnp.where(mask, q @ k.T, -1e9)
    e = jnp.exp(s - s.max(-1, keepdims=True))
    p = e / e.sum(-1, keepdims=True)
    entropy = -(p * jnp.log(p + 1e-9)).sum(-1).mean()
    return (p @ v) @ w["out"], jax.lax.stop_gradient(entropy)


def contrastive_loss(w, x, y):
    """Similarities of normalized embeddings, and the cross entropy of the pairs."""
    a, b = x @ w["x"], y @ w["y"]
    a = a / jnp.sqrt(jnp.sum(a * a, -1, keepdims=True))
    b = b / jnp.sqrt(jnp.sum(b * b, -1, keepdims=True))
    logits = (a @ b.T) * 10.0
    return -jnp.mean(jnp.diagonal(jax.nn.log_softmax(logits)))


def ordinal_loss(w, x, rank):
    """A loss of neighboring thresholds, which reads slices of one activation."""
    z = x @ w["x"] + w["bias"]
    steps = z[:, 1:] - z[:, :-1]
    logits = jnp.cumsum(jnp.logaddexp(steps, 0.0), -1)
    levels = jnp.arange(logits.shape[-1]) < rank[:, None]
    return jnp.mean(jnp.logaddexp(logits, 0.0) - levels * logits)


def _weights(**shapes):
    return {name: jnp.ones(shape) for name, shape in shapes.items()}


_X = jnp.ones((8, 16))
_SQUARE = (16, 16)
_IMAGE = jnp.ones((2, 8, 8, 4))
_KERNEL = (3, 3, 4, 8)

# (the function, the other functions that it calls, its arguments)
PROGRAMS = (
    (
        vit_block,
        (layer_norm,),
        (
            _weights(
                **dict.fromkeys(("patch", "q", "k", "v", "out"), _SQUARE),
                scale=(16,),
                shift=(16,),
                up=(16, 32),
                bias=(32,),
                down=(32, 16),
            ),
            _X,
        ),
    ),
    (
        lstm_step,
        (),
        (
            _weights(x=(16, 64), h=(16, 64), bias=(64,), head=(16, 4)),
            _X,
            _X,
            jnp.ones((5, 8, 16)),
        ),
    ),
    (
        unet_block,
        (),
        (
            _weights(
                **{"in": _KERNEL, "skip": _KERNEL},
                scale=(16,),
                out=(3, 3, 16, 4),
            ),
            _IMAGE,
            _IMAGE,
        ),
    ),
    (attention, (), (_weights(q=_SQUARE, k=_SQUARE, v=_SQUARE, out=_SQUARE), _X)),
    (contrastive_loss, (), (_weights(x=_SQUARE, y=_SQUARE), _X, _X)),
    (
        ordinal_loss,
        (),
        (_weights(x=_SQUARE, bias=(16,)), _X, jnp.arange(8)),
    ),
)
