"""Modules and kernels of other packages.

In a row, `s` is a dict with the dtype of a hand-set module, or an empty one.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from benchmarks.corpus.case import (
    Case,
    Kind,
    Loss,
    normal,
    of_matmul,
    total,
)

_INPUTS = {
    "SEQUENCE": normal(4, 12, 16),
    "IMAGE": normal(2, 16, 16, 4),
    "CHANNELS": normal(2, 4, 16, 16),
    "VIDEO": normal(2, 5, 8, 8, 4),
    "WIDE": normal(64, 16),
}

# A module and its input, from a dict with a dtype or from an empty one
Make = Callable[[dict[str, Any]], tuple[Any, Any]]


def _linen(make: Make) -> Case:
    module, x = make({})
    variables = module.init(jax.random.key(0), x)

    def loss_of(s: dict[str, Any]) -> Loss:
        module, _ = make(s)
        return lambda variables, x: total(module.apply(variables, x))

    return Case(loss_of({}), variables, (x,), lambda d: loss_of({"dtype": d}))


def _nnx(make: Make) -> Case:
    def loss_of(s: dict[str, Any]) -> tuple[Loss, Any, Any]:
        module, x = make(s)
        parts: Any = nnx.split(module, nnx.Param, ...)
        graph, params, rest = parts

        def loss(params: Any, x: Any) -> Any:
            return total(nnx.merge(graph, params, rest, copy=True)(x))

        return loss, params, x

    loss, params, x = loss_of({})
    return Case(loss, params, (x,), lambda d: loss_of({"dtype": d})[0])


def _new(cls: Any, *args: Any, **options: Any) -> Any:
    return cls(*args, **options, rngs=nnx.Rngs(0))


def _equinox(make: Callable[[Any], tuple[Any, ...]]) -> Case:
    """A model and its input, and how the model is called if not with that alone."""
    import equinox as eqx

    model, x, *called = make(jax.random.key(0))
    call = called[0] if called else lambda model, x: model(x)
    params, static = eqx.partition(model, eqx.is_inexact_array)

    def loss(params: Any, x: Any) -> Any:
        model = eqx.combine(params, static)
        return total(jax.vmap(lambda x: call(model, x))(x))

    return Case(loss, params, (x,))


def _scanned(cell: Any, xs: Any) -> Any:
    start = (jnp.zeros(cell.hidden_size),) * 2
    return jax.lax.scan(lambda h, x: (cell(x, h), None), start, xs)[0]


# --- kernels of Pallas, interpreted --------------------------------------------------


def _attention(h: Any) -> Any:
    from jax.experimental.pallas.ops.gpu import attention

    sizes = "block_q block_k block_q_dkv block_kv_dkv block_q_dq block_kv_dq"
    blocks = attention.BlockSizes(**dict.fromkeys(sizes.split(), 32))
    q = h.reshape(1, 64, 2, 16)
    options: Any = dict(causal=True, block_sizes=blocks, interpret=True)
    return attention.mha(q, q, q, None, **options)


def _layer_norm(h: Any) -> Any:
    from jax.experimental.pallas.ops.gpu import layer_norm

    scale, bias = jnp.ones(32), jnp.zeros(32)
    return layer_norm.layer_norm(h[None], scale, bias, interpret=True)


LINEN = Kind("s", _linen, _INPUTS)
NNX = Kind("s", _nnx, _INPUTS | {"new": _new})
EQUINOX = Kind("k", _equinox, _INPUTS | {"scanned": _scanned})
KERNEL = Kind(
    "h",
    functools.partial(of_matmul, normal(32, 32) / 6, normal(64, 32, seed=1)),
    {"attention": _attention, "layer_norm": _layer_norm},
)
