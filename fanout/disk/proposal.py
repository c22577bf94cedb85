"""What a commit wants, and what became of it.

Owns the values that wait in a branch's queue. Knows nothing of how they land.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from fanout.disk.merge import Intent, Policy
from fanout.disk.state import State
from fanout.format.entry import Effect
from fanout.format.lock import Acquire, Release

__all__ = ["Landed", "Proposal", "Waiting"]


@dataclass(frozen=True, slots=True)
class Proposal:
    """One commit that wants to land: what to change, what it had seen, and by which policy it meets others.

    `base_seq` None means it has seen the tail (plain object calls). `blobs` are its new inline packs; `seen_blobs`
    those of the tree it started from, which MUST be given if any node in `intents` comes from that tree: a fold may
    have let go of them since. A merge names what it brings in (`merged_uuid`, `merged_seq`); it is three-way: a path
    that does not hold what its intent saw is in the way, whatever the log says. `age_s` is how long
    ago its call arrived, which bounds how long it may be held for others. `lock_id` is the lock it holds: without it
    nothing lands (`LeaseLost`), and what lands releases it. `take` and `free` take or renew, and give back, a lock.
    `plan` makes the intents instead, for the very tree the commit will follow: it is asked again for each tree tried,
    and a `FanoutError` it raises is the commit's outcome. What it packs it adds to `blobs`.
    """

    intents: Sequence[Intent]
    policy: Policy
    base_seq: int | None = None
    blobs: Mapping[bytes, bytes] = field(default_factory=dict)
    seen_blobs: Mapping[bytes, bytes] = field(default_factory=dict)
    author: str = ""
    message: str = ""
    exec_id: str = ""
    age_s: float = 0.0
    merged_uuid: str = ""
    merged_seq: int = 0
    lock_id: str = ""
    take: Acquire | None = None
    free: Release | None = None
    plan: Callable[[State], Sequence[Intent]] | None = None


@dataclass(frozen=True, slots=True)
class Landed:
    """Where a proposal ended up. `seq` is None if it changed nothing (the tree already was as it wanted)."""

    seq: int | None
    effects: tuple[Effect, ...]
    time_ns: int


class Waiting:
    """A proposal in the queue and, later, its outcome. `touched` is what others changed from its base to `seen`.

    `turn` is held until it is `done` or the one that `leads` the next group: its caller waits for it.
    """

    __slots__ = ("done", "error", "landed", "leads", "proposal", "seen", "touched", "turn")

    def __init__(self, proposal: Proposal, seen: int, touched: Mapping[bytes, int]) -> None:
        self.proposal = proposal
        self.seen = seen
        self.touched = touched
        self.done = False
        self.leads = False
        self.turn = threading.Lock()
        self.turn.acquire()
        self.landed: Landed | None = None
        self.error: BaseException | None = None
