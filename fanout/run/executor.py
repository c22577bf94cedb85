"""Execs on this host: admission, one thread each, cancellation. The bridge from async callers to blocking work.

Owns who waits and who is told. The order is scheduler.py's, the work exec.py's.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, asynccontextmanager
from typing import Any

import anyio
import anyio.lowlevel

from fanout.errors import FanoutError, Unavailable
from fanout.model import Event, Finished, Run
from fanout.run.exec import Cancel, Cancelled, Host, Job, announce, execute
from fanout.run.scheduler import Scheduler

__all__ = ["LocalExecutor", "Mailbox", "waker"]

#: Events a slow consumer may leave unread before its command is held up.
_EVENTS_AHEAD = 64


class LocalExecutor:
    """Runs jobs on this host, at most `max_in_flight` at once, first come first served. Serves any event loops."""

    def __init__(self, host: Host, max_in_flight: int) -> None:
        self._host = host
        self._scheduler = Scheduler(max_in_flight)
        self._lock = threading.Lock()
        self._closed = False
        self._wake: dict[str, Callable[[], bool]] = {}
        self._stop: dict[str, Callable[[], None]] = {}
        # More threads than slots: a job that only waits for its commit has given up its slot.
        self._threads = ThreadPoolExecutor(4 * max_in_flight + 64, "fanout-exec")

    async def run(self, job: Job, ended: Callable[[Run | FanoutError], None] | None = None) -> Run:
        """Run a job when its turn comes and return its result. Cancelled, it leaves nothing running or committed.

        `ended` is told of a command that ran to its end, with the result or an error that carries it, from another
        thread: even where the caller goes away while the commit is under way, and is told nothing himself.
        """
        async with aclosing(self._events(job, live=False, ended=ended)) as events:
            async for event in events:
                if isinstance(event, Finished):
                    return event.run
        raise AssertionError("an exec ended without a result")

    async def stream(self, job: Job) -> AsyncGenerator[Event, None]:
        """Run a job when its turn comes, yielding its events; the last is `Finished`."""
        async with aclosing(self._events(job, live=True)) as events:
            async for event in events:
                yield event

    def load(self) -> tuple[int, int]:
        """Return how many jobs hold a slot, and how many wait for one."""
        with self._lock:
            return self._scheduler.running, self._scheduler.waiting

    def close(self) -> None:
        """Stop what waits and what runs (their callers get `Unavailable`), and wait for the threads."""
        with self._lock:
            self._closed = True
            stop, wake = list(self._stop.values()), list(self._wake.values())
        for call in (*stop, *wake):
            call()
        self._threads.shutdown(wait=True)

    async def _events(
        self, job: Job, *, live: bool, ended: Callable[[Run | FanoutError], None] | None = None
    ) -> AsyncGenerator[Event, None]:
        with announce(job) as withdraw:
            async with self._slot(job) as give_up_slot:
                mailbox, cancel = Mailbox(self._host.runtime.monotonic, job.limits.timeout_s), Cancel()

                def work() -> None:
                    try:
                        emit = mailbox.put if live else None
                        run = execute(job, self._host, cancel, emit, give_up_slot, withdraw)
                        if ended is not None:
                            ended(run)
                        mailbox.put(Finished(run=run))
                    except Cancelled:
                        mailbox.fail(_closing("while the command ran; it was killed and nothing of it committed"))
                    except BaseException as error:
                        if ended is not None and isinstance(error, FanoutError) and hasattr(error, "run"):
                            ended(error)
                        mailbox.fail(error)
                    finally:
                        withdraw()
                        mailbox.end()

                def stop() -> None:
                    cancel.set()
                    mailbox.let_go()

                self._submit(job.id, work, stop)
                try:
                    while (event := await mailbox.get()) is not None:
                        if isinstance(event, Finished):
                            mailbox.ended = True  # all of it is over: nothing is left to wait for
                        yield event
                finally:
                    if not mailbox.ended:
                        # Whatever took the caller away: when this returns, everything of the exec is gone.
                        cancel.set()
                        await mailbox.drain()
                    with self._lock:
                        self._stop.pop(job.id, None)

    def _submit(self, job_id: str, work: Callable[[], None], stop: Callable[[], None]) -> None:
        with self._lock:
            if self._closed:
                raise _closing("before the command started")
            self._stop[job_id] = stop
            self._threads.submit(work)

    @asynccontextmanager
    async def _slot(self, job: Job) -> AsyncIterator[Callable[[], None]]:
        """Wait for a slot and hold it; the value gives it up early, from any thread."""
        event, wake = waker()
        with self._lock:
            if self._closed:
                raise _closing("before the command started")
            self._wake[job.id] = wake
            started = self._scheduler.arrive(job.id, job.arrived_s)
        at_once = job.id in started  # then it need not be told, which takes a turn of the event loop
        self._start([other for other in started if other != job.id])
        try:
            if not at_once:
                await event.wait()
            yield lambda: self._leave(job.id)
        finally:
            self._leave(job.id)

    def _leave(self, job_id: str) -> None:
        with self._lock:
            self._wake.pop(job_id, None)
            started = self._scheduler.leave(job_id)
        self._start(started)

    def _start(self, jobs: list[str]) -> None:
        """Tell jobs that they have a slot; those whose event loop is gone pass it on."""
        while jobs:
            job_id = jobs.pop(0)
            with self._lock:
                wake = self._wake.get(job_id)
            if wake is not None and not wake():
                with self._lock:
                    self._wake.pop(job_id, None)
                    jobs += self._scheduler.leave(job_id)


class Mailbox:
    """Events from one worker thread to one async reader; the writer is held up when the reader lags.

    It is held up until its command's time is up, no longer: `timeout_s` runs from the first event.
    """

    def __init__(self, monotonic: Callable[[], float], timeout_s: float | None) -> None:
        self._monotonic = monotonic
        self._timeout_s = timeout_s
        self._until_s: float | None = None
        self._changed = threading.Condition()
        self._events: deque[Event] = deque()
        self._error: BaseException | None = None
        self._over = False
        self._holding = True
        self._discarding = False
        self._wake: Callable[[], bool] | None = None
        #: The reader has seen the end.
        self.ended = False

    def put(self, event: Event) -> None:
        """Hand over one event."""
        with self._changed:
            if self._until_s is None and self._timeout_s is not None:
                self._until_s = self._monotonic() + self._timeout_s
            while self._holding and len(self._events) >= _EVENTS_AHEAD:
                left_s = None if self._until_s is None else self._until_s - self._monotonic()
                if left_s is not None and left_s <= 0:
                    break
                self._changed.wait(left_s)
            if not self._discarding:
                self._events.append(event)
            self._notify()

    def fail(self, error: BaseException) -> None:
        """Have the reader get `error` after what it has not read yet."""
        with self._changed:
            self._error = error

    def end(self) -> None:
        """Nothing comes any more."""
        with self._changed:
            self._over = True
            self._notify()

    def let_go(self) -> None:
        """Hold the writer up no longer."""
        with self._changed:
            self._holding = False
            self._changed.notify_all()

    async def drain(self) -> None:
        """Drop what is unread and what still comes, errors included, until the end, however often cancelled."""
        with self._changed:
            self._discarding = True
            self._events.clear()
        self.let_go()
        again: BaseException | None = None
        with anyio.CancelScope(shield=True):
            while not self.ended:
                try:
                    await self.get()
                except anyio.get_cancelled_exc_class() as error:
                    again = error  # a task of asyncio, cancelled by its own method: no scope shields from that
        if again is not None:
            raise again

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


def waker() -> tuple[anyio.Event, Callable[[], bool]]:
    """Return an event of the running loop and a function that sets it from any thread; False if the loop is gone."""
    event = anyio.Event()
    native: Any = anyio.lowlevel.current_token().native_token  # asyncio's loop, or trio's token
    soon = getattr(native, "call_soon_threadsafe", None) or native.run_sync_soon

    def wake() -> bool:
        try:
            soon(event.set)
        except RuntimeError:
            return False
        return True

    return event, wake


def _closing(when: str) -> Unavailable:
    return Unavailable(f"the connection was closed {when}")
