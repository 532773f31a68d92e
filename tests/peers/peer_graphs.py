"""What the tests of this folder share: what ran in which dtype, and how many casts."""

import jax
import jax.numpy as jnp

from flax_amp import amp
from helpers import equations

CASTS = ("convert_element_type", "flax_amp_saturate")
WIDTH = {1: 8, 2: 16, 4: 32}


def painted(fn, *args, **options):
    """Returns `["exp:32", "dot_general:16", ...]` of `amp(fn)`: results and their bits.

    Equations are in the order in which they run, those of structured code in its place.
    Casts, and results that are no floats, are left out.
    """
    found = []
    for _, eqn in equations(jax.make_jaxpr(amp(fn, **options))(*args)):
        name, aval = eqn.primitive.name, eqn.outvars[0].aval if eqn.outvars else None
        if name in CASTS or name == "flax_amp_stored" or holds_code(eqn):
            continue
        if aval is not None and jnp.issubdtype(aval.dtype, jnp.floating):
            found.append(f"{name}:{WIDTH[aval.dtype.itemsize]}")
    return found


def only(found, *names):
    """Returns those entries of `painted` that are of some primitives."""
    return [entry for entry in found if entry.partition(":")[0] in names]


def holds_code(eqn):
    """Whether an equation is structured: what is inside of it is counted instead."""
    return any(
        hasattr(getattr(item, "jaxpr", item), "eqns")
        for param in eqn.params.values()
        for item in (param if isinstance(param, tuple | list) else (param,))
    )


def count_casts(fn, *args, **options):
    """Returns the number of casts of float32 down, and of casts up to float32."""
    down = up = 0
    for _, eqn in equations(jax.make_jaxpr(amp(fn, **options))(*args)):
        if eqn.primitive.name in CASTS:
            old, new = eqn.invars[0].aval.dtype, eqn.outvars[0].aval.dtype
            down += old == jnp.float32 and new.itemsize == 2
            up += old.itemsize == 2 and new == jnp.float32
    return down, up
