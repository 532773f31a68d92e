"""Scopes for the lines of code that stands outside of modules.

A policy names code by its scopes. Where there are none, `compare_precision` makes one
for each line, and finds the line at fault as it finds a module:

    y = mul x 3e4      at train.py:12, in no scope      =>      in the scope `train:12`
"""

import functools
from typing import Any

import jax

from flax_amp import _compat
from flax_amp._compat import Eqn, Jaxpr
from flax_amp._rewriter.primitives import bodies, traits_of
from flax_amp.debug._place import module_path, scopes_of, source_line


class LineScopes:
    """Makes scopes of lines that stand outside of modules.

    Attributes:
      sources: the line that a scope stands for, `train.py:12`, by its name.
    """

    def __init__(self) -> None:
        self.sources: dict[str, str] = {}

    def __call__(self, closed: Jaxpr, outer: tuple[str, ...] = ()) -> Jaxpr:
        """Returns an open or closed jaxpr with the scopes."""
        jaxpr = _compat.open_jaxpr(closed)[0]
        jaxpr = jaxpr.replace(eqns=[self._equation(eqn, outer) for eqn in jaxpr.eqns])
        # Before JAX 0.12, a closed jaxpr holds an open one.
        return closed.replace(jaxpr=jaxpr) if hasattr(closed, "jaxpr") else jaxpr

    def _equation(self, eqn: Eqn, outer: tuple[str, ...]) -> Eqn:
        scopes, line = outer + scopes_of(eqn), source_line(eqn)
        if bodies(eqn):
            name = traits_of(eqn).body
            value = eqn.params[name]
            if isinstance(value, tuple):
                value = tuple(self(body, scopes) for body in value)
            elif _compat.is_jaxpr(value):
                value = self(value, scopes)
            eqn = eqn.replace(params={**eqn.params, name: value})
        if module_path(scopes) or not line:
            return eqn
        file, _, number = line.rpartition("/")[2].rpartition(":")
        # A name with a dot would be that of a method.
        name = f"{file.partition('.')[0]}:{number}"
        self.sources[name] = line
        return _compat.with_scopes(eqn, (*_compat.scopes(eqn), _entry(name)))


@functools.cache
def _entry(name: str) -> Any:
    """Returns what JAX puts into the scopes of an equation for a `jax.named_scope`."""
    traced = jax.make_jaxpr(jax.named_call(lambda x: x + 1, name=name))(0.0)
    return _compat.scopes(_compat.open_jaxpr(traced)[0].eqns[0])[0]
