"""Every optimizer of optax as a pytree: the checks of `python -m benchmarks optim`."""

import jax
import optax
import pytest

from benchmarks.optimizers import cases, checks
from flax_amp import optim
from helpers import orbax_leaves_tasks

pytestmark = [
    *orbax_leaves_tasks,
    pytest.mark.filterwarnings("ignore:`optimistic_adam` is deprecated"),
    pytest.mark.filterwarnings('ignore:"seed" is deprecated'),  # dpsgd needs it
]

ALL = [*cases.names(), *cases.COMPOSED]
SOME = ["adamw", "muon"]
OTHERS = [name for name in ALL if name not in SOME]


def check(name, title):
    try:
        checks.CHECKS[title](cases.case(name))
    except checks.NotInOptax:
        pytest.skip("plain optax cannot do it either")
    finally:
        jax.clear_caches()


def test_no_optimizer_is_missing():
    aliases = (
        "adabelief adam adamw lamb lars lbfgs lion novograd radam rmsprop sgd yogi"
    )
    contrib = "ademamix cocob muon prodigy schedule_free sophia dog galore sam"
    assert {*aliases.split(), *contrib.split()} <= set(ALL)
    assert len(ALL) >= 29 + 22 + 5
    assert {"cosine_decay_schedule", "chain", "clip", "MultiSteps"} <= set(dir(optim))


@pytest.mark.parametrize(
    "name", [*SOME, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)]
)
def test_trajectory(name):
    check(name, "trajectory")


@pytest.mark.slow
@pytest.mark.parametrize("title", list(checks.CHECKS)[1:])
@pytest.mark.parametrize("name", SOME)
def test_transform(name, title):
    check(name, title)


@pytest.mark.slow
@pytest.mark.parametrize("place, name", list(enumerate(OTHERS)))
def test_every_fourth_transform(place, name):
    """Of each optimizer others; `python -m benchmarks optim` checks all of them."""
    for title in list(checks.CHECKS)[1 + place % 4 :: 4]:
        try:
            checks.CHECKS[title](cases.case(name))
        except checks.NotInOptax:
            continue
    jax.clear_caches()


def faster(rate):
    return optim.adam(rate * 1.001)


def never_replaced(rate):
    return optim.wrap(optax.adam, static_args="learning_rate")(rate)


@pytest.mark.parametrize(
    "title, pytree", [("trajectory", faster), ("replace", never_replaced)]
)
def test_checks_can_fail(title, pytree):
    """With an optimizer that computes another thing than that of optax."""
    with pytest.raises(AssertionError):
        checks.CHECKS[title](cases.case("adam")._replace(pytree=pytree))


def test_derivatives_can_fail(monkeypatch):
    update = optim.Optimizer.update

    def cut(self, grads, params=None, **extra):
        updates, tx = update(self, grads, params, **extra)
        return jax.lax.stop_gradient(updates), tx

    monkeypatch.setattr(optim.Optimizer, "update", cut)
    with pytest.raises(AssertionError):
        checks.CHECKS["grad"](cases.case("adam"))
