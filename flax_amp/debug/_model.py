"""What `explain` found: equations, the modules that hold them, problems. Data only."""

import dataclasses
import functools
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

from flax_amp._rewriter.primitives import Kind, kind_of
from flax_amp._training.arguments import first_of
from flax_amp.debug._report import fields_as_data

# How the reasons of products begin that run in fp8, and of those that do not.
IN_FP8, NOT_IN_FP8 = "in fp8", "not in fp8: "
# Why results are float32 about which there is nothing to tell.
_IN_PASSING = "only its own", "computed from", "no matmul reads", "a scalar"


class Dtypes(NamedTuple):
    """The dtypes of an equation's operands and of its results."""

    operands: tuple[str, ...]
    results: tuple[str, ...]

    def __str__(self) -> str:
        # Equal ones are written once: `bf16 -> f32`.
        sides = (dict.fromkeys(map(short, side)) for side in self)
        return " -> ".join(",".join(side) or "()" for side in sides)


def short(dtype: str) -> str:
    """Returns a dtype as JAX writes it in jaxprs, `bf16` for `bfloat16`."""
    names = (("bfloat", "bf"), ("float", "f"), ("uint", "u"), ("int", "i"))
    for long, letter in (*names, ("complex", "c")):
        if dtype.startswith(long):
            return letter + dtype.removeprefix(long)
    return dtype


@functools.cache
def is_half(dtype: str) -> bool:
    """Whether a dtype is a float of fewer than four bytes."""
    try:
        known = jnp.dtype(dtype)
    except TypeError:  # a key
        return False
    return jnp.issubdtype(known, jnp.floating) and known.itemsize < 4


def float_factors(dtypes: Sequence[str]) -> list[str]:
    """Returns the dtypes of the real or complex floats among the factors of a product.

    Args:
      dtypes: those of all operands of a product or a convolution.
    """
    return [x for x in dtypes[:2] if "float" in x or "complex" in x]


@dataclasses.dataclass
class Equation:
    """One equation of the user's function, in one module.

    All numbers are those of one call of the function: what stands in a loop is
    multiplied by the length of the loop.

    Attributes:
      path: the module, or the scope, that it stands in.
      primitive: the name of its primitive.
      before: its dtypes as the user wrote it.
      after: its dtypes under `amp`.
      reason: the rule or the policy key that decided what it computes in.
      result: what became of its result, and why: `rounded: a matmul reads it later`,
        `float32: a sum`.
      shape: the shape of its first result, such as `8x1024x768`.
      times: how often it runs. The body of a `while` counts once.
      casts_down: the casts to a narrower float that are put in for it.
      casts_up: the casts to a wider float that are put in for it.
      flops: the floating point operations, if it is a product or a convolution.
      stored: the bytes of its results that the backward pass stores, by dtype.
      source: the line of the user's code, `file:line`.
      inside: the loops and other structured primitives around it, outermost first.
    """

    path: str
    primitive: str
    before: Dtypes
    after: Dtypes
    reason: str
    result: str = ""
    shape: str = ""
    times: int = 1
    casts_down: int = 0
    casts_up: int = 0
    flops: int = 0
    stored: Counter[str] = dataclasses.field(default_factory=Counter)
    source: str = ""
    inside: tuple[str, ...] = ()

    @property
    def computes_in(self) -> str:
        """The dtype that it computes in: that of its floats, as it reads them."""
        operands, results = self.after
        floats = [dtype for dtype in (*operands, *results) if "float" in dtype]
        return next(iter((*floats, *results, *operands)), "")

    @property
    def is_low(self) -> bool:
        """Whether an operand arrives in half precision; of a product, all factors."""
        if kind_of(self.primitive) is Kind.PRODUCT:
            factors = float_factors(self.after.operands)
            return bool(factors) and all(map(is_half, factors))
        return any(map(is_half, self.after.operands))

    @property
    def is_in_fp8(self) -> bool:
        """Whether it is a product whose factors are rounded to 8-bit floats."""
        return self.reason.startswith(IN_FP8)

    @property
    def stays_by_rule(self) -> bool:
        """Whether a rule keeps its result in float32: it is a sum, or a key says so."""
        what, _, why = self.result.partition(": ")
        is_sum = kind_of(self.primitive) is Kind.SUM
        return what == "float32" and (is_sum or not why.startswith(_IN_PASSING))

    @property
    def low_flops(self) -> int:
        """Its operations, if they run in half precision."""
        return self.flops if self.is_low else 0

    def to_dict(self) -> dict[str, Any]:
        computed = {"computes_in": self.computes_in, "low_flops": self.low_flops}
        return fields_as_data(self) | computed


@dataclasses.dataclass
class Module:
    """A module, or another scope, with the equations and modules in it.

    Attributes:
      name: the last part of its path.
      path: where it stands, `GPT/Block_0`; empty for the whole function.
      equations: those that are in no module inside of it.
      children: the modules inside, by name.
    """

    name: str
    path: str
    equations: list[Equation] = dataclasses.field(default_factory=list)
    children: dict[str, "Module"] = dataclasses.field(default_factory=dict)

    def add(self, equation: Equation) -> None:
        """Adds an equation to the module of its path, relative to this module."""
        module = self
        for name in filter(None, equation.path.split("/")):
            path = f"{module.path}/{name}".lstrip("/")
            module = module.children.setdefault(name, Module(name, path))
        module.equations.append(equation)

    def walk(self) -> Iterator[Equation]:
        """Yields all equations, those of the modules inside included."""
        yield from self.equations
        for child in self.children.values():
            yield from child.walk()

    @functools.cached_property
    def totals(self) -> "Totals":
        """The sums over all equations."""
        return total(self.walk())

    def to_dict(self) -> dict[str, Any]:
        children = [child.to_dict() for child in self.children.values()]
        return fields_as_data(self) | {
            "totals": self.totals.to_dict(),
            "children": children,
        }


@dataclasses.dataclass(frozen=True)
class Totals:
    """Sums over equations; the attributes are those of `Equation`."""

    equations: int
    flops: int
    low_flops: int
    casts_down: int
    casts_up: int
    stored: Counter[str]

    @property
    def low_share(self) -> float | None:
        """The share of products in half precision; `None` if there are none."""
        return self.low_flops / self.flops if self.flops else None

    def to_dict(self) -> dict[str, Any]:
        return fields_as_data(self) | {"low_share": self.low_share}


def total(equations: Iterable[Equation]) -> Totals:
    """Returns the sums over equations."""
    rows = list(equations)
    names = ("flops", "low_flops", "casts_down", "casts_up")
    stored: Counter[str] = Counter()
    for row in rows:
        stored.update(row.stored)
    sums = {name: sum(getattr(row, name) for row in rows) for name in names}
    return Totals(len(rows), stored=stored, **sums)


@dataclasses.dataclass(frozen=True)
class Problem:
    """Something that a person has to act on, or to know.

    Attributes:
      kind: a short name, such as `float32 product`.
      message: what was found, and what can be done.
      paths: the modules where it was found; of more than three, with `*` for the
        numbers of layers.
      source: the line of the first equation.
      count: how many equations it concerns.
      flops: the operations of the products among them.
    """

    kind: str
    message: str
    paths: tuple[str, ...] = ()
    source: str = ""
    count: int = 0
    flops: int = 0

    @property
    def where(self) -> str:
        """Its modules as words."""
        return first_of([path or "outside of any module" for path in self.paths])


def without_numbers(path: str) -> str:
    """Returns a path without the numbers of layers: `GPT/Block_*`."""
    return re.sub(r"\d+", "*", path)
