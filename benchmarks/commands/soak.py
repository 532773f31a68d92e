"""`soak`: a long run in float16, with faults, kills and restarts.

Loss and scale, the state and its counters, memory and compilations are compared with
models of their own, at every step or at every save; see `benchmarks/soak`.
"""

import json
import pathlib
import sys
import tempfile

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
      SystemExit: if a check fails.
    """
    name = f"flax_amp_soak_{seed}_{steps}_{asked.size}"
    folder = pathlib.Path(work or pathlib.Path(tempfile.gettempdir(), name))
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
    path.write_text(page.page(history, curves, compared, figure))
    print(f"wrote {path}")
    if history.problems or not curves.inside:
        sys.exit(f"failed: {dict(history.problems)}, curve inside: {curves.inside}")
