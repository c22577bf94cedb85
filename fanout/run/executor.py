"""Execs on this host: admission, one thread each, cancellation. The bridge from async callers to blocking work.

Owns who waits and who is told. The order is scheduler.py's, the work exec.py's.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, asynccontextmanager, suppress
from typing import Any

import anyio
import anyio.lowlevel

from fanout.model import Event, Finished, Run
from fanout.run.exec import Cancel, Cancelled, Host, Job, execute
from fanout.run.scheduler import Scheduler

__all__ = ["LocalExecutor", "waker"]

#: Events a slow consumer may leave unread before its command is held up.
_EVENTS_AHEAD = 64


class LocalExecutor:
    """Runs jobs on this host, at most `max_in_flight` at once, first come first served. Serves any event loops."""

    def __init__(self, host: Host, max_in_flight: int) -> None:
        self._host = host
        self._scheduler = Scheduler(max_in_flight)
        self._lock = threading.Lock()
        self._wake: dict[str, Callable[[], None]] = {}
        # More threads than slots: a job that only waits for its commit has given up its slot.
        self._threads = ThreadPoolExecutor(4 * max_in_flight + 64, "fanout-exec")

    async def run(self, job: Job) -> Run:
        """Run a job when its turn comes and return its result. Cancelled, it leaves nothing running or committed."""
        async with aclosing(self._events(job, live=False)) as events:
            async for event in events:
                if isinstance(event, Finished):
                    return event.run
        raise AssertionError("an exec ended without a result")

    async def stream(self, job: Job) -> AsyncGenerator[Event, None]:
        """Run a job when its turn comes, yielding its events; the last is `Finished`."""
        async with aclosing(self._events(job, live=True)) as events:
            async for event in events:
                yield event

    def close(self) -> None:
        """Wait for the threads; no job may be running."""
        self._threads.shutdown(wait=True)

    async def _events(self, job: Job, *, live: bool) -> AsyncGenerator[Event, None]:
        async with self._slot(job.id) as give_up_slot:
            mailbox, cancel = _Mailbox(), Cancel()

            def work() -> None:
                try:
                    run = execute(job, self._host, cancel, mailbox.put if live else None, give_up_slot)
                    mailbox.put(Finished(run=run))
                except Cancelled:
                    pass
                except BaseException as error:
                    mailbox.fail(error)
                finally:
                    mailbox.end()

            self._threads.submit(work)
            try:
                while (event := await mailbox.get()) is not None:
                    yield event
            finally:
                if not mailbox.ended:
                    # Whatever took the caller away: when this returns, everything of the exec is gone.
                    cancel.set()
                    mailbox.discard()
                    with anyio.CancelScope(shield=True):
                        while await mailbox.get() is not None:
                            pass

    @asynccontextmanager
    async def _slot(self, job_id: str) -> AsyncIterator[Callable[[], None]]:
        """Wait for a slot and hold it; the value gives it up early, from any thread."""
        event, wake = waker()
        with self._lock:
            self._wake[job_id] = wake
            started = self._scheduler.arrive(job_id)
        self._start(started)

        def leave() -> None:
            with self._lock:
                self._wake.pop(job_id, None)
                started = self._scheduler.leave(job_id)
            self._start(started)

        try:
            await event.wait()
            yield leave
        finally:
            leave()

    def _start(self, jobs: list[str]) -> None:
        for job in jobs:
            with self._lock:
                wake = self._wake.get(job)
            if wake is not None:
                wake()


class _Mailbox:
    """Events from one worker thread to one async reader; the writer is held up when the reader lags."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._events: deque[Event] = deque()
        self._error: BaseException | None = None
        self._over = False
        self._discarding = False
        self._wake: Callable[[], None] | None = None
        #: The reader has seen the end.
        self.ended = False

    def put(self, event: Event) -> None:
        with self._changed:
            while len(self._events) >= _EVENTS_AHEAD and not self._discarding:
                self._changed.wait()
            if not self._discarding:
                self._events.append(event)
            self._notify()

    def fail(self, error: BaseException) -> None:
        with self._changed:
            self._error = error

    def end(self) -> None:
        with self._changed:
            self._over = True
            self._notify()

    def discard(self) -> None:
        """Drop what is unread and what still comes, errors included."""
        with self._changed:
            self._discarding = True
            self._events.clear()
            self._changed.notify_all()

    async def get(self) -> Event | None:
        """Return the next event, or None at the end; raises what the worker raised."""
        while True:
            with self._changed:
                if self._events:
                    self._changed.notify_all()
                    return self._events.popleft()
                if self._over:
                    self.ended = True
                    if self._error is not None and not self._discarding:
                        raise self._error
                    return None
                event, self._wake = waker()
            await event.wait()

    def _notify(self) -> None:
        if self._wake is not None:
            self._wake()
            self._wake = None


def waker() -> tuple[anyio.Event, Callable[[], None]]:
    """Return an event of the running loop and a function that sets it from any thread."""
    event = anyio.Event()
    native: Any = anyio.lowlevel.current_token().native_token  # asyncio's loop, or trio's token
    soon = getattr(native, "call_soon_threadsafe", None) or native.run_sync_soon

    def wake() -> None:
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            soon(event.set)

    return event, wake
