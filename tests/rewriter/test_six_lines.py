"""The dtypes that the six lines of the rule ask for, over all files of the rewriter.

The lines are those of docs/policies.md. Programs are generated (`_six_programs.py`).
`_six_lines.py` reads the lines independently of the rewriter, and tells the dtypes of
each equation at every depth and the numbers that the program gives. `make fuzz` tries
as many programs with bodies as `FLAX_AMP_FUZZ` says, in slices of at most 250, and runs
a tenth as many in a line. `FOUND` has the shortest programs in which the two differed.
"""

import os

import jax
import jax.numpy as jnp
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from jax.extend.core import Literal

from _six_lines import Reading
from _six_programs import KINDS, LAYERS, arguments, function, with_bodies
from _six_programs import programs as layers_in_bodies
from benchmarks.matmuls import exact_matmuls
from flax_amp import _source, amp, default_amp_policy
from flax_amp._rewriter.transform import rewrite
from flax_amp.policy import Policy
from helpers import HALVES, exact_jit

COUNT = int(os.environ.get("FLAX_AMP_FUZZ", 0))  # 0: the same programs in every run
DRAWS = [arguments(seed) for seed in range(3)]
ARGUMENTS = DRAWS[0]


def emitted(loss, half):
    """The table of what the rewriter emits, in the form of `Reading.table`."""
    rows = {}

    def record(eqn, around, operands, results, choice):
        scopes = [name for x in (*around, eqn) for name in _source.scope_names(x)]
        pairs = zip(operands, eqn.invars, strict=True)
        read = [x.dtype.name for x, v in pairs if not isinstance(v, Literal)]
        given = [x.dtype.name for x in results]
        # JAX may trace a body twice. The equations are kept, and so are their `id`s.
        key = tuple(map(id, (*around, eqn)))
        rows[key] = (scopes, eqn.primitive.name, read, given), (*around, eqn)

    policy, dtype = Policy(default_amp_policy), jnp.dtype(half)
    jax.make_jaxpr(rewrite(loss, policy, dtype, False, record))(*ARGUMENTS)
    return [row for row, _ in rows.values()]


def grouped(table):
    """`{(scopes, primitive): dtypes of each equation}`, in order.

    A broadcast to half precision reads float32, so that its derivative adds up in that.
    Casts are left out, and calls that one side opens.
    """
    found = {}
    for scopes, name, operands, results in table:
        if name not in ("convert_element_type", "jit"):
            operands = "any" if name == "broadcast_in_dim" else operands
            found.setdefault(("/".join(scopes), name), []).append((operands, results))
    return found


def check(program, half, returned=(), *, runs=True):
    loss = function(program, returned)
    closed = jax.make_jaxpr(loss)(*ARGUMENTS)
    reading = Reading(closed)
    asked = grouped(reading.table(jnp.dtype(half).name))
    found = grouped(emitted(loss, half))
    for key in [*asked, *found]:
        text = f"{key}: {asked.get(key)} by the lines, {found.get(key)} under amp"
        assert asked.get(key) == found.get(key), text
    if runs:
        check_numbers(loss, reading, half)


def check_numbers(loss, reading, half):
    modes = (False, True)
    fns = [
        exact_matmuls(amp(loss, compute_dtype=half, recompute=recompute))
        for recompute in modes
    ]

    @exact_jit
    def run(*args):
        lines = reading.run(jax.tree.leaves(args), half)[0]
        return lines, [fn(*args)[0] for fn in fns]

    # A sum in another order may change one rounding, but not for each draw.
    draws = [run(*draw) for draw in DRAWS]
    for i, recompute in enumerate(modes):
        gaps = [abs(ours[i] - lines) / abs(lines) for lines, ours in draws]
        text = f"recompute={recompute}: relative difference of the loss {gaps}"
        assert min(gaps) < 1e-6, text


def options(count):
    return settings(
        max_examples=count,
        derandomize=not COUNT,
        database=None,
        phases=[Phase.generate, Phase.shrink],
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )


halves = st.sampled_from(HALVES)


@options(-(-COUNT // 10) or 6)
@given(layers_in_bodies(0, 12), halves)
def test_generated_programs_in_a_line(program, half):
    check(program, half)


@pytest.mark.parametrize("number", range(-(-COUNT // 250) or 1))
def test_generated_programs_with_bodies(number):
    @options(min(COUNT, 250) or 25)
    @given(with_bodies, halves)
    def slice_of_them(program, half):
        check(program[0], half, program[1], runs=False)

    slice_of_them()
    if COUNT:
        jax.clear_caches()


MATMUL, TANH = ("matmul", 0, 0, 0), ("tanh", 0, 0, 0)


def body(kind, layers, *results):
    return (kind, 0, 0, 0, (layers,), results)


FOUND = {
    "a bias of a layer outside of a body": [
        ("residual", 0, 0, 0),
        body("jit", [("dense", 0, 0, 0), MATMUL], "sum"),
    ],
    "a constant of a scan is behind a matmul": [
        MATMUL,
        body("scan", [TANH, MATMUL], "sum"),
    ],
    "the carry of a scan was behind a matmul": [
        MATMUL,
        body("scan", [TANH], "0"),
        MATMUL,
    ],
    "a carry begins at data that is masked": [
        ("mask", 0, 0, 0),
        body("scan", [MATMUL], "0"),
    ],
    "a state times what depends on its data": [
        ("step", 0, 0, 0),
        ("sum", 1, 0, 0),
        MATMUL,
    ],
}


@pytest.mark.parametrize("name", FOUND)
def test_programs_that_differed(name):
    check(FOUND[name], HALVES[len(name) % 2])


@pytest.mark.parametrize("name", LAYERS)
def test_each_layer_between_matmuls(name):
    layers = [("matmul", 0, 0, 0), (name, 0, 1, 1), ("matmul", 0, 0, 2)]
    check(layers, HALVES[len(name) % 2], runs=False)


@pytest.mark.parametrize("kind", dict.fromkeys(KINDS))
def test_each_body_between_matmuls(kind):
    inside = (("tanh", 0, 0, 0), ("residual", 0, 0, 1))
    layers = [("matmul", 0, 0, 0), (kind, 0, 0, 1, (inside, inside), ("0", "1", "sum"))]
    check([*layers, ("block", 0, 0, 2)], HALVES[len(kind) % 2])
