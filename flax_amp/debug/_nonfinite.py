"""`find_nonfinite`: which equation made an inf or a NaN, why, and the remedy."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from flax_amp import _tree
from flax_amp._checks import first_of
from flax_amp._compat import Array
from flax_amp._rewriter.roles import Chooser
from flax_amp._rewriter.transform import TracedCall
from flax_amp.debug._call import Call, tool
from flax_amp.debug._report import Report, is_half, plural, policy_text
from flax_amp.debug._run import Cause, Finding, Runner, earliest, is_finite, kinds
from flax_amp.debug._trial import Part, Trials, fewest, keys_of, lines_of
from flax_amp.policy import Policy, default_amp_policy

Verdict = Literal["nothing", "inputs", "scale", "precision", "mathematics"]

# At most this many parts that are at fault one after the other. The exact number does
# not matter: there is a limit because each part takes a run equation by equation.
_MAX_AT_FAULT = 8
# Examples of the batch that a report holds, and that its text names. The exact numbers
# do not matter: a batch of which all examples are at fault should not fill the report.
_MOST_EXAMPLES = 64
_SHOWN = 8


@dataclasses.dataclass(frozen=True, repr=False, kw_only=True)
class NonfiniteReport(Report):
    """Where an inf or a NaN comes from. Made by `flax_amp.find_nonfinite`.

    The verdict is `nothing` if the loss, its gradients and the updated variables are
    finite; `inputs` if an argument was not finite; `scale` if only the gradients are
    not finite, and with a scale of 1 they are finite; `precision` if all results are
    finite in float32; and `mathematics` otherwise.
    """

    compute_dtype: str  #: the dtype of low-precision values
    scale: float  #: the loss scale of this run
    verdict: Verdict
    advice: str  #: the remedy, as text
    #: The equation that is the cause; `None` if an argument alone is the cause. If the
    #: verdict is `mathematics`, the equation was found in a run in float32.
    finding: Finding | None = None
    #: The arguments that have led to the inf or the NaN, by their path (`batch/image`),
    #: each with a text that says which of inf, -inf and NaN the argument holds.
    inputs: dict[str, str] = dataclasses.field(default_factory=dict)
    #: The examples of the batch that have the inf or the NaN, at most 64; empty if no
    #: axis is known to be the axis of the batch.
    examples: tuple[int, ...] = ()
    reached: tuple[str, ...] = ()  #: `loss`, `gradient of params/Dense_0/kernel`
    #: The modules in float32 with which a run was finite, to add to the policy.
    policy: dict[str, str] = dataclasses.field(default_factory=dict)
    lines: tuple[str, ...] = ()  #: the lines outside of modules, likewise in float32

    def _parts(self, only: str | None = None) -> Iterator[str]:
        scale = "" if self.scale == 1 else f", scale {self.scale:g}"
        yield f"{self.name} in {self.compute_dtype}{scale}: {self.verdict}"
        if self.reached:
            yield f"not finite: {first_of(self.reached)}"
        yield from (f"argument: {text}" for text in self.inputs.values())
        if found := self.finding:
            direction = "backward" if found.backward else "forward"
            facts = (f"the {direction} pass", found.path, *found.inside, found.source)
            where = ", ".join(filter(None, facts))
            yield f"{found.what} made {found.kind} in {where}"
            if found.operands:
                *operands, result = found.operands
                such = f", such as {found.text}" if found.text else ""
                kind = result.partition(" ")[0]
                yield f"  {found.bad} of {found.size} elements of {kind}{such}"
                yield f"  operands: {', '.join(operands)}"
        if self.examples:
            yield f"  {_words(self.examples)}"
        yield self.advice


def _words(examples: tuple[int, ...]) -> str:
    """Returns `example 3 of the batch`, or a list of several examples."""
    shown = first_of([*map(str, examples)], _SHOWN)
    return f"example{'s' * (len(examples) > 1)} {shown} of the batch"


@tool
def find_nonfinite(call: Call, *, scale: Any = None) -> NonfiniteReport:
    """Finds the equation that made the inf or the NaN in a loss or its gradient.

    The program that `amp` emits runs once, outside of `jit`, one equation after the
    next, each equation in its own dtype. An inf or a NaN counts only if it reaches the
    loss, a gradient or an updated variable, so masks of `-inf` are no false alarm.
    Further runs tell precision from mathematics, and try a policy that fixes the fault.
    The function is called as `flax_amp.explain` is, with the same options, but the
    arrays must have values. A loss may return `(loss, aux)`.

    Sharp edges:
      XLA may compute fused code with more range than its dtypes have. Then a compiled
      step can be finite where this run is not. Callbacks and `jax.debug.print` run
      again. The whole batch runs in one pass, also if the step splits the batch.

    Args:
      scale: the factor that the loss is multiplied by; by default the scale of the
        state or the optimizer, or 1.

    Returns:
      A `NonfiniteReport`, or a function that returns a `NonfiniteReport`. Print the
      report.

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
    with jax.debug_nans(False), jax.debug_infs(False):
        return _Diagnosis(call, call.request.scale(scale)).report()


class _Diagnosis:
    """Finds the cause of an inf or a NaN."""

    def __init__(self, call: Call, scale: float):
        self._request = call.request
        self._call = call
        self._scale = scale
        self._trials = Trials(call)
        trained = call.trained()
        self._wrt = [f"gradient of {x}" for x in _tree.pick(call.paths, trained)]
        # Training writes the first argument, or the state; all other arguments hold
        # data.
        arguments = [path.split("/")[0] for path in call.paths]
        first = arguments[trained.index(True)]
        self._is_batch = [a not in (first, "state") for a in arguments]
        is_last = [a == arguments[-1] != first for a in arguments]
        sizes = [x.shape[0] for x in _tree.pick(call.arrays, is_last) if x.ndim]
        self._batch_size = max(sizes, key=sizes.count, default=None)
        self._trained_shapes = {x.shape for x in _tree.pick(call.arrays, trained)}
        # Additive masks of the batch hold -inf, so -inf alone is no fault there. The
        # scale is argument 0 of the program, so array `i` is argument `i + 1`.
        self._faults = {
            i + 1
            for i, x in enumerate(call.arrays)
            if not is_finite(x) and not (self._is_batch[i] and kinds(x) == "-inf")
        }

    def _examples(self, bad: Any) -> tuple[int, ...]:
        """Returns the examples marked in `bad`, if its first axis is the batch."""
        if bad.shape[:1] != (self._batch_size,) or bad.shape in self._trained_shapes:
            return ()
        found = np.flatnonzero(bad.reshape(len(bad), -1).any(axis=1))
        return tuple(map(int, found[:_MOST_EXAMPLES]))

    def _programs(self, traced: TracedCall) -> list[Runner]:
        """Returns two programs: the loss, and the loss with its gradient."""
        reduces = self._call.request.reduce_in_float32

        def loss(arrays: Sequence[Array]) -> Any:
            # Recomputation changes no number, so the program leaves recomputation out.
            # In float32 `emit` casts nothing, but gives the rules of custom derivatives
            # their own source lines.
            outs = traced.emit(arrays, recompute=False, reduce_in_float32=reduces)
            return traced.rebuild(outs)[0]

        def forward(scale: Array, *arrays: Array) -> Any:
            return loss(arrays)[:2]

        def backward(scale: Array, *arrays: Array) -> Any:
            (value, updates, _), gradients = self._call.gradients(loss)(scale, arrays)
            return value, updates, gradients

        given = jnp.float32(1), *self._call.arrays
        return [
            Runner(jax.make_jaxpr(fun)(*given), fun is backward, self._examples)
            for fun in (forward, backward)
        ]

    def _first_cause(self, programs: list[Runner], scale: float) -> Cause | None:
        """Runs the loss and, only if the forward pass is finite, its gradient."""
        arrays = [jnp.float32(scale), *self._call.arrays]
        names = ["the scale", *self._call.paths]
        for program in programs:
            values = program(arrays, names, self._faults)
            last = self._wrt if program.backward else []
            updated = ["updated variables"] * (len(values) - 1 - len(last))
            results = zip(["loss", *updated, *last], values, strict=True)
            if cause := earliest([value.cause for value in values]):
                reached = dict.fromkeys(name for name, value in results if value.cause)
                return cause._replace(reached=tuple(reached))
        return None

    def report(self) -> NonfiniteReport:
        """Runs the loss until the cause is known."""
        request = self._request
        scale = self._scale
        programs = self._programs(self._trials.traced)
        fault = self._first_cause(programs, scale)
        if fault is None:
            names = (name for run in programs for name in run.limited_values)
            notes = [_LIMITED.format(x, request.dtype) for x in dict.fromkeys(names)]
            # By default, the scaler halves the scale if gradients alone are not finite.
            notes += [_SKIPPED.format(2 * scale)] * (scale == request.scale(None) != 1)
            return self._make("nothing", _NOTHING, Cause((0, 0)), notes=tuple(notes))
        if fault.arguments & self._faults:
            return self._make("inputs", "", fault)
        is_scaled = scale > 1 and fault.finding and fault.finding.backward
        if is_scaled and self._first_cause(programs, 1.0) is None:
            return self._make("scale", _SCALE, fault)
        if request.dtype != jnp.float32:
            in_float32 = Chooser(Policy(default_amp_policy), jnp.dtype(jnp.float32))
            programs = self._programs(self._trials.traced._replace(choose=in_float32))
            left = self._first_cause(programs, scale)
            if left is None:
                return self._precision(fault)
            fault = left  # no precision fixes this cause
        return self._make("mathematics", _advice(fault), fault)

    def _make(
        self, verdict: Verdict, advice: str, fault: Cause, **known: Any
    ) -> NonfiniteReport:
        inputs = {}
        examples = fault.examples
        for i in (number - 1 for number in sorted(fault.arguments)):
            path = self._call.paths[i]
            x = np.asarray(self._call.arrays[i])
            bad = ~np.isfinite(x)
            place = [*map(int, np.argwhere(bad)[0])] or ""
            count = plural(int(bad.sum()), "element")
            inputs[path] = f"{kinds(x)} in {path}{place} ({count})"
            if not self._is_batch[i]:
                advice = advice or _WRITTEN + path
                continue
            own = self._examples(bad)
            examples = examples or own
            to_correct = f"or drop {_words(own)}" if own else path
            advice = advice or f"Correct {to_correct}: no precision helps."
        return NonfiniteReport(
            name=self._request.name,
            compute_dtype=self._request.dtype.name,
            scale=self._scale,
            verdict=verdict,
            advice=advice,
            finding=fault.finding,
            inputs=inputs,
            examples=examples,
            reached=fault.reached,
            **known,
        )

    def _precision(self, fault: Cause) -> NonfiniteReport:
        """Looks for a few parts of the program that are enough in float32."""
        request = self._request
        trials = self._trials
        finding = fault.finding

        # The scaler lowers its scale, so the trials run with a scale of 1.
        def is_enough(parts: Sequence[Part]) -> bool:
            return bool(parts) and trials.run(parts).is_finite

        every = trials.parts()
        module = [Part(finding.path)] if finding and finding.path else []
        # The part with the fault may only be the victim of another part: so all parts
        # are tried next. At last the module of the fault is tried, because the root
        # module is no part.
        tried = self._one_by_one(fault, every), every, module
        enough = next(filter(is_enough, tried), None)
        wider = [_WIDER] * (request.dtype == jnp.float16)
        if enough is None:
            return self._make("precision", "\n".join((_NO_POLICY, *wider)), fault)
        found = fewest(enough, is_enough)
        keys = keys_of(found)
        lines = lines_of(found)
        code = policy_text(keys, lines, request.has_own_policy)
        text = "\n".join((_TRIED, *code, *wider))
        policy = dict.fromkeys(keys, "float32")
        return self._make("precision", text, fault, policy=policy, lines=lines)

    def _one_by_one(self, fault: Cause | None, every: Sequence[Part]) -> list[Part]:
        """Returns parts at fault in order, each found with the earlier in float32."""
        parts: list[Part] = []
        while fault and fault.finding and len(parts) < _MAX_AT_FAULT:
            both = Part(fault.finding.path), Part("", fault.finding.source)
            own = [part for part in both if part in every and part not in parts]
            if not own:
                break
            parts.append(own[0])
            programs = self._programs(self._trials.with_float32(parts))
            fault = self._first_cause(programs, 1.0)
        return parts


# --- advice --------------------------------------------------------------------------

_NOTHING = "The loss, its gradients and the updated variables are finite."
_LIMITED = (
    "{} holds numbers beyond the range of {}, which were limited, and the step is "
    "applied: look at it unless it is a mask"
)
_SKIPPED = "if the last step was skipped with a finite loss, scale={:g} was its scale"
_WRITTEN = (
    "It was not finite before this step: restore an earlier checkpoint, and look for "
    "what wrote "
)
_SCALE = (
    "Only the scale is too large: with a scale of 1 the gradients are finite. Nothing "
    "is to be done, if a scaler lowers it."
)
_TRIED = "In float32 it is finite. This was tried and fixes it:"
_WIDER = "Or take precision='bf16-mixed', which has the range of float32."
_NO_POLICY = (
    "In float32 it is finite, and no part of it in float32 is enough (keys of your own "
    "policy for scopes around it come first). Lower its inputs (a norm before it, a "
    "clip, a smaller learning rate), or train with '32-true'."
)
_ADVICE = {
    "log": "keep its operand above 0, as jax.nn.log_softmax does for log(softmax(x)), "
    "or, without gradients below it, with jnp.log(jnp.maximum(x, 1e-6))",
    "div": "keep the divisor away from 0, as in x / jnp.maximum(y, 1e-6)",
    "rsqrt": "add an epsilon to its operand",
    "sqrt": "keep its operand above 0",
    "exp": "subtract the maximum first, or clip its operand",
    "gather": "look for an index out of range: such a gather fills in NaN",
    "constant": "look at where the program puts it in",
}
_DERIVATIVE = (
    "the derivative of this line has a pole there, as that of a sqrt or a norm at 0. "
    "Add an epsilon inside. A derivative that a jnp.where drops is computed all the "
    "same: choose its operand, too, as in jnp.where(ok, f(jnp.where(ok, x, 1.0)), 0.0)"
)


def _advice(fault: Cause) -> str:
    """Returns the advice for a cause that is not finite in float32 either."""
    finding = fault.finding
    if finding is None:
        remedy = "look at the arguments"
    elif is_half(finding.dtype):
        return (
            f"The code itself computes in {finding.dtype} there: leave out that cast."
        )
    elif finding.backward:
        remedy = _DERIVATIVE
    else:
        remedy = _ADVICE.get(finding.primitive, "look at its operands")
    return f"It is not finite in float32 either, so no policy helps: {remedy}."
