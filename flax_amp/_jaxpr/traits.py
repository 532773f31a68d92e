"""Facts about primitives, in one table, and about the equations that they make.

Whoever asks what a primitive is asks here: the rewriter, the policy and the tools of
`debug/`. A primitive without a row is of the kind `OTHER`: it runs as it was written
and is never computed again.
"""

import enum
import math
from collections.abc import Collection
from typing import Any, NamedTuple

from jax.extend.core import Primitive

from flax_amp._compat import Eqn


class Kind(enum.Enum):
    """What a primitive does with digits."""

    PRODUCT = "a matrix product or a convolution"  # what half precision speeds up
    MOVE = "moves, selects or compares numbers, and rounds none"
    ARITHMETIC = "arithmetic"
    SUM = "adds up along an axis or over devices"
    LINEAR_ALGEBRA = "linear algebra"  # no half-precision kernels, ill-conditioned
    CALL = "a call of one body, which takes its operands as they are, once"
    STRUCTURED = "has bodies that it runs in another way"
    OTHER = "anything else, such as a random number or a callback"


class Reads(enum.Enum):
    """What the derivative of a primitive reads."""

    NOTHING = "nothing"  # it is linear, or moves data
    RESULT = "its result"
    FACTORS = "for each factor, the other one"
    PREDICATE = "its first operand"
    ALL = "operands and results"  # or it is not known


class Trait(enum.Flag):
    """What else is true of a primitive."""

    NONE = 0
    CHEAP = enum.auto()  # to compute again in the backward pass; a call: if its body is
    ELEMENTWISE = enum.auto()
    # |f(x)| may be much larger than |x|, or digits are lost near a pole.
    WIDE_RANGE = enum.auto()
    # XLA does not compute it again by itself. Other cheap arithmetic it repeats in each
    # fusion that reads the result.
    FUNCTION = enum.auto()
    # A compiler puts what such a function reads into memory if something else reads it
    # as well, as it does for a sum: the result of a norm before a `silu`.
    SIGMOID = enum.auto()
    ADDITION = enum.auto()  # of two operands
    ADDS_UP = enum.auto()  # its result may be a sum of many terms
    REDUCTION = enum.auto()  # along axes; cheap if they are short
    # A small relative error of the operand makes a large one of the result. The
    # derivative of a maximum is not even continuous.
    ILL_CONDITIONED = enum.auto()
    # It matters where results are added up, such as `x**4 / sum(x**4)`. A sigmoid is
    # nearly `exp(x)` far below zero, and a tangent has poles.
    ILL_CONDITIONED_IF_SUMMED = enum.auto()
    LAYOUT = enum.auto()  # each number of the result is one of the operand's
    IDENTITY = enum.auto()  # gives its one operand as it is
    RANKS = enum.auto()  # numbers by their size: a rounding makes equals of neighbors
    BOUND = enum.auto()  # the larger or the smaller of two numbers


class Traits(NamedTuple):
    """The row of a primitive.

    Attributes:
      kind: what it does with digits.
      traits: what else is true of it.
      reads: what its derivative reads.
      body: of a call or a structured primitive: the parameter that holds its body, or
        a tuple of bodies.
    """

    kind: Kind
    traits: Trait = Trait.NONE
    reads: Reads = Reads.ALL
    body: str = ""


def _table(rows: dict[str, Traits]) -> dict[str, Traits]:
    table: dict[str, Traits] = {}
    for names, traits in rows.items():
        for name in names.split():
            assert name not in table, f"{name} has two rows"
            table[name] = traits
    return table


_CHEAP, _REDUCTION = Trait.CHEAP, Trait.CHEAP | Trait.REDUCTION
_MAP = Trait.CHEAP | Trait.ELEMENTWISE
_FUNCTION = _MAP | Trait.FUNCTION
_WIDE = _FUNCTION | Trait.WIDE_RANGE
_LAYOUT = Trait.CHEAP | Trait.LAYOUT
_SUMS = Trait.ADDS_UP

TRAITS = _table(
    {
        # Products. The hardware adds up in float32 whatever the dtype of the result.
        # `dot_general` may also be an inner or an outer product: see `product_kind`.
        "dot_general conv_general_dilated ragged_dot_general": Traits(
            Kind.PRODUCT, reads=Reads.FACTORS
        ),
        # Moves: exact in any dtype.
        """reshape squeeze broadcast_in_dim transpose rev slice split unstack tile
        concatenate pad stack""": Traits(Kind.MOVE, _LAYOUT, Reads.NOTHING),
        "copy": Traits(Kind.MOVE, _LAYOUT | Trait.IDENTITY, Reads.NOTHING),
        "stop_gradient": Traits(Kind.MOVE, _LAYOUT, Reads.NOTHING),
        """name sharding_constraint layout_constraint relayout reshard
        xla_metadata_value""": Traits(Kind.MOVE, Trait.IDENTITY),
        """gather scatter dynamic_update_slice optimization_barrier device_put
        all_gather all_gather_invariant all_gather_reduced all_to_all ragged_all_to_all
        ppermute pmax pmin unreduced_pmax unreduced_pmin preduced reduced_vary_cast
        reduced_vary_cast_p pbroadcast pbroadcast_dynamic reduce_window_max
        reduce_window_min cummax cummin eq_to lt_to le_to""": Traits(Kind.MOVE),
        "pvary": Traits(Kind.MOVE, _CHEAP, Reads.NOTHING),
        "dynamic_slice eq ne lt le gt ge is_finite": Traits(Kind.MOVE, _CHEAP),
        "select_n": Traits(Kind.MOVE, _CHEAP, Reads.PREDICATE),
        "neg": Traits(Kind.MOVE, _MAP, Reads.NOTHING),
        "abs sign": Traits(Kind.MOVE, _MAP),
        "max min clamp": Traits(Kind.MOVE, _MAP | Trait.BOUND),
        "reduce_max reduce_min": Traits(Kind.MOVE, _REDUCTION | Trait.ILL_CONDITIONED),
        "scatter-max scatter-min": Traits(Kind.MOVE, Trait.ILL_CONDITIONED),
        "sort top_k approx_top_k argmax argmin": Traits(Kind.MOVE, Trait.RANKS),
        # Arithmetic.
        "add sub add_any": Traits(
            Kind.ARITHMETIC, _MAP | Trait.ADDITION, Reads.NOTHING
        ),
        "mul": Traits(Kind.ARITHMETIC, _MAP, Reads.FACTORS),
        "floor ceil round one_minus_square": Traits(Kind.ARITHMETIC, _MAP),
        "div rem sin cos atan atan2 erfc": Traits(Kind.ARITHMETIC, _FUNCTION),
        "sqrt cbrt": Traits(Kind.ARITHMETIC, _FUNCTION, Reads.RESULT),
        "erf": Traits(Kind.ARITHMETIC, _FUNCTION | Trait.SIGMOID),
        "tanh": Traits(Kind.ARITHMETIC, _FUNCTION | Trait.SIGMOID, Reads.RESULT),
        "logistic": Traits(
            Kind.ARITHMETIC,
            _FUNCTION | Trait.SIGMOID | Trait.ILL_CONDITIONED_IF_SUMMED,
            Reads.RESULT,
        ),
        "exp exp2 expm1": Traits(
            Kind.ARITHMETIC, _WIDE | Trait.ILL_CONDITIONED, Reads.RESULT
        ),
        "sinh cosh": Traits(Kind.ARITHMETIC, _WIDE | Trait.ILL_CONDITIONED),
        "pow tan": Traits(Kind.ARITHMETIC, _WIDE | Trait.ILL_CONDITIONED_IF_SUMMED),
        "square": Traits(Kind.ARITHMETIC, _MAP | Trait.WIDE_RANGE),
        "integer_pow": Traits(
            Kind.ARITHMETIC,
            _MAP | Trait.WIDE_RANGE | Trait.ILL_CONDITIONED_IF_SUMMED,
        ),
        """log log1p log2 rsqrt asin acos asinh acosh atanh erf_inv
        polynomial""": Traits(Kind.ARITHMETIC, _WIDE),
        # Series and continued fractions: hundreds of operations for each element.
        """lgamma digamma polygamma zeta igamma igammac igamma_grad_a bessel_i0e
        bessel_i1e regularized_incomplete_beta""": Traits(
            Kind.ARITHMETIC, _WIDE & ~Trait.CHEAP
        ),
        "select_and_scatter_add select_and_gather_add": Traits(Kind.ARITHMETIC),
        # These sums are as large as an activation: messages that are added up at the
        # nodes of a graph.
        "scatter-add scatter-sub scatter-mul": Traits(Kind.ARITHMETIC, _SUMS),
        # Sums. 70 000 ones add up to inf in float16.
        "reduce_sum": Traits(Kind.SUM, _SUMS | _REDUCTION, Reads.NOTHING),
        "reduce_prod": Traits(Kind.SUM, _SUMS | _REDUCTION),
        "cumsum psum": Traits(Kind.SUM, _SUMS, Reads.NOTHING),
        """cumprod cumlogsumexp reduce_window_sum psum_invariant unreduced_psum
        reduce_scatter unreduced_reduce_scatter""": Traits(Kind.SUM, _SUMS),
        """cholesky cholesky_update lu qr geqrf geqp3 ormqr householder_product eig eigh
        svd schur hessenberg triangular_solve tridiagonal tridiagonal_solve
        fft""": Traits(Kind.LINEAR_ALGEBRA),
        # Calls.
        "jit": Traits(Kind.CALL, _CHEAP, body="jaxpr"),
        "remat2 shard_map": Traits(Kind.CALL, body="jaxpr"),
        "closed_call eval_jaxpr custom_jvp_call": Traits(
            Kind.CALL, _CHEAP, body="call_jaxpr"
        ),
        "custom_vjp_call": Traits(Kind.CALL, body="call_jaxpr"),
        "custom_vmap_call": Traits(Kind.CALL, body="call"),
        "linear_call": Traits(Kind.STRUCTURED, body="callee"),
        "scan": Traits(Kind.STRUCTURED, body="jaxpr"),
        "while": Traits(Kind.STRUCTURED, body="body_jaxpr"),
        "cond": Traits(Kind.STRUCTURED, body="branches"),
        "custom_linear_solve": Traits(Kind.STRUCTURED, body="jaxprs"),
        # Primitives of this package.
        "flax_amp_repeat": Traits(Kind.CALL),  # in plans only, which hold its body
        "flax_amp_saturate flax_amp_rounded_function flax_amp_lookup": Traits(
            Kind.OTHER, _CHEAP
        ),
        "flax_amp_fp8_dot": Traits(Kind.OTHER, reads=Reads.FACTORS),
        # What runs as it was written.
        "convert_element_type": Traits(Kind.OTHER, _MAP, Reads.NOTHING),
        "reduce_precision real imag": Traits(Kind.OTHER, _CHEAP, Reads.NOTHING),
        """bitcast_convert_type iota not and or xor shift_left shift_right_logical
        shift_right_arithmetic""": Traits(Kind.OTHER, _CHEAP),
        "reduce_and reduce_or": Traits(Kind.OTHER, _REDUCTION),
    }
)
_UNKNOWN = Traits(Kind.OTHER)

# What can run in half precision, if a policy says so.
CASTABLE = frozenset((Kind.PRODUCT, Kind.MOVE, Kind.ARITHMETIC, Kind.SUM))


def traits_of(item: Eqn | Primitive | str) -> Traits:
    """Returns the row of an equation, of a primitive, or of its name."""
    if not isinstance(item, str):
        item = getattr(item, "primitive", item).name
    return TRAITS.get(item, _UNKNOWN)


def kind_of(item: Eqn | Primitive | str) -> Kind:
    """Returns the kind of an equation, of a primitive, or of its name."""
    return traits_of(item).kind


def has(item: Eqn | Primitive | str, trait: Trait) -> bool:
    """Whether a trait is one of an equation, of a primitive, or of its name."""
    return trait in traits_of(item).traits


def names_of(kinds: Collection[Kind]) -> list[str]:
    """Returns the names of the primitives of some kinds."""
    return [name for name, traits in TRAITS.items() if traits.kind in kinds]


def bodies(eqn: Eqn) -> tuple[Any, ...]:
    """Returns the jaxprs in the parameter that the table names.

    These are what the equation runs. `jaxprs_in_params` of JAX finds all jaxprs: those
    of conditions, and of primitives without a row, too.
    """
    found = eqn.params.get(traits_of(eqn).body, ())
    return tuple(found) if isinstance(found, tuple | list) else (found,)


# --- equations -----------------------------------------------------------------------


class ProductKind(enum.Enum):
    """What a product is for precision; `dot_general` is of all three kinds."""

    MATRIX = "a matrix product or a convolution"
    MULTIPLICATION = "a multiplication"
    SUM = "a sum of products"


def product_kind(eqn: Eqn) -> ProductKind | None:
    """Returns the kind of a product or a convolution; `None` for other equations.

    A product that adds nothing up is a multiplication. A product that leaves no axes
    but those of a batch is a sum:

        einsum("i,j->ij", positions, frequencies)     a multiplication
        positions[:, None] @ frequencies[None]        the same: it adds one term
        vdot(losses, mask)                            a sum
        einsum("bi,bi->b", x, y)                      a sum for each `b`

    An axis of length one that is left counts as any other: it may be a batch of one.
    """
    if eqn.primitive.name != "dot_general":
        return ProductKind.MATRIX if kind_of(eqn) is Kind.PRODUCT else None
    (contracted, _), (batch, _) = eqn.params["dimension_numbers"]
    shapes = [v.aval.shape for v in eqn.invars]
    if all(shapes[0][axis] == 1 for axis in contracted):
        return ProductKind.MULTIPLICATION
    shared = len(contracted) + len(batch)
    is_sum = all(len(shape) == shared for shape in shapes)
    return ProductKind.SUM if is_sum else ProductKind.MATRIX


def is_matrix_product(eqn: Eqn) -> bool:
    """Whether an equation is a matrix product or a convolution."""
    return product_kind(eqn) is ProductKind.MATRIX


def may_read_twice(eqn: Eqn) -> bool:
    """Whether an equation may read an element of its operand more than once.

    The derivative with respect to that element is then a sum with one term for each
    read. The lookup of a token in an embedding is the common case.
    """
    if eqn.primitive.name != "gather" or eqn.params["unique_indices"]:
        return False
    batch = eqn.params["dimension_numbers"].start_indices_batching_dims
    *sizes, _ = eqn.invars[1].aval.shape
    reads = [n for i, n in enumerate(sizes) if i not in batch]
    # A symbolic size (`jax.export`) may be larger than one.
    return not all(isinstance(n, int) for n in reads) or math.prod(reads) > 1


def gathers_once(eqn: Eqn) -> bool:
    """Whether an equation gathers, and reads each element at most once."""
    return eqn.primitive.name == "gather" and not may_read_twice(eqn)


def gives_operands(eqn: Eqn) -> bool:
    """Whether each result is one of the operands, as it is or sorted."""
    return (
        (eqn.primitive.multiple_results or has(eqn, Trait.IDENTITY))
        and kind_of(eqn) is Kind.MOVE
        and len(eqn.invars) == len(eqn.outvars)
    )


def has_update(eqn: Eqn) -> bool:
    """Whether an equation is a scatter that holds its update function."""
    return eqn.params.get("update_jaxpr") is not None
