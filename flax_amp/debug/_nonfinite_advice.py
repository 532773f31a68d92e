"""What `find_nonfinite` tells a person to do."""

from collections.abc import Iterable, Mapping

from flax_amp.debug._nonfinite_model import BadInput, Finding, examples_text

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


def for_scale(scale: float, skips: int, scaler: Mapping[str, float]) -> str:
    """Returns what to do if gradients are finite only with a lower scale."""
    text = _SCALE.format(scale=scale)
    if not scaler:
        return text
    if scale < scaler["min_scaler"]:
        return text + _LOWEST.format(**scaler)
    return text + _SEARCH.format(skips=f"{skips} step{'s' * (skips > 1)}")


def for_policy(keys: Iterable[str], *, own: bool) -> str:
    """Returns the line of a policy that keeps modules in float32.

    Args:
      keys: the keys that were tried.
      own: whether they are for the user's own policy.
    """
    entries = ", ".join(f'"{key}": jnp.float32' for key in keys)
    base = "your_policy" if own else "flax_amp.default_amp_policy"
    return _POLICY.format(policy=f"{base} | {{{entries}}}")


def without_fp8(compute_dtype: str) -> str:
    """Returns what to do where only products in fp8 are at fault."""
    return (
        f"In {compute_dtype} without products in fp8 it is finite. In fp8, numbers "
        "below about 1/300,000 of the largest of their array become zeros. Keep the "
        "layers before this one out of fp8, as in flax_amp.default_amp_policy | "
        f'{{"*/layer": jnp.{compute_dtype}}}, or leave out fp8.'
    )


def without_policy(*, is_float16: bool) -> str:
    """Returns what to do where no policy was found that mends it."""
    wider = "train with precision='bf16-mixed', which has the range of float32, "
    return (
        "In float32 it is finite. Keep this code in float32 with flax_amp.amp_stop, "
        f"{wider if is_float16 else ''}or lower its inputs (a norm before it, a clip, "
        "a smaller learning rate). flax_amp.compare_precision tells which modules have "
        "the largest errors."
    )


def for_input(item: BadInput) -> str:
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
    "flax_amp_lookup": "look for an index out of range: it is filled in with NaN",
    "constant": "look at where the program puts it in",
}
_DERIVATIVE = (
    "the derivative of this line has a pole there, as that of a sqrt or a norm at 0. "
    "Add an epsilon inside. A derivative that a jnp.where drops is computed all the "
    "same: choose its operand, too, as in jnp.where(ok, f(jnp.where(ok, x, 1.0)), 0.0)."
)


def for_mathematics(finding: Finding | None) -> str:
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
