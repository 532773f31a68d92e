"""`find_nonfinite` inside of a `shard_map`: the line, the numbers, and which device."""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from _programs import with_jvp, with_vjp
from flax_amp import find_nonfinite

THIS = "tests/debug/test_devices.py"
LINES = (Path(__file__).parents[2] / THIS).read_text().splitlines()
W, ROWS = jnp.eye(8), P("data")
ONES = jnp.ones((16, 8))
BIG, ZERO = ONES.at[11, 5].set(200.0), ONES.at[11, 5].set(0.0)
THIRD = "device data=2 of 4"  # it has the examples 8 to 11

search = functools.partial(find_nonfinite, compute_dtype=jnp.float32)


def line(mark):
    """The line of this file that ends with a mark."""
    (number,) = [n for n, text in enumerate(LINES, 1) if text.endswith(f"# {mark}")]
    return f"{THIS}:{number}"


def mesh_of(**sizes):
    names, types = tuple(sizes), (AxisType.Auto,) * len(sizes)
    return jax.make_mesh(tuple(sizes.values()), names, axis_types=types)


def over_devices(part, spec=ROWS, mesh=None, **options):
    """A loss that runs a function of the weights and of a part of the batch."""
    mesh = mesh or mesh_of(data=4)

    def loss(w, x):
        options.update(mesh=mesh, in_specs=(P(), spec), out_specs=spec)
        return jax.shard_map(part, **options)(w, x * w[0, 0]).mean()

    return loss


# --- programs ------------------------------------------------------------------------


def exp(y):
    with jax.named_scope("bad"):
        return jnp.exp(y)  # exp


def sqrt(y):
    with jax.named_scope("bad"):
        return jnp.sqrt(y)  # sqrt


def place():
    return lax.axis_index("data")


def neighbor(y):
    return lax.ppermute(y, "data", [(i, (i + 1) % 4) for i in range(4)])


def plain(f, w, y):
    return f(y @ w) * 2


def statistics(f, w, y):
    return f(y) - lax.pmean(jnp.minimum(y, 1.0).mean(), "data")


def ring(f, w, y):
    gathered = lax.all_gather(jnp.minimum(y, 1.0), "data")
    exchanged = lax.all_to_all(jnp.minimum(y, 1.0), "data", 0, 0)
    return f(neighbor(y)) + 0 * gathered.sum() + 0 * exchanged


def jit(f, w, y):
    return jax.jit(f)(y)


def checkpoint(f, w, y):
    return jax.checkpoint(lambda y: jnp.sin(f(y) * 2))(y)


def custom_jvp(f, w, y):
    return with_jvp(f)(y)  # custom_jvp


def custom_vjp(f, w, y):
    return with_vjp(f)(y)  # custom_vjp


def scan(f, w, y):
    def body(c, i):
        mean = lax.pmean(jnp.minimum(c, 1.0).mean(), "data")
        return c + f(jnp.where(i == 1, y, 1.0)) - 0 * mean, None

    return lax.scan(body, y * 0, jnp.arange(3))[0]


def stacked(f, w, y):
    """Each iteration asks all devices; the fault is in a stacked result."""

    def body(c, row):
        mean = lax.pmean(jnp.minimum(row, 1.0), "data")
        return c + mean, f(row) - mean

    return lax.scan(body, y[0] * 0, y)[1]


def cond(f, w, y):
    return lax.cond(y[0, 0] > 0, f, lambda y: y, y)


def apart(f, w, y):
    """One device alone takes the branch."""
    return lax.cond(place() == 2, f, lambda y: y, y)


def apart_together(f, w, y):
    """What a branch asks of its devices cannot be asked of one of them."""
    return lax.cond(place() == 2, lambda y: f(y) + 0 * place(), lambda y: y, y)  # both


def nested(f, w, y):
    branch = jax.jit(functools.partial(apart, f, w))
    return scan(lambda z: jax.checkpoint(branch)(z), w, y)


def mapped(f, w, y):
    return jax.vmap(lambda row: f(row) * 2)(y)


def masked(f, w, y):
    """The mask of each device is no cause."""
    mask = jnp.where(jnp.arange(8) > 3, 0.0, -jnp.inf)[None]
    return f(y) * jnp.exp(jnp.minimum(y + mask, 0.0))


ITERATION = "scan iteration 2 of 3"  # in both passes
BRANCH = "branch 1 of 2"
# program -> what is around the fault, and the example of the batch
PROGRAMS = {
    plain: ((THIRD,), (11,)),
    statistics: ((THIRD,), (11,)),
    ring: (("device data=3 of 4",), ()),  # its example came from another device
    jit: ((THIRD,), (11,)),
    checkpoint: ((THIRD,), (11,)),
    custom_jvp: ((THIRD,), (11,)),
    custom_vjp: ((THIRD,), (11,)),
    scan: ((THIRD, ITERATION), (11,)),
    stacked: ((THIRD, "scan iteration 4 of 4"), ()),
    cond: ((THIRD, BRANCH), (11,)),
    apart: ((THIRD, BRANCH), (11,)),
    apart_together: ((THIRD,), (11,)),
    nested: ((THIRD, ITERATION, BRANCH), (11,)),
    mapped: ((THIRD,), (11,)),
    masked: ((THIRD,), (11,)),
}


# program -> its faults, each with `check_vma`, which changes the types of variables.
# `Devices` reads these types equation by equation, so that no pair of a program and a
# value has code of its own. Loops, branches and collectives have both values, and both
# passes. A program with one pass has a single equation around the fault, and `nested`
# shows a branch, a loop and a `checkpoint` in both passes. The rules of `custom_jvp`
# and `custom_vjp` have their own line in the backward pass only.
FAULTS = {
    plain: {exp: True, sqrt: False},
    statistics: {sqrt: True},
    ring: {exp: True, sqrt: False},
    jit: {exp: False},
    checkpoint: {sqrt: False},
    custom_jvp: {sqrt: True},
    custom_vjp: {sqrt: False},
    scan: {exp: True},
    stacked: {sqrt: False},
    cond: {exp: False},
    apart: {exp: True},
    apart_together: {sqrt: True},
    nested: {exp: False, sqrt: True},
    mapped: {sqrt: True},
    masked: {exp: False},
}
CASES = [
    pytest.param(
        *(program, fault, check_vma),
        # Programs of the backward pass are larger: one version of JAX has them all.
        marks=() if fault is exp or program in (plain, ring) else pytest.mark.once,
    )
    for program, faults in FAULTS.items()
    for fault, check_vma in faults.items()
]


@pytest.mark.parametrize(
    "program, fault, check_vma", CASES, ids=lambda f: getattr(f, "__name__", None)
)
def test_the_line_and_the_device(program, fault, check_vma):
    part = functools.partial(program, fault)
    is_forward = fault is exp
    found = search(over_devices(part, check_vma=check_vma))(
        W, BIG if is_forward else ZERO
    )
    finding, (inside, examples) = found.finding, PROGRAMS[program]
    assert found.verdict == "mathematics" and finding.kind == "inf"
    assert finding.backward is not is_forward and found.examples == examples
    around = tuple(x.removesuffix(" (reverse)") for x in finding.inside)
    if program is stacked and not is_forward:
        around = around[:1], "scan iteration 1 of 4"  # the loop runs backwards
        inside = inside[:1], "scan iteration 1 of 4"
    assert around == inside
    if program is apart_together:
        assert (finding.primitive, finding.source) == ("cond", line("both"))
        return
    # JAX has the line of the call of a rule.
    is_rule = program in (custom_jvp, custom_vjp) and not is_forward
    marked = program if is_rule else fault
    assert finding.source == line(marked.__name__)
    assert finding.primitive == ("exp" if is_forward else "div")
    assert finding.path == "bad" and finding.bad == 1


# --- what a message says -------------------------------------------------------------

# A test with one value of `check_vma` is about words, which have no types.


def test_all_numbers_are_those_of_one_device():
    """Each device has another largest number, and two have a fault."""
    scales = jnp.repeat(jnp.array([5.0, 100.0, 7.0, 300.0]), 4)[:, None]
    x = jnp.ones((16, 8)).at[:, 0].set(0.0) * scales

    def part(w, y):
        with jax.named_scope("net"):
            return jnp.exp(y) / lax.psum(jnp.exp(-y).sum(), "data")  # net

    text = str(search(over_devices(part))(W, x)).splitlines()
    assert text[2:6] == [
        "exp made inf in the forward pass, net, device data=1 and 1 more of 4, "
        + line("net"),
        "  28 of 32 elements of f32[4,8], such as exp(100) = inf",
        "  operands: f32[4,8] up to 100",
        "  examples 4, 5, 6, 7, 12, 13, 14, 15 of the batch",
    ]


@pytest.mark.parametrize("check_vma", [True, False])  # JAX has two sums over devices
def test_a_sum_over_devices_overflows(check_vma):
    def part(w, y):
        total = lax.psum((y[:1] * 3e4).astype(jnp.float16), "data")  # total
        return y * total.astype(jnp.float32)

    finding = search(over_devices(part, check_vma=check_vma))(W, ONES).finding
    assert "psum" in finding.primitive and finding.source == line("total")
    assert finding.inside == ("device data=0 and 3 more of 4",)
    assert finding.operands == ("f16[1,8] up to 3e+04", "f16[1,8]")


def test_the_precision_and_the_policy():
    def part(w, y):
        with jax.named_scope("fine"):
            y = y @ w
        with jax.named_scope("large"):
            return jnp.tanh((y * 1e5) @ w)

    found = search(over_devices(part, check_vma=False), compute_dtype=jnp.float16)
    report = found(W, ONES)
    assert report.verdict == "precision" and report.policy == {"large": "float32"}
    assert report.finding.what == "the cast to float16 of the result of mul"


def test_a_bad_example():
    found = search(over_devices(lambda w, y: jnp.tanh(y @ w), check_vma=False))(
        W, ONES.at[11, 5].set(jnp.nan)
    )
    assert found.verdict == "inputs" and found.examples == (11,)


def test_a_parameter_has_no_examples():
    """Each device has as many examples as the parameter has rows."""

    def part(w, y):
        return y @ jnp.exp(200 * w)

    found = search(over_devices(part))(W, jnp.ones((32, 8)))
    assert found.finding.operands[-1] == "f32[8,8] up to 1" and not found.examples


def test_devices_of_two_axes():
    """Their order in the batch is not that of the mesh."""
    options = dict(mesh=mesh_of(data=4, model=2))
    part = lambda w, y: exp(y)  # noqa: E731
    found = search(over_devices(part, P(("model", "data")), **options))(W, BIG)
    assert found.finding.inside == ("device data=1 model=1 of 8",)
    assert found.examples == (11,) and found.finding.operands[0] == "f32[2,8] up to 200"
    # Both devices of `model` have the same examples.
    found = search(over_devices(part, **options))(W, BIG)
    assert found.finding.inside == ("device data=2 model=0 and 1 more of 8",)
    assert found.examples == (11,)
    # XLA splits the arrays along `model`, as it likes.
    found = search(over_devices(part, axis_names={"data"}, **options))(W, BIG)
    assert found.finding.inside == ("group of devices data=2 of 4",)


def test_a_followed_device_has_its_own_examples():
    """Two devices go apart from others. The message is about the first one."""

    def part(w, y):
        return lax.cond(place() % 2 == 1, exp, lambda y: y, y)

    x = jnp.full((16, 8), 100.0)
    found = search(over_devices(part, check_vma=False))(W, x)
    assert found.finding.inside == ("device data=1 of 4", BRANCH)
    assert found.examples == (4, 5, 6, 7) and found.finding.bad == 32


def test_devices_leave_a_loop_one_after_the_other():
    def part(w, y):
        last = y.max() / 100  # the third device has two iterations, others none

        def body(carry):
            i, z = carry
            return i + 1, exp(z)

        start = 0 * last, lax.stop_gradient(y)
        return y + lax.while_loop(lambda carry: carry[0] < last - 1, body, start)[1]

    found = search(over_devices(part))(W, BIG)
    assert found.finding.source == line("exp") and found.examples == (11,)
    assert found.finding.inside == (THIRD, "while iteration 1")


@pytest.mark.parametrize("number, check_vma", [(0, True), (2, True), (2, False)])
def test_a_value_that_jax_takes_for_the_same_on_all_devices(number, check_vma):
    """With `check_vma`, the result of such a `cond` has no axis along which it varies.

    The types of JAX alone do not tell what a device has.
    """

    def part(w, y):
        divisor = lax.cond(place() == number, lambda: 0.0, lambda: 1.0)
        return y * (1 / divisor)  # divisor

    found = search(over_devices(part, check_vma=check_vma))(W, ONES)
    finding = found.finding
    assert finding.source == line("divisor") and finding.text == "div(1, 0) = inf"
    assert finding.inside == (f"device data={number} of 4",)


# --- where the mesh comes from -------------------------------------------------------


@pytest.mark.parametrize(
    "kind, program, inside",
    [(AxisType.Auto, jit, ()), (AxisType.Explicit, scan, (ITERATION,))],
)
def test_a_mesh_of_the_context(kind, program, inside):
    """Some equations, such as `axis_index`, have no operand that tells the mesh."""

    def loss(w, x):
        part = lambda y: program(exp, w, y + 0 * place())  # noqa: E731
        return jax.shard_map(part, in_specs=P("data"), out_specs=P("data"))(x).sum()

    with jax.set_mesh(jax.make_mesh((4,), ("data",), axis_types=(kind,))):
        found = search(lambda w, x: loss(w, x) * w.sum())(
            W, jax.device_put(BIG, P("data"))
        )
    assert found.finding.source == line("exp") and found.examples == (11,)
    assert found.finding.inside == (THIRD, *inside)


def test_pmap():
    def loss(w, x):
        part = lambda y: exp(y) - lax.pmean(y, "i")  # noqa: E731
        return w.sum() * jax.pmap(part, axis_name="i")(x.reshape(4, 4, 8)).sum()

    finding = search(loss)(W, BIG).finding
    assert finding.source == line("exp")
    assert finding.inside == ("device i=2 of 4",)


# --- what is named as a whole --------------------------------------------------------


def test_a_shard_map_in_another_one():
    """The outer one is gone into; the line is that of the inner one."""

    def part(w, y):
        specs = dict(in_specs=P("model"), out_specs=P("model"))
        options = dict(axis_names={"model"})
        return jax.shard_map(exp, **specs, **options)(y)  # inner

    options = dict(mesh=mesh_of(data=4, model=2))
    found = search(over_devices(part, axis_names={"data"}, **options))(W, BIG)
    finding = found.finding
    assert (finding.primitive, finding.source) == ("shard_map", line("inner"))
    assert finding.inside == ("group of devices data=2 of 4", "one of 8 devices")
    assert finding.operands[0] == "f32[4,8] up to 200"


def test_an_equation_that_cannot_run_alone():
    """A reference lives in one program."""

    def part(w, y):
        ref = jax.new_ref(y * 0)
        ref[...] = y
        return exp(ref[...])

    found = search(over_devices(part, check_vma=False))(W, BIG)
    assert found.finding.primitive == "shard_map" and found.examples == (11,)
    assert found.finding.inside == ("one of 4 devices",)
