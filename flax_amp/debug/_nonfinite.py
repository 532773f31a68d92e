"""`find_nonfinite`: which equation made an inf or a NaN, why, and what to do."""

import bisect
import contextlib
import dataclasses
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
from flax_amp._rewriter.transform import is_wide, rewrite
from flax_amp._training.train_state import AmpTrainState
from flax_amp.debug import _nonfinite_advice as advice
from flax_amp.debug._call import (
    FlatLoss,
    UsersCall,
    check_concrete,
    read_compute_dtype,
    read_policy,
    read_scale,
    read_target,
    with_scopes,
)
from flax_amp.debug._nonfinite_arrays import is_finite, kinds
from flax_amp.debug._nonfinite_model import (
    MAX_EXAMPLES,
    BadInput,
    NonfiniteReport,
    Verdict,
)
from flax_amp.debug._nonfinite_run import Cause, Runner, first_of
from flax_amp.policy import (
    MatmulDType,
    Policy,
    PolicyEntries,
    default_amp_policy,
    without_fp8,
)

_MAX_POLICIES = 4  # policies tried for modules with faults


@dataclasses.dataclass(frozen=True)
class _Options:
    """The checked arguments."""

    compute_dtype: Any
    amp_policy: PolicyEntries | None
    has_own_policy: bool
    reduce_dtype: DTypeLike | None
    scale: float
    scaler: dict[str, float]  # of the state, if there is one


def find_nonfinite(
    fun: Any,
    *step: Any,
    compute_dtype: DTypeLike | None = None,
    matmul_dtype: MatmulDType = None,
    amp_policy: PolicyEntries | None = None,
    reduce_dtype: DTypeLike | None = None,
    scale: float | None = None,
) -> Any:
    """Finds the equation that made the inf or the NaN in a loss or its gradient.

    There are two ways to call it: `find_nonfinite(fun)(*args)`, where `fun` is the
    function before `amp`, which returns a loss or `(loss, aux)`, and
    `find_nonfinite(state, loss_fn, batch, *args)` for the state and the loss of
    `make_train_step`. The gradient is that with respect to the first argument.

    The program that `amp` emits runs once, outside of `jit`, one equation after the
    other, each in its own dtype. An inf or a NaN counts only if it reaches the loss, a
    gradient or an updated variable, so masks of `-inf` are no false alarm. Further runs
    tell precision from mathematics, and try a policy that mends it.

    Sharp edges:
      XLA may compute fused code with more range than its dtypes have. Then a compiled
      step can be finite where this run is not. Callbacks and `jax.debug.print` run
      again. The whole batch runs in one pass, also if the step splits it.

    Args:
      fun: a float32 function, or an `AmpTrainState`.
      *step: the loss function and what the step takes after the state, if `fun` is one.
      compute_dtype: see `flax_amp.amp`; by default that of the state's precision, or
        bfloat16.
      matmul_dtype: see `flax_amp.amp`; by default that of the state's precision.
      amp_policy: see `flax_amp.amp`.
      reduce_dtype: see `flax_amp.amp`.
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
    scaler = fun.scaler if isinstance(fun, AmpTrainState) else {}
    options = _Options(
        read_compute_dtype(fun, compute_dtype),
        read_policy(fun, amp_policy, matmul_dtype),
        amp_policy is not None,
        reduce_dtype,
        read_scale("find_nonfinite", fun, scale),
        {key: float(np.max(x)) for key, x in scaler.items()},
    )
    names_scopes = Policy(amp_policy).names_scopes
    target = read_target("find_nonfinite", fun, step)

    def found(*args: Any, **kwargs: Any) -> NonfiniteReport:
        check_concrete(f"find_nonfinite: {target.name}", (args, kwargs))

        def use(call: UsersCall) -> NonfiniteReport:
            loss = FlatLoss.of(call, f"find_nonfinite: {target.name}")
            return _Search(target.name, options, loss).report()

        mesh = _mesh_of((args, kwargs))
        with jax.debug_nans(False), jax.debug_infs(False), mesh:
            report, notes = with_scopes(
                use, target, args, kwargs, "find_nonfinite", needs_scopes=names_scopes
            )
        return dataclasses.replace(report, notes=(*report.notes, *notes))

    return found if target.args is None else found(*target.args)


def _mesh_of(args: Any) -> Any:
    """Returns the context in which a mesh with explicit axes can be used."""
    for leaf in jax.tree.leaves(args):
        mesh = getattr(getattr(leaf, "sharding", None), "mesh", None)
        if mesh is not None and AxisType.Explicit in mesh.axis_types:
            return jax.set_mesh(mesh)
    return contextlib.nullcontext()


class _Program(NamedTuple):
    """A traced program: a function of the scale and the arrays.

    Attributes:
      closed: its jaxpr.
      names: what each result is called.
      backward: whether it computes the gradient.
      functions: what its runs have compiled.
    """

    closed: Jaxpr
    names: list[str]
    backward: bool
    functions: dict[Any, Any]


class _Fault(NamedTuple):
    """The first cause that reaches a result, and the results that are not finite."""

    cause: Cause
    reached: tuple[str, ...]


class _Search:
    """Finds the cause of one inf or NaN."""

    def __init__(self, name: str, options: _Options, loss: FlatLoss):
        self._name, self._options, self._loss = name, options, loss
        # Training writes the first argument, or the state; the rest is data.
        arguments = [path.split("/")[0] for path in loss.paths]
        self._is_batch = [a not in (arguments[0], "state") for a in arguments]
        in_last = [a == arguments[-1] != arguments[0] for a in arguments]
        sizes = Counter(x.shape[0] for x in _tree.pick(loss.arrays, in_last) if x.ndim)
        self._batch_size = sizes.most_common(1)[0][0] if sizes else None
        self._trained_shapes = {x.shape for x in _tree.pick(loss.arrays, loss.trained)}
        # The number of an argument of the program: the scale is the first.
        self._faults = {
            i
            for i, (x, is_batch) in enumerate(
                zip(loss.arrays, self._is_batch, strict=True), 1
            )
            # Additive masks of the batch hold -inf.
            if not is_finite(x) and not (is_batch and kinds(x) == "-inf")
        }

    def _examples(self, bad: Any) -> tuple[int, ...]:
        """Returns the examples that carry something bad, if the first axis has them."""
        if bad.shape[:1] != (self._batch_size,) or bad.shape in self._trained_shapes:
            return ()
        found = np.flatnonzero(bad.reshape(len(bad), -1).any(axis=1))
        return tuple(map(int, found[:MAX_EXAMPLES]))

    # --- runs ------------------------------------------------------------------------

    def _trace(
        self, compute_dtype: Any, policy: PolicyEntries | None
    ) -> list[_Program]:
        """Traces the loss in a precision, and the loss with its gradient."""
        flat, mask = self._loss, self._loss.trained
        is_own = compute_dtype == self._options.compute_dtype
        reduce_dtype = self._options.reduce_dtype if is_own else None
        # Recomputation and shared layers change no number. In float32 nothing changes,
        # but the rules of custom derivatives get their own source lines.
        rewritten = rewrite(
            flat,
            Policy(policy),
            jnp.dtype(compute_dtype),
            wide_gradients=is_wide(reduce_dtype, compute_dtype),
        )

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
        options = self._options
        programs = self._trace(options.compute_dtype, options.amp_policy)
        fault = self._run(programs, options.scale)
        if fault is None:
            return self._make("nothing", advice.NOTHING)
        if fault.cause.arguments & self._faults:
            text = advice.for_input(self._inputs(fault.cause)[0])
            return self._make("inputs", text, fault)
        if self._is_of_scale(programs, fault):
            return self._make("scale", self._advice_for_scale(programs), fault)
        if options.compute_dtype != jnp.float32:
            in_float32 = self._run(self._trace(jnp.float32, None), options.scale)
            if in_float32 is None:
                return self._precision(fault)
            fault = in_float32  # what no precision mends
        text = advice.for_mathematics(fault.cause.finding)
        return self._make("mathematics", text, fault)

    def _is_of_scale(self, programs: list[_Program], fault: _Fault) -> bool:
        """Whether a lower scale mends a fault."""
        finding = fault.cause.finding
        is_backward = finding is not None and finding.backward
        is_large = is_backward and self._options.scale > 1
        return is_large and self._run(programs, 1.0) is None

    def _make(
        self, verdict: Verdict, text: str, fault: _Fault | None = None, **known: Any
    ) -> NonfiniteReport:
        if fault is not None:
            known["finding"], known["reached"] = fault.cause.finding, fault.reached
            known["inputs"] = tuple(self._inputs(fault.cause))
        return NonfiniteReport(
            name=self._name,
            compute_dtype=self._options.compute_dtype.name,
            scale=self._options.scale,
            verdict=verdict,
            advice=text,
            **known,
        )

    def _inputs(self, cause: Cause) -> list[BadInput]:
        """Describes the arguments that have led to a cause."""
        found = []
        for number in sorted(cause.arguments):
            i = number - 1  # the scale is the first
            is_batch = self._is_batch[i]
            x = np.asarray(self._loss.arrays[i])
            bad = ~np.isfinite(x)
            examples = self._examples(bad) if is_batch else ()
            where = np.argwhere(bad)
            first = tuple(map(int, where[0]))
            path = self._loss.paths[i]
            found.append(
                BadInput(path, kinds(x), len(where), first, is_batch, examples)
            )
        return found

    def _advice_for_scale(self, programs: list[_Program]) -> str:
        """Tells at which lower scale the gradients are finite."""
        scaler, scale = self._options.scaler, self._options.scale
        factor = scaler.get("adjust_factor", 2.0)
        # With a scale of 1 they are finite.
        most = math.ceil(math.log(scale, factor))
        lower = [scale / factor**skips for skips in range(1, most)]
        skips = 1 + bisect.bisect_left(
            lower, True, key=lambda scale: self._run(programs, scale) is None
        )
        return advice.for_scale(max(scale / factor**skips, 1.0), skips, scaler)

    def _precision(self, fault: _Fault) -> NonfiniteReport:
        """Tries a policy for the module at fault, then also for the next ones."""
        policy, dtype = self._options.amp_policy, self._options.compute_dtype
        if Policy(policy).fp8_recipes:
            in_half = self._trace(dtype, without_fp8(policy))
            if self._run(in_half, self._options.scale) is None:
                return self._make("precision", advice.without_fp8(dtype.name), fault)
        modules: list[str] = []
        left = fault
        for _ in range(_MAX_POLICIES):
            path = left.cause.finding.path if left.cause.finding else ""
            if path in ("", *modules):
                break  # it is the victim of another one
            inside = f"{path}/"
            modules = [*(m for m in modules if not m.startswith(inside)), path]
            keys = [glob.escape(module) for module in modules]
            programs = self._in_float32(keys)
            now = self._run(programs, self._options.scale)
            if now is None or self._is_of_scale(programs, now):
                own = self._options.has_own_policy
                return self._make(
                    "precision",
                    advice.for_policy(keys, own=own),
                    fault,
                    policy=tuple((key, "float32") for key in keys),
                    notes=() if now is None else (advice.SCALE_LEFT,),
                )
            left = now
        is_float16 = self._options.compute_dtype == jnp.float16
        text = advice.without_policy(is_float16=is_float16)
        return self._make("precision", text, fault)

    def _in_float32(self, keys: list[str]) -> list[_Program]:
        """Traces the loss with modules in float32."""
        given = self._options.amp_policy
        base = default_amp_policy if given is None else given
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            policy = {**base, **dict.fromkeys(keys, jnp.float32)}
            return self._trace(self._options.compute_dtype, policy)
