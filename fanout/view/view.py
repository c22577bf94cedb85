"""A mount made real on a host: an immutable base, perhaps a delta, and a private writable layer.

Owns which base a view rests on and when a new one is worth it. Knows nothing of engines beyond the value they
are handed, and nothing of commits.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence

from fanout.disk.data import Packer, Reader
from fanout.disk.merge import Intent
from fanout.disk.state import Difference, State
from fanout.engine.base import Mount
from fanout.errors import Corrupt, Invalid, NotFound
from fanout.format.tree import DIR, SYMLINK, Node, parents
from fanout.view.cache import HostCache, Known, Lease
from fanout.view.compare import path_limit, within
from fanout.view.diff import diff_upper
from fanout.view.local import shown
from fanout.view.materialise import host_error, materialise
from fanout.view.scratch import Scratch

__all__ = ["View", "open_view"]


class View:
    """One mount's directories. Close it when the command has ended and its changes have been taken.

    `warm`: nothing had to be materialised. `skipped`: paths of the last diff that no disk can hold (sockets, devices,
    named pipes). Blocking; use from one thread at a time.
    """

    def __init__(
        self, cache: HostCache, reader: Reader, state: State, subdirectory: bytes, lowers: list[str],
        leases: list[Lease], scratch: Scratch | None, xattr_prefix: str | None, aliases: Sequence[bytes] = (),
    ) -> None:  # fmt: skip
        self._cache = cache
        self._reader = reader
        self._state = state
        self._subdirectory = subdirectory
        self._lowers = tuple(lowers)
        self._leases = leases
        self._scratch = scratch
        self._xattr_prefix = xattr_prefix
        self._aliases = frozenset(aliases)
        self.warm = all(lease.warm for lease in leases)
        self.skipped: tuple[bytes, ...] = ()
        self._over = False  # whether the layer is known to have no writer any more

    def mount(self, target: str) -> Mount:
        """Return what an engine needs to show this view at `target`."""
        if self._scratch is None:
            return Mount(target, self._lowers)
        return Mount(target, self._lowers, self._scratch.upper, self._scratch.work)

    def intents(self, packer: Packer) -> list[Intent]:
        """Return what the command changed, its new contents packed; only after all its processes are dead.

        Call it once: reading what its owner shut himself out from opens it up in the layer.
        """
        if self._scratch is None:
            return []
        self._over = True
        found = diff_upper(
            self._scratch.upper, self._state, packer, self._reader,
            subdirectory=self._subdirectory, work=self._scratch.work, lowers=self._lowers,
            xattr_prefix=self._xattr_prefix, runtime=self._cache.runtime,
        )  # fmt: skip
        self.skipped = found.skipped
        return [intent for intent in found.intents if not self._is_alias(intent)]

    def _is_alias(self, intent: Intent) -> bool:
        """Whether this is but an alias that the command touched, and so copied into its layer."""
        node = intent.node
        return (
            intent.path in self._aliases
            and intent.base is None
            and node is not None
            and (node.kind, node.target) == (SYMLINK, b".")
        )

    def close(self) -> None:
        """Drop the private layer (in the background) and let go of the base; repeating it is harmless."""
        scratch, self._scratch = self._scratch, None
        if scratch is not None and self._over:
            self._cache.give_back(scratch)
        elif scratch is not None:
            self._cache.discard(scratch.path)
        for lease in self._leases:
            lease.release()

    def __enter__(self) -> View:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def open_view(
    cache: HostCache, reader: Reader, state: State, *, disk_id: str, subdirectory: bytes = b"", writable: bool,
    xattr_prefix: str | None = None, aliases: Sequence[bytes] = (),
) -> View:  # fmt: skip
    """Make the tree of `state` (or one directory of it) ready to be mounted.

    `aliases` are names under which the view's root is also seen inside itself, where the tree does not have them: links
    to `.` in a layer of their own, which no commit takes. `xattr_prefix` is the engine's, see `Engine.xattr_prefix`;
    without it notes of either kind are believed.
    `NotFound` or `Invalid` for a subdirectory that is not there or not a directory; `Unavailable` where the cache is
    full; `Corrupt` for stored bytes that are not what they should be.
    """
    root = _root(state, subdirectory)
    leases: list[Lease] = []
    scratch: Scratch | None = None
    try:
        lowers = _layers(cache, reader, state, disk_id, subdirectory, leases)
        inside = subdirectory + b"/" if subdirectory else b""
        shown_as = [name for name in sorted(aliases) if state.get(inside + name) is None]
        if shown_as:
            leases.append(_lease_aliases(cache, reader, root, shown_as))
            lowers.append(leases[-1].path)
        if writable:
            scratch = cache.scratch()
            _dress(scratch.upper, root)
        paths = [inside + name for name in shown_as]
        return View(cache, reader, state, subdirectory, lowers, leases, scratch, xattr_prefix, paths)
    except BaseException:
        if scratch is not None:
            cache.give_back(scratch)
        for lease in leases:
            lease.release()
        raise


def _root(state: State, subdirectory: bytes) -> Node:
    """Return the node of the view's root; refuses what is not a directory of the tree."""
    if subdirectory and any(part in (b"", b".", b"..") or b"\0" in part for part in subdirectory.split(b"/")):
        raise Invalid.argument("subdirectory", subdirectory, "names joined by '/', without '.', '..' or empty ones")
    node = state.get(subdirectory)
    if node is None:
        raise NotFound(f"subdirectory {shown(subdirectory)} does not exist")
    if node.kind != DIR:
        raise Invalid.argument("subdirectory", subdirectory, "a directory; this is a file or a link")
    return node


def _dress(path: str, root: Node) -> None:
    """Give a layer's root directory the attributes of the view's root: it is what the command sees."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for name, value in root.xattrs:
            if name.startswith(b"user.") and not name.startswith(b"user.overlay."):
                os.setxattr(fd, name, value)
        os.fchmod(fd, root.mode)
        os.utime(fd, ns=(root.mtime_ns, root.mtime_ns))
    except OSError as error:
        raise host_error(error, path) from error
    finally:
        os.close(fd)


# -- which layers ------------------------------------------------------------------------------------------------


def _layers(
    cache: HostCache, reader: Reader, state: State, disk_id: str, subdirectory: bytes, leases: list[Lease]
) -> list[str]:
    """Lease a base and, where it differs from `state`, a delta; returns their directories, lowest first."""
    wanted = state.identity
    for scope in dict.fromkeys((b"", subdirectory)):
        if cache.has("base", _base_id(wanted, scope)):
            base = Known(wanted, state)
            leases.append(_lease_base(cache, reader, base, disk_id, scope))
            return [_inside(leases[-1], scope, subdirectory)]
    for scope in dict.fromkeys((b"", subdirectory)):
        for base in _candidates(cache, state, disk_id, scope):
            try:
                changed = cache.differences.small(base.state, state, scope)
                if changed is None:
                    continue
                leases.append(_lease_base(cache, reader, base, disk_id, scope))
                return _with_delta(cache, reader, base, state, wanted, changed, scope, subdirectory, leases)
            except Corrupt:
                # The damage may lie outside of the subdirectory, or in an old tree that only this base needs.
                while leases:
                    leases.pop().release()
    base = _new_base(state, wanted)
    try:
        leases.append(_lease_base(cache, reader, base, disk_id, subdirectory))
    except Corrupt:
        if base.identity == wanted:
            raise
        base = Known(wanted, state)  # the damage may be in what was replaced since
        leases.append(_lease_base(cache, reader, base, disk_id, subdirectory))
    if base.identity == wanted:
        return [leases[-1].path]
    changed = list(within(base.state.diff(state), subdirectory))
    return _with_delta(cache, reader, base, state, wanted, changed, subdirectory, subdirectory, leases)


def _candidates(cache: HostCache, state: State, disk_id: str, scope: bytes) -> Iterator[Known]:
    for known in cache.known(disk_id, scope):
        if cache.has("base", _base_id(known.identity, scope)):
            yield known
    if state.changes and cache.has("base", _base_id(state.root_id, scope)):
        yield Known(state.root_id, _folded(state))


def _new_base(state: State, wanted: str) -> Known:
    """Choose the tree to materialise: the folded one, which other branches share, unless much came after it."""
    changes = len(state.changes)
    if changes and changes <= path_limit(state) and state.snap.pages:
        return Known(state.root_id, _folded(state))
    return Known(wanted, state)


def _folded(state: State) -> State:
    return State(state.pages, state.snap, state.snap.seq, {}, {})


def _lease_base(cache: HostCache, reader: Reader, base: Known, disk_id: str, scope: bytes) -> Lease:
    state = base.state

    def build(root_fd: int) -> int:
        root = state.get(scope)
        if root is None or root.kind != DIR:
            root = _root(state, b"")  # the directory came later: an empty base
        cut = len(scope) + 1 if scope else 0
        entries = ((path[cut:], node) for path, node in state.below(scope, whole=True))
        return materialise(root_fd, root, entries, reader, state.blob_bytes()).space_bytes

    lease = cache.lease("base", _base_id(base.identity, scope), build)
    cache.remember(disk_id, scope, base)
    return lease


def _with_delta(
    cache: HostCache, reader: Reader, base: Known, state: State, wanted: str, changed: list[Difference],
    scope: bytes, subdirectory: bytes, leases: list[Lease],
) -> list[str]:  # fmt: skip
    """Add the delta to the base that was just leased; returns the layers that hold `subdirectory`."""
    lowers = []
    below = base.state.get(subdirectory)
    if below is not None and below.kind == DIR:
        lowers.append(_inside(leases[-1], scope, subdirectory))
    if changed:
        root = state.get(scope)
        assert root is not None

        def build(root_fd: int) -> int:
            entries = _delta_entries(base.state, state, changed, scope)
            return materialise(root_fd, root, entries, reader, state.blob_bytes()).space_bytes

        identity = hashlib.sha256(f"{_base_id(base.identity, scope)} {wanted}".encode()).hexdigest()
        leases.append(cache.lease("delta", identity, build))
        inside = _inside(leases[-1], scope, subdirectory)
        if os.path.lexists(inside):
            lowers.append(inside)
    return lowers


def _delta_entries(
    base: State, state: State, changed: list[Difference], scope: bytes
) -> list[tuple[bytes, Node | None]]:
    """Return what a layer over `base` must hold to show `state`: new nodes, whiteouts, and the directories above."""
    entries: dict[bytes, Node | None] = {}
    links = {node.link for each in changed for node in (each.before, each.after) if node is not None and node.link}
    nodes = [(each.path, each.after) for each in changed]
    if links:
        # Hard links stay one file, and their count is right, only if all its names are in the same layer.
        nodes += [(path, node) for path, node in state.below(scope) if node.link in links]
    for path, node in nodes:
        if path == scope:
            continue
        above = list(_directories_above(state, path, scope))
        if node is None and above and above[0][1] is None:
            continue  # hidden by what happened to a directory above
        for parent, parent_node in above:
            if parent in entries:
                break
            entries[parent] = parent_node
        entries[path] = node
    cut = len(scope) + 1 if scope else 0
    return [(path[cut:], entries[path]) for path in sorted(entries)]


def _directories_above(state: State, path: bytes, scope: bytes) -> Iterator[tuple[bytes, Node | None]]:
    """Yield the directories between `path` and `scope`, nearest first; a first None means `path`'s is none any more."""
    for parent in parents(path):
        if parent == scope:
            return
        node = state.get(parent)
        yield parent, node if node is not None and node.kind == DIR else None


def _lease_aliases(cache: HostCache, reader: Reader, root: Node, names: Sequence[bytes]) -> Lease:
    """Lease the layer that holds these links to its own root; over a read-only view its root is the one seen."""
    identity = hashlib.sha256(repr((root.mode, root.mtime_ns, root.xattrs, names)).encode()).hexdigest()

    def build(root_fd: int) -> int:
        links = [(name, Node(SYMLINK, 0o777, root.mtime_ns, target=b".")) for name in names]
        return materialise(root_fd, root, links, reader, {}).space_bytes

    return cache.lease("delta", f"alias-{identity}", build)


def _inside(lease: Lease, scope: bytes, subdirectory: bytes) -> str:
    rest = subdirectory[len(scope) :].lstrip(b"/")
    return f"{lease.path}/{os.fsdecode(rest)}" if rest else lease.path


def _base_id(identity: str, scope: bytes) -> str:
    """Name a base: by its tree, and by the directory of it that was materialised."""
    return f"{identity}-{hashlib.sha256(scope).hexdigest()[:16]}" if scope else identity
