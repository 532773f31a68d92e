"""Generated programs: under `amp` they do what they do without it.

`FOUND` has the shortest programs that have failed once. `make fuzz` runs more programs
in slices of at most 250, so that a failure ends its slice only, and the memory of a
slice is given back. Each slice prints its seed and what it has drawn: with
`FLAX_AMP_FUZZ=250` and that `FLAX_AMP_FUZZ_SEED`, the same programs run again.
"""

import os
import time
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from _fuzz_checks import check, check_fp8, examples, options, programs
from _fuzz_language import In, Layers, Op, names
from _fuzz_twins import GRADIENTS, beside_twin
from helpers import HALVES

COUNT = int(os.environ.get("FLAX_AMP_FUZZ", 0))  # 0: those of every run
SEED = int(os.environ.get("FLAX_AMP_FUZZ_SEED", 1000 * time.time() if COUNT else 0))
SLICES = -(-COUNT // 250) or 4
DTYPES = (jnp.float32, *HALVES)
DEFAULTS = {"recompute": True}

_settings = settings(
    max_examples=-(-(COUNT or 200) // SLICES),
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
    transforms, nodes, primitives = Counter(), Counter(), Counter()

    @seed(SEED + part)
    @_settings
    @given(examples(DTYPES))
    def run(example):
        program, transform, *_ = example
        try:
            primitives.update(check(*example))
        except jax.errors.UnexpectedTracerError:  # a rule closes over a value
            return
        transforms[transform] += 1
        nodes.update(names(program))

    try:
        run()
    finally:
        print(f"{transforms.total()} programs of FLAX_AMP_FUZZ_SEED={SEED + part}")
        for drawn in (transforms, nodes, primitives):
            print(dict(drawn.most_common()))


@pytest.mark.usefixtures("clear_caches")
@pytest.mark.parametrize(
    "part", [pytest.param(i, marks=marks_of(i)) for i in range(SLICES if COUNT else 1)]
)
def test_generated_programs_in_fp8(part):
    transforms, found = Counter(), Counter()

    @seed(SEED + part)
    @_settings
    @given(examples(HALVES))
    def run(example):
        program, transform, dtype, options, _ = example
        transforms[transform] += 1
        found["products in fp8"] += check_fp8(program, transform, dtype, options)

    try:
        run()
    finally:
        print(f"{transforms.total()} programs of FLAX_AMP_FUZZ_SEED={SEED + part}")
        print(dict(transforms.most_common()), dict(found))


@pytest.mark.slow
@pytest.mark.once
@pytest.mark.usefixtures("clear_caches")
def test_errors_beside_those_of_twins():
    """Derivatives are as near to float32 as if products alone were cast, on average.

    The arrays have sixteen elements, so one program tells little.
    """
    found = []

    @seed(SEED)
    @settings(_settings, max_examples=COUNT // 4 or 80)
    @given(st.tuples(programs(), *map(st.sampled_from, (GRADIENTS, HALVES)), options))
    def run(example):
        found.append((beside_twin(*example), example))

    run()
    ratios = np.array([ratio for ratio, _ in found])
    mean = np.exp(np.mean(np.log(ratios)))
    print(
        f"{len(found)} programs of FLAX_AMP_FUZZ_SEED={SEED}: {mean:.3f} of the twins"
    )
    for ratio, example in sorted(found, key=lambda pair: -pair[0])[:5]:
        print(f"{ratio:.2f}: {example}")
    assert mean <= 1.1
    assert np.mean(ratios > 2) <= 0.05


FOUND = {
    "a loop that ends at another step for each element of a batch": (
        (In("while", (Op("abs"),), 1),),
        "vmap",
    ),
    "a custom gradient in a checkpoint, which leaks tracers without amp": (
        (In("checkpoint", (In("custom_gradient", (Op("abs"),), 1),)),),
        "grad",
        "leaks",
    ),
    "a custom gradient in a vmap, which leaks tracers without amp": (
        (In("vmap_weights", (In("custom_gradient", (Op("abs"),), 1),), 1),),
        "forward",
        "leaks",
    ),
    "a custom gradient whose own jaxpr leaks tracers without amp": (
        (In("custom_gradient", (Op("abs"),), 1),),
        "grad",
        "leaks",
    ),
    "a custom_vjp in the rule of a custom_jvp, an equation with a list in it": (
        (In("custom_jvp", (In("custom_vjp", (Op("abs"),), 1),), 1),),
        "grad",
    ),
    "a rule that closes over what a branch computes, which JAX cannot lower": (
        (In("switch", (In("custom_vjp_closed", (Op("abs"),), 1),), 1),),
        "grad",
        "export",
    ),
    "a gradient that cancels out": (
        (Op("log_softmax"), Layers((Op("log_softmax"),), "activation", 7)),
        "grad of checkpoint of grad",
    ),
}


@pytest.mark.parametrize("name", FOUND)
def test_programs_that_failed_once(name):
    program, transform, *extra = FOUND[name]
    for dtype in DTYPES:
        check(program, transform, dtype, DEFAULTS, *extra)
