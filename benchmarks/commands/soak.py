"""`soak`: a long run in float16, with faults, kills and restarts.

Loss and scale, the state and its counters, memory and compilations are compared with
models of their own, at every step or at every save; see `benchmarks/soak`.
"""

import json
import pathlib
import sys
import tempfile
from typing import Any

from benchmarks import environment
from benchmarks.request import Request
from benchmarks.soak import curve, page
from benchmarks.soak.history import History
from benchmarks.soak.processes import ALIKE, Run, plans

_SAVE_EVERY = {"full": 50, "tiny": 10}
_LONGEST = {"full": 120, "tiny": 8}  # saves of one process
_WITHOUT_SAVES = 100  # intervals between saves of the run that saves nothing


def run(asked: Request, steps: int, seed: int, work: str) -> None:
    """Writes soak.md and soak.png into the folder of results.

    Args:
      asked: size and folder of the request.
      steps: how many steps to train in float16.
      seed: of the batches, the faults and the kills.
      work: where a run that was interrupted goes on.

    Raises:
      SystemExit: if a check fails, or if the run cannot go on.
    """
    name = f"flax_amp_soak_{seed}_{steps}_{asked.size}"
    folder = pathlib.Path(work or pathlib.Path(tempfile.gettempdir(), name))
    made = begun(folder, {"size": asked.size, "steps": steps, "seed": seed})
    save_every = _SAVE_EVERY[asked.size]
    trained = Run(folder, seed, steps, save_every)
    history = History(seed)
    for record, note in trained.processes(plans(seed, _LONGEST[asked.size])):
        history.add(record, note)
        found = json.dumps(history.problems) if history.problems else "no problem"
        print(
            f"{record.stem}: {note['precision']}, {note['devices']} devices, "
            f"{note['end']}; step {len(history.rows)}, {history.half} in float16, "
            f"{found}",
            flush=True,
        )
        if history.half >= steps and history.counts["processes"] >= ALIKE:
            break
    compared = history.compare(trained.uninterrupted(_WITHOUT_SAVES * save_every))
    curves = curve.curves(history, seed, steps, folder)
    asked.folder.mkdir(parents=True, exist_ok=True)
    figure = page.draw(history, curves, asked.folder / "soak.png")
    path = asked.folder / "soak.md"
    path.write_text(page.page(made, history, curves, compared, figure))
    print(f"wrote {path}")
    if history.problems or not curves.inside:
        sys.exit(f"failed: {dict(history.problems)}, curve inside: {curves.inside}")


def begun(folder: pathlib.Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Returns what the run in a folder was begun with, which may be now.

    Raises:
      SystemExit: if it was begun with other versions, sources or settings. What it
        recorded would stand on the page as what was found with these.
    """
    path, here = folder / "made.json", {**environment.this_run(), **settings}
    if not (folder / "records").exists():
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(here))
    made: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    for key in ("versions", *settings):
        if made.get(key) != here[key]:
            sys.exit(
                f"soak: the run in {folder} was begun with {key} {made.get(key)}, not "
                f"{here[key]}. Remove the folder, or name another one with --work."
            )
    return made
