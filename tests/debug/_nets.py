"""A network with a fault between two layers, of Linen, of NNX and as a function."""

from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx

WIDTH = 8


def _bad(fault, x, *numbers):
    with jax.named_scope("bad"):
        return fault(jnp.abs(x) + 1, *numbers)


class LinenNet(nn.Module):
    fault: Callable

    @nn.compact
    def __call__(self, x, *numbers):
        x = _bad(self.fault, nn.Dense(WIDTH, name="first")(x), *numbers)
        return nn.Dense(2, name="head")(x)


class NNXNet(nnx.Module):
    def __init__(self, fault):
        self.first = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0))
        self.head = nnx.Linear(WIDTH, 2, rngs=nnx.Rngs(1))
        self.fault = fault

    def __call__(self, x, *numbers):
        return self.head(_bad(self.fault, self.first(x), *numbers))


def linen(fault):
    """Returns a function of parameters, data and numbers, and its parameters."""
    net = LinenNet(fault)
    params = LinenNet(lambda x: x).init(jax.random.key(0), jnp.ones((1, WIDTH)))
    return net.apply, params


def of_nnx(fault):
    return lambda model, x, *numbers: model(x, *numbers), NNXNet(fault)


def plain(fault):
    apply = lambda w, x, *numbers: _bad(fault, x @ w, *numbers) @ w  # noqa: E731
    return apply, jnp.eye(WIDTH)


# Where the fault is.
PATHS = {linen: "LinenNet/bad", of_nnx: "NNXNet/bad", plain: "bad"}
