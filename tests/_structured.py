"""One layer inside each structured primitive of JAX, and their nestings."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from _programs import loss_of, over_devices

SIZE = 8


def layer(w, x):
    return jnp.tanh(x @ w)


# --- functions with custom derivatives -----------------------------------------------


@jax.custom_jvp
def jvp_layer(w, x):
    return jnp.tanh(x @ w)


@jvp_layer.defjvp
def _(primals, tangents):
    (w, x), (dw, dx) = primals, tangents
    y = jnp.tanh(x @ w)
    return y, (1 - y * y) * (dx @ w + x @ dw)


@jax.custom_vjp
def vjp_layer(w, x):
    return jnp.tanh(x @ w)


def _forward(w, x):
    y = jnp.tanh(x @ w)
    return y, {"inputs": (w, x), "y": y}


def _backward(residuals, ct):
    w, x = residuals["inputs"]
    ct = ct * (1 - residuals["y"] ** 2)
    return x.T @ ct, ct @ w.T


vjp_layer.defvjp(_forward, _backward)


# --- loops and devices ---------------------------------------------------------------


def scan(fn, w, x, length=3, **options):
    return lax.scan(lambda c, _: (fn(w, c), None), x, None, length, **options)[0]


def scan_xs(w, x):
    """Weights come in as xs, results go out as ys."""
    ws = jnp.stack([w, w.T, -w])
    carry, ys = lax.scan(lambda c, v: (layer(v, c), c @ v), x, ws)
    return carry + ys.sum(0)


def while_loop(fn, w, x):
    return lax.while_loop(
        lambda c: c[0] < 3, lambda c: (c[0] + 1, fn(w, c[1])), (0, x)
    )[1]


def cond_of(w, x):
    return lax.cond(x[0, 0] > -100, layer, lambda w, x: jnp.sin(x @ w), w, x)


def switch(w, x):
    branches = [layer, lambda w, x: x @ w, lambda w, x: x]
    return sum(lax.switch(i, branches, w, x) for i in range(3))


def sharded(fn, check_vma=True):
    return over_devices(fn, (P(), P("data")), check_vma=check_vma)


def twice(x):
    """Repeats a row: with one row, the gradient of `w` would be an outer product."""
    return jnp.concatenate([x, x])


def psum_inside(w, x):
    y = layer(w, x)
    return y - lax.psum(y.mean(0), "data")[None]


def remat(fn, **options):
    return jax.checkpoint(fn, **options)


POLICIES = jax.checkpoint_policies


class Case(NamedTuple):
    fn: Any
    forward: int  # matmuls in the function ...
    both: int | None  # ... and in its value_and_grad; None: no reverse mode


CASES = {
    "jit": Case(jax.jit(layer), 1, 3),
    "scan_carry": Case(functools.partial(scan, layer), 1, 3),
    "scan_xs_ys": Case(scan_xs, 2, 6),
    "while": Case(functools.partial(while_loop, layer), 1, None),
    "cond": Case(cond_of, 2, 6),
    "switch": Case(switch, 6, 18),
    "remat": Case(remat(layer), 1, 4),
    "remat_dots": Case(remat(layer, policy=POLICIES.dots_saveable), 1, 3),
    "custom_jvp": Case(jvp_layer, 1, 3),
    "custom_vjp": Case(vjp_layer, 1, 3),
    "shard_map": Case(sharded(layer), 1, 3),
    "shard_map_psum": Case(sharded(psum_inside), 1, 3),
    "shard_map_of_custom_vjp": Case(
        sharded(lambda w, x: vjp_layer(w, twice(x))[:1], check_vma=False), 1, 3
    ),
    "vmap_of_custom_vjp": Case(
        lambda w, x: jax.vmap(lambda r: vjp_layer(w, twice(r[None]))[0])(x), 1, 3
    ),
    "scan_of_remat_of_jit": Case(
        functools.partial(scan, remat(jax.jit(layer), prevent_cse=False)), 1, 4
    ),
    "associative_scan": Case(
        lambda w, x: lax.associative_scan(jnp.matmul, jnp.stack([w, w.T, x]))[-1],
        2,
        6,
    ),
}  # fmt: skip


def arguments(dtype=np.float32):
    rng = np.random.default_rng(0)
    w, x = rng.normal(size=(2, SIZE, SIZE)).astype(np.float32)
    return (w / np.float32(SIZE**0.5)).astype(dtype), x.astype(dtype)


def differentiate(fn, has_reverse):
    """Returns value and gradients; in forward mode along one direction."""
    if has_reverse:
        return jax.value_and_grad(loss_of(fn), argnums=(0, 1))
    return lambda w, x: jax.jvp(loss_of(fn), (w, x), (jnp.ones_like(w), x))
