"""Many execs at once: running them, showing how far each is, and the table at the end.

Owns what `map` and `demo` share. A terminal sees one live line per exec; anything else one line as each ends.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, aclosing, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from fanout.cli.render import count, milliseconds, print_table, safe, stderr_console, table

if TYPE_CHECKING:
    from rich.text import Text

    from fanout.api import Fanout
    from fanout.model import Run

__all__ = ["Board", "failed", "outcome", "run_all"]

#: Live lines kept for the summary, its blank line and the prompt.
_SPARE_LINES = 4


class Board:
    """Where each exec is: queued, running, or over with its result."""

    def __init__(self, labels: Sequence[str]) -> None:
        self.labels = [safe(label) for label in labels]
        self.runs: list[Run | None] = [None] * len(labels)
        self._running: dict[int, float] = {}
        self._done: list[int] = []

    def started(self, index: int) -> None:
        """The command of exec `index` runs."""
        from fanout.runtime import system

        self._running[index] = system.monotonic()

    def finished(self, index: int, run: Run) -> None:
        """Exec `index` is over and committed."""
        self.runs[index] = run
        self._running.pop(index, None)
        self._done.append(index)

    def live(self, *, plain: bool = True) -> AbstractContextManager[None]:
        """Show progress on stderr while the body runs; `plain` says whether also where that is no terminal."""
        if sys.stderr.isatty():
            return self._live()
        return self._plain() if plain else nullcontext()

    @contextmanager
    def _live(self) -> Iterator[None]:
        from rich.live import Live

        out = stderr_console()
        with Live(
            console=out,
            get_renderable=lambda: self.view(out.height - _SPARE_LINES, out.width),
            transient=True,
            refresh_per_second=12,
        ):
            yield

    @contextmanager
    def _plain(self) -> Iterator[None]:
        before = self.finished

        def tell(index: int, run: Run) -> None:
            before(index, run)
            text = f"[{len(self._done)}/{len(self.labels)}] {self.labels[index]}: {_describe(run)}"
            print(text, file=sys.stderr, flush=True)

        self.finished = tell  # type: ignore[method-assign]
        try:
            yield
        finally:
            self.finished = before  # type: ignore[method-assign]

    def view(self, height: int, width: int) -> Text:
        """Return what is worth seeing in `height` lines: all execs if they fit, else running ones and the latest."""
        from rich.text import Text

        total, done, running = len(self.labels), len(self._done), len(self._running)
        shown = list(range(total))
        if total > height:
            chosen = [*sorted(self._running), *reversed(self._done)][: max(height, 1)]
            shown = sorted(chosen + self._queued(max(height, 1) - len(chosen)))
        rows = [(self.labels[index], *self._state(index)) for index in shown]
        head, *body = table(("branch", "state", "ms>"), rows, flexible="branch", width=width)
        summary = f"{done} of {total} done, {running} running, {total - done - running} queued"
        return Text("\n").join([Text(head, style="bold"), *map(Text, body), Text(summary, style="dim")])

    def print_table(self, results: Sequence[str]) -> None:
        """Print the table at the end; `results` is one line of text for each exec."""
        rows = [
            (
                label,
                outcome(run) if run is not None else "-",
                *(_times(run) if run is not None else ("", "", "")),
                safe(result),
            )
            for label, run, result in zip(self.labels, self.runs, results, strict=True)
        ]
        print_table(("branch", "exit", "queue>", "execute>", "commit>", "result"), rows, flexible="result")

    def _queued(self, limit: int) -> list[int]:
        if limit <= 0:
            return []
        waiting = (i for i in range(len(self.labels)) if self.runs[i] is None and i not in self._running)
        return [index for _, index in zip(range(limit), waiting, strict=False)]

    def _state(self, index: int) -> tuple[str, str]:
        from fanout.runtime import system

        run = self.runs[index]
        if run is not None:
            return _describe(run), milliseconds(run.timing.total_ms)
        if index in self._running:
            return "running", milliseconds((system.monotonic() - self._running[index]) * 1e3)
        return "queued", ""


async def run_all(
    fo: Fanout,
    board: Board,
    commands: Sequence[str],
    *,
    max_in_flight: int | None = None,
    options: Mapping[str, Any],
) -> None:
    """Run every command at once, at most `max_in_flight` of them, telling `board`.

    An error (not a failing command) cancels the others and is raised; what ended before stays on the board.
    """
    import anyio

    from fanout.model import Finished, Started

    gate = anyio.Semaphore(max_in_flight or max(len(commands), 1))
    failures: list[Exception] = []

    async def one(index: int) -> None:
        try:
            async with gate, aclosing(fo.stream(commands[index], **options)) as events:
                async for event in events:
                    if isinstance(event, Started):
                        board.started(index)
                    elif isinstance(event, Finished):
                        board.finished(index, event.run)
        except Exception as error:
            failures.append(error)
            group.cancel_scope.cancel()

    async with anyio.create_task_group() as group:
        for index in range(len(commands)):
            group.start_soon(one, index)
    if failures:
        raise failures[0]


def outcome(run: Run) -> str:
    """Return how a run ended in one word: its exit code, or why it has none; a conflict counts before success."""
    if run.exit_code is None:
        return run.status.replace("_", " ")
    return "conflict" if run.conflict is not None and run.exit_code == 0 else str(run.exit_code)


def failed(run: Run) -> bool:
    """Whether anything of it went wrong: the command, or its commit."""
    return not run.ok or run.conflict is not None


def _describe(run: Run) -> str:
    if run.status != "completed":
        return run.status.replace("_", " ")
    if run.conflict is not None:
        return "conflict"
    changes = sum(len(each.changes or ()) for each in run.commits.values())
    landed = f"committed {count(changes, 'path')}" if any(c.seq is not None for c in run.commits.values()) else "done"
    return landed if run.exit_code == 0 else f"{landed}, exit {run.exit_code}"


def _times(run: Run) -> tuple[str, str, str]:
    timing = run.timing
    return milliseconds(timing.queue_ms), milliseconds(timing.execute_ms), milliseconds(timing.commit_ms)
