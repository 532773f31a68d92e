"""`find_nonfinite` on planted faults: where each is, why, and what fixes it."""

import functools
import json
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import flax_amp
from debug._nets import PATHS, linen, of_nnx, plain
from flax_amp import AmpTrainState, find_nonfinite
from flax_amp.debug._trial import Part, keys_of

THIS = "tests/debug/test_nonfinite.py"
LINES = (Path(__file__).parents[2] / THIS).read_text().splitlines()
X, EYE = jnp.ones((4, 8)), jnp.eye(8)
ZERO = X.at[2, 5].set(0.0)

in_float16 = functools.partial(find_nonfinite, compute_dtype=jnp.float16)


def line(mark):
    """The line of this file that ends with a mark."""
    (number,) = [n for n, text in enumerate(LINES, 1) if text.endswith(f"# {mark}")]
    return f"{THIS}:{number}"


# --- faults in a layer, of Linen, of NNX and of a plain function ----------------------


def matmul(x):
    return x @ (1e3 * EYE) @ (1e3 * EYE) * 1e-6  # matmul


def cast(x):
    return jnp.tanh((x * 1e5) @ EYE)  # cast


def exp(x):
    return jnp.exp(x * 300 + 80)  # exp


def log(x):
    return jnp.log(x - x[:, :1])  # log


def root(x):
    return jnp.sqrt(jnp.sum((x - x) ** 2, -1, keepdims=True)) + x  # root


def search(make, fault, precision, **options):
    """Finds the fault of a network: of a state, of a pair, or of a function."""
    apply, first = make(fault)

    def loss_fn(first, batch):
        first = {"params": first} if make is linen else first
        return 1e-3 * jnp.mean(apply(first, batch))

    batch = jax.random.normal(jax.random.key(0), (4, 8))
    if make is linen:
        trained = AmpTrainState.create(
            params=first["params"], tx=optax.sgd(0.1), precision=precision
        )
        return find_nonfinite(trained, loss_fn, batch, scale=1.0, **options)
    options["precision"] = precision
    if make is plain:
        return find_nonfinite(loss_fn, **options)(first, batch)
    pair = first, nnx.Optimizer(first, optax.sgd(0.1), wrt=nnx.Param)
    return find_nonfinite(pair, loss_fn, batch, **options)


# fault: what made it, backward, kind, verdict in float16 and in others, advice
FAULTS = {
    matmul: ("dot_general", False, "inf", "precision", "nothing", "fixes it:"),
    cast: ("convert_element_type", False, "inf", "precision", "nothing", "fixes it:"),
    exp: ("exp", False, "inf", "mathematics", "mathematics", "subtract the max"),
    log: ("log", False, "-inf", "mathematics", "mathematics", "operand above 0"),
    root: ("div", True, "inf", "mathematics", "mathematics", "an epsilon inside"),
    abs: ("", False, "", "nothing", "nothing", "are finite"),
}


PRECISIONS = "16-mixed", "bf16-mixed", "32-true"
# Each fault in each kind of network and in each precision, and each kind of network in
# each precision. Each kind of network only hands the precision on, and the precision
# alone decides the verdict: no further case has code of its own.
PLANTED = [
    (make, fault, PRECISIONS[(i + j) % 3])
    for i, fault in enumerate(FAULTS)
    for j, make in enumerate(PATHS)
]
# Each kind of network has a policy to fix a fault: `linen` and `plain` have one above.
PLANTED += [(of_nnx, matmul, "16-mixed")]


@pytest.mark.once
@pytest.mark.parametrize("make, fault, precision", PLANTED)
def test_planted(make, fault, precision):
    primitive, backward, kind, in_half, in_others, advice = FAULTS[fault]
    verdict = in_half if precision == "16-mixed" else in_others
    found = search(make, fault, precision)
    assert found.verdict == verdict, str(found)
    if verdict == "nothing":
        assert found.finding is None and not found.reached
        return
    finding = found.finding
    assert (finding.primitive, finding.backward) == (primitive, backward)
    path, source = PATHS[make], line(fault.__name__)
    assert (finding.path, finding.source) == (path, source)
    assert kind in finding.kind and advice in found.advice
    assert found.examples == (0, 1, 2, 3)
    assert finding.what in str(found) and source in str(found)
    assert found.policy == ({path: "float32"} if verdict == "precision" else {})
    if verdict == "precision":
        text = found.advice.partition("amp_policy=")[2].splitlines()[0]
        policy = eval(text, {"flax_amp": flax_amp, "jnp": jnp})
        again = search(make, fault, precision, amp_policy=policy)
        assert again.verdict == "nothing"


# --- arguments at fault --------------------------------------------------------------


@pytest.mark.once
@pytest.mark.parametrize(
    ("which", "item", "advice"),
    [
        ("params", "params/w", "restore an earlier checkpoint"),
        ("x", "x", "Correct or drop example 1 of the batch"),
        ("y", "y", "Correct or drop example 1 of the batch"),
        ("weight", "weight", "Correct weight: no precision helps"),
    ],
)
def test_what_to_do_about_an_argument(which, item, advice):
    """All arguments but the first are data, wherever they stand."""

    def loss(params, x, key, y, weight):
        return jnp.mean((x @ params["w"] - y) * weight)

    ones = {"x": jnp.ones((3, 2)), "y": jnp.ones((3, 1)), "weight": jnp.float32(1)}
    given = {"params": {"w": jnp.ones((2, 1))}, "key": jax.random.key(0)} | ones
    bad = jax.tree.map(
        lambda x: x.at[1:2].set(jnp.nan) if x.ndim else x / 0, given[which]
    )
    given |= {which: bad}
    found = in_float16(loss)(given.pop("params"), **given)
    assert found.verdict == "inputs" and advice in found.advice
    assert found.finding is None and found.reached[0] == "loss"
    data = json.loads(json.dumps(found.to_dict()))
    assert [*data["inputs"]] == [item]
    start = "inf in weight (1" if which == "weight" else f"NaN in {item}[1, 0] ("
    assert data["inputs"][item].startswith(start)
    assert data["examples"] == ([1] if which in ("x", "y") else [])


@pytest.mark.once
def test_an_inf_in_a_running_mean():
    """The loss and the gradients are finite: the update of the mean is not."""
    model = nn.BatchNorm(use_running_average=False)
    variables = model.init(jax.random.key(0), X)
    bad = jax.tree.map(lambda x: x.at[1].set(jnp.inf), variables["batch_stats"])
    state = AmpTrainState.create(
        apply_fn=model.apply, params=variables["params"], tx=optax.sgd(0.1)
    ).replace(variables={"batch_stats": bad})

    def loss_fn(params, batch, state):
        variables = {"params": params, **state.variables}
        out, updates = state.apply_fn(variables, batch, mutable=["batch_stats"])
        return (out**2).mean(), {"variables": updates}

    found = find_nonfinite(state, loss_fn, X)
    assert found.verdict == "inputs" and found.reached == ("updated variables",)
    assert [*found.inputs] == ["state/variables/batch_stats/mean"]
    assert "restore an earlier checkpoint" in found.advice


@pytest.mark.parametrize("fun", [jnp.log, lambda x: (x * 1e5) @ EYE])
def test_a_bad_example_beside_another_fault(fun):
    batch = X.at[1].set(0.0).at[2, 0].set(jnp.nan)
    found = in_float16(lambda w, x: fun(x @ w).sum())(EYE, batch)
    assert found.verdict == "inputs" and found.examples == (2,)


def test_a_mask_is_named_but_not_blamed():
    """Each row of the mask is `-inf`, which the program turns into a NaN."""

    def attend(w, x, mask):
        z = x @ w + mask
        e = jnp.exp(z - z.max(-1, keepdims=True))  # mask
        return (e / e.sum(-1, keepdims=True)).var()

    mask = jnp.zeros((4, 8)).at[2].set(-jnp.inf)
    found = find_nonfinite(attend)(EYE, ZERO, mask)
    assert found.verdict == "mathematics" and found.finding.source == line("mask")
    assert found.finding.text == "sub(-inf, -inf) = nan"
    assert found.inputs == {"mask": "-inf in mask[2, 0] (8 elements)"}
    assert found.examples == (2,)
    found = find_nonfinite(attend)(EYE, ZERO, -mask)
    assert found.verdict == "inputs" and found.inputs["mask"].startswith("inf")


# --- the scale, and the policy -------------------------------------------------------


def squares(params, batch):
    with jax.named_scope("head"):
        return ((batch @ params["w"]) ** 2).sum()  # square


def overflow(params, batch):
    with jax.named_scope("net"):
        with jax.named_scope("bad"):
            y = batch @ (params["w"] * 5e4) * 2e-5
        with jax.named_scope("head"):
            return ((y @ params["w"].T) ** 2).sum()


def scaled(scale):
    return AmpTrainState.create(
        params={"w": jnp.full((8, 3), 0.25)},
        tx=optax.sgd(0.1),
        precision="16-mixed",
        scaler=flax_amp.init_scaler(scaler=scale),
    )


@pytest.mark.once
def test_gradients_overflow_by_the_scale_alone():
    found = find_nonfinite(scaled(2.0**22), squares, X)
    assert found.verdict == "scale" and found.reached == ("gradient of params/w",)
    assert found.finding.path == "head" and found.finding.backward
    assert found.finding.source == line("square")
    # The gradient is 4 * 2 * 2 * scale, and 65504 ends float16.
    assert find_nonfinite(scaled(2.0**11), squares, X).verdict == "nothing"
    # After a skipped step the scale fits; that of the step tells why it was skipped.
    state, metrics = flax_amp.make_train_step(squares)(scaled(2.0**12), X)
    assert not metrics["grads_finite"]
    found = find_nonfinite(state, squares, X)
    assert found.verdict == "nothing" and "scale=4096 was its scale" in found.notes[0]
    assert find_nonfinite(state, squares, X, scale=2.0**12).verdict == "scale"
    found = find_nonfinite(scaled(2.0**22), overflow, X)
    assert found.verdict == "precision" and found.finding.path == "net/bad"
    assert found.policy == {"net/bad": "float32"}


def victim_behind(w, x):
    """Float16 has no number between 3000 and 3002: a zero remains."""
    with jax.named_scope("cancels"):
        z = jnp.maximum(x @ w, 0.25) + 3000.0
        z = z @ jnp.eye(16) - 3000.0
    with jax.named_scope("mixes"):
        z = z @ jnp.abs(w)
    with jax.named_scope("victim"):
        return jnp.log(z).mean()


def overflows(w, x):
    with jax.named_scope("large"):
        y = jnp.tanh(x @ w) * 6e4
    with jax.named_scope("overflows[1]"):
        y = y @ w
    with jax.named_scope("too"):
        y = y @ w
    with jax.named_scope("last"):
        return (y * 1e-6).mean()


OWN = {"net": flax_amp.use_compute_precision}
# A program, where its fault is found, the keys that fix it, and policies to begin with.
PROGRAMS = {
    "a victim": (victim_behind, "victim", ["cancels"], [{}, OWN]),
    "two": (overflows, "overflows[1]", ["overflows[[]1]", "too"], [{}]),
}


@pytest.mark.parametrize("fun, place, fixing, own", PROGRAMS.values(), ids=PROGRAMS)
def test_the_policy_is_for_what_fixes_it(fun, place, fixing, own):
    """It names neither the victim nor the whole model."""

    def loss(w, x):
        with jax.named_scope("net"):
            return fun(w, x)

    w = jax.random.normal(jax.random.key(0), (16, 16)) / 4
    x = jax.random.normal(jax.random.key(1), (8, 16))
    for keys in own:
        given = flax_amp.default_amp_policy | keys if keys else None
        found = in_float16(loss, amp_policy=given)(w, x)
        assert found.verdict == "precision" and found.finding.path == f"net/{place}"
        if given is None:
            assert found.policy == {f"net/{key}": "float32" for key in fixing}
    policy = flax_amp.default_amp_policy | {f"net/{key}": jnp.float32 for key in fixing}
    assert in_float16(loss, amp_policy=policy)(w, x).verdict == "nothing"


def test_only_layers_at_fault_are_in_float32():
    """Of 20 layers, the results of three are out of range, and a fourth reads them.

    A search in all layers ends before it has left out the other layers.
    """

    def loss(w, x):
        for i in range(20):
            with jax.named_scope(f"layer_{i}"):
                x = x @ ({12: 1e5, 15: 1e-5}.get(i, 1) * w)
        return x.mean()

    found = in_float16(loss)(EYE, X)
    assert {*found.policy} == {f"layer_{i}" for i in range(12, 16)}
    assert "or take precision='bf16-mixed'" in found.advice.lower()


def test_only_keys_that_act():
    parts = [Part("net/a/b"), Part("net/a"), Part("net/ab"), Part("", "train.py:3")]
    assert keys_of(parts) == ("net/a", "net/ab")


def test_code_without_a_module_and_a_line():
    """No part of it has a name, and a key for everything is no remedy."""
    fun, x = functools.partial(jnp.einsum, "ij,jk,kl->"), jnp.full((8, 8), 300.0)
    report = in_float16(fun)(x, x, x)
    assert report.verdict == "precision" and not report.policy and not report.lines
    compared = flax_amp.compare_precision(fun, compute_dtype=jnp.float16)(x, x, x)
    assert not compared.remedies
    assert compared.notes == (
        "nothing less than the whole program in float32 is enough",
    )


def outside_of_modules(w, x):
    """A matmul rounds to one what is a little less."""
    gate = 1 - 1e-5 * x
    return -jnp.log(1 - (gate @ w)).mean()  # one


def read_by_a_module(w, x):
    """The module that reads the number is enough; the root would be all of it."""
    with jax.named_scope("net"):
        with jax.named_scope("first"):
            y = jnp.tanh(x @ w)
        y = y * 1e6
        with jax.named_scope("second"):
            return jnp.tanh((y @ w) * 1e-6).mean()


def in_the_root(w, x):
    """A key for the root would leave nothing in half; its lines are enough."""
    with jax.named_scope("net"):
        with jax.named_scope("first"):
            y = x @ w
        y = y * 3e5
        scores = jnp.tanh(y @ y.T)  # scores
        with jax.named_scope("last"):
            return (scores @ x @ w).mean()


@pytest.mark.parametrize(
    "loss, policy, mark",
    [
        (outside_of_modules, {}, "one"),
        (read_by_a_module, {"net/second": "float32"}, ""),
        (in_the_root, {}, "scores"),
    ],
)
def test_lines_outside_of_modules_and_in_the_root(loss, policy, mark):
    report = in_float16(loss)(EYE, X)
    assert report.verdict == "precision" and report.policy == policy
    if mark:
        assert line(mark) in report.lines
        assert f"flax_amp.amp_stop around {line(mark)}" in str(report)


def test_a_fault_that_reaches_variables_only():
    class Root(nnx.Module):
        def __init__(self):
            self.w, self.size = nnx.Param(EYE), nnx.BatchStat(jnp.zeros((8, 8)))

    def loss(model, x):
        h = x @ model.w
        z = jax.lax.stop_gradient(h) * 1e3
        model.size[...] = 0.9 * model.size + z.T @ z
        return jnp.mean(h**2)

    report = in_float16(loss)(Root(), 5 * X)
    assert report.verdict == "precision" and report.reached == ("updated variables",)
    assert report.lines or report.policy


def test_the_code_itself_computes_in_half():
    found = in_float16(lambda w, x: (x @ w * 1e5).astype(jnp.float16).sum())(EYE, X)
    assert "The code itself computes in float16 there: leave out" in found.advice


# --- words ---------------------------------------------------------------------------


def test_a_cast_says_what_it_casts():
    """A bad example that is finite in float32, and beyond the range of float16."""

    def loss(w, batch):
        with jax.named_scope("net"):
            y = batch["x"] @ w
            return jnp.tanh((y * 1e5) @ w).mean()

    found = in_float16(loss)(EYE, {"x": X.at[2, 3].set(1e30)})
    assert found.finding.what == "the cast to float16 of batch/x"
    assert found.examples == (2,) and found.finding.path == "net"
    found = in_float16(loss)(EYE, {"x": X})
    assert found.finding.what == "the cast to float16 of the result of mul"


def test_a_number_that_was_limited_is_named():
    """An argument that is added is a mask as a rule, and is kept in the range."""

    def loss(w, x, mask):
        with jax.named_scope("net"):
            return jnp.tanh((x @ w + mask) @ w).mean()

    x, mask = jnp.ones((2, 4, 8)), jnp.zeros((1, 4, 8))
    assert not in_float16(loss)(EYE, x, mask).notes
    found = in_float16(loss)(EYE, x, mask.at[0, 0, 1].set(1e30))
    assert found.verdict == "nothing"
    assert found.notes[0].startswith("mask (net) holds numbers beyond the range of")


def test_which_axis_is_that_of_the_batch():
    def loss(w, stats, x):
        return jnp.log(x @ w + 0 * stats["mean"][None]).sum()

    stats = {"mean": jnp.ones(8), "count": jnp.ones(8)}  # of another argument
    assert find_nonfinite(loss)(EYE, stats, X.at[2].set(0.0)).examples == (2,)
    found = find_nonfinite(lambda w, x: jnp.log(w * x.sum()).sum())(EYE, X)
    assert found.examples == ()  # the shape is that of the parameter
