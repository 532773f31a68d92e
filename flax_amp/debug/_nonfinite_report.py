"""What `find_nonfinite` found: where an inf or a NaN comes from, and what to do."""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

from flax_amp._training.arguments import first_of
from flax_amp.debug._model import short
from flax_amp.debug._report import Report, plural, policy_text

Verdict = Literal["nothing", "inputs", "scale", "precision", "mathematics"]

MAX_EXAMPLES = 64  # the most that are listed


@dataclasses.dataclass(frozen=True)
class Operand:
    """An operand of an equation, or its result.

    Attributes:
      dtype: its dtype.
      shape: its shape.
      largest: its largest finite magnitude; `None` if it has no finite floats.
    """

    dtype: str
    shape: tuple[int, ...]
    largest: float | None = None

    @property
    def type(self) -> str:
        """Its type as JAX writes it: `f16[4,8]`."""
        return f"{short(self.dtype)}[{','.join(map(str, self.shape))}]"

    def __str__(self) -> str:
        largest = "" if self.largest is None else f" up to {self.largest:.4g}"
        return f"{self.type}{largest}"


@dataclasses.dataclass(frozen=True)
class Finding:
    """The equation that made an inf or a NaN.

    Attributes:
      path: the module, or the scope, that it stands in.
      source: the line of the user's code, `file:line`.
      backward: whether it makes only gradients not finite.
      inside: the loops and branches around it, outermost first.
      primitive: the name of its primitive.
      kind: what it made: `inf`, `-inf` or `NaN`.
      operands: its operands.
      result: its result.
      bad: how many elements of the result it made so.
      size: the number of elements of the result.
      text: what an elementwise equation did, such as `log(0) = -inf`.
      finite_in_float32: whether it is finite in float32 for the same operands; `None`
        if that is not known.
      examples: the examples of the batch that have these elements, at most 64; empty if
        no axis of the result is known to be that of the batch.
    """

    path: str = ""
    source: str = ""
    backward: bool = False
    inside: tuple[str, ...] = ()
    primitive: str = ""
    kind: str = ""
    operands: tuple[Operand, ...] = ()
    result: Operand | None = None
    bad: int = 0
    size: int = 0
    text: str = ""
    finite_in_float32: bool | None = None
    examples: tuple[int, ...] = ()

    @property
    def _what(self) -> str:
        """The equation as words."""
        if self.primitive in ("convert_element_type", "flax_amp_saturate"):
            return (
                f"the cast to {self.result.dtype if self.result else 'another dtype'}"
            )
        return self.primitive

    def lines(self) -> Iterator[str]:
        """Yields what is known, for people."""
        pass_ = f"the {'backward' if self.backward else 'forward'} pass"
        where = ", ".join(filter(None, (pass_, self.path, *self.inside, self.source)))
        if self.result is None:
            yield f"a constant {self.kind} of the program in {where}"
            return
        yield f"{self._what} made {self.kind} in {where}"
        yield f"  {self.bad} of {self.size} elements of {self.result.type}" + (
            f", such as {self.text}" if self.text else ""
        )
        if self.operands:
            yield f"  operands: {', '.join(map(str, self.operands))}"
        if self.finite_in_float32:
            yield "  in float32 this equation is finite"
        if self.examples:
            yield f"  {examples_text(self.examples)}"


def examples_text(examples: Sequence[int]) -> str:
    """Returns `example 3 of the batch`, or the list of several."""
    shown = ", ".join(map(str, examples[:8]))
    more = ", ..." if len(examples) > 8 else ""
    return f"example{'s' * (len(examples) > 1)} {shown}{more} of the batch"


@dataclasses.dataclass(frozen=True)
class BadInput:
    """An argument that holds an inf or a NaN.

    Attributes:
      path: where it stands: `batch/image`, `params/Dense_0/kernel`.
      kind: what it holds.
      bad: how many elements.
      first: the index of the first one.
      is_batch: whether it is data, and not written by training: no part of the first
        argument or of a state.
      examples: the leading indices of them, if it is a part of the batch; at most 64.
    """

    path: str
    kind: str
    bad: int
    first: tuple[int, ...]
    is_batch: bool
    examples: tuple[int, ...] = ()

    def __str__(self) -> str:
        place = f"{self.path}[{', '.join(map(str, self.first))}]"
        text = f"{self.kind} in {place if self.first else self.path}"
        count = plural(self.bad, "element")
        where = f": {examples_text(self.examples)}" if self.examples else ""
        return f"{text} ({count}){where}"


@dataclasses.dataclass(frozen=True, repr=False)
class NonfiniteReport(Report):
    """Where the inf or the NaN of a loss or its gradient comes from.

    Made by `flax_amp.find_nonfinite`. It prints as a short text.

    Attributes:
      name: the name of the function.
      compute_dtype: the dtype of low-precision values.
      scale: the loss scale of this run.
      verdict: the kind of the cause. `nothing`: loss, gradients and updated variables
        are finite. `inputs`: an argument was not. `scale`: only the gradients are not,
        and with a scale of 1 they are. `precision`: all is finite in float32.
        `mathematics`: it is not.
      advice: what to do.
      finding: the equation, unless an argument alone is the cause. If it is
        mathematics, it is that of a run in float32.
      inputs: the arguments that hold an inf or a NaN and have led to it.
      reached: what is not finite: `loss`, `gradient of params/Dense_0/kernel`.
      policy: the keys to add to the policy, `{"Block_3/attn": "float32"}`, with which a
        run was finite; empty if none was found.
      notes: what limits these statements.
    """

    name: str
    compute_dtype: str
    scale: float
    verdict: Verdict
    advice: str
    finding: Finding | None = None
    inputs: tuple[BadInput, ...] = ()
    reached: tuple[str, ...] = ()
    policy: tuple[tuple[str, str], ...] = ()
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return super().to_dict() | {"policy": dict(self.policy)}

    def _summary(self) -> str:
        return self.verdict

    def _parts(self) -> Iterator[str]:
        scale = "" if self.scale == 1 else f", scale {self.scale:g}"
        yield f"{self.name} in {self.compute_dtype}{scale}: {self.verdict}"
        if self.reached:
            yield f"not finite: {first_of(self.reached)}"
        yield from (f"argument: {item}" for item in self.inputs)
        if self.finding:
            yield from self.finding.lines()
        yield self.advice
        yield from (f"Note: {note}" for note in self.notes)


# --- what to do ----------------------------------------------------------------------

NOTHING = "The loss, its gradients and the updated variables are finite."
_SCALE = "Only the scale is too large: with {scale:g} the gradients are finite."
_SEARCH = " Nothing is to be done: the scaler skips {skips} to get there."
_LOWEST = (
    " The scaler stops at {min_scaler:g}: lower its min_scaler, as in "
    "flax_amp.init_scaler(min_scaler=...)."
)
_POLICY = (
    "In float32 it is finite. This policy was tried and mends it:\n"
    "  amp_policy={policy}"
)
SCALE_LEFT = "with this policy only the scale is too large, which the scaler lowers"


def advice_for_scale(scale: float, skips: int, scaler: Mapping[str, float]) -> str:
    """Returns what to do if gradients are finite only with a lower scale."""
    text = _SCALE.format(scale=scale)
    if not scaler:
        return text
    lowest = scaler.get("min_scaler", 0.0)
    if scale < lowest:
        return text + _LOWEST.format(min_scaler=lowest)
    return text + _SEARCH.format(skips=plural(skips, "step"))


def advice_for_policy(keys: Iterable[str], *, own: bool) -> str:
    """Returns the line of a policy that keeps modules in float32.

    Args:
      keys: the keys that were tried.
      own: whether they are for the user's own policy.
    """
    return _POLICY.format(policy=policy_text(keys, own=own))


def advice_without_fp8(compute_dtype: str) -> str:
    """Returns what to do where only products in fp8 are at fault."""
    return (
        f"In {compute_dtype} without products in fp8 it is finite. In fp8, numbers "
        "below about 1/300,000 of the largest of their array become zeros. Keep the "
        "layers before this one out of fp8, as in flax_amp.default_amp_policy | "
        f'{{"*/layer": jnp.{compute_dtype}}}, or leave out fp8.'
    )


def advice_without_policy(*, is_float16: bool) -> str:
    """Returns what to do where no policy was found that mends it."""
    wider = "train with precision='bf16-mixed', which has the range of float32, "
    return (
        "In float32 it is finite. Keep this code in float32 with flax_amp.amp_stop, "
        f"{wider if is_float16 else ''}or lower its inputs (a norm before it, a clip, "
        "a smaller learning rate). flax_amp.compare_precision tells which modules have "
        "the largest errors."
    )


def advice_for_input(item: BadInput) -> str:
    """Returns what to do about an argument that is not finite."""
    if item.examples:
        return f"Correct or drop {examples_text(item.examples)}: no precision helps."
    if item.is_batch:
        return f"Correct {item.path}: no precision helps."
    return (
        f"{item.path} was not finite before this step: restore an earlier checkpoint, "
        "and look for what wrote it."
    )


_REMEDIES = {
    "log": "keep its operand above 0, as in jnp.log(jnp.maximum(x, 1e-6))",
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
    "same: choose its operand, too, as in jnp.where(ok, f(jnp.where(ok, x, 1.0)), 0.0)."
)


def advice_for_mathematics(finding: Finding | None) -> str:
    """Returns what to do about an equation that is not finite in any precision."""
    text = "It is not finite in float32 either, so no policy helps"
    if finding is None:
        return f"{text}: look at the arguments."
    if finding.finite_in_float32:
        dtype = finding.result.dtype if finding.result else ""
        return f"The code itself computes in {dtype} there: leave out that cast."
    if finding.backward:
        return f"{text}: {_DERIVATIVE}"
    remedy = _REMEDIES.get(finding.primitive, "look at its operands")
    return f"{text}: {remedy}."
