"""Programs, the code that they stand in, and what JAX makes of a function.

Many tests run over these tables, and some add rows of their own.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

ROWS, SIZE = 8, 4


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


W, X = normal(0, SIZE, SIZE) / 2, normal(1, ROWS, SIZE)


def norm(x):
    mean = x.mean(-1, keepdims=True)
    variance = ((x - mean) ** 2).mean(-1, keepdims=True)
    return (x - mean) * lax.rsqrt(variance + 1e-6)


def loss_of(fn):
    return lambda *args: jnp.mean(fn(*args) ** 2)


def squares(tree):
    return sum(jnp.sum(x**2) for x in jax.tree.leaves(tree))


# --- functions of a weight and data --------------------------------------------------


def layer(w, x):
    return jnp.tanh(x @ w)


def mlp(w, x):
    return jnp.tanh(norm(jax.nn.gelu(x @ w + w[0][None])) @ w)


def attention(w, x):
    scores = jnp.where(jnp.tri(len(x), dtype=bool), (x @ w) @ x.T, -1e9)
    return jax.nn.softmax(scores / 2) @ x


def recurrent(w, x):
    step = lambda h, v: (jnp.tanh(h @ w + v[None]), None)  # noqa: E731
    return lax.scan(step, jnp.zeros((2, len(w))), x)[0]


def convolution(w, x):
    image = x.reshape(1, ROWS, SIZE, 1)
    window = w[:2, :1, None, None]
    dims = ("NHWC", "HWIO", "NHWC")
    return jax.nn.relu(
        lax.conv_general_dilated(image, window, (1, 1), "SAME", dimension_numbers=dims)
    )


def scattered(w, x):
    segments = jax.ops.segment_sum(x @ w, jnp.arange(ROWS) // 2, num_segments=4)
    return jnp.cumsum(jnp.sort(segments, axis=0), axis=0).at[0].max(w[0])


PROGRAMS = {
    "mlp": mlp,
    "attention": attention,
    "recurrent": recurrent,
    "convolution": convolution,
    "scattered": scattered,
}


# --- the same function inside of other code ------------------------------------------


def with_jvp(fn):
    """The function with its own derivative as the rule of a `custom_jvp`."""
    rebuilt = jax.custom_jvp(fn)
    rebuilt.defjvp(lambda primals, tangents: jax.jvp(fn, primals, tangents))
    return rebuilt


def with_vjp(fn):
    rebuilt = jax.custom_vjp(fn)
    rebuilt.defvjp(lambda *args: jax.vjp(fn, *args), lambda vjp, g: vjp(g))
    return rebuilt


def in_scan(fn):
    return lambda *args: jax.tree.map(
        lambda y: y.mean(0),
        lax.scan(lambda c, _: (c, fn(*args)), 0, None, length=2)[1],
    )


def in_while(fn):
    def run(*args):
        zeros = jnp.zeros(jax.eval_shape(fn, *args).shape)
        step = lambda c: (c[0] + 1, fn(*args))  # noqa: E731
        return lax.while_loop(lambda c: c[0] < 2, step, (0, zeros))[1]

    return run


ROWS_OVER_DEVICES = P("data")


def over_devices(fn, in_specs, out_specs=ROWS_OVER_DEVICES, **options):
    """The function over the eight fake devices, on the axis `data`."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    options |= dict(mesh=mesh, in_specs=in_specs, out_specs=out_specs)
    return jax.shard_map(fn, **options)


WITHIN = {  # of functions of a weight and data
    "plain": lambda fn: fn,
    "jit": jax.jit,
    "nested jit": lambda fn: jax.jit(lambda w, x: jax.jit(fn)(w, x) * 1.0),
    "scan": in_scan,
    "cond": lambda fn: (
        lambda w, x: lax.cond(w[0, 0] < 9, fn, lambda w, x: fn(w, -x), w, x)
    ),
    "vmap": lambda fn: (
        lambda w, x: jax.vmap(fn, (None, 0))(w, jnp.stack([x, -x])).mean(0)
    ),
    "checkpoint": jax.checkpoint,
    "custom_jvp": with_jvp,
    "custom_vjp": with_vjp,
}


# --- what JAX makes of a scalar function ---------------------------------------------


def batched(fn):
    """The function over two values of its last argument."""

    def mapped(*args):
        *others, x = args
        axes = (*[None] * len(others), 0)
        return jax.vmap(fn, axes)(*others, jnp.stack([x, x / 2]))

    return mapped


def again(fn, wrap=lambda f: f):
    """The gradient of the size of a gradient, which runs inside of `wrap`."""
    return jax.grad(wrap(lambda *args: squares(jax.grad(fn)(*args))))


FIRST_ORDER = {
    "value": lambda f: f,
    "grad": jax.grad,
    "jit of grad": lambda f: jax.jit(jax.grad(f)),
    "jvp": lambda f: lambda *xs: jax.jvp(f, xs, xs),
    "linearize": lambda f: lambda *xs: jax.linearize(f, *xs)[1](*xs),
    "checkpoint": lambda f: jax.grad(jax.checkpoint(f)),
    "vmap": batched,
    "vmap of grad": lambda f: batched(jax.grad(f)),
    "grad of vmap": lambda f: jax.grad(lambda *xs: batched(f)(*xs).sum()),
}
SECOND_ORDER = {
    "grad of grad": again,
    "jvp of grad": lambda f: lambda *xs: jax.jvp(jax.grad(f), xs, xs),
    "hessian": jax.hessian,
}
DERIVATIVES = FIRST_ORDER | SECOND_ORDER
