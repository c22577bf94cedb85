"""The scan files that hold what one tree holds: which there are, which are to be built, which are patched over.

Owns the arrangement. Each page of a tree (a sorted range of paths) has a scan file of its text and one of its binary
files, named by the page's hash: branches that share pages share them, and they never change. A page that is new rests
on those of earlier pages where they have nearly all of it (bases.py). What the log holds since, and what a page rests
on does not have, lies in patches: small scan files of their own. A page of which this host has nothing is passed over
where published words (published.py) say that nothing of it is wanted. Knows nothing of patterns.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Literal

from fanout.disk.data import Reader
from fanout.disk.state import State
from fanout.errors import Corrupt
from fanout.format.tree import FILE, Node, PageRef, content_hash, subtree_end
from fanout.view.bases import Base, Kind, Rested, rest
from fanout.view.blocks import Range
from fanout.view.published import LEAST_BYTES, Tell, Told, identity_of
from fanout.view.scan import Copy, Scan, Stopped, is_binary, searchable
from fanout.view.scan_write import Layout, Recipe, write_scan
from fanout.view.scans import Held, Scans

__all__ = ["Part", "Wanted", "arrange"]

#: A patch holds at most this much, in bytes and files; a tree is put together from at most so many.
_PATCH_BYTES = 32 << 20
_PATCH_FILES = 8192
_MAX_PATCHES = 8
#: Changes up to this much are patched as a whole, whatever is searched, so that the next search has them.
_EAGER_BYTES = 32 << 20
_LOCK_STEP_S = 0.05
#: How many files of pages that were looked into are kept until their scan files are built; others are loaded again.
_KEPT_FILES = 1 << 17
#: How large a file of a page that nobody looked at yet is taken to be.
_GUESSED_BYTES = 8192
#: How many pages' arrangements are remembered of a disk.
_REMEMBERED_PAGES = 8192

Files = Sequence[tuple[bytes, Node]]
#: Fewer pages that rest on what is on this host are loaded sooner than it is found out whether somebody published them.
_MANY_PAGES = 16
_KINDS: tuple[Kind, ...] = ("text", "binary")
ByKind = Mapping[Kind, Files]
#: What a page without files of a kind rests on.
_NOTHING = Rested({}, ())


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which files of a tree are to be searched: those below `directory` that `selects`, binary ones if `binary`."""

    directory: bytes
    binary: bool
    selects: Callable[[bytes], bool] | None = None

    @property
    def start(self) -> bytes:
        return self.directory + b"/" if self.directory else b"\x01"

    @property
    def end(self) -> bytes | None:
        return subtree_end(self.directory) if self.directory else None

    @property
    def everything(self) -> bool:
        """Whether all files are."""
        return self.binary and self.selects is None and not self.directory

    def takes(self, path: bytes, node: Node | None) -> bool:
        """Whether a file of the tree is wanted."""
        if node is None or not searchable(node) or path < self.start or (self.end is not None and path >= self.end):
            return False
        return (self.binary or not is_binary(node)) and (self.selects is None or self.selects(path))


@dataclass(slots=True)
class Part:
    """One scan file and what of it the tree still has: the files of `live` (all, if None).

    `first` <= every path of it < `end` (None: no end). `build` makes it where it is not there, which `here` says;
    `size` is about how many bytes it has. Parts of one kind, text or binary, follow each other; patches overlap all.
    `ruled_out` says that nothing of it can match, `ranges` outside of which bytes of it nothing can.
    `passed_over` says how many files are passed over with it where that is so certain that it need not be here at all.
    """

    kind: Literal["text", "binary", "patch"]
    identity: str
    first: bytes
    end: bytes | None
    build: Callable[[int], int]
    here: bool
    size: int
    live: Set[int] | None = None
    ruled_out: bool = False
    ranges: tuple[Range, ...] | None = None
    passed_over: int | None = None

    @property
    def absent(self) -> bool:
        """Whether it has to be built."""
        return not self.here and self.passed_over is None


def arrange(
    scans: Scans,
    disk_id: str,
    state: State,
    reader: Reader,
    wanted: Wanted,
    stopped: Callable[[], bool],
    tell: Tell | None = None,
    begin: Callable[[Part], None] = lambda _: None,
) -> tuple[list[Part], list[Held]]:
    """Return the scan files to search for `wanted`, patches first, then each kind's in order of paths.

    Loads only pages whose scan files are not on this host, and of those only what `tell` does not rule out, which says
    what was published. What is handed out as held is to be released in the end. `begin` is told of each part that is to
    be built as soon as that is known, in order.
    """
    work = _Arrangement(scans, disk_id, state, reader, wanted, stopped, tell, begin)
    while not work.known.lock.acquire(timeout=_LOCK_STEP_S):
        if stopped():
            raise Stopped
    try:
        return work.parts(), list(work.held.values())
    except BaseException:
        for each in work.held.values():
            each.release()
        raise
    finally:
        work.known.lock.release()


class _Arrangement:
    def __init__(
        self,
        scans: Scans,
        disk_id: str,
        state: State,
        reader: Reader,
        wanted: Wanted,
        stopped: Callable[[], bool],
        tell: Tell | None,
        begin: Callable[[Part], None],
    ) -> None:
        self.known = scans.known(disk_id)
        self.held: dict[str, Held] = {}
        self._scans = scans
        self._disk_id = disk_id
        self._state = state
        self._reader = reader
        self._wanted = wanted
        self._stopped = stopped
        self._tell = tell
        self._told: Mapping[str, Told] = {}
        self._begin = begin
        self._blobs = state.blob_bytes()
        self._patched: dict[bytes, Node] = {}
        self._bases: list[Base] = []
        self._here: set[str] = set()
        self._keeping = 0

    def parts(self) -> list[Part]:
        wanted = self._wanted
        pages = list(self._state.page_refs(wanted.start, wanted.end))
        kinds = [self._kinds(page) for page in pages]
        ends = [*(page.first for page in pages[1:]), None]
        self._here = {identity for its in kinds for identity in its if self._scans.has(identity)}
        unknown = [place for place, its in enumerate(kinds) if not all(map(self._is_known, its))]
        many = len(unknown) >= _MANY_PAGES
        self._ask([pages[at] for at in unknown if many or self._is_new(pages[at], ends[at], kinds[at])])
        passed = {place: its for place in unknown if (its := self._passed_kinds(kinds[place])) is not None}
        missing = [place for place in unknown if place not in passed or not self._is_whole(pages[place], ends[place])]
        refs = [pages[place] for place in missing]
        loaded = self._state.pages.each(refs) if len(refs) > 1 else map(self._state.pages.load, refs)
        todo = set(missing)
        parts: list[Part] = []
        for place, page in enumerate(pages):
            files: ByKind | None = None
            if place in todo:
                if self._stopped():
                    raise Stopped
                files = _by_kind(next(loaded))
                if place not in passed and self._is_little(files):
                    continue
            for identity in passed.get(place, kinds[place]):
                parts += self._parts_of(identity, page, ends[place], files)
        self.known.bases.use(self._bases)
        self._add_changes()
        return [*self._sound_patches(), *_joined(parts)]

    # -- pages -------------------------------------------------------------------------------------------------

    def _kinds(self, page: PageRef) -> list[str]:
        """Return the names of the scan files that a page has, as far as that is known without looking into it."""
        text = identity_of(page.hash, "text")
        facts = self._scans.facts(text) if self._wanted.binary else None
        if not self._wanted.binary or (facts is not None and facts.left_out == 0):
            return [text]
        return [text, identity_of(page.hash, "binary")]

    def _is_new(self, page: PageRef, end: bytes | None, mine: Sequence[str]) -> bool:
        """Whether this host has no scan file of an earlier page that this one could rest on."""
        near = (base for kind in _KINDS for base in self.known.bases.near(kind, page.first, end))
        return not any(base not in mine and self._scans.has(base) for base in near)

    def _ask(self, pages: Sequence[PageRef]) -> None:
        """Ask what was published of pages."""
        if pages and self._tell is not None and self._state.snap.bytes >= LEAST_BYTES:
            self._told = self._tell(pages, self._wanted.binary, self._stopped)

    def _passed_kinds(self, kinds: Sequence[str]) -> list[str] | None:
        """Return what a page has, of the names given, if nothing of it can match but for what this host has."""
        text = self._told.get(kinds[0])
        its = [*kinds[:1]] if text is not None and text.facts.left_out == 0 else [*kinds]
        return its if all(self._is_ruled_out(identity) or self._is_known(identity) for identity in its) else None

    def _is_ruled_out(self, identity: str) -> bool:
        told = self._told.get(identity)
        return told is not None and told.ruled_out

    def _is_whole(self, page: PageRef, end: bytes | None) -> bool:
        """Whether all files of a page are wanted, and are still those of the tree."""
        wanted = self._wanted
        inside = page.first >= wanted.start and (wanted.end is None or (end is not None and end <= wanted.end))
        if wanted.selects is not None or not (inside or not wanted.directory):
            return False
        return next(self._state.changed_between(page.first, end), None) is None

    def _is_known(self, identity: str) -> bool:
        """Whether a scan file is there, or what it would rest on."""
        if identity in self._here:
            return True
        rested = self.known.rested.get(identity)
        return rested is not None and all(self._hold(base) is not None for base in rested.live)

    def _parts_of(self, identity: str, page: PageRef, end: bytes | None, files: ByKind | None) -> Iterator[Part]:
        """Yield what holds a page's files of one kind; `files` are all of them, where they had to be looked at."""
        kind: Kind = "binary" if identity.endswith("binary") else "text"
        if identity in self._here:
            yield self._base(kind, identity, page, end, here=True)
            return
        if self._is_ruled_out(identity) and not self._is_known(identity):
            yield self._passed_over(kind, identity, page, end, files)
            return
        rested = self.known.rested.get(identity)
        if files is not None:
            mine = files[kind]
            rested = self._rest(kind, identity, mine, page, end) if mine or kind == "text" else _NOTHING
            if rested is None or (mine and not rested.live):
                copies = rested.copies if rested is not None else {}
                yield self._base(kind, identity, page, end, here=False, copies=copies, files=files)
                return
            self.known.rested[identity] = Rested(rested.live, rested.missing)
        if rested is None:  # evicted just now
            yield self._base(kind, identity, page, end, here=False)
            return
        self.known.rested.move_to_end(identity)
        while len(self.known.rested) > _REMEMBERED_PAGES:
            self.known.rested.popitem(last=False)
        for base, live in rested.live.items():
            yield Part(kind, base, page.first, end, _never, True, self.held[base].scan.size, live)
        self._patched.update(item for item in rested.missing if item[0] not in self._state.changes)

    def _passed_over(self, kind: Kind, identity: str, page: PageRef, end: bytes | None, files: ByKind | None) -> Part:
        facts = self._told[identity].facts
        count = facts.files
        if files is not None:
            count = sum(self._wanted.takes(*item) and item[0] not in self._state.changes for item in files[kind])
        return Part(kind, identity, page.first, end, _never, False, facts.size, ruled_out=True, passed_over=count)

    def _is_little(self, files: ByKind) -> bool:
        """Whether so little of a page is wanted that it is patched instead of building its scan file."""
        wanted, changes = self._wanted, self._state.changes
        if wanted.everything and not changes:
            return False
        both = [*files["text"], *files["binary"]]
        some = [item for item in both if wanted.takes(*item) and item[0] not in changes]
        if 2 * sum(node.size for _, node in some) >= sum(node.size for _, node in both):
            return False
        self._patched.update(some)
        return True

    def _base(
        self,
        kind: Kind,
        identity: str,
        page: PageRef,
        end: bytes | None,
        *,
        here: bool,
        copies: Mapping[int, Copy] | None = None,
        files: ByKind | None = None,
    ) -> Part:
        self._bases.append(Base(kind, identity, page.first, end))
        facts = self._scans.facts(identity) if here else None
        size = page.count * _GUESSED_BYTES if facts is None else facts.size
        if files is not None:
            size = sum(node.size for _, node in files[kind])
        recipe = Recipe(self._lay_out(kind, page, files, copies), self._reader, self._blobs, self._stopped)
        part = Part(kind, identity, page.first, end, recipe, here, size)
        if not here:
            self._begin(part)
        return part

    def _lay_out(
        self, kind: Kind, page: PageRef, files: ByKind | None, copies: Mapping[int, Copy] | None
    ) -> Callable[[], Layout]:
        """Return what lays out the scan file of a page's files, which are kept until then unless they are too many."""
        other: Kind = "text" if kind == "binary" else "binary"
        kept: list[tuple[Files, int]] = []
        if files is not None and self._keeping + len(files[kind]) <= _KEPT_FILES:
            self._keeping += len(files[kind])
            kept.append((files[kind], len(files[other])))

        def lay_out() -> Layout:
            if kept:
                mine, left_out = kept.pop()
            else:
                found = _by_kind(self._state.pages.load(page))
                mine, left_out = found[kind], len(found[other])
            return Layout(mine, copies, left_out)

        return lay_out

    def _rest(self, kind: Kind, identity: str, files: Files, page: PageRef, end: bytes | None) -> Rested | None:
        scans: dict[str, Scan] = {}
        for base in self.known.bases.near(kind, page.first, end):
            held = self._hold(base) if base != identity else None
            if held is not None:
                scans[base] = held.scan
        return rest(files, scans) if scans else None

    def _hold(self, identity: str) -> Held | None:
        held = self.held.get(identity) or self._scans.hold_if_there(identity)
        if held is not None:
            self.held[identity] = held
        return held

    def _add_changes(self) -> None:
        """Have the files patched that the log holds since the pages: all of them, where that is little."""
        changes = self._state.changes.items()
        changed = [(path, node) for path, (_, node) in changes if node is not None and searchable(node)]
        if sum(node.size for _, node in changed) > _EAGER_BYTES:
            changed = [item for item in changed if self._wanted.takes(*item)]
        self._patched.update(item for item in changed if self._wanted.binary or not is_binary(item[1]))

    # -- patches -----------------------------------------------------------------------------------------------

    def _sound_patches(self) -> list[Part]:
        """Return patches; of what is wanted alone, where more than that is damaged."""
        try:
            return self._patches()
        except Corrupt:
            wanted = {path: node for path, node in self._patched.items() if self._wanted.takes(path, node)}
            if len(wanted) == len(self._patched):
                raise
            self._patched = wanted
            return self._patches()

    def _patches(self) -> list[Part]:
        """Return parts that hold exactly what is to be patched, from patches that are there and new ones."""
        wanted = [(path, self._patched[path]) for path in sorted(self._patched)]
        keys = [(path, content_hash(node)) for path, node in wanted]
        known = self.known.patched
        for identity in {known[key][0] for key in keys if key in known}:
            self._hold(identity)
        live: dict[str, set[int]] = {}
        missing: list[tuple[bytes, Node]] = []
        for key, item in zip(keys, wanted, strict=True):
            place = known.get(key)
            if place is not None and place[0] in self.held:
                live.setdefault(place[0], set()).add(place[1])
            else:
                missing.append(item)
        if live and len(live) + (1 if missing else 0) > _MAX_PATCHES:
            live, missing = {}, wanted
        for chunk in _chunks(missing):
            identity, scan = self._new_patch(chunk)
            live[identity] = set(range(scan.files))
        if len(known) > 4 * len(keys) + _PATCH_FILES:
            self.known.patched = {key: known[key] for key in keys}
        return sorted((self._patch(*each) for each in live.items()), key=lambda part: part.first)

    def _patch(self, identity: str, live: set[int]) -> Part:
        scan = self.held[identity].scan
        first, end = scan.path(min(live)), scan.path(max(live)) + b"\0"
        return Part("patch", identity, first, end, _never, True, scan.size, None if len(live) == scan.files else live)

    def _new_patch(self, chunk: Files) -> tuple[str, Scan]:
        keys = [(path, content_hash(node)) for path, node in chunk]
        digest = hashlib.sha256(self._disk_id.encode())
        for path, content in keys:
            digest.update(b"%d %s" % (len(path), path) + content)
        identity = f"{digest.hexdigest()[:48]}-patch"
        places = [self.known.patched.get(key) for key in keys]
        copies = {
            number: Copy(self.held[place[0]].scan, place[1])
            for number, place in enumerate(places)
            if place is not None and place[0] in self.held
        }
        self.held[identity] = new = self._scans.hold(
            identity,
            lambda fd: write_scan(fd, Layout(chunk, copies), self._reader, self._blobs, self._stopped),
        )
        self.known.patched.update((key, (identity, number)) for number, key in enumerate(keys))
        return identity, new.scan


def _by_kind(page: Files) -> ByKind:
    """Sort out the files of a page that have lines to search, as `is_binary` has it."""
    text: list[tuple[bytes, Node]] = []
    binary: list[tuple[bytes, Node]] = []
    for item in page:
        node = item[1]
        if node.kind == FILE and node.size > 0:
            (binary if is_binary(node) else text).append(item)
    return {"text": text, "binary": binary}


def _joined(parts: Sequence[Part]) -> list[Part]:
    """Make one of the parts that are of one scan file: several pages can rest on one base."""
    joined: dict[str, Part] = {}
    for part in parts:
        same = joined.get(part.identity)
        if same is None:
            joined[part.identity] = part
        elif same.live is not None and part.live is not None:
            same.live, same.end = same.live | part.live, part.end
    return list(joined.values())


def _chunks(files: Files) -> Iterator[Files]:
    """Cut files into runs that one patch may hold."""
    start = size = 0
    for at, (_, node) in enumerate(files):
        if at > start and (size + node.size > _PATCH_BYTES or at - start >= _PATCH_FILES):
            yield files[start:at]
            start, size = at, 0
        size += node.size
    if start < len(files):
        yield files[start:]


def _never(_: int) -> int:
    raise AssertionError("it is held, and so it is there; or it is passed over")
