"""Generated programs: under `amp` they do what they do without it.

`FOUND` has the shortest programs that have failed once. `make fuzz` runs more programs,
with other seeds, and prints how many there were.
"""

import os
from collections import Counter

import jax.numpy as jnp
import pytest
from hypothesis import HealthCheck, given, seed, settings

from _fuzz_checks import check, examples
from _fuzz_language import In, Op
from flax_amp._rewriter.outline import repeats
from helpers import HALVES

COUNT = int(os.environ.get("FLAX_AMP_FUZZ", 0))  # 0: those of every run
SHARDS = 2
DTYPES = (jnp.float32, *HALVES)
DEFAULTS = {"recompute": "auto", "merge_layers": True, "reduce_dtype": None}

_settings = settings(
    max_examples=(COUNT or 200) // SHARDS,
    derandomize=not COUNT,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    print_blob=True,
)


@pytest.fixture(autouse=True)
def small_layers(monkeypatch):
    """Equal layers are merged also where that saves next to nothing."""
    monkeypatch.setattr(repeats, "_MIN_SAVED", 2)
    monkeypatch.setattr(repeats, "_MIN_COPIES", 3)


@pytest.mark.parametrize(
    "shard", [0, *(pytest.param(i, marks=pytest.mark.once) for i in range(1, SHARDS))]
)
def test_generated_programs(shard):
    seen = Counter()

    @_settings
    @given(examples(DTYPES))
    def run(example):
        seen[example[1]] += 1
        check(*example)

    (run if COUNT else seed(shard)(run))()
    print(f"{seen.total()} programs: {dict(seen.most_common())}")


FOUND = {
    "a rule that closes over a value, in a scope that stops amp": (
        (In("stop", (In("custom_vjp_rule_closed", (Op("dot"),)),)),),
        "grad",
    ),
}


@pytest.mark.parametrize("name", FOUND)
def test_programs_that_failed_once(name):
    program, transform = FOUND[name]
    for dtype in DTYPES:
        check(program, transform, dtype, DEFAULTS)
