"""Metrics on the terminal: a live line, or lines in a file."""

import atexit
import datetime
import time
from collections import deque

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from flax_amp.metrics._writers import MetricWriter, Scalars, to_numbers, to_step


class TerminalWriter(MetricWriter):
    """Shows the progress of a run: steps per second, the time left, and metrics.

    On a terminal, a few lines are drawn again and again: the progress, and the last
    metrics of each group (`train/loss` is of the group `train`). What is printed
    meanwhile appears above. In a file, each call prints one line.

    Args:
      first_step: the first step that is to come; time counts from now.
      total_steps: the last step of the run.
      console: where to print, instead of stdout.

    Example:
      >>> with TerminalWriter(total_steps=600) as writer:
      ...     writer.write_scalars(50, {"train/loss": 0.25, "train/scale": 32768.0})
      step  50/600  train: loss 0.25  scale 32768
    """

    def __init__(
        self,
        *,
        first_step: int | None = None,
        total_steps: int | None = None,
        console: Console | None = None,
    ) -> None:
        self._console = console or Console(highlight=False)
        self._total = total_steps
        # The speed is that of the last calls: the first step compiles.
        self._times: deque[tuple[int, float]] = deque(maxlen=4)
        if first_step is not None:
            self._times.append((first_step - 1, time.monotonic()))
        self._groups: dict[str, str] = {}
        self._live: Live | None = None

    def write_scalars(self, step: int, scalars: Scalars) -> None:
        self._check_open()
        step, groups = to_step(step), _grouped(to_numbers(scalars))
        if not self._times or step > self._times[-1][0]:
            self._times.append((step, time.monotonic()))
        if not self._console.is_terminal:
            line = "  ".join([*self._progress(step), *groups.values()])
            self._console.print(line, markup=False, soft_wrap=True)
            return
        self._groups |= groups
        if self._live is None:
            self._live = Live(
                console=self._console, get_renderable=self._render, refresh_per_second=2
            )
            self._live.start()
            atexit.register(self.close)  # or the cursor stays hidden after an error
        self._live.refresh()

    def close(self) -> None:
        super().close()
        atexit.unregister(self.close)
        if self._live is not None:
            self._live.stop()  # a second time does nothing

    def _progress(self, step: int) -> list[str]:
        """Returns the step, the speed and the time left, as far as they are known."""
        total = self._total
        shown = [f"step {step:>{len(str(total))}}/{total}" if total else f"step {step}"]
        (before, began), (last, now) = self._times[0], self._times[-1]
        if last > before:
            speed = (last - before) / max(now - began, 1e-9)
            shown.append(f"{speed:.3g} steps/s")
            if total and step < total:
                seconds = (total - last) / speed - (time.monotonic() - now)
                left = datetime.timedelta(seconds=max(round(seconds), 0))
                shown.append(f"ETA {left}")
        return shown

    def _render(self) -> RenderableType:
        step = self._times[-1][0]
        bar = Table.grid(padding=(0, 2, 0, 0))
        cells: list[RenderableType] = list(map(Text, self._progress(step)))
        if self._total:
            cells.insert(1, ProgressBar(self._total, step, width=20))
        bar.add_row(*cells)
        return Group(bar, *map(Text, self._groups.values()))


def _grouped(numbers: dict[str, float]) -> dict[str, str]:
    """Returns lines by group, `train: loss 0.25  scale 32768`, for the terminal.

    Hyper-parameters are left out.
    """
    groups: dict[str, str] = {}
    for name, value in numbers.items():
        if "hyperparams/" not in name:
            group, _, last = name.rpartition("/")
            title = f"{group}: " if group else ""
            line = f"{groups[group]}  " if group in groups else title
            groups[group] = f"{line}{last} {_short(value)}"
    return groups


def _short(value: float) -> str:
    is_whole = float(value).is_integer() and abs(value) < 1e7
    return f"{value:.0f}" if is_whole else f"{value:.4g}"
