"""`compare_training`: the test of the gaps, planted faults, and runs that resume."""

import functools
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import flax_amp
from flax_amp import __main__
from flax_amp.debug import _gap, _training_runs, compare_training
from flax_amp.debug._gap import judge

THIS = "debug.test_compare_training"
WIDTH, CLASSES = 8, 4
ADAM = optax.adam(1e-2)


@pytest.fixture(autouse=True, scope="module")
def shared_steps():
    """Comparisons with the same loss and options share a step, compiled once."""

    def shared(maker):
        made = {}

        @functools.wraps(maker)
        def make_once(loss_fn, **options):
            key = loss_fn, *((name, id(value)) for name, value in options.items())
            if key not in made:
                # The options stay alive, so that no other option gets an `id` of them.
                made[key] = options, maker(loss_fn, **options)
            return made[key][1]

        return make_once

    with pytest.MonkeyPatch.context() as patch:
        for name in ("make_train_step", "make_nnx_train_step"):
            patch.setattr(_training_runs, name, shared(getattr(_training_runs, name)))
        yield


# --- the test of the gaps ------------------------------------------------------------


def test_a_gap_as_large_as_another_seed_makes_is_inside():
    reference, untrained = [1.0, 1.1, 0.9], [2.0, 2.5, 2.2]
    gap = judge(reference, untrained, [1.09, 1.19, 0.99])
    assert gap.is_inside and gap.margin == pytest.approx(0.1)
    assert gap.mean == pytest.approx(0.09) and gap.limit == pytest.approx(0.1)
    assert not judge(reference, untrained, [1.11, 1.21, 1.01]).is_inside
    assert judge(reference, untrained, [0.1, 0.2, 0.0]).is_inside  # it is better
    assert judge(reference, untrained, [1.11, 1.21, 1.01], 0.12).is_inside


def test_seeds_that_begin_far_apart_do_not_hide_that_nothing_is_learned():
    untrained = [2.0, 2.5, 2.2]
    reference = [1.99, 2.489, 2.191]  # each gains about 0.01
    assert not judge(reference, untrained, untrained).is_inside
    assert judge(reference, [math.inf, 1.0, 1.0], untrained).is_inside  # not known


def test_noise_of_the_gaps_makes_the_limit_larger():
    reference, untrained = [1.0, 1.1, 0.9], [2.0, 2.0, 2.0]
    exact = judge(reference, untrained, [1.2, 1.3, 1.1])
    noisy = judge(reference, untrained, [1.0, 1.6, 1.0])
    assert noisy.mean == pytest.approx(exact.mean)
    assert noisy.is_inside and not exact.is_inside
    assert exact.limit == exact.margin == pytest.approx(0.1)
    assert noisy.limit < noisy.detectable < 2 * noisy.limit


def test_a_fault_whose_gaps_vary_is_outside():
    gap = judge([0.60, 0.45, 0.46], [90.0, 95.0, 85.0], [18.7, 16.0, 5.3])
    assert not gap.is_inside and gap.limit < 1


@pytest.mark.parametrize("end", [math.nan, math.inf])
def test_an_end_that_is_not_finite_is_outside(end):
    assert not judge([1.0, 1.1], [2.0, 2.0], [1.0, end], 9.0).is_inside


@pytest.mark.once
@pytest.mark.parametrize("seeds", [2, 3, 5])
def test_the_power_is_as_stated(seeds, rng, monkeypatch):
    """A true gap that is told to be detectable is outside in 90 % of comparisons."""
    reference = np.linspace(-1e3, 1e3, seeds)  # too wide for the second test
    gained = reference + 9

    def judged(gaps):
        return judge(reference, gained, reference + gaps, tolerance=0.5)

    noise = np.linspace(-1, 1, seeds)
    told = judged(noise / np.std(noise, ddof=1)).detectable
    # The power of each draw would take most of the time, and decides nothing.
    monkeypatch.setattr(_gap, "_detectable", lambda size, *_: size)
    draws = rng.normal(told, 1.0, (2000, seeds))
    share = sum(not judged(gaps).is_inside for gaps in draws) / 2000
    assert share == pytest.approx(0.9, abs=0.03)


def test_the_power_counts_gaps_that_vary_more_than_the_spread():
    gap = judge([1.0, 1.0, 1.0], [2.0, 2.0, 2.0], [1.0, 1.3, 0.8], tolerance=0.1)
    error = np.std(gap.gaps, ddof=1) / np.sqrt(3)
    assert gap.limit == pytest.approx(0.1)  # by the second test, without any spread
    assert gap.detectable == pytest.approx(0.1 + 1.2816 * error, rel=1e-3)


@pytest.mark.once
@pytest.mark.parametrize("seeds, most", [(2, 0.018), (3, 0.018), (10, 0.013)])
def test_other_seeds_of_float32_are_seldom_outside(seeds, most, rng, monkeypatch):
    """The precision ends where float32 ends with other seeds: nothing is in common."""
    # The power would take most of the time, and decides nothing.
    monkeypatch.setattr(_gap, "_detectable", lambda size, *_: size)
    repeats = 4000
    judged = [judge(*rng.normal(size=(3, seeds))) for _ in range(repeats)]
    share = sum(not gap.is_inside for gap in judged) / repeats
    assert share == pytest.approx(most, abs=0.006)


# --- training ------------------------------------------------------------------------


def params_of(seed):
    rng = np.random.default_rng(seed)
    shapes = {"first": (WIDTH, 16), "last": (16, CLASSES)}
    return {k: jnp.float32(rng.normal(0, 0.3, shape)) for k, shape in shapes.items()}


def make(seed, tx=None, more=None, **options):
    params = params_of(seed) | ({} if more is None else {"more": more})
    return flax_amp.AmpTrainState.create(params=params, tx=tx or ADAM, **options)


TRUE = jax.device_get(params_of(99))


def logits_of(params, x):
    return jnp.tanh(x @ params["first"]) @ params["last"]


def batches(seed):
    rng = np.random.default_rng((seed, 1))
    while True:
        x = np.float32(rng.normal(size=(16, WIDTH)))
        logits = np.tanh(x @ TRUE["first"]) @ TRUE["last"]
        yield {"x": x, "y": logits.argmax(-1)}


def loss_fn(params, batch):
    logits = logits_of(params, batch["x"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()


class Net(nnx.Module):
    def __init__(self, seed):
        rngs = nnx.Rngs(seed)
        self.first = nnx.Linear(WIDTH, 16, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.last = nnx.Linear(16, CLASSES, rngs=rngs)

    def __call__(self, x):
        return self.last(self.dropout(jnp.tanh(self.first(x))))


def make_nnx(seed, optimizer=flax_amp.AmpOptimizer, tx=ADAM):
    model = Net(seed)
    return model, optimizer(model, tx, wrt=nnx.Param)


def nnx_loss(model, batch):
    logits = model(batch["x"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()


def same(found):
    """All of a comparison but what a clock measures."""
    told = found.to_dict()
    for trained in (told["reference"], *told["precisions"]):
        del trained["step_ms"]
    return told


@pytest.mark.once
def test_half_precision_ends_where_float32_ends(count_traces):
    counted, traces = count_traces(loss_fn)
    words = "bf16-mixed", "16-mixed"
    found = compare_training(
        lambda seed: make(seed, optax.adam(1e-2)),
        counted,
        batches,
        precisions=words,
        steps=60,
    )
    assert found.outside == () and found.seeds == 3 and found.steps == 60
    assert traces() == 3  # once for each precision, with an optimizer for each seed
    first, (bfloat16, float16) = found.reference, found.precisions
    assert first.name == "32-true" and first.gap is None
    assert (first.name, bfloat16.name, float16.name) == ("32-true", *words)
    assert [*map(len, first.curves)] == [20] * 3 and found.steps_of_parts[-1] == 60
    # Both end with about the loss that float32 has told at last.
    assert first.ends == pytest.approx([x[-1] for x in first.curves], rel=0.3)
    assert first.curves != bfloat16.curves != float16.curves
    assert first.scales == (1.0,) * 3 and float16.scales == (2.0**15,) * 3
    ends = zip(bfloat16.ends, first.ends, strict=True)
    assert bfloat16.gap.gaps == tuple(x - y for x, y in ends)
    assert first.step_ms > 0 and first.temp_mb > 0
    text = " ".join(str(found).split())
    assert "bf16-mixed is inside: its mean gap of" in text
    assert "Loss scale at the end: 32768." in text
    assert json.loads(json.dumps(found.to_dict()))["precisions"][0]["gap"]["is_inside"]


@pytest.mark.once
@pytest.mark.parametrize("optimizer", [flax_amp.AmpOptimizer, nnx.Optimizer])
def test_nnx(optimizer, count_traces):
    counted, traces = count_traces(nnx_loss)
    seen = []
    measured = nnx.jit(nnx_loss)

    def evaluate(model):
        seen.append(model.dropout.deterministic)
        return measured(model, next(batches(7)))

    found = compare_training(
        lambda seed: make_nnx(seed, optimizer, optax.adam(1e-2)),
        counted,
        batches,
        seeds=2,
        steps=10,
        evaluate=evaluate,
    )
    assert found.outside == () and found.measure == "evaluate"
    assert traces() == 2 and {*seen} == {True}
    assert found.reference.ends != found.precisions[0].ends


def rounded_update():
    """Adam with a rate of 1e-6 on parameters that are rounded to the nearest."""

    def round_all(tree):
        return jax.tree.map(lambda x: jax.lax.reduce_precision(x, 8, 7), tree)

    def update(updates, state, params):
        new = round_all(optax.apply_updates(params, updates))
        return jax.tree.map(jnp.subtract, new, params), state

    init = lambda params: optax.EmptyState()  # noqa: E731
    rounding = optax.GradientTransformation(init, update)
    return optax.chain(optax.adam(1e-6), rounding)


def exact_loss(params, batch, round=lambda x: x):
    """A cross entropy whose parts are large and differ by little."""
    with jax.named_scope("loss"):
        logits = 3e3 + logits_of(params, batch["x"])
        whole = round(jax.nn.logsumexp(logits, axis=-1))
        own = round(logits[jnp.arange(16), batch["y"]])
        return jnp.mean(jnp.square(whole - own))


def rounded_loss(params, batch):
    return exact_loss(params, batch, lambda x: jax.lax.reduce_precision(x, 8, 7))


@pytest.mark.once
def test_parameters_that_do_not_move_are_outside():
    steady = lambda seed: make(seed, optax.adam(1e-6))  # noqa: E731
    stuck = {"make": lambda seed: make(seed, rounded_update())}
    precisions = {"bf16-mixed": "bf16-mixed", "stuck": stuck}
    found = compare_training(steady, loss_fn, batches, precisions=precisions)
    assert [x.name for x in found.outside] == ["stuck"]
    # What each seed begins with differs far more than training changes it.
    assert np.std(found.reference.ends) > 10 * found.precisions[1].gap.mean


FAULTS = {
    "a cast": {"precision": "32-true", "loss_fn": rounded_loss},
    "a key": {
        "precision": "bf16-mixed",
        "amp_policy": flax_amp.default_amp_policy
        | {"loss": flax_amp.use_compute_precision},
    },
}


@pytest.mark.once
def test_a_loss_that_is_rounded_inside_is_outside():
    precisions = {"bf16-mixed": "bf16-mixed", **FAULTS}
    found = compare_training(make, exact_loss, batches, precisions=precisions, steps=60)
    assert [x.name for x in found.outside] == [*FAULTS]
    assert "a cast is outside: its mean gap of" in str(found)
    # All terms are rounded to the same number: the loss that it reports is the best.
    assert found.precisions[2].curves[0][-1] == 0 < found.reference.curves[0][-1]


@pytest.mark.slow
@pytest.mark.once
def test_ten_repetitions_of_bfloat16_are_inside():
    """Five begin a last bit away from the runs that they are compared with.

    The other five begin with other seeds.
    """

    def moved(index):
        def made(seed):
            state = make(seed)
            rng = np.random.default_rng((seed, index))
            signs = {k: rng.choice([-1, 1], x.shape) for k, x in state.params.items()}
            moved = {
                k: x * (1 + s * 2.0**-23)
                for (k, x), s in zip(state.params.items(), signs.values(), strict=True)
            }
            return state.replace(params={k: jnp.float32(x) for k, x in moved.items()})

        return made

    repetitions = {f"moved {i}": {"make": moved(i)} for i in range(5)}
    for i in range(5):
        other = lambda seed, i=i: make(100 + 10 * i + seed)  # noqa: E731
        repetitions[f"other seeds {i}"] = {"make": other}
    found = compare_training(
        make, loss_fn, batches, precisions=repetitions, reference="bf16-mixed"
    )
    assert len(found.precisions) == 10 and found.outside == ()
    assert all(any(x.gap.gaps) for x in found.precisions)


def test_an_evaluation_and_a_tolerance(tmp_path):
    worse = {"make": lambda seed: make(seed, optax.adam(1e-3))}
    data = next(batches(7))

    @jax.jit
    def error(state):
        return jnp.mean(logits_of(state.params, data["x"]).argmax(-1) != data["y"])

    options = dict(precisions={"slow": worse}, steps=40, evaluate=error)
    options |= {"directory": tmp_path}  # the second call reads the stored runs
    found = compare_training(make, loss_fn, batches, **options)
    assert found.measure == "error" and found.outside
    found = compare_training(make, loss_fn, batches, **options, tolerance=1.0)
    assert not found.outside and found.precisions[0].gap.margin == 1.0


def test_a_precision_whose_runs_are_not_finite_is_outside():
    def overflows(params, batch):
        return loss_fn(params, batch) + jnp.log(-jnp.sum(params["last"] ** 2))

    variants = {"bad": {"precision": "bf16-mixed", "loss_fn": overflows}}
    found = compare_training(make, loss_fn, batches, precisions=variants, steps=4)
    assert found.outside[0].skipped == (4, 4, 4)
    assert "or with skipped steps alone. Skipped steps: 4." in " ".join(
        str(found).split()
    )
    with pytest.raises(ValueError, match="in 32-true, the run of seed 0 skips its la"):
        compare_training(make, overflows, batches, steps=4)


def test_a_state_in_this_precision_keeps_its_scaler():
    scaler = flax_amp.init_scaler(scaler=8.0)
    options = dict(precision="16-mixed", scaler=scaler)
    made = lambda seed: make(seed, **options)  # noqa: E731
    found = compare_training(
        made, loss_fn, batches, precisions=["fp16"], steps=2, seeds=2
    )
    assert found.reference.scales == (1.0, 1.0)
    assert found.precisions[0].scales == (8.0, 8.0)


FROZEN_FIRST = optax.multi_transform(
    {"trains": optax.adam(1e-2), "stays": optax.set_to_zero()},
    {"first": "stays", "last": "trains"},
)


def make_frozen(seed):
    params = params_of(seed)
    params["first"] = params["first"].astype(jnp.bfloat16)
    return flax_amp.AmpTrainState.create(params=params, tx=FROZEN_FIRST)


def make_small(seed):
    return make(seed, param_dtype=jnp.bfloat16)


@pytest.mark.once
@pytest.mark.parametrize("made", [make_frozen, make_small])
def test_parameters_that_are_bfloat16_in_the_reference(made):
    found = compare_training(made, loss_fn, batches, seeds=2, steps=20)
    last = [curve[-1] for curve in found.reference.curves]
    assert found.reference.ends == pytest.approx(last, rel=0.3)
    assert found.outside == ()


# --- runs that are stopped -----------------------------------------------------------


# The third batch of the first run, of the last run, and of a run in between.
@pytest.mark.parametrize("kind, stop", [("linen", 3), ("linen", 15), ("nnx", 7)])
def test_a_run_that_is_stopped_continues_with_the_same_bits(
    kind, stop, tmp_path, monkeypatch, settle
):
    monkeypatch.setattr(_training_runs, "SAVE_EVERY_S", 0.0)
    made, loss = (make, loss_fn) if kind == "linen" else (make_nnx, nnx_loss)
    options = dict(seeds=2, steps=4, precisions=["16-mixed"])
    count = 0

    def stopping(seed):
        nonlocal count
        for batch in batches(seed):
            count += 1
            if count == stop:
                raise KeyboardInterrupt
            yield batch

    with pytest.raises(KeyboardInterrupt):
        compare_training(made, loss, stopping, directory=tmp_path, **options)
    trained = count
    found = compare_training(made, loss, stopping, directory=tmp_path, **options)
    assert same(found) == same(compare_training(made, loss, batches, **options))
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]
    # All runs are stored: nothing is made, and no batch is asked for.
    count = trained = 0
    again = compare_training(made, loss, stopping, directory=tmp_path, **options)
    assert again.to_dict() == found.to_dict() and count == trained == 0


def test_a_resumed_run_begins_at_its_checkpoint(tmp_path, monkeypatch, settle):
    monkeypatch.setattr(_training_runs, "SAVE_EVERY_S", 0.0)
    steps = []
    step = _training_runs._StateSession.step

    def counted(self, batch):
        steps.append(int(self.trained.step))
        if len(steps) == 4 + 2 + 3:  # float32, its two ends, float16
            raise KeyboardInterrupt
        return step(self, batch)

    monkeypatch.setattr(_training_runs._StateSession, "step", counted)
    options = dict(seeds=2, steps=4, precisions=["16-mixed"], directory=tmp_path)
    with pytest.raises(KeyboardInterrupt):
        compare_training(make, loss_fn, batches, **options)
    seen = len(steps)
    compare_training(make, loss_fn, batches, **options)
    assert steps[seen : seen + 2] == [2, 3]  # Each step is a part.


def test_a_run_that_begins_at_a_late_step_resumes(tmp_path, monkeypatch, settle):
    monkeypatch.setattr(_training_runs, "SAVE_EVERY_S", 0.0)
    count = 0

    def late(seed):
        return make(seed).replace(step=jnp.int32(1000))

    def stopping(seed):
        nonlocal count
        for batch in batches(seed):
            count += 1
            if count == 3:
                raise KeyboardInterrupt
            yield batch

    options = dict(seeds=2, steps=4)
    with pytest.raises(KeyboardInterrupt):
        compare_training(late, loss_fn, stopping, directory=tmp_path, **options)
    found = compare_training(late, loss_fn, stopping, directory=tmp_path, **options)
    assert same(found) == same(compare_training(late, loss_fn, batches, **options))


def test_numbers_behind_the_checkpoint_are_trained_again(tmp_path, monkeypatch, settle):
    """The numbers of three parts are stored, and a checkpoint of two."""
    monkeypatch.setattr(_training_runs, "SAVE_EVERY_S", 0.0)
    save, saved = flax_amp.checkpoint.save, []

    def killed(*args, **options):
        saved.append(args)
        if len(saved) == 3:
            raise KeyboardInterrupt
        return save(*args, **options)

    options = dict(seeds=2, steps=4, precisions=["bf16-mixed"])
    with monkeypatch.context() as patch:
        patch.setattr(flax_amp.checkpoint, "save", killed)
        with pytest.raises(KeyboardInterrupt):
            compare_training(make, loss_fn, batches, directory=tmp_path, **options)
    stored = json.loads((tmp_path / "32-true-0.json").read_text())
    assert len(stored["run"]["curve"]) == 3
    found = compare_training(make, loss_fn, batches, directory=tmp_path, **options)
    assert same(found) == same(compare_training(make, loss_fn, batches, **options))


def test_a_directory_of_another_question(tmp_path):
    options = dict(seeds=2, precisions=["bf16-mixed"], directory=tmp_path)
    first = compare_training(make, loss_fn, batches, steps=3, **options)
    with pytest.raises(ValueError, match="has runs with steps=3; expected steps=4"):
        compare_training(make, loss_fn, batches, steps=4, **options)
    with pytest.raises(ValueError, match="has runs with reference='32-true'; expecte"):
        half = options | {"reference": "16-mixed"}
        compare_training(make, loss_fn, batches, steps=3, **half)
    other = {"bf16-mixed": {"precision": "bf16-mixed", "reduce_in_float32": True}}
    with pytest.raises(ValueError, match="Use another name or another directory"):
        compare_training(
            *(make, loss_fn, batches), steps=3, **options | {"precisions": other}
        )
    more = compare_training(make, loss_fn, batches, steps=3, **options | {"seeds": 3})
    assert more.reference.ends[:2] == first.reference.ends
    with pytest.raises(ValueError, match="of make\\(0\\) differ in the parameters"):
        compare_training(
            *(lambda seed: make(seed + 1), loss_fn, batches),
            **options | {"precisions": ["16-mixed"]},
            steps=3,
        )


OTHERS = {
    "the value of an option": ("a", dict(accum_steps=1), "a", dict(accum_steps=2)),
    "a name of the same file": ("\N{GREEK SMALL LETTER ALPHA}", {}, "_", {}),
}


@pytest.mark.once
@pytest.mark.parametrize("name, options, other, others", OTHERS.values(), ids=OTHERS)
def test_a_stored_run_is_that_of_its_name_and_options(
    name, options, other, others, tmp_path
):
    def run(name, options):
        precisions = {name: {"precision": "bf16-mixed", **options}}
        given = dict(steps=3, seeds=2, precisions=precisions, directory=tmp_path)
        return compare_training(make, loss_fn, batches, **given)

    assert run(name, options).to_dict() == run(name, options).to_dict()
    with pytest.raises(ValueError, match="Use another name or another directory"):
        run(other, others)


# --- errors, the command and the picture ---------------------------------------------

STREAM = batches(0)
ERRORS = {
    "one seed": (dict(seeds=1), "seeds=1; expected an integer of at least 2"),
    "no steps": (dict(steps=0), "steps=0; expected an integer of at least 1"),
    "a string": (dict(precisions="bf16-mixed"), "expected a sequence of words"),
    "a word": (dict(precisions=["bf8"]), "precision of 'bf8'"),
    "twice": (dict(precisions=["32-true"]), "32-true is compared with itself or twice"),
    "precision": (dict(precision="bf16-mixed"), "expected precisions=, all precisions"),
    "tolerance": (dict(tolerance=-1.0), "tolerance=-1.0; expected a number of at leas"),
    "make": (dict(make=params_of), "returned a dict; expected an AmpTrainState, or a"),
    "few batches": (
        dict(batches=lambda seed: [next(batches(seed))]),
        r"batches\(0\) ended after 1 batches; expected 4",
    ),
    "one stream": (
        dict(batches=lambda seed: STREAM),
        r"two calls of batches\(0\) differ in the first batch",
    ),
    "one run": (
        dict(make=lambda seed: make(0), batches=lambda seed: batches(0)),
        "seeds 0 and 1 made the same run; expected runs that differ",
    ),
    "a loss of NaN": (
        dict(loss_fn=lambda *_: jnp.float32(jnp.nan)),
        "the run of seed 0 skips its last steps",
    ),
    "evaluate": (dict(evaluate=lambda _: None), "evaluate returned .*None"),
    "an option": (
        dict(precisions={"two": {"acum_steps": 2}}),
        r"'two' has the options \['acum_steps'\], which make_train_step does not take",
    ),
    "other parameters": (
        dict(precisions={"wide": {"make": lambda seed: make(seed, more=jnp.ones(3))}}),
        "'wide' trains other parameters than '32-true'",
    ),
}


@pytest.mark.once
@pytest.mark.parametrize("given, message", ERRORS.values(), ids=ERRORS)
def test_what_is_wrong_is_told(given, message):
    arguments = dict(make=make, loss_fn=loss_fn, batches=batches, steps=4, seeds=2)
    with pytest.raises((TypeError, ValueError), match=message):
        compare_training(**arguments | given)


def setup():
    return dict(make=make, loss_fn=loss_fn, batches=batches, seeds=2)


def setup_with_a_fault():
    return setup() | dict(loss_fn=exact_loss, precisions=FAULTS, steps=60)


def setup_as_a_tuple():
    return make, loss_fn, batches


def setup_without_data():
    return setup() | dict(batches=lambda seed: [])


@pytest.mark.once
def test_the_command(capsys, tmp_path):
    def run(name, *options):
        code = __main__.main(["compare-training", f"{THIS}:{name}", *options])
        return code, capsys.readouterr()

    words = ["--precision", "bf16-mixed", "--precision", "16-mixed"]
    picture = tmp_path / "runs.png"
    code, printed = run("setup", "--steps", "20", *words, "--plot", str(picture))
    assert code == 0 and "20 steps, 2 seeds" in printed.out
    assert "16-mixed is inside" in printed.out
    assert picture.read_bytes().startswith(b"\x89PNG")
    code, printed = run("setup_with_a_fault", "--seeds", "3")
    assert code == 1 and "a cast is outside" in printed.out
    with pytest.raises(SystemExit) as ended:
        __main__.main(["compare-training", "--help"])
    assert ended.value.code == 0 and "by default setup" in capsys.readouterr().out
    code, printed = run("setup_without_data", "--directory", str(tmp_path))
    assert code == 2 and not printed.out
    assert "ended after 0 batches" in printed.err
    code, printed = run("setup_as_a_tuple")
    assert code == 2 and "a dict of arguments of compare_training" in printed.err
