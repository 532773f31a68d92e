"""Solvers: what they return depends on a matmul."""

import functools
import importlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.corpus.program import Case, Programs, normal, of_product, rows


def _programs(
    module: str, text: str, run: Callable[[Any, Any, Any, Any], Any]
) -> Programs:
    """Returns programs `run(module, value of the row, w, x)`."""

    def case(expression: str) -> Case:
        m = importlib.import_module(module)
        given = eval(expression, {"m": m, "jnp": jnp})
        function = functools.partial(run, m, given)
        return of_product(function, normal(8, 8) / 4, normal(8, seed=1))

    return {name: functools.partial(case, code) for name, code in rows(text)}


def _diffrax(m: Any, given: Any, w: Any, x: Any) -> Any:
    solver, options = given
    term = m.ODETerm(lambda t, y, w: jnp.tanh(w @ y) - y)
    options = dict(stepsize_controller=m.ConstantStepSize()) | options
    return m.diffeqsolve(term, solver, 0.0, 1.0, 0.125, x, w, **options).ys


def _optimistix(m: Any, given: Any, w: Any, x: Any) -> Any:
    method, solver = given
    function = {
        "fixed_point": lambda y, w: jnp.tanh(w @ y) * 0.5 + x,
        "root_find": lambda y, w: y - jnp.tanh(w @ y) * 0.5 - x,
        "least_squares": lambda y, w: y - jnp.tanh(w @ y) * 0.5 - x,
        "minimise": lambda y, w: jnp.sum((y - jnp.tanh(w @ x)) ** 2 * (1 + y**2)),
    }[method]
    kind = solver(rtol=1e-4, atol=1e-4)
    return getattr(m, method)(function, kind, x, w, throw=False).value


def _lineax(m: Any, solver: Any, w: Any, x: Any) -> Any:
    matrix = w @ w.T + jnp.eye(8)
    operator = m.MatrixLinearOperator(matrix, m.positive_semidefinite_tag)
    return m.linear_solve(operator, x, solver, throw=False).value


def _jaxopt(m: Any, given: Any, w: Any, x: Any) -> Any:
    kind, function, settings = given
    functions = {
        "objective": lambda y, w: jnp.sum((y - jnp.tanh(w @ x)) ** 2 * (1 + y**2)),
        "residual": lambda y, w: y - 0.5 * jnp.tanh(w @ y) - x,
        "map": lambda y, w: 0.5 * jnp.tanh(w @ y) + x,
    }
    # A proximal operator has parameters of its own, before those of the function.
    arguments = (None, w) if kind is m.ProximalGradient else (w,)
    solver = kind(functions[function], maxiter=20, **settings)
    return solver.run(x, *arguments).params


def _ott(m: Any, settings: dict[str, Any], w: Any, x: Any) -> Any:
    from ott.geometry import pointcloud
    from ott.problems.linear import linear_problem

    geometry = pointcloud.PointCloud(jnp.outer(x, x) @ w, w, epsilon=0.5)
    problem = linear_problem.LinearProblem(geometry, **settings)
    return m.Sinkhorn(max_iterations=50)(problem).reg_ot_cost


def _tinygp(m: Any, kernel: Any, w: Any, x: Any) -> Any:
    kind = kernel(jnp.exp(0.1 * jnp.mean(w)))
    return m.GaussianProcess(kind, w @ x, diag=0.5).log_probability(x)


def _blackjax(m: Any, given: Any, w: Any, x: Any) -> Any:
    sampler, settings = given
    kind = sampler(lambda y: -jnp.sum(jnp.log1p((w @ y - x) ** 2)), **settings)

    def step(state: Any, key: Any) -> Any:
        return kind.step(key, state)[0], None

    keys = jax.random.split(jax.random.key(0), 4)
    return jax.lax.scan(step, kind.init(x), keys)[0].logdensity


_ADAPTIVE = "stepsize_controller=m.PIDController(rtol=1e-3, atol=1e-3)"
_TABLES = {
    "lineax": (
        "lineax",
        """
LU QR SVD Cholesky: m.@()
CG GMRES BiCGStab: m.@(rtol=1e-5, atol=1e-5)
""",
        _lineax,
    ),
    "tinygp": ("tinygp", "ExpSquared Matern32 Matern52 Exp: m.kernels.@", _tinygp),
    "jaxopt solvers": (
        "jaxopt",
        """
GradientDescent LBFGS BFGS NonlinearCG ProximalGradient: (m.@, "objective", {})
GaussNewton LevenbergMarquardt Broyden: (m.@, "residual", {})
FixedPointIteration AndersonAcceleration: (m.@, "map", {})
GradientDescent(scan): (m.GradientDescent, "objective",
    dict(implicit_diff=False, unroll=True, stepsize=0.1))
""",
        _jaxopt,
    ),
    "optimistix": (
        "optimistix",
        """
fixed_point(FixedPointIteration): ("fixed_point", m.FixedPointIteration)
root_find(Newton): ("root_find", m.Newton)
root_find(Chord): ("root_find", m.Chord)
least_squares(LevenbergMarquardt): ("least_squares", m.LevenbergMarquardt)
least_squares(GaussNewton): ("least_squares", m.GaussNewton)
least_squares(Dogleg): ("least_squares", m.Dogleg)
minimise(BFGS): ("minimise", m.BFGS)
minimise(NonlinearCG): ("minimise", m.NonlinearCG)
""",
        _optimistix,
    ),
    "blackjax": (
        "blackjax",
        """
hmc: (m.@, dict(step_size=0.05, inverse_mass_matrix=jnp.ones(8),
    num_integration_steps=3))
mala: (m.@, dict(step_size=0.01))
""",
        _blackjax,
    ),
    "ott": (
        "ott.solvers.linear.sinkhorn",
        """
Sinkhorn: {}
Sinkhorn(unbalanced): {"tau_a": 0.9}
""",
        _ott,
    ),
    # Each takes half a minute to trace.
    "diffrax": (
        "diffrax",
        f"""
Euler Heun Tsit5: (m.@(), {{}})
Kvaerno3: (m.@(), dict({_ADAPTIVE}))
Tsit5,~DirectAdjoint: (m.Tsit5(), dict({_ADAPTIVE}, adjoint=m.DirectAdjoint()))
Tsit5,~BacksolveAdjoint: (m.Tsit5(), dict({_ADAPTIVE}, adjoint=m.BacksolveAdjoint()))
""",
        _diffrax,
    ),
}
TABLES = {
    source: functools.partial(_programs, *given) for source, given in _TABLES.items()
}
