"""A progress bar over finished requests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as ProgressBar

from triton_diffusion_client.result import GenerationResult

Progress = bool | None
"""True and False show a bar or not; None shows one for several requests on a terminal."""


@contextmanager
def track(total: int, progress: Progress) -> Iterator[Callable[[GenerationResult], None]]:
    """A function to be called with each finished result."""
    console = Console(stderr=True)
    if not (console.is_terminal and total > 1 if progress is None else progress):
        yield lambda _: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with ProgressBar(*columns, console=console) as bar:
        task = bar.add_task("generating", total=total)
        failed = 0

        def advance(result: GenerationResult) -> None:
            nonlocal failed
            failed += result.error is not None
            bar.update(task, advance=1, description=f"generating ({failed} failed)" if failed else "generating")

        yield advance
