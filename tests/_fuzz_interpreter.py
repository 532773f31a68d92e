"""Evaluates jaxprs equation by equation, so that equal equations give equal bits.

XLA fuses, and fused code rounds otherwise. Here each equation runs by itself, without
a compiler around it: two programs with the same equations have the same results, bit
for bit. The same interpreter gives the error that a program has in which each single
equation rounds its results to half precision.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from flax_amp import _compat

_CALLS = ("jaxpr", "call_jaxpr", "call")  # parameters that hold the body of a call
_KEYS = jax.dtypes.prng_key


def _of_dtype(atoms, values):
    """The values of variables; literals, which are numbers, as arrays."""
    return [
        np.asarray(x, atom.aval.dtype) if isinstance(atom, Literal) else x
        for atom, x in zip(atoms, values, strict=True)
    ]


def _is_float32(x):
    return getattr(x, "dtype", None) == jnp.float32


@dataclasses.dataclass
class Interpreter:
    """Evaluates jaxprs.

    Attributes:
      half: the dtype to which each float32 result is rounded, if there is one.
      seed: of the further noise of each rounding.
      bits: the random bits that were drawn, in order.
    """

    half: Any = None
    seed: int = 0
    bits: list[Any] = dataclasses.field(default_factory=list)

    def __post_init__(self):
        self._rng = np.random.default_rng(self.seed)

    def __call__(self, closed, args):
        outs = _compat.evaluate(closed, args, self._equation)
        return _of_dtype(_compat.open_jaxpr(closed)[0].outvars, outs)

    def _equation(self, eqn, args):
        args = _of_dtype(eqn.invars, args)
        name, params = eqn.primitive.name, eqn.params
        if name == "scan":
            return self._scan(eqn, args)
        if name == "while":
            return self._while(params, args)
        if name == "cond":
            branches = params["branches"]
            index = np.clip(int(args[0]), 0, len(branches) - 1)
            return self(branches[index], args[1:])
        for body in (params[key] for key in _CALLS if key in params):
            return self(body, args)
        return self._bind(eqn, args)

    def _bind(self, eqn, args):
        outs = _compat.bind(eqn, args, eqn.params)
        if eqn.primitive.name == "random_bits":
            self.bits.append(np.asarray(outs[0]))
        return outs if self.half is None else list(map(self._rounded, outs))

    def _rounded(self, x):
        if not _is_float32(x):
            return x
        x = np.asarray(x)
        noise = 1 + jnp.finfo(self.half).eps / 2 * self._rng.uniform(-1, 1, x.shape)
        with np.errstate(over="ignore"):  # an error that is infinite explains all
            return (x * noise).astype(self.half).astype(np.float32)

    def _scan(self, eqn, args):
        params = eqn.params
        num_consts, num_carry = _compat.scan_counts(eqn)
        split = num_consts + num_carry
        consts, carry, xs = args[:num_consts], args[num_consts:split], args[split:]
        xs = [x if _is_key(x) else np.asarray(x) for x in xs]
        order, rows = range(params["length"]), {}
        for i in reversed(order) if params["reverse"] else order:
            outs = self(params["jaxpr"], [*consts, *carry, *(x[i] for x in xs)])
            carry = outs[:num_carry]
            rows[i] = outs[num_carry:]
        columns = zip(*(rows[i] for i in order), strict=True)
        return [*carry, *map(_stack, columns)]

    def _while(self, params, args):
        first, second = params["cond_nconsts"], params["body_nconsts"]
        of_cond, of_body = args[:first], args[first : first + second]
        carry = args[first + second :]
        while np.any(on := self(params["cond_jaxpr"], [*of_cond, *carry])[0]):
            outs = self(params["body_jaxpr"], [*of_body, *carry])
            carry = [_choose(on, *pair) for pair in zip(outs, carry, strict=True)]
        return carry


def _is_key(x):
    return jnp.issubdtype(getattr(x, "dtype", None), _KEYS)


def _choose(on, new, old):
    """Returns the new carry of those elements of a batch that go on, else the old."""
    if not np.ndim(on):
        return new
    dims = (*np.shape(on), *(1,) * (np.ndim(new) - np.ndim(on)))
    return np.where(np.reshape(on, dims), new, old)


def _stack(rows):
    return (
        jnp.stack(rows) if _is_key(rows[0]) else np.stack(list(map(np.asarray, rows)))
    )
