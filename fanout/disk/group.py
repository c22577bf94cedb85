"""The queue of a branch's commits: who waits, who leads, and how long a group is held open for others.

Owns group commit's order and patience (docs/decisions/0003-commit-groups.md). Knows nothing of what a commit is.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from fanout.config import Tuning
from fanout.disk.proposal import Waiting
from fanout.runtime import Runtime

__all__ = ["Group"]


class Group:
    """The commits of one branch in this process. Thread safe."""

    def __init__(self, runtime: Runtime, tuning: Tuning) -> None:
        self._runtime = runtime
        self._tuning = tuning
        self._queue: list[Waiting] = []
        self._changed = threading.Condition()
        self._leading = False
        self._writers: dict[object, float] = {}
        self._fan_out = (0.0, 1.0)  # of the last group: when its first call arrived, how wide its bounds were

    @contextmanager
    def writing(self, since_s: float) -> Iterator[None]:
        """Announce that a commit may come: while several are announced, commits wait for one another a little.

        `since_s` is when its call arrived, in monotonic seconds.
        """
        writer = object()
        with self._changed:
            self._writers[writer] = since_s
        try:
            yield
        finally:
            with self._changed:
                del self._writers[writer]
                self._changed.notify_all()

    def land(self, mine: Waiting, commit: Callable[[list[Waiting]], None]) -> None:
        """Return when `mine` is done: by another caller's `commit` of a group, or by this one's.

        Only who has something to do is woken: waking all who wait costs more than the commit.
        """
        with self._changed:
            self._queue.append(mine)
            if not self._leading:
                self._leading = mine.leads = True
            self._changed.notify_all()
        try:
            if not mine.leads:
                mine.turn.acquire()
            while not mine.done:
                self._lead(mine, commit)
        except BaseException:
            with self._changed:  # interrupted: nobody is to commit it later, nor to wait for it to lead
                if mine in self._queue:
                    self._queue.remove(mine)
                if mine.leads:
                    self._pass_on(mine)
            raise

    def _lead(self, mine: Waiting, commit: Callable[[list[Waiting]], None]) -> None:
        """Commit one group, which need not hold `mine`, and then let another lead, if it did."""
        batch: list[Waiting] = []
        try:
            with self._changed:
                self._gather()
                batch = self._take()
            commit(batch)
        finally:
            with self._changed:
                for waiting in batch:
                    waiting.done = True
                    if waiting is not mine:
                        waiting.turn.release()
                if mine.done:
                    self._pass_on(mine)

    def _pass_on(self, mine: Waiting) -> None:
        """Let whoever is first in the queue lead, if there is anybody."""
        mine.leads = False
        self._leading = bool(self._queue)
        if self._queue:
            self._queue[0].leads = True
            self._queue[0].turn.release()

    def _gather(self) -> None:
        """Hold the group open while announced writers keep arriving, as long as its first member can afford.

        That is twice the time it has taken so far, and half a second (`group_wait_s`): calls that started together
        then need a number of entries that grows with the logarithm of how far apart they end, and no call takes more
        than three times as long. It ends early when nobody came for as long as the first member took, at most six
        gaps; more for a member of a large fan-out, by as many again for every eight calls that arrived about when it
        did and were still out at the fan-out's first group, which on a busy machine end far apart. Writers that are
        much older than it are not waited for: they are the long ones.
        """
        tuning = self._tuning
        age_s = self._queue[0].proposal.age_s if self._queue else 0.0
        now = self._runtime.monotonic()
        old = sum(now - since_s > 4 * age_s for since_s in self._writers.values())
        arrived_s = now - age_s
        together = sum(abs(since_s - arrived_s) <= age_s / 2 for since_s in self._writers.values())
        wide = max(1.0, (together - len(self._queue)) / 8)
        if abs(self._fan_out[0] - arrived_s) <= age_s / 2:
            wide = max(wide, self._fan_out[1])
        self._fan_out = arrived_s, wide
        gap_s = min(max(tuning.group_gap_s, age_s), 6 * tuning.group_gap_s * wide)
        deadline, quiet_at = now + min(2 * age_s, tuning.group_wait_s), now + gap_s
        while len(self._queue) < min(len(self._writers) - old, tuning.group_commits) and now < min(deadline, quiet_at):
            before = len(self._queue)
            self._changed.wait(min(deadline, quiet_at) - now)
            now = self._runtime.monotonic()
            if len(self._queue) > before:
                quiet_at = now + gap_s

    def _take(self) -> list[Waiting]:
        size = count = 0
        for waiting in self._queue:
            size += sum(map(len, waiting.proposal.blobs.values()))
            if count and (size > self._tuning.group_bytes or count >= self._tuning.group_commits):
                break
            count += 1
        batch, self._queue = self._queue[:count], self._queue[count:]
        return batch
