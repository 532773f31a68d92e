"""What `explain` found: equations, the modules that hold them, problems. Data only."""

import dataclasses
import functools
import html
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

from flax_amp._jaxpr.traits import Kind, kind_of
from flax_amp._rewriter.fp8_dot import FORWARD
from flax_amp.debug._report import Report, as_text, fields_as_data

IN_FP8 = (FORWARD.name,) * 2  # the operands of a product in fp8


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
    for long, letter in (("bfloat", "bf"), ("float", "f"), ("uint", "u"), ("int", "i")):
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
    """Returns the dtypes of the factors of a product of floats.

    Args:
      dtypes: those of all operands of a product or a convolution.

    Returns:
      The floats among the two factors; none if a factor is complex.
    """
    factors = dtypes[:2]
    if any("complex" in dtype for dtype in factors):
        return []
    return [dtype for dtype in factors if "float" in dtype]


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
      kept: the dtype in which its first float32 result is kept; empty if it is used in
        passing, or if there is none.
      kept_by: the rule that decided about this result; empty if there is none.
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
    kept: str = ""
    kept_by: str = ""
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
    def result(self) -> str:
        """What becomes of its first float32 result, as words."""
        if not self.kept_by:
            return ""
        what = f"kept in {short(self.kept)}" if self.kept else "not kept"
        return f"{what}: {self.kept_by}"

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
        return self.after.operands == IN_FP8

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
    return Totals(
        equations=len(rows),
        flops=sum(row.flops for row in rows),
        low_flops=sum(row.low_flops for row in rows),
        casts_down=sum(row.casts_down for row in rows),
        casts_up=sum(row.casts_up for row in rows),
        stored=sum((row.stored for row in rows), Counter()),
    )


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


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Explanation(Report):
    """What mixed precision does to a function, and why. Made by `flax_amp.explain`.

    It prints as a report, and shows itself as a page in a notebook.

    Attributes:
      name: the name of the function.
      compute_dtype: the dtype of low-precision values.
      root: the modules and their equations.
      problems: what a person has to act on, the most important first.
      stored_without_recompute: the bytes that the backward pass would store, by dtype,
        if it computed nothing again; `None` if the function has no derivative, or none
        was asked for.
      stored_without_amp: the bytes that the backward pass stores without `amp`, by
        dtype; `None` if not known.
      notes: what limits these figures.
    """

    name: str
    compute_dtype: str
    root: Module
    problems: tuple[Problem, ...]
    stored_without_recompute: Counter[str] | None = None
    stored_without_amp: Counter[str] | None = None
    notes: tuple[str, ...] = ()

    @property
    def equations(self) -> list[Equation]:
        """All equations, module by module."""
        return list(self.root.walk())

    @property
    def totals(self) -> Totals:
        """The sums over all equations."""
        return self.root.totals

    def report(self, *, depth: int | None = None, only: str | None = None) -> str:
        """Returns the report as text.

        Args:
          depth: how many levels of modules to show. `None`: as many as fit a screen.
          only: `"problems"` to leave out the modules; `"equations"` for a list of all
            equations, with what each computes in and what becomes of its result.

        Raises:
          ValueError: if `only` is something else, or `depth` is negative.
        """
        from flax_amp.debug._terminal import render

        return as_text(render(self, depth=depth, only=only))

    def to_dict(self) -> dict[str, Any]:
        found = super().to_dict()
        return found | {"totals": self.totals.to_dict(), "modules": found.pop("root")}

    def to_html(self) -> str:
        """Returns one page that needs nothing else: a tree to fold, search and sort."""
        from flax_amp.debug._page import page

        return page(self)

    def _repr_html_(self) -> str:
        # In a frame, so that its styles leave the notebook alone.
        source = html.escape(self.to_html(), quote=True)
        style = 'width="100%" height="640" style="border: 0"'
        return f'<iframe srcdoc="{source}" {style}></iframe>'

    def _summary(self) -> str:
        return f"{self.totals.equations} equations"
