"""What must hold of every optimizer, one function for each transformation of JAX.

A check raises an `AssertionError` where the pytree optimizer and plain optax part, or
`NotInOptax` where plain optax cannot do it either.
"""

import copy
import pickle
import tempfile
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import serialization
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.optimizers.cases import RATE, Case, inputs, params_of
from benchmarks.optimizers.runs import (
    FEW,
    Way,
    distance,
    final_loss,
    final_params,
    in_optax,
    ours,
    quick_jit,
    run,
    steps_from,
)
from flax_amp import optim

PyTree = Any
Check = Callable[[Case], str]

STEPS = 50
# Of float32 under other roundings, relative; measured against the parameters.
CLOSE = 1e-6
CLOSE_DERIVATIVES = 1e-4


class NotInOptax(Exception):
    """Plain optax cannot do this with this optimizer."""


def _close(a: PyTree, b: PyTree, bound: float = CLOSE) -> str:
    """Asserts that two results are close."""
    apart = distance(a, b)
    assert apart <= bound, f"{apart:.1e}"
    return "exact" if apart == 0 else f"{apart:.0e}"


def _agree(
    measure: Callable[[Way], tuple[PyTree, PyTree]], bound: float = CLOSE
) -> str:
    """Asserts that two results are close, or that those of plain optax are not either.

    Args:
      measure: gives both results of one way to train.
      bound: on their distance.
    """
    results = measure(ours)
    try:
        return _close(*results, bound)
    except AssertionError:
        theirs = distance(*measure(in_optax))
        if theirs <= bound:
            raise
    return f"{distance(*results):.0e} *"


def _same_structure(a: PyTree, b: PyTree) -> None:
    assert _structure(a) == _structure(b), "another structure"
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert (x.shape, x.dtype) == (jnp.shape(y), jnp.result_type(y)), "other leaves"


def _structure(tree: PyTree) -> Any:
    return jax.tree.structure(tree)


def trajectory(case: Case) -> str:
    """50 steps with a fixed learning rate, against plain optax."""
    return _same_trajectory(case, RATE)[0]


def _same_trajectory(case: Case, rate: Any) -> tuple[str, Any]:
    expected, state = run(in_optax(case, rate), STEPS, jax.jit)
    params, tx = run(ours(case, rate), STEPS, jax.jit)
    _same_structure(tx.opt_state, state)

    def measure(way: Way) -> tuple[PyTree, PyTree]:
        if way is ours:
            return params, expected
        return run(in_optax(case, rate), STEPS)[0], expected  # otherwise compiled

    return _agree(measure), tx


def schedule(case: Case) -> str:
    """50 steps with a schedule of optax, and its value at the end."""
    if not case.schedules:
        raise NotInOptax
    warm_up = optax.warmup_cosine_decay_schedule(0.0, RATE, 10, STEPS)
    found, tx = _same_trajectory(case, warm_up)
    rates = [tx.hyperparams[name] for name in _rates(tx)]
    updates = STEPS // 2 if case.name.startswith("MultiSteps") else STEPS
    first = 1 if case.name == "schedule_free" else 0  # it counts from 1
    last = warm_up(updates - 1 + first)
    assert rates and all(rate == last for rate in rates), f"{rates}, expected {last}"
    return found


def _rates(tx: optim.Optimizer) -> list[str]:
    """Returns the names of the rates that a case is made with."""
    names = [name for name in tx.hyperparams if name.endswith("learning_rate")]
    return ["learning_rate"] if "learning_rate" in names else names


def replace(case: Case) -> str:
    """Another learning rate, without compiling again."""
    _has_a_rate(case)
    training = ours(case, RATE)
    step: Any = jax.jit(training.step)
    params, tx = step(params_of(), training.init(params_of()))
    other = tx.replace(**dict.fromkeys(_rates(tx), RATE / 3))
    expected, _ = jax.jit(in_optax(case, RATE / 3).step)(params, other.opt_state)
    found, _ = step(params, other)
    assert step._cache_size() == 1, "compiled again"
    return _close(found, expected)


def _has_a_rate(case: Case) -> None:
    if not case.rate:
        raise NotInOptax


def vmap(case: Case) -> str:
    """Three learning rates in one step, each equal to its own run."""
    _has_a_rate(case)
    rates = np.array([0.5, 1, 2], np.float32) * RATE

    def measure(way: Way) -> tuple[PyTree, PyTree]:
        def train(rate: Any) -> PyTree:
            return final_params(way(case, rate))

        rows = [quick_jit(train)(rate) for rate in rates]
        alone = jax.tree.map(lambda *x: jnp.stack(x), *rows)
        return quick_jit(jax.vmap(train))(rates), alone

    return _agree(measure)


def _differentiable(case: Case, derivative: Callable[..., Any]) -> None:
    _has_a_rate(case)
    try:
        jax.eval_shape(derivative(final_loss(in_optax, case)), RATE)
    except Exception as error:  # whatever JAX or optax raise
        raise NotInOptax from error


def grad(case: Case) -> str:
    """Derivative through three updates by the rate, against finite differences."""
    _differentiable(case, jax.grad)
    with jax.enable_x64(True):
        final = quick_jit(final_loss(ours, case, jnp.float64))
        step = RATE * 1e-4
        expected = (final(RATE + step) - final(RATE - step)) / (2 * step)

        def measure(way: Way) -> tuple[PyTree, PyTree]:
            slope = jax.grad(final_loss(way, case, jnp.float64))
            return quick_jit(slope)(RATE), expected

        return _agree(measure, CLOSE_DERIVATIVES)


def _forward_mode(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda rate: jax.jvp(function, (rate,), (1.0,))[1]


def jvp(case: Case) -> str:
    """Forward mode, against reverse mode where there is one."""
    _differentiable(case, _forward_mode)
    try:
        _differentiable(case, jax.grad)
    except NotInOptax:
        tangent = quick_jit(_forward_mode(final_loss(ours, case)))(RATE)
        assert np.isfinite(tangent)
        return "finite"

    def measure(way: Way) -> tuple[PyTree, PyTree]:
        final = final_loss(way, case)
        return quick_jit(_forward_mode(final))(RATE), quick_jit(jax.grad(final))(RATE)

    return _agree(measure, CLOSE_DERIVATIVES)


def checkpoint(case: Case) -> str:
    """Rematerialized derivative, against the stored one."""
    _differentiable(case, jax.grad)

    def measure(way: Way) -> tuple[PyTree, PyTree]:
        final = final_loss(way, case)
        again = quick_jit(jax.grad(jax.checkpoint(final)))(RATE)
        return again, quick_jit(jax.grad(final))(RATE)

    return _agree(measure, CLOSE_DERIVATIVES)


def scan(case: Case) -> str:
    """Steps in `lax.scan`, against a loop."""

    def measure(way: Way) -> tuple[PyTree, PyTree]:
        training = way(case, RATE)

        @quick_jit
        def scanned(params: PyTree, state: Any) -> Any:
            def body(carry: Any, _: None) -> Any:
                return training.step(*carry), None

            return jax.lax.scan(body, (params, state), length=FEW)[0]

        params, state = scanned(params_of(), training.init(params_of()))
        expected, looped = run(training)
        _same_structure(state, looped)
        return params, expected

    return _agree(measure)


def _mesh() -> Any:
    return jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))


def sharded(case: Case) -> str:
    """Parameters and moments split over all devices, against one device."""
    mesh = _mesh()

    def place(leaf: Any) -> Any:
        split = leaf.ndim > 1 and leaf.shape[0] % mesh.size == 0
        return jax.device_put(leaf, NamedSharding(mesh, P("data") if split else P()))

    def measure(way: Way) -> tuple[PyTree, PyTree]:
        training = way(case, RATE)
        begin = jax.tree.map(place, (params_of(), training.init(params_of())))
        return steps_from(quick_jit(training.step), *begin)[0], run(training)[0]

    return _agree(measure)


def shard_map(case: Case) -> str:
    """The whole optimizer as an argument of `shard_map`, gradients averaged."""
    mesh = _mesh()

    def step(params: PyTree, tx: Any, weight: jax.Array) -> Any:
        grads, extra = inputs(case, params)
        mean = jax.lax.pmean(weight.sum(), "data")  # 1, but different on each device
        grads = jax.tree.map(lambda g: g * mean, grads)
        updates, tx = tx.update(grads, params, **extra)
        return optax.apply_updates(params, updates), tx

    mapped = quick_jit(
        jax.shard_map(
            step,
            mesh=mesh,
            in_specs=(P(), P(), P("data")),
            out_specs=(P(), P()),
            check_vma=False,
        )
    )
    training = ours(case, RATE)
    weights = np.linspace(0.5, 1.5, mesh.size, dtype=np.float32)
    found, _ = steps_from(
        lambda params, tx: mapped(params, tx, weights),
        params_of(),
        training.init(params_of()),
    )
    return _close(found, run(training)[0])


def pmap(case: Case) -> str:
    """One optimizer for each device, as a mapped argument of `pmap`."""
    count = jax.device_count()

    def measure(way: Way) -> tuple[PyTree, PyTree]:
        training = way(case, RATE)
        begin = jax.tree.map(
            lambda leaf: jnp.stack([leaf] * count),
            (params_of(), training.init(params_of())),
        )
        found, _ = steps_from(jax.pmap(training.step), *begin)
        return jax.tree.map(lambda leaf: leaf[-1], found), run(training)[0]

    return _agree(measure)


def donate(case: Case) -> str:
    """The old optimizer gives its memory to the new one."""
    training = ours(case, RATE)
    tx = jax.tree.map(jnp.copy, training.init(params_of()))
    step = quick_jit(training.step, donate_argnums=1)
    found, _ = steps_from(step, params_of(), tx)
    assert any(leaf.is_deleted() for leaf in jax.tree.leaves(tx)), "nothing was donated"
    return _close(found, run(training)[0])


def eval_shape(case: Case) -> str:
    """Shapes without values, of `init` and of a step."""
    training = ours(case, RATE)
    real = training.init(params_of())
    _same_structure(real, jax.eval_shape(training.init, params_of()))
    _same_structure(real, jax.eval_shape(training.step, params_of(), real)[1])
    return "exact"


def _goes_on(case: Case, tx: Any, other: Any) -> str:
    """Asserts that two optimizers are one bit for bit, and go on as one."""
    assert _structure(tx) == _structure(other), "another structure"
    traces: list[None] = []

    @quick_jit
    def step(params: PyTree, tx: Any) -> Any:
        traces.append(None)
        return ours(case, RATE).step(params, tx)

    first, second = step(params_of(1), tx), step(params_of(1), other)
    assert len(traces) == 1, "traced again"
    assert not distance(_raw(first), _raw(second)), "other values"
    return "exact"


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _raw(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda x: jax.random.key_data(x) if _is_key(x) else x, tree)


def _has_no_keys(tx: Any) -> None:
    if any(map(_is_key, jax.tree.leaves(tx))):
        raise NotInOptax  # neither JAX pickles typed keys nor Flax serializes them


def copies(case: Case) -> str:
    """`copy.copy` and `copy.deepcopy`."""
    tx = case.pytree(RATE).init(params_of())
    _goes_on(case, tx, copy.copy(tx))
    return _goes_on(case, tx, copy.deepcopy(tx))


def pickled(case: Case) -> str:
    """`pickle`, there and back."""
    tx = case.pytree(RATE).init(params_of())
    _has_no_keys(tx)
    return _goes_on(case, tx, pickle.loads(pickle.dumps(tx)))


def serialized(case: Case) -> str:
    """`flax.serialization`: bytes there and back; dicts of plain optax, both ways."""
    tx = case.pytree(RATE).init(params_of())
    _has_no_keys(tx)
    _, trained = run(ours(case, RATE), 1)
    _, state = run(in_optax(case, RATE), 1)
    read = serialization.from_bytes(tx, serialization.to_bytes(trained))
    _goes_on(case, trained, jax.tree.map(jnp.asarray, read))
    theirs, mine = map(serialization.to_state_dict, (state, trained))
    assert _structure(mine["opt_state"]) == _structure(theirs)
    loaded = serialization.from_state_dict(tx, theirs)
    assert not distance(loaded.opt_state, state)
    back = serialization.from_state_dict(state, mine["opt_state"])
    assert _structure(back) == _structure(state)
    return "exact"


def orbax(case: Case) -> str:
    """Orbax: the optimizer there and back; checkpoints of plain optax, both ways."""
    _, trained = run(ours(case, RATE), 1)
    _, state = run(in_optax(case, RATE), 1)
    if any(leaf.size == 0 for leaf in jax.tree.leaves(state)):
        raise NotInOptax  # Orbax does not save arrays of no size
    with tempfile.TemporaryDirectory() as name, ocp.StandardCheckpointer() as saver:
        saver.save(f"{name}/ours", trained)
        saver.save(f"{name}/theirs", {"opt_state": state})
        saver.save(f"{name}/back", {"opt_state": trained.opt_state})
        saver.wait_until_finished()
        _goes_on(case, trained, saver.restore(f"{name}/ours", trained))
        target = {"opt_state": trained.opt_state}
        loaded = saver.restore(f"{name}/theirs", target)["opt_state"]
        assert not distance(_raw(loaded), _raw(state))
        back = saver.restore(f"{name}/back", {"opt_state": state})["opt_state"]
        assert not distance(_raw(back), _raw(trained.opt_state))
    return "exact"


CHECKS: dict[str, Check] = {
    "trajectory": trajectory,
    "schedule": schedule,
    "replace": replace,
    "vmap": vmap,
    "grad": grad,
    "jvp": jvp,
    "checkpoint": checkpoint,
    "scan": scan,
    "sharded jit": sharded,
    "shard_map": shard_map,
    "pmap": pmap,
    "donation": donate,
    "eval_shape": eval_shape,
    "copy": copies,
    "pickle": pickled,
    "serialization": serialized,
    "Orbax": orbax,
}
