"""`find_nonfinite` inside of structured primitives, and what is no fault at all."""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import flax_amp
from flax_amp import find_nonfinite

THIS = "tests/debug/test_nonfinite_inside.py"
LINES = (Path(__file__).parents[2] / THIS).read_text().splitlines()
W = jnp.eye(8)
BIG = jnp.ones((4, 8)).at[2, 5].set(200.0)
ZERO = jnp.ones((4, 8)).at[2, 5].set(0.0)
HUGE = jnp.ones((4, 8)).at[2, 5].set(6e4)

search = functools.partial(find_nonfinite, compute_dtype=jnp.float32)
in_float16 = functools.partial(find_nonfinite, compute_dtype=jnp.float16)


def line(mark):
    """The line of this file that ends with a mark."""
    (number,) = [n for n, text in enumerate(LINES, 1) if text.endswith(f"# {mark}")]
    return f"{THIS}:{number}"


# --- faults --------------------------------------------------------------------------


def exp(x):
    with jax.named_scope("bad"):
        return jnp.exp(x)  # exp


def sqrt(x):
    with jax.named_scope("bad"):
        return jnp.sqrt(x)  # sqrt


def product(x):
    with jax.named_scope("bad"):
        return x @ (W + 1)  # product


# fault -> its input, its primitive, its pass
FAULTS = {
    exp: (BIG, "exp", "forward"),
    sqrt: (ZERO, "div", "backward"),
    product: (HUGE, "dot_general", "forward"),
}

# --- structures ----------------------------------------------------------------------


def plain(f, y):
    return f(y)


def scan(f, y):
    def body(c, i):
        with jax.named_scope("layer"):
            return c + f(jnp.where(i == 2, y, 1.0)), i

    return jax.lax.scan(body, y * 0, jnp.arange(5))[0]


def stacked(f, y):
    """The fault is in a stacked result, and the loop runs backwards."""

    def body(c, i):
        return c, f(jnp.where(i == 2, y, 1.0))

    return jax.lax.scan(body, y * 0, jnp.arange(5), reverse=True)[1]


def while_loop(f, y):
    s = jax.lax.stop_gradient(y)

    def body(carry):
        i, c = carry
        return i + 1, c + f(jnp.where(i == 2, s, 1.0))

    loop = jax.lax.while_loop(lambda carry: carry[0] < 5, body, (0, s * 0))
    return y * 0 + loop[1]


def cond(f, y):
    return jax.lax.cond(y.sum() > 0, f, lambda y: y, y)


def checkpoint(f, y):
    return jax.checkpoint(lambda y: jnp.sin(f(y) * 2))(y)


def custom_jvp(f, y):
    @jax.custom_jvp
    def g(y):
        return f(y)

    g.defjvp(lambda p, t: (g(*p), jax.jvp(f, p, t)[1]))
    return g(y)  # rule


def custom_vjp(f, y):
    @jax.custom_vjp
    def g(y):
        return f(y)

    g.defvjp(lambda y: (f(y), y), lambda y, ct: (jax.vjp(f, y)[1](ct)[0],))
    return g(y)


def sharded(f, y):
    mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Auto,))

    def part(y):
        return f(y) * 2 + 0 * jax.lax.psum(jnp.minimum(y, 1).sum(), "d")

    mapped = jax.shard_map(part, mesh=mesh, in_specs=P("d"), out_specs=P("d"))
    return mapped(y)  # sharded


def nested(f, y):
    branch = functools.partial(cond, f)
    return jax.jit(lambda y: scan(lambda z: jax.checkpoint(branch)(z), y))(y)


THIRD, DEVICES = "scan iteration 3 of 5", "one of 4 devices"
# structure -> what is around the fault
STRUCTURES = {
    plain: (),
    scan: (THIRD,),
    stacked: (THIRD,),
    while_loop: ("while iteration 3",),
    cond: ("branch 1 of 2",),
    checkpoint: (),
    custom_jvp: (),
    custom_vjp: (),
    sharded: (DEVICES,),
    nested: (THIRD, "branch 1 of 2"),
}


# A while loop has no backward pass, and a product is like an exp.
CASES = [
    # Programs of the backward pass are larger: one version of JAX has them all.
    pytest.param(
        structure,
        fault,
        marks=pytest.mark.once if fault is sqrt and structure is not plain else (),
    )
    for structure in STRUCTURES
    for fault in FAULTS
    if (structure, fault) != (while_loop, sqrt)
    and (fault is not product or structure in (plain, scan, cond, sharded))
]


@pytest.mark.parametrize(
    "structure, fault", CASES, ids=lambda f: getattr(f, "__name__", "")
)
def test_each_structure_shows_the_fault(structure, fault):
    x, primitive, pass_ = FAULTS[fault]

    def loss(w, x):
        return structure(fault, x * w[0, 0]).mean()

    options = dict(compute_dtype=jnp.float16) if fault is product else {}
    found = search(loss, **options)(W, x)
    finding = found.finding
    assert ("backward" if finding.backward else "forward") == pass_
    # The third of five, also if a backward pass goes the other way.
    inside = tuple(x.removesuffix(" (reverse)") for x in finding.inside)
    assert inside == STRUCTURES[structure] and finding.kind == "inf"
    assert found.verdict == ("precision" if fault is product else "mathematics")
    if DEVICES in inside:  # a `shard_map` is named as a whole
        assert (finding.primitive, finding.source) == ("shard_map", line("sharded"))
        return
    is_rule = structure is custom_jvp and fault is sqrt  # JAX has the line of its call
    assert finding.primitive == primitive and found.examples == (2,)
    assert finding.source == line("rule" if is_rule else fault.__name__)
    layers = "layer/" if structure in (scan, nested) else ""
    assert finding.path == f"{layers}bad"


# --- what is no fault ----------------------------------------------------------------


def masked_softmax(y):
    y = jnp.where(jnp.arange(8) > 3, y, -jnp.inf)
    return jax.nn.softmax(y, axis=-1).var()


def largest(y):
    start = jnp.full((4,), -jnp.inf)
    return jax.lax.scan(lambda c, x: (jnp.maximum(c, x), None), start, y.T)[0].sum()


def safe_log(y):
    ok = y > 0.5
    return jnp.where(ok, jnp.log(jnp.where(ok, y - 0.5, 1.0)), 0.0).sum()


def discarded(y):
    return jnp.where(y > -1, y, jax.lax.stop_gradient(jnp.log(y * 0))).sum()


def empty_rows(y):
    z = jnp.where(jnp.arange(4)[:, None] > 0, y, -jnp.inf)
    sums = jax.nn.logsumexp(z, axis=-1)
    return jnp.where(jnp.isfinite(sums), sums, 0.0).sum()


def reciprocal(y):
    return y.sum() + (1 / jax.lax.stop_gradient(jnp.exp(y * 1e4))).sum()


def indices(y):
    z = jnp.where(y > 0.5, y, -jnp.inf)
    return y[jnp.arange(4), jnp.argmax(z, axis=-1)].sum()


def random(y):
    key = jax.random.key(0)
    return (y * jax.random.bernoulli(key, 0.5, y.shape)).sum() + jax.random.normal(key)


def printed(y):
    jax.debug.callback(lambda x: None, y.sum())
    return y.sum()


def aux_only(y):
    return y.sum(), {"logits": jnp.where(y > 0.5, y, -jnp.inf), "count": 3}


@pytest.mark.parametrize(
    "fun",
    [masked_softmax, largest, safe_log, discarded, empty_rows, reciprocal, indices]
    + [random, printed, aux_only],
    ids=lambda f: f.__name__,
)
def test_no_false_alarm(fun):
    found = search(lambda w, x: jax.jit(fun)(x @ w))(W, ZERO + 0.1)
    assert found.verdict == "nothing", str(found)


# --- where it comes from -------------------------------------------------------------


def test_a_mask_is_named_but_not_blamed():
    """Each row of the mask is `-inf`, which the program turns into a NaN."""

    def attend(w, x, mask):
        z = x @ w + mask
        e = jnp.exp(z - z.max(-1, keepdims=True))  # mask
        return (e / e.sum(-1, keepdims=True)).var()

    mask = jnp.zeros((4, 8)).at[2].set(-jnp.inf)
    found = search(attend)(W, ZERO, mask)
    assert found.verdict == "mathematics" and found.finding.source == line("mask")
    assert found.finding.text == "sub(-inf, -inf) = nan"
    assert found.inputs == {"mask": "-inf in mask[2, 0] (8 elements)"}
    assert found.examples == (2,)
    found = search(attend)(W, ZERO, -mask)
    assert found.verdict == "inputs" and found.inputs["mask"].startswith("inf")


def test_constants():
    def loss(w, x):
        return jnp.maximum(x @ w, jnp.inf).sum()  # constant

    found = search(loss)(W, ZERO)
    assert found.finding.primitive == "constant" and found.finding.kind == "inf"
    assert found.verdict == "mathematics" and found.finding.source == line("constant")
    table = np.array([1.0, np.nan], np.float32)
    found = search(lambda w, x: (x @ w).sum() * table[:1].sum() + table.sum())(W, ZERO)
    assert found.verdict == "mathematics" and found.finding.kind == "NaN"


def test_a_derivative_that_a_where_drops():
    def loss(w, x):
        y = x @ w
        return jnp.where(y > 0, jnp.log(y), 0.0).sum()  # where

    found = search(loss)(W, ZERO)
    assert found.finding.backward and found.finding.source == line("where")
    assert found.finding.text == "div(0, 0) = nan" and found.examples == (2,)
    assert found.verdict == "mathematics" and "jnp.where(ok, f(" in found.advice
    assert found.reached == ("gradient of w",)


def test_the_first_of_several():
    """A NaN made of an overflow inherits its cause."""

    def loss(w, x):
        y = jnp.exp(x @ w)  # overflow
        return (y - y).sum()

    found = search(loss)(W, BIG)
    assert found.finding.source == line("overflow") and found.finding.kind == "inf"


def beside_a_mask(x):
    return jnp.exp(jnp.where(x == 0, -jnp.inf, x)) * 3


def dropped_before(x):
    """The -inf of the log does not pass the exp."""
    return jnp.exp(jnp.log(x) * 40)


def of_the_other_branch(x):
    return jnp.where(x == 1, jnp.log(x), jnp.exp(x))


def in_a_product(x):
    z = jnp.where(jnp.arange(4)[:, None] == 0, jnp.inf, x)
    return jnp.where(jnp.arange(4)[:, None] == 0, 0, (z * 1e36) @ (W + 1))


@pytest.mark.parametrize(
    "f, primitive",
    [
        (beside_a_mask, "exp"),
        (dropped_before, "exp"),
        (of_the_other_branch, "exp"),
    ],
)
def test_what_is_new_beside_other_infs(f, primitive):
    """A mask, or an inf that goes nowhere, does not hide an overflow."""
    x = BIG.at[2, 1].set(0.0)
    found = search(lambda w, x: f(x * w[0, 0]).max())(W, x)
    finding = found.finding
    assert (finding.primitive, finding.kind, finding.bad) == (primitive, "inf", 1)
    assert found.examples == (2,)


def test_which_axis_is_that_of_the_batch():
    def loss(w, stats, x):
        return jnp.log(x @ w + 0 * stats["mean"][None]).sum()

    x = jnp.ones((4, 8)).at[2].set(0.0)
    stats = {"mean": jnp.ones(8), "count": jnp.ones(3)}  # of no common size
    assert search(loss)(W, stats, x).examples == (2,)
    stats["count"] = jnp.ones(8)  # of another argument
    assert search(loss)(W, stats, x).examples == (2,)
    found = search(lambda w, x: jnp.log(w * x.sum()).sum())(W, jnp.ones((8, 8)))
    assert found.examples == ()  # the shape is that of the parameter


def test_an_index_out_of_range():
    found = search(lambda w, i: w[i].sum())(W, jnp.array([1, 2]))
    assert found.verdict == "nothing"
    found = search(lambda w, i: w.at[i].get(mode="fill").sum())(W, jnp.array([1, 99]))
    assert found.finding.primitive.endswith(("gather", "lookup"))
    assert "index out of range" in found.advice


def test_complex_and_integer_arguments():
    def loss(params, x):
        z = jnp.log(params["z"] * x)
        return jnp.real(z).sum() + params["n"]

    params = {"z": jnp.array([1 + 1j, 0j]), "n": jnp.array(3)}
    found = search(loss)(params, jnp.ones(2))
    assert found.finding.primitive == "log"
    assert found.verdict == "mathematics"


def test_an_opaque_primitive_is_reported_whole():
    def loss(w, x):
        solve = jax.lax.custom_linear_solve(
            lambda v: v * w[0, 1], x, lambda _, b: b / w[0, 1], symmetric=True
        )
        return solve.sum()

    found = search(loss)(W, ZERO)
    assert found.finding.primitive == "custom_linear_solve"
    assert found.verdict == "mathematics"


@pytest.mark.parametrize("reverse", [False, True])
def test_iterations_count_as_they_run(reverse):
    def loss(w, x):
        def body(c, row):
            return c + jnp.log(row @ w).sum(), None

        return jax.lax.scan(body, 0.0, x, reverse=reverse)[0]

    found = search(loss)(W, jnp.ones((4, 8)).at[2].set(0.0))
    text = "scan iteration 2 of 4 (reverse)" if reverse else "scan iteration 3 of 4"
    assert found.finding.inside == (text,)


def test_functions_that_compute_in_half_or_are_rewritten_already():
    def loss(w, x):
        return (x @ w * 1e5).astype(jnp.float16).sum()

    found = in_float16(loss)(W, jnp.ones((4, 8)))
    assert "The code itself computes in float16 there: leave out" in found.advice
    for fun in (flax_amp.amp(loss), lambda w, x: flax_amp.amp(loss)(w, x)):
        with pytest.raises(TypeError, match="expected the function before amp"):
            find_nonfinite(fun)(W, W)


def test_a_loss_that_is_a_number():
    assert find_nonfinite(lambda w: 1.0)(W).verdict == "nothing"


def test_a_mesh_with_explicit_axes():
    mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Explicit,))
    x = jax.device_put(ZERO, jax.NamedSharding(mesh, P("d")))
    w = jax.device_put(W, jax.NamedSharding(mesh, P()))
    found = find_nonfinite(lambda w, x: jnp.log(x @ w).sum() * 2)(w, x)
    assert found.verdict == "mathematics" and found.finding.text == "log(0) = -inf"
    assert "keep its operand above 0" in found.advice


@pytest.mark.filterwarnings("ignore::flax_amp.PolicyWarning")
@pytest.mark.parametrize(
    "scope, given, policy",
    [
        ("bad", None, 'flax_amp.default_amp_policy | {"net/bad": jnp.float32}'),
        ("bad[1]", None, 'flax_amp.default_amp_policy | {"net/bad[[]1]": jnp.float32}'),
        ("bad", "net/bad", 'your_policy | {"net/bad": jnp.float32}'),
    ],
)
def test_a_policy_that_is_tried_is_in_force(scope, given, policy):
    def loss(w, x):
        with jax.named_scope("net"):
            with jax.named_scope(scope):
                y = jnp.tanh(x @ w) * 60000.0 @ w
            return jnp.mean(jnp.log(jnp.abs(y)))

    args = jnp.ones((8, 8)), jnp.ones((4, 8))
    names = {"flax_amp": flax_amp, "jnp": jnp}
    if given:
        own = {given: flax_amp.use_compute_precision}
        names["your_policy"] = flax_amp.default_amp_policy | own
    found = in_float16(loss, amp_policy=names.get("your_policy"))(*args)
    assert found.advice.endswith(f"amp_policy={policy}"), found.advice
    mended = in_float16(loss, amp_policy=eval(policy, names))(*args)
    assert mended.verdict == "nothing"
