"""Generated programs: under `amp` they do what they do without it.

`FOUND` has the shortest programs that have failed once. `make fuzz` runs more programs
in slices of at most 250, so that a failure ends its slice only, and the memory of a
slice is given back. Each slice prints its seed and what it has drawn: with
`FLAX_AMP_FUZZ=250` and that `FLAX_AMP_FUZZ_SEED`, the same programs run again.
"""

import contextlib
import os
import time
from collections import Counter

import jax
import jax.numpy as jnp
import pytest
from hypothesis import HealthCheck, given, seed, settings

from _fuzz_checks import check, examples
from _fuzz_language import In, Op
from helpers import HALVES

COUNT = int(os.environ.get("FLAX_AMP_FUZZ", 0))  # 0: those of every run
SEED = int(os.environ.get("FLAX_AMP_FUZZ_SEED", 1000 * time.time() if COUNT else 0))
SLICES = -(-COUNT // 250) or 4
DTYPES = (jnp.float32, *HALVES)

_settings = settings(
    max_examples=-(-(COUNT or 120) // SLICES),
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    print_blob=True,
)


@pytest.fixture
def clear_caches():
    yield
    if COUNT:
        jax.clear_caches()


def marks_of(part):
    """A slice is enough on the other versions of JAX, and for the fast part."""
    slow = [pytest.mark.slow] if part and not COUNT else []
    return [pytest.mark.once, *slow] if part else []


@pytest.mark.filterwarnings("ignore::flax_amp.PolicyWarning")  # nothing in half
@pytest.mark.usefixtures("clear_caches")
@pytest.mark.parametrize(
    "part", [pytest.param(i, marks=marks_of(i)) for i in range(SLICES)]
)
def test_generated_programs(part):
    transforms = Counter()

    @seed(SEED + part)
    @_settings
    @given(examples(DTYPES))
    def run(example):
        with contextlib.suppress(jax.errors.UnexpectedTracerError):  # of a closure
            check(*example)
            transforms[example[1]] += 1

    try:
        run()
    finally:
        print(f"{transforms.total()} programs of FLAX_AMP_FUZZ_SEED={SEED + part}")
        print(dict(transforms.most_common()))


FOUND = {
    "a loop that ends at another step for each element of a batch": (
        (In("while", (Op("abs"),), 1),),
        "vmap",
    ),
    "a custom_vjp in the rule of a custom_jvp, an equation with a list in it": (
        (In("custom_jvp", (In("custom_vjp", (Op("abs"),), 1),), 1),),
        "grad",
    ),
    "a rule that closes over what a branch computes": (
        (In("switch", (In("custom_vjp_closed", (Op("abs"),), 1),), 1),),
        "grad",
    ),
}


@pytest.mark.parametrize("name", FOUND)
def test_programs_that_failed_once(name):
    for dtype in DTYPES:
        check(*FOUND[name], dtype)
