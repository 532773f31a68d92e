"""The report of `compare_precision` as text."""

import math
from collections.abc import Iterator

from rich.text import Text

from flax_amp.debug._compare_model import Comparison, ModuleErrors, Setting
from flax_amp.debug._report import Part, bytes_text, table

_MODULES = (
    "\nmodule",
    "own\nfwd",
    "own\nbwd",
    "own\nparam",
    "\ntotal",
    "flush\nf16",
    "max\nvalue",
    "max\ngrad",
)
_RUNS = ("\nthe program", "error of\nloss", "\ngradients", "\nstored", "in\nhalf")


def parts(found: Comparison, top: int) -> Iterator[Part]:
    """Yields the parts of the report; `top` is how many modules to show."""
    scale = f", loss scale {found.scale:g}" if found.scale != 1 else ""
    before, after = found.loss
    yield f"{found.name} in {found.compute_dtype} against float32{scale}"
    yield f"loss {before:.6g} in float32, {after:.6g} here"
    yield "\nFirst the modules whose remedy helps, then by own error:"
    yield table(_MODULES, map(_module, found.modules[:top]))
    more = len(found.modules) - top
    if more > 0:
        yield f"... and {more} more"
    bad = sum(module.harm > found.threshold for module in found.modules)
    count = {0: "No module adds", 1: "1 module adds"}.get(bad, f"{bad} modules add")
    yield f"{count} more than {error(found.threshold)}.\n"
    yield table(_RUNS, map(_run, (*found.settings, *found.remedies)))
    yield from _advice(found)
    yield from (Text(f"Note: {note}.") for note in found.notes)


def _module(module: ModuleErrors) -> list[str]:
    name = module.path or "(outside of modules)"
    if module.iterations:
        worst = max(range(len(module.iterations)), key=module.iterations.__getitem__)
        name += f" x{len(module.iterations)}, worst {worst}"
    return [
        name,
        *map(error, (*module.own, module.total.largest)),
        percent(module.flushed) if module.flushed else "",
        f"{module.largest_value:.2g}",
        f"{module.largest_gradient:.2g}",
    ]


def _run(run: Setting) -> list[str]:
    return [
        f"{run.name} in float32" if run.policy else run.name,
        error(run.loss_error),
        error(run.gradient_error),
        "" if run.stored is None else bytes_text(run.stored),
        "" if run.low_share is None else percent(run.low_share),
    ]


def _advice(found: Comparison) -> Iterator[Part]:
    helpful = found.helpful
    if found.budget is not None:
        yield from _cheapest(found)
        helpful = [found.cheapest] if found.cheapest else []
    elif found.remedies and not helpful:
        yield "\nNone of them helps: the gradients stay as wrong as they are."
    for scale in {run.scale for run in helpful} - {found.scale}:
        yield f"\nScale the loss: flax_amp.init_scaler(scaler={scale:.8g})."
    entries = [run.policy for run in helpful if run.policy]
    if entries:
        what = "Add one of these" if entries[1:] else "Add"
        yield f"\n{what} to amp_policy, as {{...}} | flax_amp.default_amp_policy:"
        yield from (f"  {line}" for line in entries)


def _cheapest(found: Comparison) -> Iterator[Part]:
    budget, run = f"{found.budget:g}", found.cheapest
    if run is None:
        every = (found.settings[0], *found.remedies)
        least = error(min(run.gradient_error for run in every))
        yield Text(
            f"\nNone of them is within the budget of {budget}: the least error is "
            f"{least}. Try more modules with remedies=, or raise the budget."
        )
        return
    name, _, gradients, stored, share = _run(run)
    figures = [f"error {gradients}"]
    figures += [f"{stored} stored"] if stored else []
    figures += [f"{share} of the products in half precision"] if share else []
    yield f"\nThe cheapest within the budget of {budget} is '{name}':"
    yield f"  {', '.join(figures)}"


def error(value: float | None) -> str:
    """Returns a relative error in a few characters."""
    if value is None:
        return ""
    if not math.isfinite(value):
        return "inf"
    return f"{value:.1e}".replace("e-0", "e-").replace("e+0", "e+") if value else "0"


def percent(value: float) -> str:
    """Returns a share, never rounded to none or to all."""
    if value in (0, 1):
        return f"{value:.0%}"
    return "<0.1%" if value < 0.001 else f"{100 * min(value, 0.999):.3g}%"
