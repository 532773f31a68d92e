"""Errors of generated programs, beside those of their twins."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import assume

from _fuzz_checks import made
from benchmarks.exact import with_exact_products
from benchmarks.twin import cast_products, count_cast
from flax_amp import amp
from helpers import relative_error

GRADIENTS = ("grad", "vmap of grad", "grad of checkpoint", "jvp", "linearize")


def beside_twin(program, transform, dtype, options):
    """Returns the error of a derivative beside that of its twin.

    It gives up programs whose products, if there are any, make no error, and those
    that the twin cannot run: it calls no rule that closes over a value.
    """
    case = made(program, transform)
    assume(count_cast(jax.make_jaxpr(case.function)(*case.args)))

    def error(fn):
        closed, _ = case.trace(fn, with_exact_products)
        with np.errstate(all="ignore"):  # a twin in float16 may overflow
            return relative_error(case.evaluate(closed)[0], case.reference())

    try:
        theirs = error(cast_products(case.function, dtype))
    except jax.errors.UnexpectedTracerError:
        assume(False)
    ours = error(amp(case.function, compute_dtype=dtype, **options))
    # Of what is as near as if the result alone were rounded, nothing is better.
    least = jnp.finfo(dtype).eps / 4
    assume(np.isfinite(theirs) and max(ours, theirs) > least)
    return max(ours, least) / max(theirs, least)
