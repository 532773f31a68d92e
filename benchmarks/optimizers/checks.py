"""What must hold of every optimizer, one function for each transformation of JAX.

A check raises an `AssertionError` where the pytree optimizer and plain optax part, or
`NotInOptax` where plain optax cannot do it either.
"""

import copy
import functools
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

from benchmarks.optimizers.cases import RATE, Case, inputs, loss_of, params_of
from flax_amp import optim

PyTree = Any
Check = Callable[[Case], str]

STEPS = 50
FEW = 3
# Of float32 under other roundings, relative; measured against the parameters.
CLOSE = 1e-6


# Without the optimizations that make compiling slow; trajectories have them.
_QUICK = {"xla_backend_optimization_level": 0}
_jit: Any = functools.partial(jax.jit, compiler_options=_QUICK)


class NotInOptax(Exception):
    """Plain optax cannot do this with this optimizer."""


def _step(case: Case, params: PyTree, tx: optim.Optimizer) -> tuple[PyTree, Any]:
    grads, extra = inputs(case, params)
    updates, tx = tx.update(grads, params, **extra)
    return optax.apply_updates(params, updates), tx


def _plain_step(case: Case, tx: Any, params: PyTree, state: PyTree) -> Any:
    grads, extra = inputs(case, params)
    updates, state = tx.update(grads, state, params, **extra)
    return optax.apply_updates(params, updates), state


def _run(
    case: Case, tx: optim.Optimizer, steps: int, jit: Any = _jit
) -> tuple[PyTree, Any]:
    params = params_of()
    tx = tx.init(params)
    step = jit(functools.partial(_step, case))
    for _ in range(steps):
        params, tx = step(params, tx)
    return params, tx


def _run_plain(
    case: Case, tx: Any, steps: int, jit: Any = _jit
) -> tuple[PyTree, PyTree]:
    params = params_of()
    state = tx.init(params)
    step = jit(functools.partial(_plain_step, case, tx))
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
    size = sum(float(np.sum(y**2)) for _, y in as64)
    return float(np.sqrt(difference / max(size, 1e-30)))


def _close(
    a: PyTree,
    b: PyTree,
    bound: float = CLOSE,
    in_optax: Callable[[], tuple[PyTree, PyTree]] | None = None,
) -> str:
    """Asserts that two trees are close, or that those of plain optax are not either."""
    apart = distance(a, b)
    if apart <= bound:
        return "exact" if apart == 0 else f"{apart:.0e}"
    if in_optax is not None:
        theirs = distance(*in_optax())
        if theirs > bound or np.isnan(theirs):
            return f"{apart:.0e} *"
    raise AssertionError(f"{apart:.1e}")


def _structure(tree: PyTree) -> Any:
    return jax.tree.structure(tree)


def _same_structure(a: PyTree, b: PyTree) -> None:
    assert _structure(a) == _structure(b), "another structure"
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert (x.shape, x.dtype) == (jnp.shape(y), jnp.result_type(y)), "other leaves"


def trajectory(case: Case) -> str:
    """50 steps with a fixed learning rate, against plain optax."""
    return _same_trajectory(case, RATE)[0]


def _same_trajectory(case: Case, rate: Any) -> tuple[str, Any]:
    expected, state = _run_plain(case, case.plain(rate), STEPS, jax.jit)
    params, tx = _run(case, case.pytree(rate), STEPS, jax.jit)
    _same_structure(tx.opt_state, state)

    def otherwise_compiled() -> tuple[PyTree, PyTree]:
        return _run_plain(case, case.plain(rate), STEPS)[0], expected

    return _close(params, expected, in_optax=otherwise_compiled), tx


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
    if not case.rate:
        raise NotInOptax
    params = params_of()
    step: Any = jax.jit(functools.partial(_step, case))
    params, tx = step(params, case.pytree(RATE).init(params))
    other = tx.replace(**dict.fromkeys(_rates(tx), RATE / 3))
    plain = jax.jit(functools.partial(_plain_step, case, case.plain(RATE / 3)))
    expected, _ = plain(params, other.opt_state)
    params, other = step(params, other)
    assert step._cache_size() == 1, "compiled again"
    return _close(params, expected)


def vmap(case: Case) -> str:
    """Three learning rates in one step, each equal to its own run."""
    if not case.rate:
        raise NotInOptax
    rates = np.array([0.5, 1, 2], np.float32) * RATE

    def run(rate: Any) -> PyTree:
        return _loop(case, case.pytree(rate), params_of())[0]

    def run_plain(rate: Any) -> PyTree:
        return _plain_loop(case, rate)

    def both(run: Callable[[Any], PyTree]) -> tuple[PyTree, PyTree]:
        rows = [_jit(run)(rate) for rate in rates]
        alone = jax.tree.map(lambda *x: jnp.stack(x), *rows)
        return _jit(jax.vmap(run))(rates), alone

    return _close(*both(run), in_optax=lambda: both(run_plain))


def _loop(case: Case, tx: optim.Optimizer, params: PyTree) -> tuple[PyTree, Any]:
    tx = tx.init(params)
    for _ in range(FEW):
        params, tx = _step(case, params, tx)
    return params, tx


def _final_loss(case: Case, rate: Any, dtype: Any = jnp.float32) -> jax.Array:
    return loss_of(_loop(case, case.pytree(rate), params_of(dtype=dtype))[0])


def _plain_loop(case: Case, rate: Any, dtype: Any = jnp.float32) -> PyTree:
    tx, params = case.plain(rate), params_of(dtype=dtype)
    state = tx.init(params)
    for _ in range(FEW):
        params, state = _plain_step(case, tx, params, state)
    return params


def _plain_final_loss(case: Case, rate: Any, dtype: Any = jnp.float32) -> jax.Array:
    return loss_of(_plain_loop(case, rate, dtype))


def _differentiable(case: Case, derivative: Callable[..., Any]) -> None:
    if not case.rate:
        raise NotInOptax
    try:
        jax.eval_shape(derivative(functools.partial(_plain_final_loss, case)), RATE)
    except Exception as error:  # whatever JAX or optax raise
        raise NotInOptax from error


def grad(case: Case) -> str:
    """Derivative through three updates by the rate, against finite differences."""
    _differentiable(case, jax.grad)
    with jax.enable_x64(True):
        eager = functools.partial(_final_loss, case, dtype=jnp.float64)
        final, slope = _jit(eager), _jit(jax.grad(eager))
        step = RATE * 1e-4
        expected = (final(RATE + step) - final(RATE - step)) / (2 * step)

        def in_optax() -> tuple[PyTree, PyTree]:
            plain = functools.partial(_plain_final_loss, case, dtype=jnp.float64)
            return _jit(jax.grad(plain))(RATE), expected

        return _close(slope(RATE), expected, 1e-4, in_optax)


def jvp(case: Case) -> str:
    """Forward mode, against reverse mode where there is one."""
    _differentiable(case, lambda f: lambda rate: jax.jvp(f, (rate,), (1.0,)))
    final = functools.partial(_final_loss, case)
    _, tangent = _jit(lambda rate: jax.jvp(final, (rate,), (1.0,)))(RATE)
    try:
        _differentiable(case, jax.grad)
    except NotInOptax:
        assert np.isfinite(tangent)
        return "finite"
    plain = functools.partial(_plain_final_loss, case)

    def in_optax() -> tuple[PyTree, PyTree]:
        forward = _jit(lambda rate: jax.jvp(plain, (rate,), (1.0,))[1])
        return forward(RATE), _jit(jax.grad(plain))(RATE)

    return _close(tangent, _jit(jax.grad(final))(RATE), 1e-4, in_optax)


def checkpoint(case: Case) -> str:
    """Rematerialized derivative, against the stored one."""
    _differentiable(case, jax.grad)
    final = functools.partial(_final_loss, case)
    again = _jit(jax.grad(jax.checkpoint(final)))(RATE)
    return _close(again, _jit(jax.grad(final))(RATE), 1e-4)


def scan(case: Case) -> str:
    """Steps in `lax.scan`, against a loop."""
    params = params_of()
    tx = case.pytree(RATE).init(params)

    @_jit
    def run(params: PyTree, tx: Any) -> Any:
        def body(carry: Any, _: None) -> Any:
            return _step(case, *carry), None

        return jax.lax.scan(body, (params, tx), length=FEW)[0]

    scanned, tx = run(params, tx)
    looped, expected = _run(case, case.pytree(RATE), FEW)
    _same_structure(tx, expected)
    return _close(scanned, looped)


def sharded(case: Case) -> str:
    """Parameters and moments split over all devices, against one device."""
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))

    def place(leaf: Any) -> Any:
        split = leaf.ndim > 1 and leaf.shape[0] % mesh.size == 0
        return jax.device_put(leaf, NamedSharding(mesh, P("data") if split else P()))

    def split(step: Any, state: PyTree) -> PyTree:
        params, state = jax.tree.map(place, (params_of(), state))
        for _ in range(FEW):
            params, state = step(params, state)
        return params

    def in_optax() -> tuple[PyTree, PyTree]:
        tx = case.plain(RATE)
        step = _jit(functools.partial(_plain_step, case, tx))
        return split(step, tx.init(params_of())), _run_plain(case, tx, FEW)[0]

    step = _jit(functools.partial(_step, case))
    found = split(step, case.pytree(RATE).init(params_of()))
    alone = _run(case, case.pytree(RATE), FEW)[0]
    return _close(found, alone, in_optax=in_optax)


def shard_map(case: Case) -> str:
    """The whole optimizer as an argument of `shard_map`, gradients averaged."""
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))

    def step(params: PyTree, tx: Any, weight: jax.Array) -> Any:
        grads, extra = inputs(case, params)
        mean = jax.lax.pmean(weight.sum(), "data")  # 1, but different on each device
        grads = jax.tree.map(lambda g: g * mean, grads)
        updates, tx = tx.update(grads, params, **extra)
        return optax.apply_updates(params, updates), tx

    mapped = _jit(
        jax.shard_map(
            step,
            mesh=mesh,
            in_specs=(P(), P(), P("data")),
            out_specs=(P(), P()),
            check_vma=False,
        )
    )
    params = params_of()
    tx = case.pytree(RATE).init(params)
    weights = np.linspace(0.5, 1.5, mesh.size, dtype=np.float32)
    for _ in range(FEW):
        params, tx = mapped(params, tx, weights)
    return _close(params, _run(case, case.pytree(RATE), FEW)[0])


def pmap(case: Case) -> str:
    """One optimizer for each device, as a mapped argument of `pmap`."""
    count = jax.device_count()

    def mapped(step: Any, state: PyTree) -> PyTree:
        params, state = jax.tree.map(
            lambda leaf: jnp.stack([leaf] * count), (params_of(), state)
        )
        step = jax.pmap(step)
        for _ in range(FEW):
            params, state = step(params, state)
        return jax.tree.map(lambda leaf: leaf[-1], params)

    def in_optax() -> tuple[PyTree, PyTree]:
        tx = case.plain(RATE)
        step = functools.partial(_plain_step, case, tx)
        return mapped(step, tx.init(params_of())), _run_plain(case, tx, FEW)[0]

    tx = case.pytree(RATE)
    found = mapped(functools.partial(_step, case), tx.init(params_of()))
    return _close(found, _run(case, tx, FEW)[0], in_optax=in_optax)


def donate(case: Case) -> str:
    """The old optimizer gives its memory to the new one."""
    params = params_of()
    tx = jax.tree.map(jnp.copy, case.pytree(RATE).init(params))
    step = _jit(functools.partial(_step, case), donate_argnums=1)
    old = jax.tree.leaves(tx)
    for _ in range(FEW):
        params, tx = step(params, tx)
    assert any(leaf.is_deleted() for leaf in old), "nothing was donated"
    return _close(params, _run(case, case.pytree(RATE), FEW)[0])


def eval_shape(case: Case) -> str:
    """Shapes without values, of `init` and of a step."""
    tx = case.pytree(RATE)
    real = tx.init(params_of())
    shapes = jax.eval_shape(tx.init, params_of())
    _same_structure(real, shapes)
    _same_structure(
        real, jax.eval_shape(lambda t: _step(case, params_of(), t)[1], real)
    )
    return "exact"


def _goes_on(case: Case, tx: Any, other: Any) -> str:
    """Asserts that two optimizers are one bit for bit, and go on as one."""
    assert _structure(tx) == _structure(other), "another structure"
    traces: list[None] = []

    @_jit
    def step(params: PyTree, tx: Any) -> Any:
        traces.append(None)
        return _step(case, params, tx)

    first, second = step(params_of(1), tx), step(params_of(1), other)
    assert len(traces) == 1, "traced again"
    assert not distance(_raw(first), _raw(second)), "other values"
    return "exact"


def _raw(tree: PyTree) -> PyTree:
    is_key = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key)  # noqa: E731
    return jax.tree.map(lambda x: jax.random.key_data(x) if is_key(x) else x, tree)


def copies(case: Case) -> str:
    """`copy.copy` and `copy.deepcopy`."""
    tx = case.pytree(RATE).init(params_of())
    _goes_on(case, tx, copy.copy(tx))
    return _goes_on(case, tx, copy.deepcopy(tx))


def pickled(case: Case) -> str:
    """`pickle`, there and back."""
    tx = case.pytree(RATE).init(params_of())
    if any(jnp.issubdtype(x.dtype, jax.dtypes.prng_key) for x in jax.tree.leaves(tx)):
        raise NotInOptax  # JAX does not pickle typed keys
    return _goes_on(case, tx, pickle.loads(pickle.dumps(tx)))


def serialized(case: Case) -> str:
    """`flax.serialization`: bytes there and back; dicts of plain optax, both ways."""
    params = params_of()
    tx = case.pytree(RATE).init(params)
    if any(jnp.issubdtype(x.dtype, jax.dtypes.prng_key) for x in jax.tree.leaves(tx)):
        raise NotInOptax  # Flax does not serialize typed keys
    _, trained = _jit(functools.partial(_step, case))(params, tx)
    _, state = _run_plain(case, case.plain(RATE), 1)
    read = serialization.from_bytes(tx, serialization.to_bytes(trained))
    _goes_on(case, trained, jax.tree.map(jnp.asarray, read))
    theirs, ours = map(serialization.to_state_dict, (state, trained))
    assert _structure(ours["opt_state"]) == _structure(theirs)
    loaded = serialization.from_state_dict(tx, theirs)
    _close(loaded.opt_state, state, 0)
    back = serialization.from_state_dict(state, ours["opt_state"])
    assert _structure(back) == _structure(state)
    return "exact"


def orbax(case: Case) -> str:
    """Orbax: the optimizer there and back; checkpoints of plain optax, both ways."""
    params = params_of()
    _, trained = _jit(functools.partial(_step, case))(
        params, case.pytree(RATE).init(params)
    )
    _, state = _run_plain(case, case.plain(RATE), 1)
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
