"""The rows of `explain` about parameters that can be stored in half precision."""

import dataclasses

from flax_amp._rewriter import half_params
from flax_amp._rewriter.half_params import Reason
from flax_amp.debug._call import Call
from flax_amp.debug._record import Location
from flax_amp.policy import Policy

# The primitives of this package, and the primitives of the user's program that they
# replace. Messages name the primitive of the user's program.
_AS_WRITTEN = {
    "flax_amp_spread": "broadcast_in_dim",
    "flax_amp_fp8_dot": "dot_general",
}
_REASON_TEXT = {
    Reason.UNROUNDED: "reads it in float32",
    Reason.PROMOTED: "would compute something else from half precision",
}


@dataclasses.dataclass(frozen=True)
class Parameter:
    """A float32 array of the first argument, and whether half precision is enough."""

    path: str  #: such as `params/Dense_0/kernel`
    nbytes: int  #: the size in float32
    is_half: bool  #: whether half precision gives the same results, bit for bit
    reason: str  #: why the parameter stays float32; empty if `is_half`


def parameters_of(call: Call) -> tuple[Parameter, ...]:
    """Returns a row for each float32 array of the first argument of a call."""
    request = call.request
    # Without positional arguments, there is no first argument.
    argnums = range(len(call.arguments[0]))[:1]
    policy = Policy(request.entries)
    found = half_params.find_parameters(call, policy, request.dtype, argnums)
    arrays = dict(
        zip(call.places, zip(call.paths, call.arrays, strict=True), strict=True)
    )
    rows = []
    for x in found:
        path, array = arrays[x.place]
        nbytes = array.size * array.dtype.itemsize
        rows.append(Parameter(path, nbytes, x.is_half, _why(x)))
    return tuple(rows)


def _why(found: half_params.Parameter) -> str:
    """Says why a parameter stays float32, and names the equation that is the reason."""
    reason = found.reason
    reader = found.reader
    if reason is None:
        return ""
    if reader is None:
        return reason.value
    if not reader.eqns:
        return "it is a result of the function"
    at = Location(reader.eqns)
    name = reader.eqns[-1].primitive.name
    module = at.path.rpartition("/")[2]
    where = f" in {module}" if module else ""
    text = f"{_AS_WRITTEN.get(name, name)}{where} {_REASON_TEXT[reason]}"
    return ", ".join(filter(None, (text, at.source)))
