"""`fanout keys`: make, list and remove the keys that a server asks for."""

from __future__ import annotations

import re
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from fanout.cli.app import json_option, settings

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fanout.disk.catalogue import Catalogue
    from fanout.server.keys import Keys

__all__ = ["keys"]

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 7 * 86_400}


@click.group(short_help="Create, list and remove the keys of a server.")
def keys() -> None:
    """Create, list and remove the keys with which clients use `fanout serve` on this store, over REST and S3."""


@keys.command(short_help="Create a key; its token is shown once.")
@click.option("--disk", "disks", multiple=True, metavar="NAME", help="Only for this disk; can be repeated. [all]")
@click.option("--read-only", is_flag=True, help="May read, and run commands that write nothing.")
@click.option("--admin", is_flag=True, help="May also create and delete disks and keys.")
@click.option("--nickname", default="", metavar="NAME", help="What commits made with it say they are by.")
@click.option("--expires", metavar="TIME", help="When it ends: 90s, 15m, 12h, 30d, 4w from now. [never]")
@json_option
@click.pass_context
def create(
    context: click.Context, disks: tuple[str, ...], read_only: bool, admin: bool, nickname: str, expires: str | None,
    as_json: bool,
) -> int:  # fmt: skip
    """Create a key and show its token, and the same key as S3 credentials. It cannot be shown again."""
    from fanout.cli.render import json_document
    from fanout.errors import Invalid

    if admin and (read_only or disks):
        raise Invalid("--admin is set: an administrator's key is for all disks, to read and write")
    lasts_s = None if expires is None else _seconds(expires)
    with _opened(context) as (found, catalogue):
        ids = [catalogue.get(disk).id for disk in disks]
        made = found.create(
            nickname=nickname, right="admin" if admin else "read" if read_only else "write",
            disks=ids or None, expires_in_s=lasts_s,
        )  # fmt: skip
    if as_json:
        json_document(
            {
                "id": made.record.id,
                "token": made.token,
                "s3_access_key": made.record.id,
                "s3_secret_key": made.s3_secret,
            }
        )
        return 0
    print(f"token:          {made.token}")
    print(f"S3 access key:  {made.record.id}")
    print(f"S3 secret key:  {made.s3_secret}")
    if sys.stdout.isatty():
        print("\nThis is shown once. Use it: fanout.connect(URL, api_key=…), or `Authorization: key-…`.")
    return 0


@keys.command("ls", short_help="List the keys.")
@json_option
@click.pass_context
def list_(context: click.Context, as_json: bool) -> int:
    """List the keys of the store, oldest first. What they are recognised by is kept, they themselves are not."""
    from fanout.cli.render import json_document, local_time, print_table, safe
    from fanout.errors import NotFound
    from fanout.run.describe import when
    from fanout.runtime import system

    def disk_name(catalogue: Catalogue, disk_id: str) -> str:
        try:
            return catalogue.get(disk_id).name
        except NotFound:
            return f"{disk_id} (deleted)"

    now_ns = system.now_ns()
    rows: list[dict[str, Any]] = []
    with _opened(context) as (found, catalogue):
        for record in found.list():
            names = None if record.disks is None else [disk_name(catalogue, disk) for disk in record.disks]
            expires = when(record.expires_ns) if record.expires_ns else None
            rows.append(
                {
                    "id": record.id, "nickname": record.nickname, "right": record.right, "disks": names,
                    "created": when(record.created_ns), "expires": expires,
                    "expired": bool(record.expires_ns) and record.expires_ns <= now_ns,
                }
            )  # fmt: skip
    if as_json:
        json_document(rows)
        return 0
    if not rows:
        if sys.stdout.isatty():
            print("no keys yet; make one: fanout keys create")
        return 0
    cells = []
    for row in rows:
        ends = "never" if row["expires"] is None else local_time(row["expires"])
        disks = "all" if row["disks"] is None else ", ".join(row["disks"])
        cells.append(
            [row["id"], row["right"], safe(disks), "expired" if row["expired"] else ends, safe(row["nickname"])]
        )
    print_table(["id", "right", "disks", "expires", "nickname"], cells, flexible="disks")
    return 0


@keys.command("rm", short_help="Remove keys.")
@click.argument("ids", metavar="ID...", nargs=-1, required=True)
@click.pass_context
def remove(context: click.Context, ids: tuple[str, ...]) -> int:
    """Remove keys by id. A server that runs honours them for at most 5 seconds more."""
    with _opened(context) as (found, _):
        for key_id in ids:
            found.get(key_id)
        for key_id in ids:
            found.delete(key_id)
    return 0


@contextmanager
def _opened(context: click.Context) -> Iterator[tuple[Keys, Catalogue]]:
    from fanout.disk.catalogue import Catalogue
    from fanout.errors import Invalid
    from fanout.runtime import system
    from fanout.server.keys import Keys
    from fanout.store.open import open_store

    chosen = settings(context)
    if chosen.url is not None:
        raise Invalid(f"keys are kept in the store: run this where it can be reached, without the URL {chosen.url}")
    store = open_store(chosen.store, s3_endpoint=chosen.s3_endpoint)
    try:
        yield Keys(store, system), Catalogue(store, system, chosen.tuning)
    finally:
        store.close()


def _seconds(text: str) -> float:
    from fanout.errors import Invalid

    match = re.fullmatch(r"([0-9]{1,6})([smhdw])", text)
    if match is None or int(match[1]) == 0:
        raise Invalid.argument("--expires", text, "a number and a unit: 90s, 15m, 12h, 30d, 4w")
    return float(int(match[1]) * _UNITS[match[2]])
