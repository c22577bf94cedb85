"""From the mounts of a request to open branches and points, without asking the store where that can be.

Owns what of it this process remembers. Decides nothing about trees.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fanout.disk.branch import Branch
from fanout.disk.catalogue import Catalogue
from fanout.disk.disk import Disk, Point
from fanout.disk.paths import shown, tree_path
from fanout.errors import Invalid
from fanout.model import Mount
from fanout.run.exec import JobMount

__all__ = ["Lines", "PlacedMount"]


class PlacedMount(Mount):
    """A mount that is seen somewhere else than at /mnt/<name>, for APIs that promise it; `aliases` as in `JobMount`."""

    place: str
    aliases: tuple[str, ...] = ()

    @classmethod
    def of(cls, mount: Mount, place: str, aliases: tuple[str, ...] = ()) -> PlacedMount:
        """Return `mount` at `place`."""
        return cls(**{name: getattr(mount, name) for name in Mount.model_fields}, place=place, aliases=aliases)


class Lines:
    """The branches that this connection's execs have mounted, by disk id and name. Thread safe."""

    def __init__(self, catalogue: Catalogue) -> None:
        self._catalogue = catalogue
        self._known: dict[tuple[str, str], tuple[Disk, Branch]] = {}

    def known(self, mounts: Mapping[str, Mount]) -> list[JobMount] | None:
        """Return the job's mounts without any request, or None where something has to be looked up."""
        found: list[JobMount] = []
        for name, mount in mounts.items():
            line = self._known.get((mount.disk, mount.branch))
            if line is None or mount.at is not None:
                return None
            found.append(_job_mount(name, line[0], Point(line[1]), mount))
        _check_checkouts(found)
        return found

    def look_up(self, mounts: Mapping[str, Mount]) -> list[JobMount]:
        """Return the job's mounts; `NotFound` for a disk, branch or point that is not there. Blocking."""
        found = [self._look_up(name, mount) for name, mount in mounts.items()]
        _check_checkouts(found)
        return found

    def _look_up(self, name: str, mount: Mount) -> JobMount:
        disk = self._catalogue.get(mount.disk)
        branch = disk.branch(mount.branch)
        self._known[mount.disk, mount.branch] = disk, branch
        base = Point(branch)
        if mount.at is not None:
            base = disk.point(mount.at, mount.branch)
            if base.seq is not None:
                base.branch.require(base.seq)
        if mount.mode != "read_only" and base.branch is not branch:
            raise Invalid.argument("at", mount.at, f"a point of branch {mount.branch!r}, or mount it read-only")
        return _job_mount(name, disk, base, mount)

    def forget(self, disk_id: str) -> None:
        """A disk was deleted: the next exec on it has to look, and will not find it."""
        for line in [line for line in list(self._known) if line[0] == disk_id]:
            self._known.pop(line, None)


def _check_checkouts(mounts: Sequence[JobMount]) -> None:
    """Refuse two checkouts of one branch: taken one after the other, two execs could wait for each other."""
    holders: dict[str, str] = {}
    for mount in mounts:
        if mount.checkout and (first := holders.setdefault(mount.base.branch.uuid, mount.name)) != mount.name:
            allowed = f"all paths of branch {mount.base.branch.name!r} in one mount's checkout; {first!r} has one, too"
            raise Invalid.argument(f"checkout of {mount.name!r}", tuple(map(shown, mount.checkout)), allowed)


def _job_mount(name: str, disk: Disk, base: Point, mount: Mount) -> JobMount:
    return JobMount(
        name,
        disk,
        base,
        mount.mode,
        tree_path("subdirectory", (mount.subdirectory or "").rstrip("/") or "/", allow_root=True),
        tuple(tree_path("checkout", path.rstrip("/") or "/", allow_root=True) for path in mount.checkout),
        None if mount.queue_ms is None else mount.queue_ms / 1e3,
        *((mount.place, tuple(map(str.encode, mount.aliases))) if isinstance(mount, PlacedMount) else ()),
    )
