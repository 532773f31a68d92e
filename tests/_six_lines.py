"""The six lines of docs/policies.md, read again for any program with bodies.

It shares nothing with the rewriter. Three walks over a program, each of which calls
itself for a body, find what is read later (backward), what each value comes from
(forward), and the dtypes that the lines ask for (forward), which `Reading.table` lists.
"""

import functools
import itertools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.extend.core import Literal

from flax_amp._compat import scan_counts

LAYOUT = "reshape transpose rev slice squeeze broadcast_in_dim concatenate split"
MOVES = LAYOUT + " select_n max neg"
SUMS = "reduce_sum reduce_max cumsum"
CALLS = "jit remat2 checkpoint custom_jvp_call custom_vjp_call shard_map"
ADDITIONS, FACTORS = "add sub", "mul div"
NONE = frozenset()


# --- the program ---------------------------------------------------------------------


class Value(NamedTuple):
    """A value of the program. A body that is called twice has its values twice."""

    number: int
    aval: Any

    @property
    def is_float(self):
        return self.aval.dtype == jnp.float32


def values_of(atoms):
    """The values among what is read, `None` for literals."""
    return [None if isinstance(v, Literal) else v for v in atoms]


class Step(NamedTuple):
    """An equation: what it reads and gives, and its bodies."""

    eqn: Any
    scopes: tuple[str, ...]
    atoms: list[Any]  # values and literals
    outs: list[Value]
    bodies: list["Part"]

    def is_in(self, names):
        return self.eqn.primitive.name in names.split()

    @property
    def ins(self):
        return values_of(self.atoms)

    @property
    def values(self):
        return [v for v in self.ins if v is not None]

    @property
    def floats(self):
        return [v for v in self.values if v.is_float]

    @property
    def has_matmul(self):
        return self.is_in("dot_general") or any(b.has_matmul for b in self.bodies)

    @property
    def in_region(self):
        return not self.has_matmul

    @property
    def counts(self):
        """How many operands of a loop each step reads, how many it carries."""
        if self.is_in("scan"):
            return scan_counts(self.eqn)
        return self.eqn.params["body_nconsts"], len(self.outs)

    def for_bodies(self, items):
        """What each body gets, given something for each operand."""
        if not self.is_in("while"):
            return [items[len(items) - len(b.inputs) :] for b in self.bodies]
        first, (count, _) = self.eqn.params["cond_nconsts"], self.counts
        init = items[first + count :]
        return [[*items[first : first + count], *init], [*items[:first], *init]]


class Part:
    """A program or a body: its steps in order. Calls of arithmetic alone are opened."""

    def __init__(self, closed, numbers, scopes=()):
        jaxpr, consts = getattr(closed, "jaxpr", closed), getattr(closed, "consts", ())
        self.numbers, self.steps = numbers, []
        pairs = zip(jaxpr.constvars, consts, strict=True)
        self.consts = {self.value(v): const for v, const in pairs}
        self.inputs = [self.value(v) for v in jaxpr.invars]
        variables = [*jaxpr.constvars, *jaxpr.invars]
        names = dict(zip(variables, [*self.consts, *self.inputs], strict=True))
        self.atoms = self.add(jaxpr, names, scopes)  # values and literals
        self.results = values_of(self.atoms)
        self.has_matmul = any(step.has_matmul for step in self.steps)
        # 2. The level of a value: the number of matmuls on the longest path to it. A
        # body with a matmul is one step to the next level.
        self.level = dict.fromkeys([*self.consts, *self.inputs], 0)
        for step in self.steps:
            level = self.level_of(step) + step.has_matmul
            self.level |= dict.fromkeys(step.outs, level)

    def value(self, v):
        return Value(next(self.numbers), v.aval)

    def level_of(self, step):
        """The level that a step reads at."""
        return max((self.level[v] for v in step.values), default=0)

    def add(self, jaxpr, names, scopes):
        """Adds the steps of a jaxpr. `names`: the values of its variables."""

        def value(v):
            return v if isinstance(v, Literal) else names[v]

        for eqn in jaxpr.eqns:
            ins = [value(v) for v in eqn.invars]
            name, own = eqn.primitive.name, (*scopes, *scopes_of(eqn))
            # From float32 to float32: it makes a number strongly typed.
            dtypes = [v.aval.dtype for v in (*eqn.invars, *eqn.outvars)]
            if name == "convert_element_type" and dtypes == [jnp.float32] * 2:
                names[eqn.outvars[0]] = ins[0]
                continue
            closed = bodies_of(eqn)
            if name == "jit" and is_plain(closed[0].jaxpr):
                inner, consts = closed[0].jaxpr, closed[0].consts
                known = dict(zip(inner.invars, ins, strict=True))
                known |= {v: self.value(v) for v in inner.constvars}
                pairs = zip(inner.constvars, consts, strict=True)
                self.consts |= {known[v]: const for v, const in pairs}
                outs = self.add(inner, known, own)
            else:
                outs = [self.value(v) for v in eqn.outvars]
                parts = [Part(body, self.numbers, own) for body in closed]
                self.steps.append(Step(eqn, own, ins, outs, parts))
            names |= dict(zip(eqn.outvars, outs, strict=True))
        return [value(v) for v in jaxpr.outvars]


def scopes_of(eqn):
    stack = eqn.source_info.name_stack.stack
    return [entry.name for entry in stack if type(entry).__name__ == "Scope"]


def bodies_of(eqn):
    params, name = eqn.params, eqn.primitive.name
    if name == "cond":
        return list(params["branches"])
    if name == "while":
        return [params["body_jaxpr"], params["cond_jaxpr"]]
    if name == "scan" or name in CALLS.split():
        return [params["call_jaxpr" if "call_jaxpr" in params else "jaxpr"]]
    return []


def is_plain(jaxpr):
    """Whether there is neither a matmul nor a loop nor a checkpoint, at any depth."""
    names = ("dot_general", "scan", "while", "remat2", "checkpoint", "shard_map")
    return not any(
        eqn.primitive.name in (*names, "custom_vjp_call")
        or not all(is_plain(getattr(b, "jaxpr", b)) for b in bodies_of(eqn))
        for eqn in jaxpr.eqns
    )


# --- backward: what is read later ----------------------------------------------------


class Use(NamedTuple):
    """What happens to a value behind the equation that gives it."""

    leads: bool  # 3. a matmul reads it later
    # 3. The arithmetic of its region reads it, as it was before it was rounded; or it
    # is a result, or a state of a loop.
    is_read: bool
    # 5. It is a result of the program, or a state of a loop, as it is or moved.
    is_result: bool


RESULT, STREAM = Use(False, True, True), Use(True, False, False)


class Backward:
    """A walk backward over a part, given the uses of its results."""

    def __init__(self, part, uses):
        self.part, pairs = part, list(zip(part.results, uses, strict=True))
        self.leads = {v for v, use in pairs if v and use.leads}
        self.is_read = {v for v, use in pairs if use.is_read}
        self.results = {v for v, use in pairs if use.is_result}
        self.unrounded = {*self.is_read}
        # 3. What leaves its region: read by a matmul, or at a later level.
        self.leaving = {v for v, use in pairs if not use.is_read}
        self.by_later = set()  # what arithmetic at a later level reads
        self.of_results = {}  # by a step with bodies
        self.own = {}  # by a step: which operands it reads as they are in their region
        for number, step in reversed([*enumerate(part.steps)]):
            self.step(number, step)

    def use(self, v):
        leads = v in self.leads
        return Use(leads, not leads or v in self.is_read, v in self.results)

    def step(self, number, step):
        level, outs, ins = self.part.level_of(step), {*step.outs}, {*step.values}
        same = {v for v in ins if self.part.level[v] == level}
        own = [v in same and step.in_region for v in step.ins]
        if step.bodies and step.has_matmul:
            uses = self.of_results[number] = list(map(self.use, step.outs))
            pairs = list(zip(step.ins, uses_of_operands(step, uses), strict=True))
            own = [v in same and use.is_read for v, use in pairs]
            self.leads |= {v for v, use in pairs if v and use.leads}
            self.is_read |= {v for v, use in pairs if v in same and use.is_read}
        elif step.has_matmul or self.leads & outs:
            self.leads |= ins
        if step.in_region:
            # A move reads what is read of its result.
            if not step.is_in(MOVES + " reduce_max") or self.is_read & outs:
                self.is_read |= same
            is_move = step.is_in(MOVES + " reduce_max") or step.bodies
            if is_move and self.results & outs:
                self.results |= same
            self.by_later |= ins - same
        self.own[number] = own
        pairs = zip(step.ins, own, strict=True)
        self.leaving |= {v for v, is_own in pairs if v and not is_own}


def uses_of_operands(step, uses):
    """What happens to the operands of a step with bodies, in any of them."""
    if step.is_in("while"):  # a while carries float32
        return [Use(True, True, True)] * len(step.ins)
    if step.is_in("scan"):  # the next step reads what this one gives
        _, count = step.counts
        uses = [use._replace(leads=True) for use in uses[:count]] + uses[count:]
    found = [Use(False, False, False)] * len(step.ins)
    for body in step.bodies:
        flow, start = Backward(body, uses), len(step.ins) - len(body.inputs)
        for i, v in enumerate(body.inputs, start):  # behind the index of a branch
            leads, is_read = found[i].leads, found[i].is_read
            found[i] = Use(
                leads | (v in flow.leads), is_read | (v in flow.is_read), False
            )
    return found


# --- forward: what each value comes from ---------------------------------------------


class Origin(NamedTuple):
    """4. What a value comes from. A root is an argument, a constant, or zeros."""

    is_argument: bool = False  # or a constant, reshaped or transposed at most
    is_sum: bool = False  # or a maximum along an axis, moved at most
    is_state: bool = False
    is_shared: bool = False  # a state that passes the same weights again
    after_matmul: bool = False
    begins: frozenset = NONE  # the roots that it is, plus something at most
    reads: frozenset = NONE  # the roots that it was computed from
    weights: frozenset = NONE  # of these, what multiplied on the way in matmuls


def joined(origins):
    """The origin of what may be any of these, or is made of all of them."""
    flags, sets = [o[:5] for o in origins], [o[5:] for o in origins]
    are_arguments, *others = zip(*flags, strict=True)
    unions = (NONE.union(*each) for each in zip(*sets, strict=True))
    return Origin(all(are_arguments), *map(any, others), *unions)


def weights_of(x, y):
    """4. A weight comes before any matmul, and multiplies what is no argument."""
    if x.after_matmul and y.after_matmul:
        return x.reads ^ y.reads
    pairs = (x, y), (y, x)
    found = [a.reads for a, b in pairs if not (a.after_matmul or b.is_argument)]
    return NONE.union(*found)


class Forward:
    """A walk forward over a part, given the origins of its inputs."""

    def __init__(self, part, inputs, biases):
        self.part, self.biases, self.inner = part, biases, {}
        self.of = dict(zip(part.inputs, inputs, strict=True))
        self.of |= {v: root(v)._replace(is_argument=True) for v in part.consts}
        for number, step in enumerate(part.steps):
            self.of |= zip(step.outs, self.step(number, step), strict=True)
        self.results = list(map(self.read, part.results))

    def read(self, v):
        return Origin() if v is None else self.of[v]

    def step(self, number, step):
        if step.bodies:
            return self.bodies(number, step)
        if not step.values:  # zeros, or positions
            return [root(v) for v in step.outs]
        whole = joined([self.of[v] for v in step.values])
        # 4. Sums and maxima along an axis, moved at most.
        is_layout = step.is_in(LAYOUT)
        are_sums = all(self.of[v].is_sum for v in step.values)
        is_sum = step.is_in(SUMS) or (is_layout and are_sums)
        is_argument = whole.is_argument and is_layout
        after = whole.after_matmul or step.has_matmul
        flags = is_argument, is_sum, False, False, after
        origin = Origin(*flags, NONE, whole.reads, whole.weights)
        if step.has_matmul:
            used = weights_of(*[self.of[v] for v in step.values[:2]])
            return [origin._replace(weights=whole.weights | used)] * len(step.outs)
        origin = self.along(step, origin)
        if not (step.is_in("slice split") and self.of[step.values[0]].is_argument):
            return [origin] * len(step.outs)
        # Layers may have their weights in one array.
        part = origin.reads, step.eqn.primitive, str(step.eqn.params)
        parts = [frozenset([(*part, i)]) for i in range(len(step.outs))]
        return [origin._replace(reads=origin.reads | own) for own in parts]

    def along(self, step, origin):
        """4. States, and what begins at data."""
        arrays = [v for v in step.values if v.aval.shape]
        is_sum_or_product = step.is_in(f"{ADDITIONS} {FACTORS}")
        if is_sum_or_product and len(arrays) == 2:
            return self.sum(step, arrays, origin)
        # A move or a scalar step of a state is one.
        states = [self.of[v] for v in arrays if self.of[v].is_state]
        is_shared = any(o.is_shared for o in states)
        is_function = len(arrays) == 1 and not step.is_in(SUMS)
        if states and (is_function or step.is_in(MOVES)):
            origin = origin._replace(is_state=True, is_shared=is_shared)
        if not (step.is_in(MOVES) or (is_sum_or_product and len(arrays) == 1)):
            return origin
        begins = [self.of[v].begins for v in arrays if v.is_float]
        if step.is_in("concatenate") or all(begins):
            origin = origin._replace(begins=NONE.union(*begins))
        return origin

    def sum(self, step, arrays, origin):
        """4. `x + y` or `x * y`, in any order, is a state if `y` depends on `x`."""
        level = self.part.level
        is_addition = step.is_in(ADDITIONS)
        is_apart = True
        for x, y in itertools.permutations(arrays):
            of_x, of_y = self.of[x], self.of[y]
            is_later = level[y] > level[x]  # `y` is behind a matmul that `x` is not
            if not (is_later or of_x.is_state):
                continue
            is_apart = False
            begins = of_x.begins - self.biases
            if begins & of_y.reads:  # it begins at data
                return origin._replace(is_state=True, begins=of_x.begins)
            if not (is_addition and is_later):
                continue
            if of_x.weights and of_y.weights <= of_x.weights:  # the same weights again
                self.of[x] = of_x._replace(is_state=True, is_shared=True)
                return origin._replace(is_state=True, is_shared=True)
            if of_x.is_argument:
                self.biases |= begins
        for x, y in itertools.permutations(arrays):  # moved or scaled by others
            of_x = self.of[x]
            if of_x.is_state and not self.of[y].after_matmul:
                flags = dict(is_state=True, is_shared=of_x.is_shared)
                return origin._replace(**flags, begins=of_x.begins)
        begins = [self.of[v].begins for v in arrays]
        if is_apart and all(begins):  # the difference of two coordinates is one
            return origin._replace(begins=NONE.union(*begins))
        return origin

    def bodies(self, number, step):
        operands = step.for_bodies(list(map(self.read, step.ins)))
        if step.is_in("scan while"):
            self.inner[number], results = self.loop(step, operands)
            self.mark(step, self.inner[number][:1])
            return results
        pairs = zip(step.bodies, operands, strict=True)
        # What a branch adds as a bias is one behind it, and none in another branch.
        inner = [Forward(body, each, {*self.biases}) for body, each in pairs]
        self.inner[number] = inner
        self.biases.update(*(x.biases for x in inner))
        self.mark(step, inner)
        return [joined(each) for each in zip(*(x.results for x in inner), strict=True)]

    def mark(self, step, inner):
        """4. An operand is a state if a body adds to it by the same weights again."""
        for each in inner:
            inputs = each.part.inputs
            for v, own in zip(
                step.ins[len(step.ins) - len(inputs) :], inputs, strict=True
            ):
                if v is not None and each.of[own].is_shared:
                    self.of[v] = self.of[v]._replace(is_state=True, is_shared=True)

    def loop(self, step, operands):
        """4. A carry is what it was before the loop and after any number of steps."""
        start, count = step.counts
        body, inputs = step.bodies[0], operands[0]
        consts, init, xs = (
            inputs[:start],
            inputs[start : start + count],
            inputs[start + count :],
        )
        # What the slices of a step are, those of the next one are not.
        roots = [root(v).begins for v in body.inputs[start + count :]]
        slices = [
            o._replace(begins=own, reads=own) if o.begins else o
            for o, own in zip(xs, roots, strict=True)
        ]
        known = NONE.union(*(x for o in inputs for x in o[5:]))  # before the loop
        carries = [o._replace(is_argument=False) for o in init]
        while True:
            before = carries, {*self.biases}
            forward = Forward(body, [*consts, *carries, *slices], self.biases)
            carries = [
                o._replace(
                    is_state=o.is_state or after.is_state,
                    is_shared=o.is_shared or after.is_shared,
                    after_matmul=o.after_matmul or after.after_matmul,
                    reads=o.reads | (after.reads & known),
                    weights=o.weights | (after.weights & known),
                )
                for o, after in zip(carries, forward.results, strict=False)
            ]
            self.biases.difference_update(*roots)
            if (carries, self.biases) == before:
                break

        def outside(roots_inside):
            pairs = zip(roots, xs, strict=True)
            found = [o.reads for own, o in pairs if own & roots_inside]
            return (roots_inside & known).union(*found)

        results = [
            o._replace(
                begins=outside(o.begins),
                reads=outside(o.reads),
                weights=outside(o.weights),
            )
            for o in forward.results
        ]
        if step.is_in("scan"):
            return [forward], results
        condition = Forward(
            step.bodies[1], [*operands[1][: -count or None], *carries], self.biases
        )
        # A while may run no step at all.
        pairs = zip(init, results, strict=True)
        return [forward, condition], [joined(pair) for pair in pairs]


def root(v):
    roots = frozenset([v]) if v.aval.shape else NONE
    return Origin(begins=roots, reads=roots)


# --- streams: which carries of a scan go through layers ------------------------------


class Passed(NamedTuple):
    """4. What a value in a step of a scan has passed."""

    weight: Any = None  # which weight of the step's own it is, moved at most
    carry: Any = None  # which carry it is, moved at most
    carries: frozenset = NONE  # those that it was computed from
    pairs: frozenset = NONE  # carries, each with a weight that multiplied it
    streams: frozenset = NONE  # the carries that were the first factor of such a matmul


def together(passed):
    """What a value has passed that is made of all of these."""
    sets = zip(*(x[2:] for x in passed), strict=True)
    return Passed(None, None, *(NONE.union(*each) for each in sets))


class Streams:
    """A walk over the body of a scan: the next value of a stream is computed from a
    matmul of it by a weight that each step has for itself, once.
    """

    def __init__(self, step, are_arguments):
        start, count = step.counts
        body, self.states = step.bodies[0], set()
        passed = [Passed()] * start
        passed += [Passed(carry=i, carries=frozenset([i])) for i in range(count)]
        pairs = enumerate(are_arguments)
        passed += [Passed(weight=i if is_one else None) for i, is_one in pairs]
        results = self.walk(body, passed)
        shapes = [v.aval.shape for v in body.results]
        self.flags = [
            i in results[i].streams and i not in self.states and bool(shapes[i])
            for i in range(count)
        ]

    def walk(self, part, inputs):
        of = dict(zip(part.inputs, inputs, strict=True))

        def read(v):
            return of.get(v, Passed())

        for step in part.steps:
            ins = list(map(read, step.ins))
            whole = together(ins)
            outs = [whole] * len(step.outs)
            if step.is_in("dot_general"):
                outs = [self.matmul(step, *ins, whole)]
            elif step.is_in(LAYOUT) and len(ins) == 1:
                outs = ins * len(step.outs)
            elif step.bodies and step.has_matmul:
                pairs = zip(step.bodies, step.for_bodies(ins), strict=True)
                for found in (self.walk(*pair) for pair in pairs):
                    if len(found) == len(outs):  # a condition gives something else
                        outs = list(map(together, zip(outs, found, strict=True)))
            of |= zip(step.outs, outs, strict=True)
        return list(map(read, part.results))

    def matmul(self, step, x, y, whole):
        pairs, streams = whole.pairs, whole.streams
        for factor, by in ((x, y), (y, x)):
            if by.weight is not None:
                found = {(carry, by.weight) for carry in factor.carries}
                self.states |= {carry for carry, _ in found & factor.pairs}
                pairs |= found
        _, (_, batch) = step.eqn.params["dimension_numbers"]
        if step.ins[1].aval.ndim >= 2 and not batch:  # a kernel, one for all examples
            self.states |= set() if y.carry is None else {y.carry}
            streams |= x.carries if y.weight is not None else NONE
        return Passed(None, None, whole.carries, pairs, streams)


# --- the dtypes ----------------------------------------------------------------------


def behind(part, flags):
    """Which results have a matmul before them, given which inputs have one."""
    after = {v for v, flag in zip(part.inputs, flags, strict=True) if flag}
    for step in part.steps:
        found = zip(step.outs, behind_step(step, after), strict=True)
        after |= {v for v, flag in found if flag}
    return [v in after for v in part.results]


def behind_step(step, after):
    """The same for the results of a step, given the values that have one."""
    flags = [v in after for v in step.ins]
    if not step.bodies:
        return [step.has_matmul or any(flags)] * len(step.outs)
    each = step.for_bodies(flags)
    if not step.is_in("scan while"):
        found = map(behind, step.bodies, each)
        return list(map(any, zip(*found, strict=True)))
    inputs, (start, count) = each[0], step.counts
    while True:  # it was there before the loop, or is after any number of steps
        found = behind(step.bodies[0], inputs)
        carries = list(map(max, inputs[start : start + count], found))
        if carries == inputs[start : start + count]:
            return found if step.is_in("scan") else carries  # a while may run no step
        inputs[start : start + count] = carries


class Row(NamedTuple):
    """A line of the table: a step, and which operands and results are half."""

    step: Step
    halves: list[bool]
    results: list[bool]  # before what leaves the region is rounded


class Dtypes:
    """A walk forward over a part that chooses the dtypes.

    `halves` and `after` say of its inputs whether they are half, and whether they have
    a matmul before them; `uses` says what happens to its results.
    """

    def __init__(self, part, forward, halves, after, uses):
        self.part, self.forward, self.uses = part, forward, uses
        self.backward = Backward(part, uses)
        self.rows, self.inner, self.numbers = [], {}, set()
        self.after = {v for v, flag in zip(part.inputs, after, strict=True) if flag}
        # What is half for its own region, and for all behind it.
        self.half = {v for v, flag in zip(part.inputs, halves, strict=True) if flag}
        self.half_outside = {*self.half}
        for number, step in enumerate(part.steps):
            self.step(number, step)
        pairs = zip(part.results, uses, strict=True)
        self.results = [self.reads_half(v, use.is_read) for v, use in pairs]

    def reads_half(self, v, is_own):
        return v in (self.half if is_own else self.half_outside)

    def step(self, number, step):
        own = self.backward.own[number]
        halves = list(map(self.reads_half, step.ins, own))
        after = zip(step.outs, behind_step(step, self.after), strict=True)
        self.after |= {v for v, flag in after if flag}
        if step.is_in(LAYOUT) and not step.floats:
            self.numbers |= {*step.outs}
        if step.bodies and step.has_matmul:
            self.inner[number], results = self.bodies(number, step, halves)
        else:
            low = step.is_in("dot_general") or self.stays_half(step, halves)  # 1., 5.
            halves = [low and v in step.floats for v in step.ins]  # 2.
            results = [low] * len(step.outs)
        for v, is_half in zip(step.outs, results, strict=True):
            is_rounded = v.is_float and self.is_rounded(v)
            is_low = is_half or (is_rounded and self.is_residual(step, v))
            self.half |= {v} if is_low else set()
            self.half_outside |= {v} if is_low or is_rounded else set()
        self.rows.append(Row(step, halves, results))

    def is_rounded(self, v):
        """3. What leaves a region towards another matmul is rounded at the border.

        4. Never: sums, scalars, what no matmul comes before, and states.
        """
        origin, backward = self.forward.of[v], self.backward
        is_exempt = origin.is_sum or origin.is_state or not v.aval.shape
        is_leaving = v in backward.leads and v in backward.leaving
        return is_leaving and v in self.after and not is_exempt

    def is_residual(self, step, v):
        """5. A residual sum is read rounded in its own region, too; no result is."""
        are_after = [x in self.after for x in step.values]
        is_sum = step.is_in("add") and len(are_after) == 2 and all(are_after)
        is_result = v in self.backward.results or v in self.backward.unrounded
        return is_sum and v in self.backward.by_later and not is_result

    def stays_half(self, step, halves):
        """5. A move of halves, and a sum of two halves or of a half and a bias."""
        pairs = zip(step.ins, halves, strict=True)
        others = {*step.floats} - {v for v, is_half in pairs if is_half}
        if not any(halves) or self.backward.leads.isdisjoint(step.outs):
            return False
        are_arguments = all(self.forward.of[v].is_argument for v in others)
        if step.is_in("add"):
            (v,) = step.outs
            is_exempt = v in self.backward.results or self.forward.of[v].is_state
            are_arrays = all(x and x.aval.shape for x in step.ins)
            return are_arguments and are_arrays and not is_exempt
        if step.is_in("concatenate"):
            return are_arguments or others <= self.numbers
        return step.is_in(MOVES) and others <= self.numbers

    def bodies(self, number, step, halves):
        """A call hands through, branches are joined, a while is float32."""
        inner, uses = self.forward.inner[number], self.backward.of_results[number]
        # 4. A state is handed out as it is.
        are_states = [self.forward.of[v].is_state for v in step.outs]
        uses = [
            use._replace(is_read=True, is_result=True) if is_state else use
            for use, is_state in zip(uses, are_states, strict=True)
        ]
        each = step.for_bodies(halves)
        after = step.for_bodies([v in self.after for v in step.ins])
        if step.is_in("scan"):
            return self.scan(step, inner[0], each[0], after[0], uses)
        if not step.is_in("while"):
            found = list(
                map(Dtypes, step.bodies, inner, each, after, [uses] * len(each))
            )
            return found, list(map(all, zip(*(x.results for x in found), strict=True)))
        found, count = [], len(step.outs)
        for body, forward, *flags in zip(step.bodies, inner, each, after, strict=True):
            flags = ([*x[:-count], *[False] * count] for x in flags)
            found.append(Dtypes(body, forward, *flags, [RESULT] * len(body.results)))
        return found, [False] * count

    def scan(self, step, forward, halves, after, uses):
        """A scan is a fixed point: streams are half, as a step gives them. No state is.

        In a step, what begins at a state has no matmul before it.
        """
        start, count = step.counts
        origins = list(map(self.forward.read, step.ins))[start:]
        flags = Streams(step, [o.is_argument for o in origins[count:]]).flags
        states = zip(origins, forward.results, strict=False)
        are_states = [bool(init.begins or last.is_state) for init, last in states]
        streams = [x and not y for x, y in zip(flags, are_states, strict=False)]
        while True:
            known = [
                [*x[:start], *streams, *x[start + count :]] for x in (halves, after)
            ]
            carried = [STREAM if is_stream else RESULT for is_stream in streams]
            uses = [*carried, *uses[count:]]
            found = Dtypes(step.bodies[0], forward, *known, uses)
            settled = list(map(min, streams, found.results))
            if settled == streams:
                return [found], [*streams, *found.results[count:]]
            streams = settled


# --- the table -----------------------------------------------------------------------


class Reading:
    """What the lines say of a program, as `jax.make_jaxpr` gives it."""

    def __init__(self, closed):
        self.part = Part(closed, itertools.count())
        arguments = [root(v)._replace(is_argument=True) for v in self.part.inputs]
        forward = Forward(self.part, arguments, set())
        none, uses = [False] * len(arguments), [RESULT] * len(self.part.results)
        self.dtypes = Dtypes(self.part, forward, none, none, uses)

    def table(self, half):
        """Returns `(scopes, primitive, operand dtypes, result dtypes)` of each step."""
        return list(table(self.dtypes, half))

    def run(self, arguments, half):
        """Returns the results of the program in the dtypes of the lines."""
        results = run(self.dtypes, half, *arguments)
        return cast(results, [False] * len(results), half)


def table(dtypes, half):
    def name(v, is_half):
        return half if is_half else v.aval.dtype.name

    for number, (step, halves, _) in enumerate(dtypes.rows):
        pairs = zip(step.ins, halves, strict=True)
        operands = [name(*pair) for pair in pairs if pair[0]]
        results = [name(v, v in dtypes.half_outside) for v in step.outs]
        yield step.scopes, step.eqn.primitive.name, operands, results
        for inner in dtypes.inner.get(number, []):
            yield from table(inner, half)


# --- the numbers ---------------------------------------------------------------------


def cast(arrays, halves, half):
    """Casts floats to half precision, or to float32."""
    pairs = [(jnp.asarray(x), flag) for x, flag in zip(arrays, halves, strict=True)]
    return [
        x.astype(half if flag else jnp.float32)
        if jnp.issubdtype(x.dtype, jnp.floating)
        else x
        for x, flag in pairs
    ]


def run(dtypes, half, *inputs):
    """Runs a part in its dtypes; returns its results in theirs."""
    part, backward = dtypes.part, dtypes.backward
    own = part.consts | dict(zip(part.inputs, inputs, strict=True))
    outside = dict(own)
    for number, (step, halves, results) in enumerate(dtypes.rows):
        pairs = zip(step.atoms, backward.own[number], strict=True)
        values = [number_of(v, own if is_own else outside) for v, is_own in pairs]
        values = cast(values, halves, half)
        if number in dtypes.inner:
            inner = [functools.partial(run, d, half) for d in dtypes.inner[number]]
            found = run_bodies(step, inner, results, half, values)
        else:
            found = bind(step, values)
        found = cast(found, results, half)
        for known, flags in ((own, dtypes.half), (outside, dtypes.half_outside)):
            halves = [v in flags for v in step.outs]
            known |= zip(step.outs, cast(found, halves, half), strict=True)
    pairs = zip(part.atoms, dtypes.uses, strict=True)
    return [number_of(v, own if use.is_read else outside) for v, use in pairs]


def number_of(v, known):
    return jnp.asarray(v.val, v.aval.dtype) if isinstance(v, Literal) else known[v]


def bind(step, values):
    primitive, params = step.eqn.primitive, step.eqn.params
    if step.is_in("dot_general"):  # 1. it adds up in float32
        values = [x.astype(jnp.float32) for x in values]
        params = params | {"precision": (lax.Precision.HIGHEST,) * 2}
    found = primitive.bind(*values, **primitive.get_bind_params(params))
    return found if primitive.multiple_results else [found]


def run_bodies(step, inner, results, half, values):
    params = step.eqn.params
    if step.is_in("cond"):

        def branch(function):
            return lambda *xs: cast(function(*xs), results, half)

        return lax.switch(values[0], list(map(branch, inner)), *values[1:])
    if not step.is_in("scan while"):
        return inner[0](*values)
    start, count = step.counts
    known, *of_condition = step.for_bodies(values)
    init = cast(known[start:][:count], results[:count], half)

    def body(carry, own):
        found = inner[0](*known[:start], *carry, *own)
        return cast(found[:count], results[:count], half), found[count:]

    if step.is_in("scan"):
        xs, length = known[start + count :], params["length"]
        carry, stacked = lax.scan(body, init, xs, length, params["reverse"])
        return [*carry, *stacked]
    consts = of_condition[0][: len(of_condition[0]) - count]
    return lax.while_loop(
        lambda carry: inner[1](*consts, *carry)[0],
        lambda carry: body(carry, ())[0],
        init,
    )
