"""A table of facts about primitives, and facts about the equations of a program.

A primitive without a row is of the kind `OTHER`: its equations run as written, and
their results are stored for the backward pass.
"""

import enum
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal, Primitive

from flax_amp import _compat, _jaxprs, _source
from flax_amp._compat import Atom, Eqn, Jaxpr


class Kind(enum.Enum):
    """How a primitive treats digits, or how an equation runs by a policy."""

    MATMUL = "a matmul or a convolution"  # faster in half precision
    MOVE = "moves, selects or compares numbers, and rounds none"
    ARITHMETIC = "arithmetic"
    SUM = "adds up along an axis or over devices"
    LINEAR_ALGEBRA = "linear algebra"  # no half-precision kernels, ill-conditioned
    STRUCTURED = "has bodies"
    OTHER = "anything else, such as a random number or a callback"
    # By a policy, or because of the operands:
    HALF = "in half precision"
    ORIGINAL = "in its own dtypes"
    CALLED = "by a user's precision function, or in a third dtype"


class Trait(enum.Flag):
    """Further facts about a primitive."""

    NONE = 0
    # The result is stored for the backward pass, because the computation takes long.
    STORED = enum.auto()
    # A small relative error of the operand makes a large relative error of the result.
    # The derivative of a maximum is not even continuous.
    ILL_CONDITIONED = enum.auto()
    MAXIMUM = enum.auto()  # or minimum, along an axis
    LAYOUT = enum.auto()  # each number of the result is a number of an operand
    # Ranks numbers by their size, and rounding makes neighbors equal. With a rounded
    # operand, 19 % of a router's choices among 32 experts differed from float32. In the
    # model that is cast by hand, 0.2 % differ.
    RANKS = enum.auto()
    EXACT_LITERAL = enum.auto()  # a rounded literal would change the result


class Traits(NamedTuple):
    """The row of a primitive."""

    kind: Kind
    traits: Trait = Trait.NONE
    body: str = ""  # the parameter that holds its body, or a tuple of bodies
    # The `Body` of `bodies.py` that plans and emits equations of the primitive. `None`:
    # they run as written.
    rewriting: Any = None


def _table(rows: dict[str, Traits]) -> dict[str, Traits]:
    table: dict[str, Traits] = {}
    for names, traits in rows.items():
        for name in names.split():
            assert name not in table, f"{name} has two rows"
            table[name] = traits
    return table


_ILL = Trait.ILL_CONDITIONED

TRAITS = _table(
    {
        # Matmuls. The hardware adds up in float32, also for a result in half precision.
        # `dot_general` may also be an inner or an outer product: see `kind_by_shape`.
        "dot_general conv_general_dilated ragged_dot_general": Traits(
            Kind.MATMUL, Trait.STORED
        ),
        # Moves: exact in any dtype, but for rounded literals.
        """reshape squeeze broadcast_in_dim transpose rev slice split unstack tile
        concatenate pad stack copy stop_gradient pvary name sharding_constraint
        layout_constraint relayout reshard xla_metadata_value optimization_barrier
        device_put preduced reduced_vary_cast reduced_vary_cast_p""": Traits(
            Kind.MOVE, Trait.LAYOUT
        ),
        # Traffic between devices, and moves that take long, are not repeated.
        """all_gather all_gather_invariant all_gather_reduced all_to_all
        ragged_all_to_all ppermute pbroadcast pbroadcast_dynamic pmax pmin
        unreduced_pmax unreduced_pmin cummax cummin""": Traits(Kind.MOVE, Trait.STORED),
        """gather scatter dynamic_slice dynamic_update_slice select_n neg abs sign
        is_finite reduce_window_max reduce_window_min""": Traits(Kind.MOVE),
        "eq ne lt le gt ge eq_to lt_to le_to max min clamp": Traits(
            Kind.MOVE, Trait.EXACT_LITERAL
        ),
        # The derivative looks for the maximum in the array. Both are computed again for
        # the derivative, so that they have the same bits. With a stored maximum, a scan
        # found no equal element (error 0.09). `mark_maximum` stores the maximum for all
        # further readers.
        "reduce_max reduce_min": Traits(Kind.MOVE, Trait.MAXIMUM | _ILL),
        "scatter-max scatter-min": Traits(
            Kind.MOVE, Trait.STORED | Trait.MAXIMUM | _ILL
        ),
        "sort top_k approx_top_k argmax argmin": Traits(
            Kind.MOVE, Trait.STORED | Trait.RANKS
        ),
        # Arithmetic.
        """add sub add_any mul div rem floor ceil round one_minus_square square
        integer_pow sqrt rsqrt cbrt sin cos atan atan2 erf erfc tanh logistic log log1p
        log2 asin acos asinh acosh atanh erf_inv polynomial pow
        tan""": Traits(Kind.ARITHMETIC),
        "exp exp2 expm1 sinh cosh": Traits(Kind.ARITHMETIC, _ILL),
        # Series and continued fractions: hundreds of operations for each element.
        """lgamma digamma polygamma zeta igamma igammac igamma_grad_a bessel_i0e
        bessel_i1e regularized_incomplete_beta select_and_scatter_add
        select_and_gather_add""": Traits(Kind.ARITHMETIC, Trait.STORED),
        # These sums are as large as an activation: messages that are added up at the
        # nodes of a graph.
        "scatter-add scatter-sub scatter-mul": Traits(Kind.ARITHMETIC, Trait.STORED),
        # Sums. In float16, a sum of 70,000 elements of 1.0 is infinite.
        """reduce_sum reduce_prod cumsum psum cumprod cumlogsumexp reduce_window_sum
        psum_invariant unreduced_psum reduce_scatter
        unreduced_reduce_scatter""": Traits(Kind.SUM, Trait.STORED),
        """cholesky cholesky_update lu qr geqrf geqp3 ormqr householder_product eig eigh
        svd schur hessenberg triangular_solve tridiagonal tridiagonal_solve
        fft""": Traits(Kind.LINEAR_ALGEBRA, Trait.STORED),
        # Primitives with bodies that run as written. `bodies.py` registers all further
        # primitives with bodies.
        "custom_vmap_call": Traits(Kind.STRUCTURED, body="call"),
        "linear_call": Traits(Kind.STRUCTURED, body="callee"),
        "custom_linear_solve": Traits(Kind.STRUCTURED, body="jaxprs"),
        # Primitives of this package, in a program that `amp` has rewritten before.
        "flax_amp_fp8_dot flax_amp_weight_matmul": Traits(Kind.OTHER, Trait.STORED),
        """flax_amp_spread flax_amp_collect flax_amp_stored flax_amp_copies
        flax_amp_add_copies""": Traits(Kind.ARITHMETIC),
        # These run as written, and belong to the arithmetic around them.
        """convert_element_type reduce_precision real imag bitcast_convert_type iota not
        and or xor shift_left shift_right_logical shift_right_arithmetic reduce_and
        reduce_or""": Traits(Kind.ARITHMETIC),
    }
)
_UNKNOWN = Traits(Kind.OTHER, Trait.STORED)


def register(names: str, body: str) -> Callable[[type], type]:
    """Registers a class that plans and emits primitives with bodies: their only row.

    Args:
      names: the names of the primitives, with spaces between them.
      body: the parameter that holds the body, or a tuple of bodies.
    """

    def add(rewriting: type) -> type:
        row = Traits(Kind.STRUCTURED, body=body, rewriting=rewriting())
        TRAITS.update(_table({names: row}))
        return rewriting

    return add


def traits_of(item: Eqn | Primitive | str) -> Traits:
    """Returns the row of an equation, of a primitive, or of its name."""
    if not isinstance(item, str):
        item = getattr(item, "primitive", item).name
    return TRAITS.get(item, _UNKNOWN)


def kind_of(item: Eqn | Primitive | str) -> Kind:
    """Returns the kind of an equation, of a primitive, or of its name."""
    return traits_of(item).kind


def has(item: Eqn | Primitive | str, trait: Trait) -> bool:
    """Whether an equation or a primitive has a trait; a name stands for a primitive."""
    return trait in traits_of(item).traits


def bodies(eqn: Eqn) -> list[Jaxpr]:
    """Returns the jaxprs that an equation runs, in the parameter that the table names.

    `inner_jaxprs` finds the jaxprs of conditions and of unknown primitives, too.
    """
    found = eqn.params.get(traits_of(eqn).body, ())
    if not isinstance(found, tuple | list):
        found = (found,)
    return [body for body in found if body is not None]


class Visit(NamedTuple):
    """An equation of a program, and where the equation stands.

    `scopes` are the names of the scopes around the equation, and `around` are the
    equations whose bodies hold the equation, outermost first.
    """

    eqn: Eqn
    scopes: tuple[str, ...]
    around: tuple[Eqn, ...]


def walk(jaxpr: Jaxpr) -> Iterator[Visit]:
    """Yields the equations of an open or closed jaxpr, each before its bodies.

    Kernels are left out, because they have a precision of their own. A body that is
    called again in the same scopes is walked once: a few calls within calls may make
    millions of equations.
    """
    # By the open jaxpr: before JAX 0.11, several closed jaxprs may share an open
    # jaxpr.
    seen: set[tuple[int, tuple[str, ...]]] = set()
    # A stack instead of recursion: calls may be nested deeply.
    stack: list[tuple[Jaxpr, tuple[str, ...], tuple[Eqn, ...]]] = [(jaxpr, (), ())]
    while stack:
        body, outer, around = stack.pop()
        body = _compat.open_jaxpr(body)[0]
        if (id(body), outer) in seen:
            continue
        seen.add((id(body), outer))
        for eqn in body.eqns:
            scopes = outer + _source.scope_names(eqn)
            yield Visit(eqn, scopes, around)
            if eqn.primitive.name != "pallas_call":
                inner = _jaxprs.inner_jaxprs(eqn)
                stack += [(x, scopes, (*around, eqn)) for x in inner]


def inside(eqn: Eqn) -> Iterator[Eqn]:
    """Yields the equations in the bodies of an equation, at all depths."""
    return (visit.eqn for body in bodies(eqn) for visit in walk(body))


# --- equations -----------------------------------------------------------------------


def is_float32(v: Atom) -> bool:
    """Whether a variable is float32 in the user's program."""
    return getattr(v.aval, "dtype", None) == np.float32


def is_same_dtype(eqn: Eqn) -> bool:
    """Whether an equation casts from float32 to float32, such as to a strong type."""
    if eqn.primitive.name != "convert_element_type":
        return False
    return is_float32(eqn.invars[0]) and is_float32(eqn.outvars[0])


def is_cast_up(eqn: Eqn) -> bool:
    """Whether an equation casts half precision to float32: the numbers are the same."""
    if eqn.primitive.name != "convert_element_type":
        return False
    from_dtype = eqn.invars[0].aval.dtype
    is_half = from_dtype in (jnp.bfloat16, jnp.float16)
    return is_half and is_float32(eqn.outvars[0])


def is_layout(eqn: Eqn) -> bool:
    """Whether an equation gives its operands in another shape or order."""
    return has(eqn, Trait.LAYOUT) or is_same_dtype(eqn)


def kind_by_shape(eqn: Eqn) -> Kind:
    """Returns the kind of an equation, which for a `dot_general` depends on the shapes.

    A matmul that adds nothing up is arithmetic. A matmul whose result has no axes but
    batch axes is a sum. Rounded to half precision, `vdot(losses, mask)` was infinite in
    float16, and rotary positions made a loss of 0.84 instead of 0.004:

        einsum("i,j->ij", positions, frequencies)     a multiplication
        positions[:, None] @ frequencies[None]        the same: sums of a single term
        vdot(losses, mask)                            a sum
        einsum("bi,bi->b", x, y)                      a sum for each `b`

    An axis of length 1 in the result counts like a longer axis, because the axis may be
    a batch of a single example.
    """
    if eqn.primitive.name != "dot_general":
        return kind_of(eqn)
    (contracted, _), (batch, _) = eqn.params["dimension_numbers"]
    shapes = [v.aval.shape for v in eqn.invars]
    if all(shapes[0][axis] == 1 for axis in contracted):
        return Kind.ARITHMETIC
    shared = len(contracted) + len(batch)
    is_sum = all(len(shape) == shared for shape in shapes)
    return Kind.SUM if is_sum else Kind.MATMUL


def is_matmul(eqn: Eqn) -> bool:
    """Whether an equation is a matmul or a convolution."""
    return kind_by_shape(eqn) is Kind.MATMUL


def has_matmul(jaxpr: Jaxpr) -> bool:
    """Whether there is a matmul in a jaxpr, at any depth."""
    return any(is_matmul(visit.eqn) for visit in walk(jaxpr))


def repeats(eqn: Eqn) -> bool:
    """Whether an equation may give an element of its operand more than once.

    The derivative with respect to that element is then a sum with a term for each copy.
    A broadcast and the lookup of a token in an embedding are the common cases.
    """
    if eqn.primitive.name in ("broadcast_in_dim", "tile"):
        return True
    if eqn.primitive.name != "gather" or eqn.params["unique_indices"]:
        return False
    batch = eqn.params["dimension_numbers"].start_indices_batching_dims
    *shape, _ = eqn.invars[1].aval.shape
    reads = [n for i, n in enumerate(shape) if i not in batch]
    # A symbolic size (`jax.export`) may be larger than 1.
    return not all(isinstance(n, int) for n in reads) or math.prod(reads) > 1


def is_relu(eqn: Eqn) -> bool:
    """Whether an equation is `jax.nn.relu`."""
    if eqn.primitive.name != "custom_jvp_call" or len(eqn.invars) != 1:
        return False
    return _source.source_of(bodies(eqn)[0]).startswith("relu at ")


def literal(atom: Any) -> float | None:
    """Returns the number of a scalar literal, `None` for all else."""
    if not isinstance(atom, Literal) or getattr(atom.aval, "shape", None) != ():
        return None
    is_number = np.issubdtype(np.asarray(atom.val).dtype, np.number)
    if not is_number or np.iscomplexobj(atom.val):
        return None
    return float(atom.val)
