"""The optimizers of optax, and the small problem that each of them is run on."""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from flax_amp import optim

PyTree = Any

RATE = 0.01

# Of optax.contrib, what is no optimizer by itself.
_PARTS = {
    "differentially_private_aggregate",
    "hutchinson_estimator_diag_hessian",
    "normalize",
    "reduce_on_plateau",
}
_LINE_SEARCH = ("value", "grad", "value_fn")
_EXTRA_ARGS = {
    "lbfgs": _LINE_SEARCH,
    "momo": ("value",),
    "momo_adam": ("value",),
    "polyak_sgd": ("value",),
    "sophia": ("obj_fn",),
}
_NEEDED = inspect.Parameter.empty
_NO_SCHEDULES = {
    "optimistic_adam",
    "rprop",
    "schedule_free_adamw",
    "schedule_free_sgd",
    "sm3",
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


def names() -> list[str]:
    """Returns every optimizer that optax and optax.contrib export."""
    found = [name for name in dir(optim) if _is_optimizer(name)]
    return [n for n in found if n not in _PARTS and not n.startswith("scale_by_")]


def _is_optimizer(name: str) -> bool:
    factory = getattr(getattr(optim, name), "wrapped_factory", None)
    module = getattr(factory, "__module__", "")
    return module.endswith(".alias") or module.startswith("optax.contrib")


def case(name: str) -> Case:
    """Returns the case of an optimizer, or of a composition."""
    if name in COMPOSED:
        composed = COMPOSED[name]
        return Case(name, _plain(composed), lambda rate: composed(optim, rate))
    factory = getattr(optim, name).wrapped_factory
    parameters = inspect.signature(factory).parameters
    arguments: dict[str, Callable[[Any], Any]] = {
        "base_optimizer": lambda space: space.sgd(0.1),
        "optimizer": lambda space: space.sgd(0.1),
        "adv_optimizer": lambda space: space.sgd(0.05),
        "inner": lambda space: space.adam(0.1),
        "key": lambda space: jax.random.key(0),
        "l2_norm_clip": lambda space: 1.0,
        "noise_multiplier": lambda space: 0.1,
        "seed": lambda space: 0,
    }

    def build(space: Any, rate: Any) -> Any:
        given = {
            name: arguments[name](space)
            for name, parameter in parameters.items()
            if name in arguments and (name == "key" or parameter.default is _NEEDED)
        }
        if "learning_rate" in parameters:
            given["learning_rate"] = rate
        return getattr(space, name)(**given)

    return Case(
        name,
        _plain(build),
        lambda rate: build(optim, rate),
        extra_args=_EXTRA_ARGS.get(name, ()),
        rate="learning_rate" in parameters,
        schedules="learning_rate" in parameters and name not in _NO_SCHEDULES,
        per_example=name == "dpsgd",
    )


class _PlainNames:
    """optax and optax.contrib as one."""

    def __getattr__(self, name: str) -> Any:
        return getattr(optim, name).wrapped_factory


def _plain(build: Callable[[Any, Any], Any]) -> Any:
    def make(rate: Any) -> optax.GradientTransformationExtraArgs:
        made = build(_PlainNames(), rate)
        if isinstance(made, optax.MultiSteps):
            made = made.gradient_transformation()
        return optax.with_extra_args_support(made)

    return make


def _is_matrix(params: PyTree) -> PyTree:
    return jax.tree.map(lambda leaf: leaf.ndim > 1, params)


def _labels(params: PyTree) -> PyTree:
    return jax.tree.map(lambda leaf: "a" if leaf.ndim > 1 else "b", params)


COMPOSED: dict[str, Callable[[Any, Any], Any]] = {
    "chain(clip, adamw)": lambda space, rate: space.chain(
        space.clip_by_global_norm(1.0), space.adamw(rate, mask=_is_matrix)
    ),
    "masked(adam)": lambda space, rate: space.masked(space.adam(rate), _is_matrix),
    "partition(adam, sgd)": lambda space, rate: space.partition(
        {"a": space.adam(rate), "b": space.sgd(rate, momentum=0.9)}, _labels
    ),
    "MultiSteps(adam)": lambda space, rate: space.MultiSteps(space.adam(rate), 2),
    "apply_if_finite(sgd)": lambda space, rate: space.apply_if_finite(
        space.sgd(rate, momentum=0.9), 5
    ),
}


# The problem


def params_of(seed: int = 0, dtype: Any = jnp.float32) -> PyTree:
    """Returns the parameters at the start."""
    key = jax.random.key(seed)
    return {
        "w": jax.random.normal(key, (8, 4), dtype) / 2,
        "b": jnp.full((4,), 0.1, dtype),
    }


def loss_of(params: PyTree, *_: Any, **__: Any) -> jax.Array:
    """Returns a loss that is smooth and not convex."""
    dtype = params["w"].dtype
    x = jnp.sin(jnp.arange(16 * 8, dtype=dtype).reshape(16, 8))
    y = jnp.cos(jnp.arange(16 * 4, dtype=dtype).reshape(16, 4))
    return jnp.mean((jnp.tanh(x @ params["w"]) + params["b"][None] - y) ** 2)


def inputs(case: Case, params: PyTree) -> tuple[PyTree, dict[str, Any]]:
    """Returns the gradients, and what else the update asks for."""
    value, grads = jax.value_and_grad(loss_of)(params)
    known = {"value": value, "grad": grads, "value_fn": loss_of, "obj_fn": loss_of}
    extra = {name: known[name] for name in case.extra_args}
    if case.per_example:
        grads = jax.tree.map(lambda g: jnp.stack([g, g / 2]), grads)
    return grads, extra


# Training


class Training(NamedTuple):
    """A training, whatever the state is of which it is made."""

    init: Callable[[PyTree], Any]  # of the state from parameters
    step: Callable[[PyTree, Any], tuple[PyTree, Any]]


def ours(case: Case, rate: Any) -> Training:
    """Returns the training with a pytree optimizer, which is its state."""

    def step(params: PyTree, tx: Any) -> tuple[PyTree, Any]:
        grads, extra = inputs(case, params)
        updates, tx = tx.update(grads, params, **extra)
        return optax.apply_updates(params, updates), tx

    return Training(case.pytree(rate).init, step)


def in_optax(case: Case, rate: Any) -> Training:
    """Returns the training with plain optax."""
    tx = case.plain(rate)

    def step(params: PyTree, state: PyTree) -> tuple[PyTree, PyTree]:
        grads, extra = inputs(case, params)
        updates, state = tx.update(grads, state, params, **extra)
        return optax.apply_updates(params, updates), state

    return Training(tx.init, step)


def run(training: Training, steps: int) -> tuple[PyTree, Any]:
    """Returns parameters and state after some compiled steps."""
    quick: Any = {"xla_backend_optimization_level": 0}
    step, params = jax.jit(training.step, compiler_options=quick), params_of()
    state = training.init(params)
    for _ in range(steps):
        params, state = step(params, state)
    return params, state


def distance(a: PyTree, b: PyTree) -> float:
    """Returns the relative L2 distance of two trees, 0 if all bits are equal."""
    pairs = list(zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))
    as64 = [(np.asarray(x, np.float64), np.asarray(y, np.float64)) for x, y in pairs]
    if all(np.array_equal(x, y, equal_nan=True) for x, y in as64):
        return 0.0
    difference = sum(float(np.sum((x - y) ** 2)) for x, y in as64)
    return float(
        np.sqrt(difference / max(sum(float(np.sum(y**2)) for _, y in as64), 1e-4))
    )
