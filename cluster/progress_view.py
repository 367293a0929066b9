"""What a person sees while a cluster starts: the phase, and how much of the model has been read."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Self

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

if TYPE_CHECKING:
    from kvorum.cluster.engine_deployment import LoadProgress


class ProgressView:
    """Bars on a terminal, plain lines elsewhere; on standard error, so that output can be piped."""

    def __init__(self) -> None:
        self._console = Console(stderr=True)
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TimeElapsedColumn(),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
        )
        self._phase: TaskID | None = None
        self._engines: dict[str, TaskID] = {}

    def __enter__(self) -> Self:
        """Start drawing."""
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Stop drawing and leave no trace."""
        self._progress.stop()

    def show_phase(self, phase: str) -> None:
        """Say what goes on now."""
        if not self._console.is_terminal:
            self._console.print(f"{phase} …")
        elif self._phase is None:
            self._phase = self._progress.add_task(phase, total=None)
        else:
            self._progress.update(self._phase, description=phase)

    def show_load(self, load: LoadProgress, engine: str) -> None:
        """Say how far an engine has loaded."""
        if not load.total_bytes:
            return
        if engine not in self._engines:
            self._engines[engine] = self._progress.add_task(engine, total=load.total_bytes)
        self._progress.update(self._engines[engine], completed=load.loaded_bytes, total=load.total_bytes)
