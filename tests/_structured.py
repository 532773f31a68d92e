"""One layer inside each structured primitive of JAX, and their nestings."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from _programs import loss_of, over_devices, with_jvp, with_vjp

SIZE = 8


def layer(w, x):
    return jnp.tanh(x @ w)


jvp_layer, vjp_layer = with_jvp(layer), with_vjp(layer)


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
    "remat": Case(jax.checkpoint(layer), 1, 4),
    "remat_dots": Case(jax.checkpoint(layer, policy=POLICIES.dots_saveable), 1, 3),
    "custom_jvp": Case(jvp_layer, 1, 3),
    "custom_vjp": Case(vjp_layer, 1, 3),
    "shard_map": Case(sharded(layer), 1, 3),
    "scan_of_remat_of_jit": Case(
        functools.partial(scan, jax.checkpoint(jax.jit(layer), prevent_cse=False)), 1, 4
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
