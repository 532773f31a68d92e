"""Solvers: what they return depends on a product."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.corpus.program import Case, Programs, lazily, normal, of_product


def _solver_case(function: Callable[..., Any]) -> Case:
    return of_product(function, normal(8, 8) / 4, normal(8, seed=1))


def _by_name(run: Callable[..., Any], names: str) -> Programs:
    table = {name: functools.partial(run, name) for name in names.split()}
    return lazily(_solver_case, table)


def _diffrax() -> Programs:
    def solve(solver: str, adjoint: str = "", adaptive: bool = False) -> Any:
        def run(w: Any, x: Any) -> Any:
            import diffrax

            kind = getattr(diffrax, solver)()
            term = diffrax.ODETerm(lambda t, y, w: jnp.tanh(w @ y) - y)
            chosen = {"adjoint": getattr(diffrax, adjoint)()} if adjoint else {}
            steps: Any = diffrax.ConstantStepSize()
            if adaptive:
                steps = diffrax.PIDController(rtol=1e-3, atol=1e-3)
            return diffrax.diffeqsolve(
                term, kind, 0.0, 1.0, 0.125, x, w, stepsize_controller=steps, **chosen
            ).ys

        return run

    # Each takes half a minute to trace.
    adjoints = "DirectAdjoint BacksolveAdjoint"
    table = {name: solve(name) for name in "Euler Heun Tsit5".split()}
    table["Kvaerno3"] = solve("Kvaerno3", adaptive=True)
    table |= {f"Tsit5, {a}": solve("Tsit5", a, True) for a in adjoints.split()}
    return lazily(_solver_case, table)


def _optimistix() -> Programs:
    def run(method: str, solver: str, w: Any, x: Any) -> Any:
        import optimistix as optx

        kind = getattr(optx, solver)(rtol=1e-4, atol=1e-4)
        function = {
            "fixed_point": lambda y, w: jnp.tanh(w @ y) * 0.5 + x,
            "root_find": lambda y, w: y - jnp.tanh(w @ y) * 0.5 - x,
            "least_squares": lambda y, w: y - jnp.tanh(w @ y) * 0.5 - x,
            "minimise": lambda y, w: jnp.sum((y - jnp.tanh(w @ x)) ** 2 * (1 + y**2)),
        }[method]
        return getattr(optx, method)(function, kind, x, w, throw=False).value

    methods = {
        "fixed_point": "FixedPointIteration",
        "root_find": "Newton Chord",
        "least_squares": "LevenbergMarquardt GaussNewton Dogleg",
        "minimise": "BFGS NonlinearCG",
    }
    table = {
        f"{method}({solver})": functools.partial(run, method, solver)
        for method, solvers in methods.items()
        for solver in solvers.split()
    }
    return lazily(_solver_case, table)


def _lineax() -> Programs:
    def run(solver: str, w: Any, x: Any) -> Any:
        import lineax as lx

        matrix = w @ w.T + jnp.eye(8)
        iterative = solver in ("CG", "GMRES", "BiCGStab", "NormalCG")
        given = dict(rtol=1e-5, atol=1e-5) if iterative else {}
        operator = lx.MatrixLinearOperator(matrix, lx.positive_semidefinite_tag)
        kind = getattr(lx, solver)(**given)
        return lx.linear_solve(operator, x, kind, throw=False).value

    names = "LU QR SVD Cholesky CG GMRES BiCGStab"
    return _by_name(run, names)


def _jaxopt() -> Programs:
    def run(solver: str, settings: dict[str, Any], w: Any, x: Any) -> Any:
        import jaxopt

        def objective(y: Any, w: Any) -> Any:
            return jnp.sum((y - jnp.tanh(w @ x)) ** 2 * (1 + y**2))

        def residual(y: Any, w: Any) -> Any:
            return y - 0.5 * jnp.tanh(w @ y) - x

        def map_(y: Any, w: Any) -> Any:
            return 0.5 * jnp.tanh(w @ y) + x

        by_kind = {
            "GaussNewton": residual,
            "LevenbergMarquardt": residual,
            "Broyden": residual,
            "FixedPointIteration": map_,
            "AndersonAcceleration": map_,
        }
        kind = getattr(jaxopt, solver)
        function = by_kind.get(solver, objective)
        # A proximal operator has parameters of its own, before those of the function.
        given = (None, w) if solver == "ProximalGradient" else (w,)
        return kind(function, maxiter=20, **settings).run(x, *given).params

    plain = (
        "GradientDescent LBFGS BFGS NonlinearCG GaussNewton LevenbergMarquardt "
        "Broyden FixedPointIteration AndersonAcceleration ProximalGradient"
    )
    table = {name: functools.partial(run, name, {}) for name in plain.split()}
    unrolled = functools.partial(
        run, "GradientDescent", dict(implicit_diff=False, unroll=True, stepsize=0.1)
    )
    return lazily(_solver_case, table | {"GradientDescent(scan)": unrolled})


def _ott() -> Programs:
    def run(settings: dict[str, Any], w: Any, x: Any) -> Any:
        from ott.geometry import pointcloud
        from ott.problems.linear import linear_problem
        from ott.solvers.linear import sinkhorn

        geometry = pointcloud.PointCloud(jnp.outer(x, x) @ w, w, epsilon=0.5)
        problem = linear_problem.LinearProblem(geometry, **settings)
        return sinkhorn.Sinkhorn(max_iterations=50)(problem).reg_ot_cost

    table = {
        "Sinkhorn": functools.partial(run, {}),
        "Sinkhorn(unbalanced)": functools.partial(run, {"tau_a": 0.9}),
    }
    return lazily(_solver_case, table)


def _tinygp() -> Programs:
    def run(kernel: str, w: Any, x: Any) -> Any:
        from tinygp import GaussianProcess, kernels

        scale = jnp.exp(0.1 * jnp.mean(w))
        kind = getattr(kernels, kernel)(scale)
        return GaussianProcess(kind, w @ x, diag=0.5).log_probability(x)

    names = "ExpSquared Matern32 Matern52 Exp"
    return _by_name(run, names)


def _blackjax() -> Programs:
    def run(sampler: str, settings: dict[str, Any], w: Any, x: Any) -> Any:
        import blackjax

        def density(y: Any) -> Any:
            return -jnp.sum(jnp.log1p((w @ y - x) ** 2))

        kind = getattr(blackjax, sampler)(density, **settings)

        def step(state: Any, key: Any) -> Any:
            return kind.step(key, state)[0], None

        keys = jax.random.split(jax.random.key(0), 4)
        return jax.lax.scan(step, kind.init(x), keys)[0].logdensity

    mass = jnp.ones(8)
    table = {
        "hmc": functools.partial(
            run,
            "hmc",
            dict(step_size=0.05, inverse_mass_matrix=mass, num_integration_steps=3),
        ),
        "mala": functools.partial(run, "mala", dict(step_size=0.01)),
    }
    return lazily(_solver_case, table)


TABLES = {
    "lineax": _lineax,
    "tinygp": _tinygp,
    "jaxopt solvers": _jaxopt,
    "optimistix": _optimistix,
    "blackjax": _blackjax,
    "ott": _ott,
    "diffrax": _diffrax,
}
