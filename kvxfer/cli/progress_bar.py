"""A progress bar on standard error, where that is a terminal; elsewhere a line a step."""

from __future__ import annotations

import sys
import time

_WIDTH = 32


class ProgressBar:
    """One line that fills up. Use as a context manager."""

    def __init__(self, label: str, *, shown: bool = True) -> None:
        self._label = label
        self._shown = shown
        self._live = sys.stderr.isatty()
        self._started = time.monotonic()
        self._last = ""

    def __enter__(self) -> ProgressBar:
        self.show(0.0)
        return self

    def __exit__(self, *exception: object) -> None:
        if self._shown and self._live:
            print(file=sys.stderr)

    def show(self, share: float, note: str = "") -> None:
        """Draw the bar at `share` (0 to 1) with a short note behind it."""
        filled = round(min(1.0, max(0.0, share)) * _WIDTH)
        line = f"{self._label:<10} [{'█' * filled}{'·' * (_WIDTH - filled)}] {share:4.0%}  {note}"
        if not self._shown or line == self._last:
            return
        self._last = line
        if self._live:
            print(f"\r\x1b[2K{line}", end="", file=sys.stderr, flush=True)
        elif share >= 1.0:
            print(line, file=sys.stderr, flush=True)
