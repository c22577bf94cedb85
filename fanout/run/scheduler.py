"""Admission: who may run now. A pure state machine: events in, the jobs to start out.

Owns the order (first come, first served) and the cap. Knows no threads, clocks or jobs beyond their ids.
"""

from __future__ import annotations

from collections import OrderedDict

__all__ = ["Scheduler"]


class Scheduler:
    """At most `cap` jobs run at once; the others wait in order of arrival. Not thread safe: the caller locks."""

    def __init__(self, cap: int) -> None:
        self.cap = cap
        self._waiting: OrderedDict[str, None] = OrderedDict()
        self._running: set[str] = set()

    @property
    def running(self) -> int:
        """How many jobs hold a slot."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """How many jobs wait for one."""
        return len(self._waiting)

    def arrive(self, job: str) -> list[str]:
        """A job wants to run; returns the jobs to start now (this one, or none)."""
        if job in self._running or job in self._waiting:
            raise ValueError(f"job {job} arrived twice")
        self._waiting[job] = None
        return self._fill()

    def leave(self, job: str) -> list[str]:
        """A job ended, failed, or gave up waiting; returns the jobs to start now. Unknown jobs are ignored."""
        self._running.discard(job)
        self._waiting.pop(job, None)
        return self._fill()

    def _fill(self) -> list[str]:
        started: list[str] = []
        while self._waiting and len(self._running) < self.cap:
            job, _ = self._waiting.popitem(last=False)
            self._running.add(job)
            started.append(job)
        return started
