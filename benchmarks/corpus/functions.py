"""Functions of what a matmul returns, `h = x @ w`, and solvers, with a matmul inside.

In a row of a solver, `w` is the parameter, a square matrix, and `x` a vector.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import ode

from benchmarks.corpus.case import Kind, normal, of_data, of_matmul


def _targets(h: Any) -> Any:
    return jnp.sin(jnp.arange(h.size, dtype=h.dtype)).reshape(h.shape)


_NAMES = {
    "ode": ode,
    "labels": lambda: jnp.arange(16) % 7,
    "targets": _targets,
    "soft": lambda h: jax.nn.softmax(_targets(h)),
    "pos": lambda h: jax.nn.softplus(h) + 0.5,
    "share": lambda h: 0.05 + 0.9 * jax.nn.sigmoid(h),
    "definite": lambda h: h @ h.T / 16 + jnp.eye(len(h)),
    "color": lambda h: jax.nn.sigmoid(h[:, :15].reshape(4, 20, 3)),
    "gray": lambda h: jax.nn.sigmoid(h)[..., None],
}


# --- solvers -------------------------------------------------------------------------

# What is minimised, has a root, or a fixed point: functions of `y` and `w`
_FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "objective": lambda x: (
        lambda y, w: jnp.sum((y - jnp.tanh(w @ x)) ** 2 * (1 + y**2))
    ),
    "residual": lambda x: lambda y, w: y - jnp.tanh(w @ y) * 0.5 - x,
    "map": lambda x: lambda y, w: jnp.tanh(w @ y) * 0.5 + x,
}


def _sinkhorn(solver: Any, w: Any, x: Any) -> Any:
    from ott.geometry import pointcloud
    from ott.problems.linear import linear_problem

    geometry = pointcloud.PointCloud(jnp.outer(x, x) @ w, w, epsilon=0.5)
    return solver(linear_problem.LinearProblem(geometry)).reg_ot_cost


def _ode(solver: Any, w: Any, x: Any, adaptive: bool = True, **options: Any) -> Any:
    import diffrax

    term = diffrax.ODETerm(lambda t, y, w: jnp.tanh(w @ y) - y)
    by_error = diffrax.PIDController(rtol=1e-3, atol=1e-3)
    control: Any = by_error if adaptive else diffrax.ConstantStepSize()
    return diffrax.diffeqsolve(
        term, solver, 0.0, 1.0, 0.125, x, w, stepsize_controller=control, **options
    ).ys


_RNG = np.random.default_rng(0)
_W, _X = (_RNG.normal(size=s).astype(np.float32) for s in ((32, 16), (16, 32)))
MATMUL = Kind("h", functools.partial(of_matmul, _W / 6, _X), _NAMES)
SOLVER = Kind(
    "w, x",
    functools.partial(of_data, normal(8, 8) / 4, normal(8, seed=1)),
    _FUNCTIONS | {"sinkhorn": _sinkhorn, "ode": _ode},
)
