"""The six lines of docs/policies.md, read again for programs in a straight line.

It shares nothing with the rewriter: it runs a program in the dtypes that the lines ask
for, one equation after the other, and notes them. Calls without a matmul are opened.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.extend.core import Literal

LAYOUT = "reshape transpose rev slice squeeze broadcast_in_dim concatenate"
MOVES = LAYOUT + " select_n max neg"
SUMS = "reduce_sum reduce_max cumsum"


class Step(NamedTuple):
    """An equation of the program, calls opened: variables, or numbers as literals."""

    eqn: Any
    ins: list[Any]
    outs: list[Any]

    def is_in(self, names):
        return self.eqn.primitive.name in names.split()

    @property
    def floats(self):
        arrays = [v for v in self.ins if not isinstance(v, Literal)]
        return [v for v in arrays if v.aval.dtype == jnp.float32]


class Value(NamedTuple):
    """A value of the program. A body that is called twice has its variables twice."""

    number: int
    aval: Any


def opened(jaxpr, names, steps):
    """Adds the steps of a jaxpr, in order. `names`: the values of its variables."""

    def value(v):
        return v if isinstance(v, Literal) else names[v]

    for eqn in jaxpr.eqns:
        ins = [value(v) for v in eqn.invars]
        if eqn.primitive.name == "jit":
            body = eqn.params["jaxpr"].jaxpr
            outs = opened(body, dict(zip(body.invars, ins, strict=True)), steps)
        elif eqn.primitive.name == "convert_element_type":
            outs = ins  # from float32 to float32: it makes a number strongly typed
        else:
            outs = [Value(len(steps), v.aval) for v in eqn.outvars]
            steps.append(Step(eqn, ins, outs))
        names |= dict(zip(eqn.outvars, outs, strict=True))
    return [value(v) for v in jaxpr.outvars]


class Reading:
    """What the lines say of the values of a program."""

    def __init__(self, jaxpr):
        variables = [*jaxpr.constvars, *jaxpr.invars]
        self.arguments = [Value(-1 - i, v.aval) for i, v in enumerate(variables)]
        names, self.steps = dict(zip(variables, self.arguments, strict=True)), []
        self.results = opened(jaxpr, names, self.steps)
        self.leads, self.level, after, sums = set(), {}, set(), set()
        self.weights, self.numbers = {*self.arguments}, set()
        self.sums = set()
        inside, outside, later = {}, set(), set()
        self.moved = {*self.results}  # results, and what is moved to one
        for step in reversed(self.steps):
            if step.is_in("dot_general") or self.leads & {*step.outs}:
                self.leads |= {*step.floats}
            if step.is_in(MOVES) and self.moved & {*step.outs}:
                self.moved |= {*step.floats}

        for step in self.steps:
            level = max((self.level.get(v, 0) for v in step.floats), default=0)
            matmul = step.is_in("dot_general")
            self.level |= dict.fromkeys(step.outs, level + matmul)
            if matmul or after & {*step.floats}:
                after |= {*step.outs}
            for v in step.floats:
                if matmul or inside.get(v, level) != level:
                    outside.add(v)  # 3. it leaves its region
                    later |= set() if matmul else {v}
            arrays = [v for v in step.floats if v in after]
            if step.is_in("add") and len(arrays) == len(step.ins):
                self.sums |= {*step.outs}
            inside |= {} if matmul else dict.fromkeys(step.outs, level)
            if step.is_in(SUMS):
                sums |= {*step.outs}
            if step.is_in(LAYOUT) and {*step.floats} <= self.weights:
                self.weights |= {*step.outs}
                self.numbers |= set() if step.floats else {*step.outs}
        self.inside = inside
        scalars = {v for v in inside if not v.aval.shape}
        self.border = (outside & self.leads & after & {*inside}) - sums - scalars
        # 5. its own region reads a residual sum rounded, too
        self.residual = (self.border & self.sums & later) - self.moved

    def run(self, arguments, half):
        """Returns the results, and notes the operand dtypes of each step."""
        own = dict(zip(self.arguments, arguments, strict=True))
        out, self.noted = dict(own), []

        def read(v, level):
            if isinstance(v, Literal):
                return jnp.asarray(v.val, v.aval.dtype)
            return (own if self.inside.get(v) == level else out)[v]

        for step in self.steps:
            values = [read(v, self.level[step.outs[0]]) for v in step.ins]
            halves = {v for v in step.floats if values[step.ins.index(v)].dtype == half}
            low = step.is_in("dot_general") or self.stays_half(step, halves)  # 1., 5.
            dtype = half if low else jnp.dtype(jnp.float32)  # 2.
            is_float = [jnp.issubdtype(x.dtype, jnp.floating) for x in values]
            pairs = zip(values, is_float, strict=True)
            values = [x.astype(dtype) if flag else x for x, flag in pairs]
            self.noted.append([x.dtype.name for x in values])
            params = step.eqn.params
            if step.is_in("dot_general"):  # adds up in float32
                values = [x.astype(jnp.float32) for x in values]
                params = params | {"precision": (lax.Precision.HIGHEST,) * 2}
            result = step.eqn.primitive.bind(*values, **params).astype(dtype)
            v = step.outs[0]
            out[v] = result.astype(half) if v in self.border else result  # 3.
            own[v] = out[v] if v in self.residual else result
        return [read(v, None).astype(jnp.float32) for v in self.results]

    def stays_half(self, step, halves):
        """5. A move of halves, and a sum of two halves or of a half and a bias."""
        others = {*step.floats} - halves
        if not halves or step.outs[0] not in self.leads:
            return False
        if step.is_in("add"):
            if step.outs[0] in self.moved:  # 3. a result is never rounded
                return False
            return others <= self.weights and all(v.aval.shape for v in step.ins)
        return step.is_in(MOVES) and others <= self.numbers
