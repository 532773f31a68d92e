"""The origin of each variable of a program: arguments, matmuls, sums, states.

A *root* is an argument, a constant, or a part of an argument. A set of roots is an
integer with a bit for each root, because a program of a thousand weights has as many
sets as variables. The roots tell states from biases and from residual streams:

    c1 = c0 + head(c0, w)      begins at c0, and head depends on c0: a state
    c2 = c1 + head(c1, w)      begins at c0, as c1 does: a state
    h  = x @ w + b             x @ w does not depend on b: a bias
    y2 = y1 + f(y1, u)         passes only weights that y1 has passed: a state, as y1 is
    z2 = z1 + f(z1, v[2])      passes v[2], which z1 has not passed: a residual stream

A state is never rounded to half precision. In bfloat16, a coordinate `c1` near 500
would stand on a grid of two pixels: the gradient of an optical flow has an error of
0.0037, and had 0.197 with rounded coordinates. Before, states were found by a small
literal that multiplies `f`. That search lost coordinates, and took deep residual layers
for states.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jax.extend.core import Literal

from flax_amp._compat import Atom, Eqn, Jaxpr, Var
from flax_amp._jaxprs import variables
from flax_amp._rewriter.flow import FlowAnalysis, Node, cached
from flax_amp._rewriter.primitives import (
    Kind,
    Trait,
    has,
    is_cast_up,
    is_float32,
    is_layout,
    traits_of,
)
from flax_amp._rewriter.roles import Context

Roots = int  # a set of roots, with a bit for each root

BEGINS_AT_DATA = "a state that begins at data"
SAME_WEIGHTS = "a state that passes the same weights again"


class Origin(NamedTuple):
    """The origin of a variable."""

    is_argument: bool = False  # an argument or constant, moved or cast up at most
    after_matmul: bool = False  # whether a matmul comes before the value
    is_sum: bool = False  # a sum or a maximum along an axis, moved at most
    state: str = ""  # why the variable is a state; empty if no state
    begins_at: Roots = 0  # the roots of which the value is a shifted or scaled copy
    reads: Roots = 0  # the roots that the value was computed from
    weights: Roots = 0  # of `reads`, the weights of matmuls before the value

    def mapped(self, change: Callable[[Roots], Roots]) -> "Origin":
        """Returns the origin with another set in the place of each set."""
        return self._replace(
            begins_at=change(self.begins_at),
            reads=change(self.reads),
            weights=change(self.weights),
        )


NOWHERE = Origin()


def first_root(origins: Sequence[Origin]) -> Roots:
    """Returns the first root that stands in none of the origins."""
    sets = (o.begins_at | o.reads | o.weights for o in origins)
    return 1 << max((roots.bit_length() for roots in sets), default=0)


class Origins(NamedTuple):
    """The origins of the variables of a program."""

    of: dict[Var, Origin]
    results: tuple[Origin, ...]
    inputs: tuple[Origin, ...]  # as they are known after the last equation
    biases: Roots  # arguments that were added to arrays that do not depend on them
    # By the `id` of an equation with bodies: the origins that its bodies get.
    of_bodies: dict[int, tuple[Origin, ...]]

    def read(self, atom: Atom) -> Origin:
        """Returns the origin of an operand; a literal has none."""
        return NOWHERE if isinstance(atom, Literal) else self.of[atom]


class OriginAnalysis(FlowAnalysis):
    """Sweeps that also find the origins of variables."""

    @cached
    def origins(
        self, closed: Jaxpr, context: Context, inputs: tuple[Origin, ...]
    ) -> Origins:
        """Sweeps forward over a jaxpr, given the origins of its inputs."""
        return _Sweep(self, closed, context, inputs).run()


# --- bodies --------------------------------------------------------------------------


class RootMap:
    """Translates sets of roots between a program and the bodies of an equation.

    Roots that stand in the same sets are a single root for the body. So the sets that a
    body gets are equal for each layer of a stack, and the body is planned once.
    """

    def __init__(self, origins: Sequence[Origin], new_root: Callable[[], Roots]):
        """`new_root` makes a root of the program for each root that the body makes."""
        self.new_root = new_root
        self.made: dict[Roots, Roots] = {}  # the program's root, by the body's root
        sets = dict.fromkeys(
            x for o in origins for x in (o.begins_at, o.reads, o.weights)
        )
        stands_in: dict[Roots, list[int]] = {}  # by a root: the places of its sets
        for place, roots in enumerate(sets):
            for root in _bits(roots):
                stands_in.setdefault(root, []).append(place)
        # By the places of some sets: the roots that stand in these sets only.
        classes: dict[tuple[int, ...], Roots] = {}
        for root, found in stands_in.items():
            key = tuple(found)
            classes[key] = classes.get(key, 0) | root
        ordered = sorted(classes)
        self.classes = [classes[key] for key in ordered]
        in_body = [0] * len(sets)
        for i, key in enumerate(ordered):
            for place in key:
                in_body[place] |= 1 << i
        to_body = dict(zip(sets, in_body, strict=True))
        self.body_origins = tuple(o.mapped(to_body.__getitem__) for o in origins)

    def to_program(self, roots: Roots) -> Roots:
        """Translates a set of roots of the body to roots of the program."""
        found = 0
        for i, whole in enumerate(self.classes):
            if roots >> i & 1:
                found |= whole
        count = len(self.classes)
        for bit in _bits(roots >> count << count):
            if bit not in self.made:
                self.made[bit] = self.new_root()
            found |= self.made[bit]
        return found


def _bits(roots: Roots) -> list[Roots]:
    """Returns the single bits of a set."""
    found = []
    while roots:
        found.append(roots & -roots)
        roots &= roots - 1
    return found


def joined(origins: Sequence[Origin]) -> Origin:
    """Returns the origin of a value that is computed or chosen from some values."""
    begins_at = reads = weights = 0
    for o in origins:
        begins_at |= o.begins_at
        reads |= o.reads
        weights |= o.weights
    return Origin(
        all(o.is_argument for o in origins),
        any(o.after_matmul for o in origins),
        any(o.is_sum for o in origins),
        next((o.state for o in origins if o.state), ""),
        begins_at,
        reads,
        weights,
    )


# --- equations -----------------------------------------------------------------------

# Layers may have their weights in a single array. A part of the array is a root of its
# own, beside the root of the array: a gather may read the weights of another layer each
# time.
_PARTS = ("slice", "split", "unstack", "gather", "dynamic_slice")
# `x.at[i].add(y)` adds as `x + y` does.
_ADDITIONS = ("add", "add_any", "sub", "scatter-add", "scatter-sub")
_FACTORS = ("mul", "div", "rem", "scatter-mul")


class _Sweep:
    """A forward sweep that finds the origins of the variables of a program."""

    def __init__(
        self,
        analysis: OriginAnalysis,
        closed: Jaxpr,
        context: Context,
        inputs: Sequence[Origin],
    ):
        self.analysis = analysis
        self.program = analysis.program(closed, context)
        self.levels = analysis.levels(closed, context)
        self.biases: Roots = 0
        self.parts: dict[Any, Roots] = {}
        self.next = first_root(inputs)
        self.of_bodies: dict[int, tuple[Origin, ...]] = {}
        self.of: dict[Var, Origin] = dict(zip(self.program.invars, inputs, strict=True))
        for v in self.program.consts:
            root = self._root() if _shape(v) else 0
            self.of[v] = Origin(is_argument=True, begins_at=root, reads=root)

    def run(self) -> Origins:
        for node in self.levels.nodes:
            outs = self._equation(node)
            self.of.update(zip(node.eqn.outvars, outs, strict=True))
        results = tuple(map(self._read, self.program.outvars))
        inputs = tuple(map(self._read, self.program.invars))
        return Origins(self.of, results, inputs, self.biases, self.of_bodies)

    def _root(self) -> Roots:
        """Returns a new root."""
        self.next <<= 1
        return self.next >> 1

    def _read(self, atom: Atom) -> Origin:
        return NOWHERE if isinstance(atom, Literal) else self.of[atom]

    def _equation(self, node: Node) -> list[Origin]:
        """Returns the origins of the results of an equation."""
        eqn = node.eqn
        count = len(node.eqn.outvars)
        has_bodies = node.choice.role is Kind.STRUCTURED or node.has_matmul
        if has_bodies and traits_of(eqn).rewriting is not None:
            return self._of_bodies(node)
        operands = [self.of[v] for v in variables(eqn.invars)]
        # Zeros, or positions. Zeros of a weak type are broadcast from a number that was
        # cast to a strong type, and that number has the origin `NOWHERE`, too.
        if node.in_region and all(o == NOWHERE for o in operands):
            is_array = any(map(_shape, eqn.outvars))
            is_constant = is_array and node.choice.role is not Kind.OTHER
            root = self._root() if is_constant else 0
            return [Origin(begins_at=root, reads=root)] * count
        origin = self._with_carried_data(node, self._computed(node, operands))
        # Weights may be computed before they are taken apart, such as from int8.
        is_part = eqn.primitive.name in _PARTS
        if not is_part or self._read(eqn.invars[0]).after_matmul:
            return [origin] * count
        parts = [self._part(eqn, i) for i in range(count)]
        return [origin._replace(reads=origin.reads | part) for part in parts]

    def _computed(self, node: Node, operands: Sequence[Origin]) -> Origin:
        """Returns the origin of a result, without the data of its operands."""
        whole = joined(operands)
        weights = whole.weights
        if node.choice.role is Kind.MATMUL:
            weights |= _weights(*operands[:2])
        return Origin(
            is_argument=self._is_argument(node.eqn),
            after_matmul=whole.after_matmul or not node.in_region,
            is_sum=self._is_sum(node),
            reads=whole.reads,
            weights=weights,
        )

    def _of_bodies(self, node: Node) -> list[Origin]:
        """Returns the origins of the results of an equation with bodies."""
        eqn = node.eqn
        operands = map(self._read, eqn.invars)
        # A bias of a layer is a bias in the bodies behind the layer, too.
        known = [o._replace(begins_at=o.begins_at & ~self.biases) for o in operands]
        roots = RootMap(known, self._root)
        self.of_bodies[id(eqn)] = roots.body_origins
        context = node.choice.body_context
        rewriting = traits_of(eqn).rewriting
        found = rewriting.origins(self.analysis, eqn, context, roots.body_origins)
        self.biases |= roots.to_program(found.biases)
        self._mark_operands(eqn, found)
        return [o.mapped(roots.to_program) for o in found.results]

    def _mark_operands(self, eqn: Eqn, found: Origins) -> None:
        """Marks operands that are the first of a chain of states in a body.

        `y = block(block(x, w), w)` with `block = checkpoint(lambda x, w: x + f(x, w))`:
        the second block finds that the result of the first block is a state.
        """
        start = len(eqn.invars) - len(found.inputs)
        for v, origin in zip(eqn.invars[start:], found.inputs, strict=True):
            if not isinstance(v, Literal) and origin.state == SAME_WEIGHTS:
                self.of[v] = self.of[v]._replace(state=origin.state)

    def _part(self, eqn: Eqn, i: int) -> Roots:
        """Returns the root of a part of an argument, such as the weights of a layer."""
        if len(eqn.invars) > 1:  # by an index, which may differ each time
            return self._root()
        key = self._read(eqn.invars[0]).reads, eqn.primitive, i, str(eqn.params)
        if key not in self.parts:
            self.parts[key] = self._root()
        return self.parts[key]

    def _is_argument(self, eqn: Eqn) -> bool:
        """Whether an equation moves an argument, or takes a part of an argument.

        A weight that is stored in half precision, and cast up, is an argument as well.
        If not, the streams of a GPT with such weights would stay float32, and the GPT
        could not share the program of float32 weights (`half_params.py`).
        """
        if eqn.primitive.name == "dynamic_slice" or is_cast_up(eqn):
            return self._read(eqn.invars[0]).is_argument
        is_moved = all(self.of[v].is_argument for v in variables(eqn.invars))
        return is_moved and is_layout(eqn)

    def _is_sum(self, node: Node) -> bool:
        """Whether an equation gives a sum or a maximum, or moves such a result."""
        eqn = node.eqn
        role = node.choice.role
        if role is Kind.SUM or (role is Kind.MOVE and has(eqn, Trait.MAXIMUM)):
            return True
        is_moved = is_layout(eqn)
        return is_moved and all(self.of[v].is_sum for v in variables(eqn.invars))

    def _with_carried_data(self, node: Node, origin: Origin) -> Origin:
        """Adds to the origin of a result the data that the result carries along."""
        eqn = node.eqn
        name = node.eqn.primitive.name
        role = node.choice.role
        if not node.in_region:
            return origin
        arrays = [v for v in variables(eqn.invars) if _shape(v)]
        floats = [v for v in arrays if is_float32(v)]
        if name.startswith("scatter-"):  # without the indices in between
            arrays = floats
        is_sum_or_product = name in _ADDITIONS or name in _FACTORS
        if is_sum_or_product and len(arrays) == len(floats) == 2:
            return self._sum(eqn, arrays, origin)
        if _moves(node) or (is_sum_or_product and len(arrays) == 1):
            return self._of_move(name, arrays, origin)
        if role in (Kind.ARITHMETIC, Kind.MOVE) and len(floats) == 1:
            return _of_function(role, self.of[floats[0]], origin)
        return origin

    def _of_move(self, name: str, arrays: Sequence[Var], origin: Origin) -> Origin:
        """Adds to the origin of moved arrays the data of the arrays."""
        whole = joined([self.of[v] for v in arrays])
        are_data = (self.of[v].begins_at for v in arrays if is_float32(v))
        # A row of features beside coordinates is data, too.
        if name == "concatenate" or all(are_data):
            return origin._replace(state=whole.state, begins_at=whole.begins_at)
        return origin._replace(state=whole.state)

    def _sum(self, eqn: Eqn, arrays: Sequence[Var], origin: Origin) -> Origin:
        """Returns the origin of `x + y` or `x * y`: a state if `y` depends on `x`.

        `y` is behind a matmul that `x` is not behind, or `x` is a state already.
        """
        level = self.levels.region
        pairs = [pair for pair in (arrays, arrays[::-1]) if self._may_begin(*pair)]
        for x, y in pairs:
            of_x = self.of[x]
            of_y = self.of[y]
            begins_at = of_x.begins_at & ~self.biases
            if begins_at & of_y.reads:
                return origin._replace(state=BEGINS_AT_DATA, begins_at=of_x.begins_at)
            if eqn.primitive.name not in _ADDITIONS or level[y] <= level[x]:
                continue
            if of_x.weights and not of_y.weights & ~of_x.weights:
                self.of[x] = of_x._replace(state=SAME_WEIGHTS)
                return origin._replace(state=SAME_WEIGHTS)
            if of_x.is_argument:
                self.biases |= begins_at
        return self._shifted_or_scaled(pairs, arrays, origin)

    def _shifted_or_scaled(
        self, pairs: Sequence[Sequence[Var]], arrays: Sequence[Var], origin: Origin
    ) -> Origin:
        """Returns the origin of `x + y` or `x * y` that begins no state of its own."""
        for x, y in pairs:
            # A state that is shifted or scaled by an array is still a state, unless the
            # array was computed from a matmul.
            of_x = self.of[x]
            if of_x.state and not self.of[y].after_matmul:
                return origin._replace(state=of_x.state, begins_at=of_x.begins_at)
        first, second = (self.of[v].begins_at for v in arrays)
        # The difference of two coordinates is a coordinate, too.
        if not pairs and first and second:
            return origin._replace(begins_at=first | second)
        return origin

    def _may_begin(self, x: Var, y: Var) -> bool:
        """Whether `x` may begin a sum with `y`: `x` comes before `y`, or is a state."""
        level = self.levels.region
        return level[y] > level[x] or bool(self.of[x].state)


def _of_function(role: Kind, of_x: Origin, origin: Origin) -> Origin:
    """Adds to the origin of `f(x)` the data of `x`.

    An array that is computed from a state alone is a state: sorted coordinates, and for
    boxes the sigmoid of a logit. A lookup in a table begins nothing.
    """
    # A function begins no further sum: the `tanh(c)` of an LSTM is multiplied by a
    # gate, and the product is no state.
    begins_at = of_x.begins_at if of_x.state and role is Kind.MOVE else 0
    return origin._replace(state=of_x.state, begins_at=begins_at)


def _weights(x: Origin, y: Origin = NOWHERE) -> Roots:
    """Returns the weights of a matmul of two factors.

    A weight is computed from arguments alone, and multiplies a computed array. Data and
    the weights of a first layer are both arguments, so neither counts as a weight.
    """
    if x.after_matmul and y.after_matmul:  # of `x @ (w + a @ b)`: `w`, `a`, `b`
        return x.reads ^ y.reads
    weights = 0
    for factor, other in ((x, y), (y, x)):
        is_weight = not factor.after_matmul and not other.is_argument
        if is_weight:
            weights |= factor.reads
    return weights


def _shape(v: Var) -> tuple[int, ...]:
    """Returns the shape of a variable; a token has none, and counts as a scalar."""
    return getattr(v.aval, "shape", ())


def _moves(node: Node) -> bool:
    """Whether an equation only gives unchanged numbers of its operands."""
    if node.eqn.primitive.name == "convert_element_type" or is_layout(node.eqn):
        return True
    if node.choice.role is not Kind.MOVE or node.eqn.primitive.name == "gather":
        return False
    others = Trait.RANKS, Trait.STORED, Trait.MAXIMUM
    return not any(has(node.eqn, trait) for trait in others)
