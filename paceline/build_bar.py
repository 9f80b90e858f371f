"""A bar on standard error that shows how far a build or a check of shards is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn, TextColumn

from fleet.build_messages import BuildProgress
from paceline.build_shards import PHASE_WORDS

_MEBIBYTE = 1 << 20


@contextmanager
def build_bar() -> Iterator[Callable[[BuildProgress], None]]:
    """A function that shows each report. Off a terminal only remarks are shown, and only they remain."""
    console = Console(stderr=True)
    texts = TextColumn("{task.description}"), TextColumn("{task.fields[bytes]}")
    columns = (SpinnerColumn(), texts[0], BarColumn(), TaskProgressColumn(), texts[1])
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=1.0, bytes="")

        def show(progress: BuildProgress) -> None:
            if progress.remark:
                console.print(progress.remark, highlight=False)
            done = ""
            if progress.bytes_total:
                done = f"{progress.bytes_done / _MEBIBYTE:,.0f} of {progress.bytes_total / _MEBIBYTE:,.0f} MiB"
            if progress.seconds_left is not None:
                done += f", {progress.bytes_per_second / _MEBIBYTE:,.0f} MiB/s, {progress.seconds_left:,.0f} s left"
            bar.update(task, completed=progress.fraction, description=PHASE_WORDS[progress.phase], bytes=done)

        yield show
