"""Which parameters can be stored in half precision, as `explain` tells it."""

import dataclasses

from flax_amp._rewriter import half_params
from flax_amp._rewriter.half_params import Reason
from flax_amp.debug._call import Call
from flax_amp.debug._record import Location
from flax_amp.policy import Policy

# What primitives of this package are in the user's program.
_AS_WRITTEN = {
    "flax_amp_spread": "broadcast_in_dim",
    "flax_amp_fp8_dot": "dot_general",
}
_TOLD = {
    Reason.UNROUNDED: "reads it in float32",
    Reason.PROMOTED: "would compute something else from half precision",
}


@dataclasses.dataclass(frozen=True)
class Parameter:
    """A float32 array of the first argument, and how it can be stored."""

    path: str  #: such as `params/Dense_0/kernel`
    nbytes: int  #: in float32
    is_half: bool  #: whether half precision gives the same results, bit for bit
    reason: str  #: why it stays float32; empty if it is half


def parameters_of(call: Call) -> tuple[Parameter, ...]:
    """Returns the float32 arrays of the first argument of a call."""
    asked = call.asked
    argnums = range(len(call.arguments[0]))[:1]  # none if all are passed by name
    policy = Policy(asked.entries)
    found = half_params.find_parameters(call, policy, asked.dtype, argnums)
    arrays = dict(
        zip(call.places, zip(call.paths, call.arrays, strict=True), strict=True)
    )
    told = []
    for x in found:
        path, array = arrays[x.place]
        nbytes = array.size * array.dtype.itemsize
        told.append(Parameter(path, nbytes, x.is_half, _why(x)))
    return tuple(told)


def _why(found: half_params.Parameter) -> str:
    """Says why a parameter stays float32, with the equation that reads it."""
    reason, reader = found.reason, found.reader
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
    told = f"{_AS_WRITTEN.get(name, name)}{where} {_TOLD[reason]}"
    return f"{told}, {at.source}" if at.source else told
