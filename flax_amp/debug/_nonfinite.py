"""`find_nonfinite`: which equation made an inf or a NaN, why, and what to do."""

import bisect
import contextlib
import glob
import math
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType
from jax.typing import DTypeLike

from flax_amp import _tree
from flax_amp._compat import Array, Jaxpr
from flax_amp._rewriter.transform import rewrite
from flax_amp.debug import _nonfinite_report as reports
from flax_amp.debug._call import (
    Asked,
    FlatLoss,
    Tool,
    UsersCall,
    check_concrete,
    read_scale,
    read_scaler,
)
from flax_amp.debug._nonfinite_report import (
    MAX_EXAMPLES,
    BadInput,
    NonfiniteReport,
    Verdict,
)
from flax_amp.debug._nonfinite_run import Cause, Runner, first_of, is_finite, kinds
from flax_amp.policy import (
    MatmulDType,
    Policy,
    PolicyEntries,
    Precision,
    default_amp_policy,
    without_fp8,
)

_MAX_POLICIES = 4  # policies tried for modules with faults


def find_nonfinite(
    fun: Asked,
    *step: Any,
    precision: Precision | None = None,
    compute_dtype: DTypeLike | None = None,
    matmul_dtype: MatmulDType = None,
    amp_policy: PolicyEntries | None = None,
    scale: float | None = None,
) -> Any:
    """Finds the equation that made the inf or the NaN in a loss or its gradient.

    It is called as `find_nonfinite(loss)(params, batch)`, with the loss before `amp`,
    which may return `(loss, aux)`, or as `find_nonfinite(state, loss_fn, batch,
    *args)`. The gradient is that with respect to the first argument.

    The program that `amp` emits runs once, outside of `jit`, one equation after the
    other, each in its own dtype. An inf or a NaN counts only if it reaches the loss, a
    gradient or an updated variable, so masks of `-inf` are no false alarm. Further runs
    tell precision from mathematics, and try a policy that mends it.

    Sharp edges:
      XLA may compute fused code with more range than its dtypes have. Then a compiled
      step can be finite where this run is not. Callbacks and `jax.debug.print` run
      again. The whole batch runs in one pass, also if the step splits it.

    Args:
      fun, precision, compute_dtype, matmul_dtype, amp_policy: see `flax_amp.explain`.
      *step: see `flax_amp.explain`.
      scale: what the loss is multiplied by; by default the scale of the state, or 1.

    Returns:
      A `NonfiniteReport`, or a function that returns one. Print it.

    Raises:
      TypeError: if an argument is of a wrong kind, or abstract.
      ValueError: if the scale is not a positive number.

    Example:
      >>> import jax, jax.numpy as jnp, flax_amp
      >>> def loss(w, x):
      ...     with jax.named_scope("head"):
      ...         return jnp.mean(jnp.log(x @ w))
      >>> found = flax_amp.find_nonfinite(loss)(jnp.eye(2), jnp.array([[1.0, 0.0]]))
      >>> found.verdict, found.finding.path, found.finding.text
      ('mathematics', 'head', 'log(0) = -inf')
    """
    tool = Tool.read(
        "find_nonfinite", fun, step, precision, compute_dtype, matmul_dtype, amp_policy
    )
    factor, scaler = read_scale("find_nonfinite", fun, scale), read_scaler(fun)

    def use(call: UsersCall) -> NonfiniteReport:
        loss = FlatLoss.of(call, tool.where)
        with tool.working():
            return _Search(tool, loss, factor, scaler).report()

    def found(*args: Any, **kwargs: Any) -> NonfiniteReport:
        check_concrete(tool.where, (args, kwargs))
        with jax.debug_nans(False), jax.debug_infs(False), _mesh_of((args, kwargs)):
            return tool.run(use, args, kwargs)

    return tool.on_target(found)


def _mesh_of(args: Any) -> Any:
    """Returns the context in which a mesh with explicit axes can be used."""
    for leaf in jax.tree.leaves(args):
        mesh = getattr(getattr(leaf, "sharding", None), "mesh", None)
        if mesh is not None and AxisType.Explicit in mesh.axis_types:
            return jax.set_mesh(mesh)
    return contextlib.nullcontext()


class _Program(NamedTuple):
    """A traced program: a function of the scale and the arrays."""

    closed: Jaxpr
    names: list[str]  # of its results
    backward: bool  # whether it computes the gradient
    functions: dict[Any, Any]  # what its runs have compiled


class _Fault(NamedTuple):
    """The first cause that reaches a result, and the results that are not finite."""

    cause: Cause
    reached: tuple[str, ...]


class _Search:
    """Finds the cause of one inf or NaN."""

    def __init__(
        self, tool: Tool, loss: FlatLoss, scale: float, scaler: dict[str, float]
    ):
        self._tool, self._loss = tool, loss
        self._scale, self._scaler = scale, scaler
        # Training writes the first argument, or the state; the rest is data.
        arguments = [path.split("/")[0] for path in loss.paths]
        self._is_batch = [a not in (arguments[0], "state") for a in arguments]
        in_last = [a == arguments[-1] != arguments[0] for a in arguments]
        sizes = Counter(x.shape[0] for x in _tree.pick(loss.arrays, in_last) if x.ndim)
        self._batch_size = sizes.most_common(1)[0][0] if sizes else None
        self._trained_shapes = {x.shape for x in _tree.pick(loss.arrays, loss.trained)}
        # Additive masks of the batch hold -inf. An argument of the program has the
        # next number: the scale is the first.
        self._faults = {
            i + 1
            for i, x in enumerate(loss.arrays)
            if not is_finite(x) and not (self._is_batch[i] and kinds(x) == "-inf")
        }

    def _examples(self, bad: Any) -> tuple[int, ...]:
        """Returns the examples that carry something bad, if the first axis has them."""
        if bad.shape[:1] != (self._batch_size,) or bad.shape in self._trained_shapes:
            return ()
        found = np.flatnonzero(bad.reshape(len(bad), -1).any(axis=1))
        return tuple(map(int, found[:MAX_EXAMPLES]))

    # --- runs ------------------------------------------------------------------------

    def _trace(self, compute_dtype: Any, policy: PolicyEntries) -> list[_Program]:
        """Traces the loss in a precision, and the loss with its gradient."""
        flat, mask = self._loss, self._loss.trained
        # Recomputation changes no number. In float32 nothing changes, but the rules of
        # custom derivatives get their own source lines.
        rewritten = rewrite(flat, Policy(policy), jnp.dtype(compute_dtype))

        def forward(scale: Array, *arrays: Array) -> Any:
            return rewritten(list(arrays))[:2]

        def backward(scale: Array, *arrays: Array) -> Any:
            def scaled(trained: list[Array]) -> Any:
                loss, updates, _ = rewritten(_tree.fill(trained, mask, arrays))
                return _tree.widen(loss) * scale, (loss, updates)

            grads, out = jax.grad(scaled, has_aux=True)(_tree.pick(arrays, mask))
            return out, [_tree.widen(g) / scale for g in grads]

        def trace(fun: Callable[..., Any], last: list[str]) -> _Program:
            closed = jax.make_jaxpr(fun)(jnp.float32(1), *flat.arrays)
            updated = ["updated variables"] * (len(closed.out_avals) - 1 - len(last))
            return _Program(closed, ["loss", *updated, *last], bool(last), {})

        wrt = [f"gradient of {path}" for path in _tree.pick(flat.paths, mask)]
        return [trace(forward, []), trace(backward, wrt)]

    def _run(self, programs: list[_Program], scale: float) -> _Fault | None:
        """Runs the forward pass and, only if that is finite, the gradient."""
        for program in programs:
            runner = Runner(program.functions, program.backward, self._examples)
            arrays = [jnp.float32(scale), *self._loss.arrays]
            values = runner.start(program.closed, arrays, self._faults)
            cause = first_of(value.cause for value in values)
            if cause:
                found = zip(program.names, values, strict=True)
                names = dict.fromkeys(name for name, value in found if value.cause)
                return _Fault(cause, tuple(names))
        return None

    # --- the verdict -----------------------------------------------------------------

    def report(self) -> NonfiniteReport:
        """Runs the loss until the cause is known."""
        programs = self._trace(self._tool.dtype, self._tool.entries)
        fault = self._run(programs, self._scale)
        if fault is None:
            return self._make("nothing", reports.NOTHING)
        if fault.cause.arguments & self._faults:
            text = reports.advice_for_input(self._inputs(fault.cause)[0])
            return self._make("inputs", text, fault)
        if self._is_of_scale(programs, fault):
            return self._make("scale", self._advice_for_scale(programs), fault)
        if self._tool.dtype != jnp.float32:
            in_float32 = self._run(
                self._trace(jnp.float32, default_amp_policy), self._scale
            )
            if in_float32 is None:
                return self._precision(fault)
            fault = in_float32  # what no precision mends
        text = reports.advice_for_mathematics(fault.cause.finding)
        return self._make("mathematics", text, fault)

    def _is_of_scale(self, programs: list[_Program], fault: _Fault) -> bool:
        """Whether a lower scale mends a fault."""
        finding = fault.cause.finding
        is_backward = finding is not None and finding.backward
        return is_backward and self._scale > 1 and self._run(programs, 1.0) is None

    def _make(
        self, verdict: Verdict, text: str, fault: _Fault | None = None, **known: Any
    ) -> NonfiniteReport:
        if fault is not None:
            known["finding"], known["reached"] = fault.cause.finding, fault.reached
            known["inputs"] = tuple(self._inputs(fault.cause))
        return NonfiniteReport(
            name=self._tool.name,
            compute_dtype=self._tool.dtype.name,
            scale=self._scale,
            verdict=verdict,
            advice=text,
            **known,
        )

    def _inputs(self, cause: Cause) -> list[BadInput]:
        """Describes the arguments that have led to a cause."""
        found = []
        for i in (number - 1 for number in sorted(cause.arguments)):
            path, is_batch = self._loss.paths[i], self._is_batch[i]
            x = np.asarray(self._loss.arrays[i])
            bad = ~np.isfinite(x)
            examples = self._examples(bad) if is_batch else ()
            places = np.argwhere(bad)
            first = tuple(map(int, places[0]))
            found.append(
                BadInput(path, kinds(x), len(places), first, is_batch, examples)
            )
        return found

    def _advice_for_scale(self, programs: list[_Program]) -> str:
        """Tells at which lower scale the gradients are finite."""
        scaler, scale = self._scaler, self._scale
        factor = scaler.get("adjust_factor", 2.0)
        # With a scale of 1 they are finite.
        most = math.ceil(math.log(scale, factor))
        lower = [scale / factor**skips for skips in range(1, most)]
        skips = 1 + bisect.bisect_left(
            lower, True, key=lambda scale: self._run(programs, scale) is None
        )
        return reports.advice_for_scale(max(scale / factor**skips, 1.0), skips, scaler)

    def _precision(self, fault: _Fault) -> NonfiniteReport:
        """Tries a policy for the module at fault, then also for the next ones."""
        policy, dtype = self._tool.entries, self._tool.dtype
        if Policy(policy).fp8_recipes:
            in_half = self._trace(dtype, without_fp8(policy))
            if self._run(in_half, self._scale) is None:
                return self._make(
                    "precision", reports.advice_without_fp8(dtype.name), fault
                )
        modules: list[str] = []
        left = fault
        for _ in range(_MAX_POLICIES):
            path = left.cause.finding.path if left.cause.finding else ""
            if path in ("", *modules):
                break  # it is the victim of another one
            inside = f"{path}/"
            modules = [*(m for m in modules if not m.startswith(inside)), path]
            keys = [glob.escape(module) for module in modules]
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                tried = {**policy, **dict.fromkeys(keys, jnp.float32)}
                programs = self._trace(dtype, tried)
            now = self._run(programs, self._scale)
            if now is None or self._is_of_scale(programs, now):
                return self._make(
                    "precision",
                    reports.advice_for_policy(keys, own=self._tool.has_own_policy),
                    fault,
                    policy=tuple((key, "float32") for key in keys),
                    notes=() if now is None else (reports.SCALE_LEFT,),
                )
            left = now
        text = reports.advice_without_policy(is_float16=dtype == jnp.float16)
        return self._make("precision", text, fault)
