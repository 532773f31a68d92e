"""Reads or replaces what passes along marked edges while a program runs.

At each edge, `run_tapped` returns the value. The cotangent is the gradient with respect
to the *tap* of the edge, an array of zeros that it adds in effect.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from flax_amp import _compat
from flax_amp._compat import Array, Arrays, Eqn, Jaxpr
from flax_amp._jaxpr.evaluate import evaluate
from flax_amp._jaxpr.walk import walk
from flax_amp._tree import split_list, widen
from flax_amp.debug._compare_edges import bodies, edge_name


class Passed(NamedTuple):
    """What passed through a program.

    Attributes:
      loss: the loss.
      gradients: those of the trained arrays.
      values: those of the edges, by name.
      cotangents: those of the edges, by name.
    """

    loss: Array
    gradients: Any
    values: dict[str, Array]
    cotangents: dict[str, Array]


class Feed(NamedTuple):
    """What an edge gets.

    Attributes:
      tap: zeros; the gradient with respect to them is the cotangent of the edge.
      instead: the value and the cotangent that take the place of those of the edge, if
        any do.
    """

    tap: Array
    instead: tuple[Array, Array] | None = None


def gradient(
    closed: Jaxpr,
    trained: Sequence[bool],
    arrays: Arrays,
    scale: Array,
    instead: Mapping[str, tuple[Array, Array]],
) -> Passed:
    """Returns what passes along the edges of a program, and its gradients.

    Args:
      closed: the program; its first result is the loss.
      trained: of which arguments a gradient is asked for.
      arrays: its arguments.
      scale: the factor of the loss, and so of all gradients.
      instead: values that take the place of those of edges, and cotangents without the
        scale, by name.
    """
    chosen = [i for i, is_trained in enumerate(trained) if is_trained]

    def scaled_loss(wrt: Arrays, taps: dict[str, Array]) -> Any:
        """Returns the scaled loss, and with it the loss and the values of the edges."""
        operands = list(arrays)
        for index, x in zip(chosen, wrt, strict=True):
            operands[index] = x
        feeds = {name: Feed(tap) for name, tap in taps.items()}
        for name in feeds.keys() & instead.keys():
            value, cotangent = instead[name]
            dtype = taps[name].dtype
            others = _fit(value, dtype), _fit(cotangent * scale, dtype)
            feeds[name] = Feed(taps[name], others)
        (loss, *_), values = run_tapped(closed, operands, feeds)
        return widen(loss) * scale, (loss, values)

    taps = {name: jnp.zeros(s.shape, s.dtype) for name, s in taps_of(closed).items()}
    wrt = [arrays[i] for i in chosen]
    differentiate = jax.grad(scaled_loss, argnums=(0, 1), has_aux=True)
    (gradients, cotangents), (loss, values) = differentiate(wrt, taps)
    return Passed(loss, gradients, values, cotangents)


def _fit(x: Array, dtype: Any) -> Array:
    """Returns a finite array in a dtype whose range may be too small for it."""
    limit = float(jnp.finfo(dtype).max)
    return jnp.where(jnp.isfinite(x), jnp.clip(x, -limit, limit), x).astype(dtype)


@jax.custom_vjp
def _pass(x: Array, feed: Feed) -> Array:
    return feed.instead[0] if feed.instead else x


def _pass_back(feed: Feed, cotangent: Array) -> tuple[Array, Feed]:
    return feed.instead[1] if feed.instead else cotangent, Feed(cotangent)


_pass.defvjp(lambda x, feed: (_pass(x, feed), feed), _pass_back)


def taps_of(closed: Jaxpr) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the marked edges of a program, with a leading axis for each loop."""
    found = {}
    for eqn, _, around in walk(closed):
        if name := edge_name(eqn):
            scans = (outer for outer in around if outer.primitive.name == "scan")
            lengths = (scan.params["length"] for scan in scans)
            aval = eqn.invars[0].aval
            found[name] = jax.ShapeDtypeStruct((*lengths, *aval.shape), aval.dtype)
    return found


# --- evaluation ----------------------------------------------------------------------


def run_tapped(
    closed: Jaxpr, operands: Arrays, feeds: Mapping[str, Feed]
) -> tuple[Arrays, dict[str, Array]]:
    """Evaluates a program with what its edges get.

    Returns:
      The results, and the values of the edges before anything took their place.
    """
    values: dict[str, Array] = {}

    def bind(eqn: Eqn, xs: Arrays) -> Arrays:
        if name := edge_name(eqn):
            values[name] = xs[0]
            return [_pass(xs[0], feeds[name])]
        inner = {name: feeds[name] for body in bodies(eqn) for name in taps_of(body)}
        if not inner:
            return _compat.bind_in_context(eqn, xs)
        with _compat.equation_context(eqn):
            outs, found = _STRUCTURED[eqn.primitive.name](eqn, xs, inner)
        values.update(found)
        return outs

    return evaluate(closed, operands, bind), values


def _run_jit(eqn: Eqn, xs: Arrays, feeds: dict[str, Feed]) -> Any:
    return run_tapped(eqn.params["jaxpr"], xs, feeds)


def _run_checkpoint(eqn: Eqn, xs: Arrays, feeds: dict[str, Feed]) -> Any:
    def body(xs: Arrays, feeds: dict[str, Feed]) -> Any:
        return run_tapped(eqn.params["jaxpr"], xs, feeds)

    options = {k: eqn.params[k] for k in ("prevent_cse", "policy")}
    return jax.checkpoint(body, **options)(xs, feeds)


def _run_scan(eqn: Eqn, xs: Arrays, feeds: dict[str, Feed]) -> Any:
    consts, init, slices = split_list(xs, *_compat.scan_counts(eqn))

    def body(carry: Any, x: Any) -> Any:
        operands = (*consts, *carry, *x[0])
        outs, values = run_tapped(eqn.params["jaxpr"], operands, x[1])
        return tuple(outs[: len(carry)]), (tuple(outs[len(carry) :]), values)

    options = _compat.scan_options(eqn)
    carry, (ys, values) = jax.lax.scan(body, init, (slices, feeds), **options)
    return [*carry, *ys], values


def _run_cond(eqn: Eqn, xs: Arrays, feeds: dict[str, Feed]) -> Any:
    def branch(body: Jaxpr) -> Any:
        def run(xs: Arrays, feeds: dict[str, Feed]) -> Any:
            outs, values = run_tapped(body, xs, feeds)
            # The edges of a branch that is not taken are zero.
            zeros = {name: jnp.zeros_like(feed.tap) for name, feed in feeds.items()}
            return outs, zeros | values

        return run

    return jax.lax.switch(xs[0], [*map(branch, bodies(eqn))], list(xs[1:]), feeds)


_STRUCTURED = {
    "jit": _run_jit,
    "remat2": _run_checkpoint,
    "scan": _run_scan,
    "cond": _run_cond,
}
