"""Admission: who may run now. A pure state machine: events in, the jobs to start out.

Owns the order (first come, first served) and the cap. Knows no threads, clocks or jobs beyond their ids.
"""

from __future__ import annotations

import heapq

__all__ = ["Scheduler"]


class Scheduler:
    """At most `cap` jobs run at once; the others wait in order of arrival. Not thread safe: the caller locks."""

    def __init__(self, cap: int) -> None:
        self.cap = cap
        self._waiting: dict[str, int] = {}
        self._queue: list[tuple[float, int, str]] = []  # of those that left too, until their turn comes
        self._running: set[str] = set()
        self._number = 0

    @property
    def running(self) -> int:
        """How many jobs hold a slot."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """How many jobs wait for one."""
        return len(self._waiting)

    def arrive(self, job: str, arrived_s: float = 0.0) -> list[str]:
        """A job wants to run; returns the jobs to start now (this one, or none).

        `arrived_s` is when its call came, which may be before others that are here already; equals keep their order.
        """
        if job in self._running or job in self._waiting:
            raise ValueError(f"job {job} arrived twice")
        self._number += 1
        self._waiting[job] = self._number
        heapq.heappush(self._queue, (arrived_s, self._number, job))
        return self._fill()

    def leave(self, job: str) -> list[str]:
        """A job ended, failed, or gave up waiting; returns the jobs to start now. Unknown jobs are ignored."""
        self._running.discard(job)
        self._waiting.pop(job, None)
        return self._fill()

    def _fill(self) -> list[str]:
        started: list[str] = []
        while self._waiting and len(self._running) < self.cap:
            _, number, job = heapq.heappop(self._queue)
            if self._waiting.get(job) == number:
                del self._waiting[job]
                self._running.add(job)
                started.append(job)
        if not self._waiting:
            self._queue.clear()
        return started
