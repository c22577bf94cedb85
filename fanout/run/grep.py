"""One search: plan from the tree, scan on the cores of this host, first results in order.

Owns the order of things, time and early stops. What holds the bytes is view/scans.py, what finds lines is ripgrep.
"""

from __future__ import annotations

import os
import socket
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile
from typing import Literal

import anyio
import anyio.to_thread

from fanout.disk.disk import Disk, Point
from fanout.disk.paths import shown
from fanout.disk.state import State
from fanout.errors import Invalid, NotFound, Unavailable
from fanout.format.tree import DIR, subtree_end
from fanout.model import Grep, GrepMatch
from fanout.run.describe import KINDS
from fanout.run.grep_lines import Collector, Found, read_lines
from fanout.run.grep_plan import Ahead, Shard, split
from fanout.run.grep_query import Query
from fanout.run.indexer import Indexer
from fanout.run.publisher import Publisher
from fanout.run.ripgrep import Check, Program, Search, Source, program
from fanout.run.rule_out import matching_words, rule_out
from fanout.runtime import Runtime
from fanout.view.blocks import size_of
from fanout.view.parts import Part, Wanted, arrange
from fanout.view.published import Published, Tell
from fanout.view.scan import Scan, Stopped
from fanout.view.scans import Held, Scans

__all__ = ["Searcher"]

#: Binary files that match are named up to this many. Held by tests/contract/test_api_grep.py.
_MAX_NAMES = 100
_COMPILED = 256


class Searcher:
    """Searches the disks of one connection. `close` ends what is under way.

    `published` is what others published of words, which are then published, too; None: neither.
    """

    def __init__(self, scans: Scans, published: Published | None, runtime: Runtime) -> None:
        self.scans = scans
        self.published = published
        self.runtime = runtime
        self.host = socket.gethostname()
        self.cores = len(os.sched_getaffinity(0))
        self.indexer = Indexer()
        self.publisher = Publisher(scans, runtime, self.indexer.settle) if published is not None else None
        #: Patterns that are known to compile, the last used last.
        self.compiled: OrderedDict[tuple[str, ...], None] = OrderedDict()
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._running: set[_Search] = set()
        self._closed = False

    async def grep(self, disk: Disk, point: Point, query: Query) -> Grep:
        """Run one search. A caller that goes away ends it."""
        search = _Search(self, disk, point, query)
        outcome: list[Grep | BaseException] = []
        over = anyio.Event()

        async def shielded() -> None:
            with anyio.CancelScope(shield=True):
                outcome.append(await anyio.to_thread.run_sync(self._run, search))
            over.set()

        async with anyio.create_task_group() as group:
            group.start_soon(shielded)
            try:
                await over.wait()
            finally:
                search.stop()
        if isinstance(outcome[0], BaseException):
            raise outcome[0]
        return outcome[0]

    def close(self) -> None:
        """End all searches (their callers get `Unavailable`) and wait for them."""
        with self._lock:
            self._closed = True
            running = list(self._running)
        for search in running:
            search.stop()
        with self._lock:
            self._idle.wait_for(lambda: not self._running)
        if self.publisher is not None:
            self.publisher.stop()
        self.indexer.close()
        if self.publisher is not None:
            self.publisher.close()

    def _run(self, search: _Search) -> Grep | BaseException:
        try:
            with self._lock:
                if self._closed:
                    raise _closing()
                self._running.add(search)
            try:
                found = search.run()
            finally:
                with self._lock:
                    self._running.discard(search)
                    self._idle.notify_all()
            if self._closed:
                raise _closing()
            return found
        except BaseException as error:
            return error


def _closing() -> Unavailable:
    return Unavailable("the connection was closed while it searched")


@dataclass(slots=True)
class _Hits:
    """What was found in one scan file: for each row that matches the offsets of its lines, and how many there are."""

    lines: dict[int, list[int]] = field(default_factory=dict)
    counts: dict[int, int] = field(default_factory=dict)
    binary: list[bytes] = field(default_factory=list)


class _Search:
    def __init__(self, searcher: Searcher, disk: Disk, point: Point, query: Query) -> None:
        self._searcher = searcher
        self._scans = searcher.scans
        self._monotonic = searcher.runtime.monotonic
        self._disk = disk
        self._point = point
        self._query = query
        self._began_s = self._monotonic()
        self._deadline_s = self._began_s + query.max_duration_s
        self._stopped = threading.Event()
        self._late = False
        self._lock = threading.Lock()
        self._running: set[Search] = set()
        self._unindexed: dict[str, int] = {}
        self._collector = Collector(query.max_results)
        self._state: State
        self._rg: Program
        self._ahead: Ahead

    def stop(self) -> None:
        """End it as soon as possible, from any thread."""
        self._stopped.set()
        with self._lock:
            running = list(self._running)
        for each in running:
            each.kill()

    def run(self) -> Grep:
        self._rg = program()
        query = self._query
        if query.pattern.pcre2 and not self._rg.pcre2:
            raise Invalid.argument("syntax", "pcre2", f"this ripgrep ({self._rg.path}) has no PCRE2")
        point = self._point if query.at is None else self._disk.point(query.at, self._point.branch.name)
        self._state = state = point.state()
        self._check_directory(state)
        timer = threading.Timer(max(self._deadline_s - self._monotonic(), 0), self._out_of_time)
        timer.daemon = True
        timer.start()
        shards: list[Shard] = []
        held: list[Held] = []
        compiled = self._searcher.compiled
        check = None if query.pattern.options in compiled else Check(query.pattern, self._rg)
        try:
            wanted = Wanted(query.directory, query.binary, query.selects if query.selective else None)
            with Ahead(self._scans, lambda part: self._stopped.is_set() or self._beyond(part.first)) as ahead:
                parts, held = arrange(
                    self._scans, self._disk.id, state, self._disk.reader, wanted,
                    lambda: self._stopped.is_set() or (check is not None and check.refused), self._tell(), ahead.add,
                )  # fmt: skip
                ahead.all_added()
                rule_out(parts, query, self._scans, self._rg, self._searcher.cores)
                if check is not None:
                    check.finish(self._deadline_s - self._monotonic())
                    compiled[query.pattern.options] = None
                    while len(compiled) > _COMPILED:
                        compiled.popitem(last=False)
                shards = split(parts, query.concurrency or self._searcher.cores)
                self._ahead = ahead
                self._run_all(shards)
        except Stopped:
            if check is not None and check.refused:
                check.finish(0.0)
        finally:
            timer.cancel()
            if check is not None:
                check.abandon()
            for each in held:
                each.release()
        self._searcher.indexer.want(self._unindexed)
        if self._searcher.publisher is not None:
            snap, newest = state.snap, point.seq is None
            self._searcher.publisher.want(self._disk.index, snap.pages, snap.bytes, newest=newest)
        return self._result(shards)

    def _tell(self) -> Tell | None:
        """Return what says which pages have no word that the pattern needs, without anything of them on this host."""
        published = self._searcher.published
        matching = matching_words(self._query, self._rg, self._searcher.cores) if published is not None else None
        if published is None or matching is None:
            return None
        return partial(published.tell, self._disk.index, matching)

    def _check_directory(self, state: State) -> None:
        directory = self._query.directory
        if not directory:  # the root is one, and need not be looked at
            return
        node = state.get(directory)
        if node is None:
            raise NotFound(f"directory: disk {self._disk.name!r} has no {'/' + shown(directory)!r}")
        if node.kind != DIR:
            allowed = "a directory; it is a " + KINDS[node.kind]
            raise Invalid.argument("directory", "/" + shown(directory), allowed)

    def _out_of_time(self) -> None:
        self._late = True
        self.stop()

    def _run_all(self, shards: Sequence[Shard]) -> None:
        width = min(self._query.concurrency or self._searcher.cores, len(shards))
        todo = iter(shards)

        def worker() -> None:
            while not self._stopped.is_set():
                with self._lock:
                    shard = next(todo, None)
                if shard is None:
                    return
                self._run_shard(shard)

        if width <= 1:
            worker()
            return
        with ThreadPoolExecutor(width, "fanout-grep") as pool:
            workers = [pool.submit(worker) for _ in range(width)]
            try:
                for done in workers:
                    done.result()
            except BaseException:
                self.stop()
                raise

    def _run_shard(self, shard: Shard) -> None:
        """Make a shard's scan files available and search them."""
        began_s = self._monotonic()
        held: list[Held] = []
        runs: list[list[tuple[Part, Scan]]] = []
        try:
            for run in shard.runs:
                runs.append([])
                for part in run:
                    if self._stopped.is_set() or self._beyond(part.first):
                        break
                    if part.ruled_out and (files := self._passed_over(part)) is not None:
                        shard.done.files += files
                        shard.done.skipped += 1
                        continue
                    one = self._ahead.hold(part)
                    shard.done.fetched += not one.warm
                    files = self._looked_at(part, one.scan)
                    shard.done.files += files
                    if part.ruled_out or not files:
                        one.release()
                        shard.done.skipped += part.ruled_out
                        continue
                    held.append(one)
                    runs[-1].append((part, one.scan))
            runs = [run for run in runs if run]
            while runs and not self._stopped.is_set():
                runs = runs[self._search(shard, runs) :]
        finally:
            for one in held:
                one.release()
            shard.done.duration_ms = (self._monotonic() - began_s) * 1e3

    def _passed_over(self, part: Part) -> int | None:
        """How many files are in a part that nothing of can match, where that is known without opening it."""
        if part.passed_over is not None:
            return part.passed_over
        if part.live is not None or self._query.directory or self._query.selective:
            return None
        facts = self._scans.facts(part.identity)
        if facts is None or next(self._state.changed_between(part.first, part.end), None) is not None:
            return None
        return facts.files

    def _beyond(self, path: bytes) -> bool:
        cut = self._collector.cut
        return cut is not None and path > cut

    def _search(self, shard: Shard, runs: list[list[tuple[Part, Scan]]]) -> int:
        """Search runs of scan files; returns how many were done with when nothing more of one was wanted."""
        scans = [each for run in runs for each in run]
        sources = [Source(scan.data_path, part.ranges) for part, scan in scans]
        search = Search(self._rg, self._query.pattern, sources)
        with self._lock:
            self._running.add(search)
        if self._stopped.is_set():
            search.kill()
        try:
            over = self._collect(search, scans, [place for place, run in enumerate(runs) for _ in run])
        except BaseException:
            search.kill()
            raise
        finally:
            with self._lock:
                self._running.discard(search)
            problem = search.finish()
        if problem is not None:
            for part, scan in scans:  # whoever reads it knows the disk, not this host
                problem = problem.replace(scan.data_path, f"from /{shown(part.first)} on")
            shard.done.problem = problem
        done = len(runs) if over is None else over + 1
        for part, scan in (each for run in runs[:done] for each in run):
            shard.done.bytes_scanned += scan.size if part.ranges is None else size_of(part.ranges)
            if part.kind != "patch" and not os.path.exists(scan.places_path):
                self._unindexed[f"{part.kind}:{os.path.dirname(scan.data_path)}"] = scan.size
        return done

    def _looked_at(self, part: Part, scan: Scan) -> int:
        """How many files of the tree are looked at in one scan file."""
        query = self._query
        all_wanted = not (query.directory or query.selective)
        if part.kind == "patch" or (part.live is not None and not all_wanted):
            numbers: Iterable[int] = range(scan.files) if part.live is None else part.live
            return sum(self._is_live(part, scan, number, scan.path(number)) for number in numbers)
        if part.live is not None:
            count = len(part.live)
        else:
            key = query.directory, query.recursive, query.globs.key
            count = scan.counted(key, lambda: self._count(scan))
        changed = ((path, scan.find(path)) for path in self._state.changed_between(part.first, part.end))
        return count - sum(
            number is not None and (part.live is None or number in part.live) and self._is_wanted(path)
            for path, number in changed
        )

    def _count(self, scan: Scan) -> int:
        """How many files of a scan file are wanted, whether the tree still has them or not."""
        query = self._query
        if query.selective:
            return sum(self._is_wanted(scan.path(number)) for number in range(scan.files))
        if not query.directory:
            return scan.files
        return scan.first_from(subtree_end(query.directory)) - scan.first_from(query.prefix)

    def _is_wanted(self, path: bytes) -> bool:
        return path.startswith(self._query.prefix) and (not self._query.selective or self._query.selects(path))

    def _collect(self, search: Search, scans: list[tuple[Part, Scan]], run_of: Sequence[int]) -> int | None:
        """Turn offsets into files and lines. Where no more of a run can be among the first, it ends with that run."""
        limit = self._query.max_results + 1
        by_line = self._query.output == "lines"
        found = [_Hits() for _ in scans]
        over: int | None = None
        at = run = -1
        start = end = next_start = kept = row = 0
        wanted = binary = ordered = False
        for number, offset in search:
            if number != at or offset >= next_start:
                part, scan = scans[number]
                hits, at = found[number], number
                if run_of[number] != run:
                    run, kept = run_of[number], 0
                    ordered = all(one.in_order for (_, one), its in zip(scans, run_of, strict=True) if its == run)
                row = scan.row_at(offset)
                start, end = scan.span(row)
                next_start = scan.next_start(row)
                path = scan.path(row)
                wanted = self._is_live(part, scan, row, path)
                binary = scan.has_nul(row)
                if ordered and wanted and (kept >= limit or self._beyond(path)):
                    over = run
                    break
            if not wanted or not start <= offset < end:
                continue
            if binary:
                if not hits.binary or hits.binary[-1] != path:
                    hits.binary.append(path)
            elif by_line:
                lines = hits.lines.setdefault(row, [])
                if len(lines) < limit:
                    lines.append(offset)
                    kept += 1
                elif ordered:
                    over = run
                    break
            else:
                kept += row not in hits.counts
                hits.counts[row] = hits.counts.get(row, 0) + 1
        if over is not None:
            search.kill()
        for (_, scan), hits in zip(scans, found, strict=True):
            self._collector.add_binary(hits.binary)
            read = read_lines(scan, hits.lines.items(), self._query) if hits.lines else self._counted(scan, hits)
            self._collector.add(takewhile(self._goes_on, read))
        return over

    def _goes_on(self, _: object) -> bool:
        return not self._stopped.is_set()

    def _is_live(self, part: Part, scan: Scan, row: int, path: bytes) -> bool:
        """Whether the tree still has this row, and it was asked for."""
        if part.live is not None and scan.file_of(row) not in part.live:
            return False
        if part.kind != "patch" and path in self._state.changes:
            return False
        return self._is_wanted(path)

    def _counted(self, scan: Scan, hits: _Hits) -> Iterator[Found]:
        for row, lines in hits.counts.items():
            path = scan.path(row)
            count = lines if self._query.output == "count" else None
            yield Found(path, 0, GrepMatch.model_construct(file=shown(path), line=0, count=count))

    def _result(self, shards: Sequence[Shard]) -> Grep:
        collector = self._collector
        problems = tuple(shard.done.problem for shard in shards if shard.done.problem is not None)
        reason: Literal["completed", "max_results", "deadline", "incomplete"] = "completed"
        if self._late:
            reason = "deadline"
        elif problems:
            reason = "incomplete"
        elif collector.overflowed:
            reason = "max_results"
        binary = collector.binary_files()
        return Grep(
            matches=collector.matches(),
            stopped_reason=reason,
            files_scanned=sum(shard.done.files for shard in shards),
            bytes_scanned=sum(shard.done.bytes_scanned for shard in shards),
            duration_ms=(self._monotonic() - self._began_s) * 1e3,
            binary_files=tuple(binary[:_MAX_NAMES]),
            binary_count=len(binary),
            shards=tuple(shard.described(self._searcher.host) for shard in shards),
            problems=problems,
        )
