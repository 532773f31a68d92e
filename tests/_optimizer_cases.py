"""The optimizers of optax, and the small problem that each of them is run on."""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from flax_amp import optim
from helpers import jit

RATE = 0.01

# Of optax.contrib, what is no optimizer by itself.
_PARTS = {
    "differentially_private_aggregate",
    "hutchinson_estimator_diag_hessian",
    "normalize",
    "reduce_on_plateau",
}
_EXTRA_ARGS = {
    "lbfgs": ("value", "grad", "value_fn"),
    "momo": ("value",),
    "momo_adam": ("value",),
    "polyak_sgd": ("value",),
    "sophia": ("obj_fn",),
}
_NO_SCHEDULES = set(
    "optimistic_adam rprop schedule_free_adamw schedule_free_sgd sm3".split()
)
_ARGUMENTS = {  # without defaults; made by optax or by `flax_amp.optim`
    "base_optimizer": lambda space: space.sgd(0.1),
    "optimizer": lambda space: space.sgd(0.1),
    "adv_optimizer": lambda space: space.sgd(0.05),
    "inner": lambda space: space.adam(0.1),
    "key": lambda space: jax.random.key(0),
    "l2_norm_clip": lambda space: 1.0,
    "noise_multiplier": lambda space: 0.1,
    "seed": lambda space: 0,
}


class Case(NamedTuple):
    """An optimizer, made by plain optax or by `flax_amp.optim` from equal arguments."""

    name: str
    plain: Callable[[Any], optax.GradientTransformationExtraArgs]  # from a rate
    pytree: Callable[[Any], optim.Optimizer]  # from a rate
    extra_args: tuple[str, ...] = ()  # that its update asks for
    rate: bool = True  # whether it has one
    schedules: bool = True  # whether the rate may be one
    per_example: bool = False  # whether its gradients have an axis of examples


def names():
    """Returns every optimizer that optax and optax.contrib export."""
    return [
        name
        for name in dir(optim)
        if name not in _PARTS and not name.startswith("scale_by_")
        if module_of(name).endswith(".alias") or module_of(name).startswith("optax.con")
    ]


def module_of(name):
    factory = getattr(getattr(optim, name), "wrapped_factory", None)
    return getattr(factory, "__module__", "")


class _Plain:
    """optax and optax.contrib as one."""

    def __getattr__(self, name):
        return getattr(optim, name).wrapped_factory


def case(name):
    """Returns the case of an optimizer, or of a composition."""
    if name in COMPOSED:
        return _case_of(name, COMPOSED[name])
    parameters = inspect.signature(getattr(optim, name).wrapped_factory).parameters

    def build(space, rate):
        given = {
            name: make(space)
            for name, make in _ARGUMENTS.items()
            if name in parameters
            and (name == "key" or parameters[name].default is inspect.Parameter.empty)
        }
        if "learning_rate" in parameters:
            given["learning_rate"] = rate
        return getattr(space, name)(**given)

    return _case_of(
        name,
        build,
        extra_args=_EXTRA_ARGS.get(name, ()),
        rate="learning_rate" in parameters,
        schedules="learning_rate" in parameters and name not in _NO_SCHEDULES,
        per_example=name == "dpsgd",
    )


def _case_of(name, build, **how):
    def plain(rate):
        made = build(_Plain(), rate)
        if isinstance(made, optax.MultiSteps):
            made = made.gradient_transformation()
        return optax.with_extra_args_support(made)

    return Case(name, plain, lambda rate: build(optim, rate), **how)


def is_matrix(params):
    return jax.tree.map(lambda leaf: leaf.ndim > 1, params)


def labels(params):
    return jax.tree.map(lambda leaf: "a" if leaf.ndim > 1 else "b", params)


COMPOSED = {
    "chain(clip, adamw)": lambda space, rate: space.chain(
        space.clip_by_global_norm(1.0), space.adamw(rate, mask=is_matrix)
    ),
    "masked(adam)": lambda space, rate: space.masked(space.adam(rate), is_matrix),
    "partition(adam, sgd)": lambda space, rate: space.partition(
        {"a": space.adam(rate), "b": space.sgd(rate, momentum=0.9)}, labels
    ),
    "MultiSteps(adam)": lambda space, rate: space.MultiSteps(space.adam(rate), 2),
    "apply_if_finite(sgd)": lambda space, rate: space.apply_if_finite(
        space.sgd(rate, momentum=0.9), 5
    ),
}


# The problem


def params_of():
    """Returns the parameters at the start."""
    w = jax.random.normal(jax.random.key(0), (8, 4)) / 2
    return {"w": w, "b": jnp.full(4, 0.1, jnp.float32)}


def loss_of(params, *_, **__):
    """Returns a loss that is smooth and not convex."""
    x = jnp.sin(jnp.arange(16.0 * 8).reshape(16, 8))
    y = jnp.cos(jnp.arange(16.0 * 4).reshape(16, 4))
    return jnp.mean((jnp.tanh(x @ params["w"]) + params["b"][None] - y) ** 2)


def inputs(case, params):
    """Returns the gradients, and what else the update asks for."""
    value, grads = jax.value_and_grad(loss_of)(params)
    known = {"value": value, "grad": grads, "value_fn": loss_of, "obj_fn": loss_of}
    extra = {name: known[name] for name in case.extra_args}
    if case.per_example:
        grads = jax.tree.map(lambda g: jnp.stack([g, g / 2]), grads)
    return grads, extra


class Training(NamedTuple):
    """A training, whatever the state is of which it is made."""

    init: Callable[[Any], Any]  # of the state from parameters
    step: Callable[[Any, Any], tuple[Any, Any]]


def ours(case, rate):
    """Returns the training with a pytree optimizer, which is its state."""

    def step(params, tx):
        grads, extra = inputs(case, params)
        updates, tx = tx.update(grads, params, **extra)
        return optax.apply_updates(params, updates), tx

    return Training(case.pytree(rate).init, step)


def in_optax(case, rate):
    """Returns the training with plain optax."""
    tx = case.plain(rate)

    def step(params, state):
        grads, extra = inputs(case, params)
        updates, state = tx.update(grads, state, params, **extra)
        return optax.apply_updates(params, updates), state

    return Training(tx.init, step)


def run(training, steps):
    """Returns parameters and state after some compiled steps."""
    step, params = jit(training.step), params_of()
    state = training.init(params)
    for _ in range(steps):
        params, state = step(params, state)
    return params, state


def distance(a, b):
    """Returns the relative L2 distance of two trees, 0 if all bits are equal."""
    pairs = list(zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))
    as64 = [(np.asarray(x, np.float64), np.asarray(y, np.float64)) for x, y in pairs]
    if all(np.array_equal(x, y, equal_nan=True) for x, y in as64):
        return 0.0
    difference = sum(float(np.sum((x - y) ** 2)) for x, y in as64)
    size = max(sum(float(np.sum(y**2)) for _, y in as64), 1e-4)
    return float(np.sqrt(difference / size))
