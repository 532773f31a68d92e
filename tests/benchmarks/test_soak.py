"""The soak: its model of the scale, checks that must be able to fail, a short run."""

import json

import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import environment
from benchmarks.commands import soak
from benchmarks.soak import curve, page, stream
from benchmarks.soak.history import CHECKS, History
from benchmarks.soak.processes import Plan, Run
from benchmarks.soak.rule import DYNAMIC, FIRST, Rule
from flax_amp import AmpTrainState, checkpoint, init_scaler, update_scaler

pytestmark = pytest.mark.once


def of(scaler):
    """The values of a scaler as the model holds them."""
    names = ("scaler", "patience", "adjust_factor", "count")
    return Rule(*(np.asarray(scaler[name]).item() for name in names))


@settings(max_examples=30, deadline=None)
@given(
    st.integers(0, 4),
    st.integers(-24, 24),
    st.sampled_from([1.0, 2.0, 4.0]),
    st.lists(st.tuples(st.booleans(), st.booleans()), max_size=20),
)
def test_the_model_of_the_scale(patience, start, factor, flags):
    scaler = init_scaler(scaler=2.0**start, patience=patience, adjust_factor=factor)
    model = of(scaler)
    for forward, grads in flags:
        scaler = update_scaler(scaler, grads, loss_finite=forward)
        model = model.after(forward, grads)
        assert of(scaler) == model


@pytest.mark.parametrize("now", FIRST)
@pytest.mark.parametrize("then", FIRST)
@pytest.mark.filterwarnings("ignore::flax_amp.checkpoint.CheckpointWarning")
def test_the_model_of_a_restart(then, now, tmp_path):
    def state(word):
        params = {"w": np.ones(2, np.float32)}
        return AmpTrainState.create(params=params, tx=optax.sgd(0.1), precision=word)

    saved = state(then)
    saved = saved.replace(scaler=update_scaler(saved.scaler, False))
    with checkpoint.manager(tmp_path) as manager:
        checkpoint.save(manager, saved)
    resumed = checkpoint.restore(tmp_path, state(now)).scaler
    assert of(saved.scaler).resumed_as(of(state(now).scaler)) == of(resumed)


SEED = 15  # of its first 50 batches, one is bad: number 48


class Fake:
    """Records of processes that did all right, to be changed."""

    def __init__(self):
        self.lines, self.rule, self.updates, self.in_a_row = [], FIRST[DYNAMIC], 0, 0
        self.number = self.digest = 0

    def restore(self, precision=DYNAMIC, step=0, warnings=()):
        self.number = step
        more = {"fingerprint": f"of {step}", "warnings": warnings, "devices": 1}
        self.lines.append({"precision": precision, "restored": step, **more})
        return self

    def steps(self, count, precision=DYNAMIC):
        for _ in range(count):
            bad = stream.fault(SEED, self.number).bad
            finite = not bad
            loss = 1.0 if finite else float("nan")
            self.rule = self.rule.after(finite, finite)
            self.updates += finite
            self.in_a_row = 0 if finite else self.in_a_row + 1
            self.digest += finite
            skipped = self.number + 1 - self.updates
            metrics = {"grads_finite": finite, "loss": loss, "plain_loss": loss}
            metrics |= {"scaler": self.rule.scale, "skipped_total": skipped}
            self.lines.append(
                {
                    "n": self.number,
                    "metrics": metrics,
                    "plain": {"finite": finite, "rounded": 0.1, "largest": 0.1},
                    "step": self.number + 1,
                    "scale": self.rule.scale,
                    "count": self.rule.count,
                    "skipped": skipped,
                    "in_a_row": self.in_a_row,
                    "updates": [self.updates, self.updates],
                    "leaves_finite": True,
                    "digest": self.digest,
                }
            )
            self.number += 1
        return self

    def save(self):
        compiled = {"jit(train_step)": 1, "jit(observe)": 1}
        memory = {"megabytes": 300.0, "arrays": 60, "compiled": compiled}
        what = {"fingerprint": f"of {self.number}", "replicas_equal": True}
        self.lines.append({"saved": self.number, **what, **memory})
        return self

    def write(self, path):
        """Writes the record of a process that was killed after its last save."""
        path.write_text("".join(json.dumps(line) + "\n" for line in self.lines))
        saved = [line["saved"] for line in self.lines if "saved" in line]
        self.lines = []
        return path, {"end": "killed", "newest": saved[-1], "torn": 0}


def two_processes(folder, change=lambda lines: None, again=lambda lines: None):
    """Follows two processes: 40 steps, of which a kill undoes 10, and 40 more."""
    history, fake = History(SEED), Fake()
    fake.restore().steps(10).save().steps(10).save().steps(10).save()
    kept = dict(vars(fake))
    fake.steps(10)
    change(fake.lines)
    history.add(*fake.write(folder / "0.jsonl"))
    vars(fake).update(kept, lines=[])
    fake.restore(step=30).steps(20).save()
    again(fake.lines)
    history.add(*fake.write(folder / "1.jsonl"))
    return history


def test_a_right_history_has_no_problem(tmp_path):
    history = two_processes(tmp_path)
    assert not history.problems
    assert len(history.rows) == history.half == 50
    assert history.counts["steps undone"] == 10
    assert history.counts["checked repeated"] == 10
    # One process more, on what the second one saved.
    assert history.counts["restarts"] == 1


def put(at, value, *path):
    """Changes a value of a line: `at` is its place, `path` where it is."""

    def change(lines):
        found = lines[at]
        for key in path[:-1]:
            found = found[key]
        found[path[-1]] = value

    return change


# Lines of the first process: 0 is the restore, 1 to 10 are steps, 11 is a save.
WRONG = {
    "another scale": ("scale", put(5, 4.0**8, "scale")),
    "grown one step too late": ("scale", put(34, 2.0**15, "scale")),
    "another scale in the metrics": ("scale", put(5, 1.0, "metrics", "scaler")),
    "a scale beyond its limit": ("bounds", put(5, 2.0**25, "scale")),
    "a skip for no reason": ("overflows", put(5, False, "metrics", "grads_finite")),
    "an overflow that is not seen": ("overflows", put(5, 10.0, "plain", "rounded")),
    "a loss that is NaN": ("bad batches", put(5, float("nan"), "metrics", "loss")),
    "a NaN in a leaf": ("finite", put(5, False, "leaves_finite")),
    "a count that lags": ("counters", put(5, [5, 4], "updates")),
    "a step that is lost": ("counters", put(5, 4, "step")),
    "an update without effect": ("skips", put(5, 4, "digest")),
    "devices that differ": ("replicas", put(11, False, "replicas_equal")),
    "a second compilation": (
        "compilations",
        put(11, 2, "compiled", "jit(train_step)"),
    ),
    "a late compilation": ("compilations", put(33, 2, "compiled", "jit(observe)")),
    "an array that stays alive": ("memory", put(22, 61, "arrays")),
    "other bits than were saved": ("restarts", put(33, "of 29", "fingerprint")),
    "a step that comes out otherwise": ("repeated", put(36, 0.9, "metrics", "loss")),
}


@pytest.mark.parametrize("name", WRONG)
def test_each_check_can_fail(tmp_path, name):
    check, change = WRONG[name]
    assert check in two_processes(tmp_path, change).problems


@pytest.mark.parametrize("finite", [True, False])
def test_a_gradient_that_may_overflow(tmp_path, finite):
    """A large gradient before the residual block says nothing."""

    def change(lines):
        put(5, 10.0, "plain", "largest")(lines)
        put(5, finite, "metrics", "grads_finite")(lines)

    assert "overflows" not in two_processes(tmp_path, change).problems


LATER = {
    "a restart from an older step": put(0, 20, "restored"),
    "a warning for no reason": put(0, ["the scaler of the target is used"], "warnings"),
}


@pytest.mark.parametrize("name", LATER)
def test_a_wrong_restart(tmp_path, name):
    def change(lines):
        LATER[name](lines)
        del lines[1:]  # steps of another number are no record of a run
        lines.append({**Fake().save().lines[0], "saved": 30, "fingerprint": "of 30"})

    assert "restarts" in two_processes(tmp_path, again=change).problems


def test_a_skip_that_changes_a_bit(tmp_path):
    """A digest that moves with a batch that is bad."""
    bad = next(n for n in range(10**6) if stream.fault(SEED, n).bad == "NaN")
    fake = Fake().restore().steps(bad + 1)
    history = History(SEED)
    fake.lines[-1]["digest"] += 1
    history.add(*fake.save().write(tmp_path / "0.jsonl"))
    assert {*history.problems} == {"skips"}


def test_memory_that_grows(tmp_path):
    fake = Fake().restore()
    for i in range(90):
        fake.steps(1).save().lines[-1]["megabytes"] += 0.5 * i
    history = History(SEED)
    history.add(*fake.write(tmp_path / "0.jsonl"))
    assert {*history.problems} == {"memory"}


def test_the_spread_of_the_curves():
    """Only float32 runs of the same seed are compared with the run."""
    steps = 20 * curve.WINDOW
    same = np.random.default_rng(0).normal(1.0, 0.1, (curve.SAME, steps))
    others = np.full((curve.OTHERS, steps), 0.9)
    history = History(SEED)
    for number in range(steps):
        row = {"updates": [number + 1], "metrics": {"plain_loss": 1.0}}
        history.rows.append(row)
    assert curve.compare(history, SEED, same, others).inside
    for row in history.rows[5 * curve.WINDOW :]:
        row["metrics"]["plain_loss"] = 1.05
    curves = curve.compare(history, SEED, same, others)
    assert not curves.inside and 0.7 < curves.far < 0.8 and curves.end > 3


def test_parameters_move_by_less_than_a_rounding():
    params = {"kernel": np.ones((8, 64), np.float32)}
    same, moved = [curve._moved(params, n)["kernel"] for n in (0, 1)]
    np.testing.assert_array_equal(same, params["kernel"])
    assert 2.0**-12 < np.max(np.abs(moved - 1)) <= 2.0**-11


def test_the_page(tmp_path):
    history = two_processes(tmp_path, put(5, False, "leaves_finite"))
    losses = np.random.default_rng(0).normal(size=(5, 50))
    curves = curve.compare(history, SEED, losses[:3], losses[3:])
    figure = page.draw(history, curves, tmp_path / "soak.png")
    assert (tmp_path / "soak.png").exists() == ("soak.png" in figure)
    made = soak.begun(tmp_path / "work", {"steps": 50})
    text = page.page(made, history, curves, 30, figure)
    verdicts = {
        line.split(" | ")[0][2:]: line.split(" | ")[2]
        for line in text.splitlines()
        if line.count(" | ") == 3
    }
    assert {*CHECKS, "curve"} <= {*verdicts}
    assert verdicts["finite"] == "FAILS 1 times"
    assert verdicts["scale"] == "holds"
    assert "the first 30 steps" in text


def test_a_run_goes_on_with_what_it_was_begun_with(tmp_path, monkeypatch):
    folder, settings = tmp_path / "work", {"size": "full", "steps": 50, "seed": 0}
    made = soak.begun(folder, settings)
    (folder / "records").mkdir()
    assert soak.begun(folder, settings) == made
    with pytest.raises(SystemExit, match="begun with steps 50, not 60. Remove"):
        soak.begun(folder, settings | {"steps": 60})
    monkeypatch.setattr(environment, "versions", lambda: {"jax": "another"})
    with pytest.raises(SystemExit, match="begun with versions .* another one with"):
        soak.begun(folder, settings)


@pytest.mark.slow
def test_a_short_soak(tmp_path):
    """200 steps and two kills, a change of precision and of the number of devices."""
    plans = [
        Plan(DYNAMIC, 1, 4, "killed"),
        Plan("bf16-mixed", 2, 3, "killed in a save"),
        Plan(DYNAMIC, 1, 14, "done"),
    ]
    run, history = Run(tmp_path, SEED, horizon=200, save_every=10), History(SEED)
    for record, note in run.processes(plans):
        history.add(record, note)
    assert len(history.rows) >= 190
    assert history.counts["changes of precision"] == 2
    compared = history.compare(run.uninterrupted(30))
    assert compared >= 30
    assert not history.problems
    # With the seed of the run come its batches, its dropout and its parameters.
    metrics = [row["metrics"] for row in history.rows[:40]]
    done = np.array([found["grads_finite"] for found in metrics])
    seeds, moves = np.array([SEED, SEED + 1]), np.zeros(2, int)
    same, other = curve._train(seeds, moves, SEED, done, horizon=200)
    loss = np.array([found["plain_loss"] for found in metrics])
    np.testing.assert_allclose(same, loss, rtol=5e-3)
    assert np.abs(other - loss).max() > 0.1
    # What was recorded is followed again, without a process.
    again = History(SEED)
    for record, note in run.processes(plans):
        again.add(record, note)
    assert again.texts == history.texts
