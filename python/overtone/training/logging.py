"""What a run reports: a progress bar, a CSV file, and TensorBoard's event files."""

from __future__ import annotations

import csv
import io
import math
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

from overtone.training.checkpoint import write_text
from overtone.training.metrics import EpochMetrics

BARS = "▁▂▃▄▅▆▇█"
Row = dict[str, float]  # one epoch


def ratio_column(layer: int) -> str:
    """The CSV column of a layer's mean ‖HFC‖/‖LFC‖ on the test images; layers count from 1."""
    return f"hfc_lfc_{layer:02d}"


def write_csv(path: Path, history: Sequence[Row]) -> None:
    text = io.StringIO(newline="")
    columns = dict.fromkeys(name for row in history for name in row)  # a resumed run's first rows may have fewer
    writer = csv.DictWriter(text, list(columns), lineterminator="\n")
    writer.writeheader()
    writer.writerows(history)
    write_text(path, text.getvalue())


class TensorBoardLogger:
    """TensorBoard's, where it is installed; says once when it is not."""

    _warned = False

    def __init__(self, folder: Path, wanted: bool, first_epoch: int) -> None:
        self._writer = None
        if not wanted:
            return
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            if not TensorBoardLogger._warned:
                warnings.warn("no TensorBoard event files: pip install 'overtone[tensorboard]'", stacklevel=2)
            TensorBoardLogger._warned = True
            return
        # What a killed run wrote after its last checkpoint is hidden.
        self._writer = SummaryWriter(str(folder), purge_step=first_epoch + 1)

    def write(self, row: Row) -> None:
        if self._writer is None:
            return
        for name, value in row.items():
            if name not in ("epoch", "step"):
                self._writer.add_scalar(name.replace("_", "/", 1), value, int(row["epoch"]))
        self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class Progress:
    """A bar over the steps of a run, on stderr."""

    def __init__(self, title: str, first: int, steps: int, shown: bool) -> None:
        from tqdm import tqdm

        # A log file gets a line now and then, a terminal a live bar.
        interval = 0.1 if sys.stderr.isatty() else 10.0
        self._bar = tqdm(
            total=steps,
            initial=first,
            desc=title,
            unit="step",
            disable=not shown,
            mininterval=interval,
            dynamic_ncols=True,
        )

    def show(self, step: int, metrics: EpochMetrics | None, rate: float, unit: str) -> None:
        """metrics: of the epoch so far; None leaves those that are shown."""
        if metrics is not None:
            means = f"loss {metrics.loss:.3f}, accuracy {metrics.accuracy:.1%}"
            self._bar.set_postfix_str(f"{means}, {rate:.0f} {unit}/s, HFC/LFC {profile(metrics.ratios)}", refresh=False)
        self._bar.update(step - self._bar.n)

    def close(self) -> None:
        self._bar.close()


def profile(ratios: Sequence[float]) -> str:
    """The first and the last layer's ratio, and the layers between as bars, on a scale from zero to the largest."""
    if len(ratios) == 1:
        return f"{ratios[0]:.2f}"
    largest = max((ratio for ratio in ratios if math.isfinite(ratio)), default=0.0) or 1.0
    heights = [min(1.0, ratio / largest) if ratio >= 0 else 0.0 for ratio in ratios]  # NaN is drawn as zero
    bars = "".join(BARS[int(height * (len(BARS) - 1))] for height in heights)
    return f"{ratios[0]:.2f} {bars} {ratios[-1]:.2f}"
