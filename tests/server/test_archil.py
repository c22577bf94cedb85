"""The unchanged archil 0.18.0 client against a real server: disks, execs, branches, delegations, tokens, links."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Iterator
from functools import partial
from typing import Any

import archil
import httpx
import pytest
from archil import ArchilApiError, ExecMountSpec, RootAttrs

from tests.support.serving import Running


def client_of(server: Running, token: str | None = None) -> archil.Archil:
    return archil.Archil(
        api_key=token or server.token, region="local", base_url=server.url, s3_base_url=server.s3_url, timeout=120
    )


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[archil.Archil]:
    made = client_of(server)
    yield made
    made.close()


@pytest.fixture
def disk(client: archil.Archil, disk_name: str) -> Any:
    return client.disks.create(name=disk_name).disk


def refused(call: Any, status: int, code: str) -> str:
    with pytest.raises(ArchilApiError) as caught:
        call()
    assert (caught.value.status, caught.value.code) == (status, code), str(caught.value)
    return str(caught.value)


# -- disks ---------------------------------------------------------------------------------------------------------


def test_a_disk_from_creation_to_deletion(client: archil.Archil, disk_name: str) -> None:
    made = client.disks.create(name=disk_name)
    assert made.token is not None
    assert made.token.startswith("key-")
    assert made.token_identifier is not None
    assert made.disk.name == disk_name
    assert made.disk.wait_until_ready(timeout=5).status == "available"
    assert client.disks.get(made.disk.id).id == made.disk.id
    assert [each.id for each in client.disks.list(name=disk_name)] == [made.disk.id]
    made.disk.delete()
    refused(lambda: client.disks.get(made.disk.id), 404, "not_found")
    assert client.disks.list(name=disk_name) == []


def test_creating_again_is_the_same_and_otherwise_a_conflict(client: archil.Archil, disk_name: str) -> None:
    attributes = RootAttrs(uid=1000, gid=1000, mode=0o775)
    first = client.disks.create(name=disk_name, root_attrs=attributes)
    again = client.disks.create(name=disk_name, root_attrs=attributes)
    assert again.disk.id == first.disk.id
    assert again.token is None
    other = RootAttrs(mode=0o700)
    refused(lambda: client.disks.create(name=disk_name, root_attrs=other), 409, "exists")
    assert first.disk.exec("stat -c %a /mnt").stdout == "775\n"


def test_listing_in_pages(client: archil.Archil) -> None:
    prefix = f"page-{uuid.uuid4().hex[:8]}"
    ids = {client.disks.create(name=f"{prefix}-{number}").disk.id for number in range(5)}
    pages = list(client.disks.list_pages(page_size=2))
    assert all(len(page.disks) <= 2 for page in pages)
    names = [each.name for page in pages for each in page.disks]
    assert names == sorted(names)
    assert ids <= {each.id for page in pages for each in page.disks}
    assert ids <= {each.id for each in client.disks.list()}
    assert len(client.disks.list(limit=3)) == 3


@pytest.mark.parametrize("name", ["", "UPPER", "a/b", "..", "a" * 64, "sp ace", "caf\u00e9"])
def test_names_a_disk_cannot_have(client: archil.Archil, name: str) -> None:
    told = refused(lambda: client.disks.create(name=name), 400, "invalid")
    assert "[a-z0-9]" in told


def test_what_a_disk_cannot_be_created_with(client: archil.Archil, disk_name: str) -> None:
    refused(lambda: client.disks.create(name=disk_name, allowed_ips=["10.0.0.1"]), 501, "not_implemented")
    assert client.disks.list(name=disk_name) == []


# -- execs ---------------------------------------------------------------------------------------------------------


def test_exec_on_one_disk(disk: Any) -> None:
    done = disk.exec("echo out; echo err >&2; echo kept > /mnt/data/f; exit 3")
    assert (done.exit_code, done.stdout, done.stderr) == (3, "out\n", "err\n")
    assert done.timing.total_ms >= done.timing.execute_ms >= 0
    assert disk.exec("cat /mnt/f /mnt/archil/f /mnt/data/f f; ls -A").stdout == "kept\n" * 4 + "archil\ndata\nf\n"


def test_exec_on_several_disks_with_every_mode(client: archil.Archil) -> None:
    made = {name: client.disks.create(name=f"{name}-{uuid.uuid4().hex[:8]}").disk for name in ("a", "b", "c", "d")}
    made["b"].exec("echo b > only; mkdir sub; echo in > sub/x")
    disks = {
        "a": made["a"],
        "b": ExecMountSpec(made["b"], read_only=True),
        "c": ExecMountSpec(made["c"], conditional=True),
        "deep/er": made["d"].id,
        "part": ExecMountSpec(made["b"], subdirectory="sub", conditional=True),
    }
    command = """
        pwd; ls; cat b/only part/x
        for each in a b c deep/er part; do touch $each/new 2>/dev/null && echo wrote $each; done
    """
    done = client.exec(disks=disks, command=command)
    assert done.stdout.split("\n") == [
        *("/mnt/archil", "a", "b", "c", "deep", "part", "b", "in"),
        *("wrote a", "wrote c", "wrote deep/er", "wrote part", ""),
    ], done.stderr
    assert made["d"].exec("ls").stdout == "archil\ndata\nnew\n"
    assert made["b"].exec("ls . sub").stdout == ".:\narchil\ndata\nonly\nsub\n\nsub:\nnew\nx\n"


#: How long an exec lasts that something else is to happen under; longer where this machine was too slow.
PATIENCE = (0.5, 3, 15)


def test_a_conflict_is_no_success(client: archil.Archil, disk: Any, server: Running) -> None:
    failures: list[Exception] = []

    def slow(seconds: float) -> None:
        try:
            disk.exec(f"echo slow > same; sleep {seconds}")
        except ArchilApiError as error:
            failures.append(error)

    for seconds in PATIENCE:
        with server.meanwhile(partial(slow, seconds)) as thread:
            disk.exec("echo first > same")
            in_time = thread.is_alive()
        if in_time and failures:
            break
    assert [getattr(each, "code", "") for each in failures] == ["conflict"]
    assert "rescue/ex-" in str(failures[0])
    assert disk.exec("cat same").stdout == "first\n"
    (rescued,) = disk.list_branches()
    assert client.disks.get(rescued.filesystem_id).exec("cat same").stdout == "slow\n"


def test_conditional_execs_at_once(client: archil.Archil, disk: Any) -> None:
    disk.exec("touch all")
    threads = [
        threading.Thread(
            target=client.exec,
            kwargs={"disks": {"w": ExecMountSpec(disk, conditional=True)}, "command": f"echo {n} >> w/all"},
        )
        for n in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(disk.exec("cat all").stdout.split()) == [str(n) for n in range(6)]


@pytest.mark.parametrize("path", ["", "..", "a/../b", "/", "a//b", "x" * 300])
def test_paths_where_no_disk_can_be(client: archil.Archil, disk: Any, path: str) -> None:
    refused(lambda: client.exec(disks={path: disk}, command="true"), 400, "invalid")


def test_disks_do_not_lie_in_each_other(client: archil.Archil, disk: Any) -> None:
    refused(lambda: client.exec(disks={"a": disk, "a/b": disk}, command="true"), 400, "invalid")


def test_all_disks_or_none(client: archil.Archil, disk: Any) -> None:
    call = {"a": disk, "b": "dsk-0000000000000000"}
    refused(lambda: client.exec(disks=call, command="touch a/x"), 404, "not_found")
    assert disk.exec("ls").stdout == "archil\ndata\n"


# -- branches ------------------------------------------------------------------------------------------------------


def checkpoint(server: Running, disk_id: str, name: str) -> None:
    """The client has no call for it: an exec's result is named through fanout itself."""
    import anyio

    import fanout

    async def work() -> None:
        async with fanout.connect(store=server.store) as fo:
            await (await fo.disks.get(disk_id)).checkpoint(name)

    anyio.run(work)


def test_branches(client: archil.Archil, server: Running, disk: Any) -> None:
    disk.exec("echo base > f")
    checkpoint(server, disk.id, "base")
    made = disk.create_branch("try-1", "base")
    assert (made.root_filesystem_id, made.branch_name, made.from_checkpoint_name) == (disk.id, "try-1", "base")
    handle = client.disks.get(made.filesystem_id)
    handle.exec("echo changed > f")
    assert disk.exec("cat f").stdout == "base\n"
    assert client.exec(disks={"x": made.filesystem_id, "y": disk}, command="cat x/f y/f").stdout == "changed\nbase\n"
    assert disk.get_branch("try-1") == made
    assert disk.list_branches() == [made]
    point = client.disks.get(made.from_checkpoint_filesystem_id)
    assert point.exec("cat f; touch g").stdout == "base\n"
    refused(lambda: disk.create_branch("try-1", "base"), 409, "exists")
    refused(lambda: disk.create_branch("try-2", "missing"), 404, "not_found")
    refused(lambda: disk.create_branch("try-2", "base", from_branch="other"), 404, "not_found")
    refused(lambda: disk.create_branch("No Name", "base"), 400, "invalid")


def test_a_retried_branch_is_the_same(client: archil.Archil, server: Running, disk: Any) -> None:
    checkpoint(server, disk.id, "base")
    checkpoint(server, disk.id, "other")
    key = str(uuid.uuid4())
    made = disk.create_branch("one", "base", idempotency_key=key)
    assert disk.create_branch("one", "base", idempotency_key=key) == made
    refused(lambda: disk.create_branch("one", "other", idempotency_key=key), 409, "exists")
    refused(lambda: disk.create_branch("one", "base", idempotency_key=str(uuid.uuid4())), 409, "exists")


# -- delegations ---------------------------------------------------------------------------------------------------


def test_delegations_are_checkouts(client: archil.Archil, server: Running, disk: Any) -> None:
    answers: list[httpx.Response] = []
    headers = {"Authorization": server.token}
    mount = {"disk": disk.id, "checkoutPaths": ["src/", "doc"]}

    def hold(seconds: float) -> None:
        body = {"disks": {"w": mount}, "command": f"echo 1 > w/x; sleep {seconds}"}
        answers.append(httpx.post(f"{server.url}/api/exec", json=body, headers=headers, timeout=60))

    assert disk.list_delegations() == []
    for seconds in PATIENCE:
        with server.meanwhile(partial(hold, seconds)) as thread:
            while not (held := disk.list_delegations()) and thread.is_alive():
                time.sleep(0.02)
            body = {"disks": {"w": {**mount, "checkoutPaths": ["src/a"], "queueMs": 10}}, "command": "true"}
            busy = httpx.post(f"{server.url}/api/exec", json=body, headers=headers)
            if thread.is_alive() and held:
                disk.revoke_delegation(held[0])
                assert disk.list_delegations() == []
        if answers[-1].status_code == 409:
            break
    assert {each.path for each in held} == {"/src", "/doc"}
    assert not any(each.is_pending or each.is_orphaned for each in held)
    assert (busy.status_code, busy.json()["code"]) == (503, "busy")
    assert "retry-after" in busy.headers
    assert answers[-1].json()["code"] == "lease_lost"
    assert "rescue/" in answers[-1].json()["error"]
    refused(lambda: disk.revoke_delegation(held[0]), 404, "not_found")


# -- keys ----------------------------------------------------------------------------------------------------------


def test_a_disk_token_is_for_its_disk(client: archil.Archil, server: Running, disk: Any, disk_name: str) -> None:
    user = disk.create_token("laptop")
    mine = client_of(server, user.token)
    try:
        assert [each.id for each in mine.disks.list()] == [disk.id]
        assert mine.disks.get(disk.id).exec("echo 1 > f").exit_code == 0
        other = client.disks.create(name=f"{disk_name}-other").disk
        refused(lambda: mine.disks.get(other.id), 403, "denied")
        refused(lambda: mine.disks.get("dsk-0000000000000000"), 403, "denied")
        refused(lambda: mine.disks.get(other.name), 403, "denied")
        refused(lambda: mine.exec(disks={"a": disk.id, "b": other.id}, command="true"), 403, "denied")
        refused(lambda: mine.disks.create(name=f"{disk_name}-more"), 403, "denied")
        refused(lambda: mine.disks.get(disk.id).delete(), 403, "denied")
        refused(lambda: mine.tokens.list(), 403, "denied")
    finally:
        mine.close()
    disk.remove_token_user(user.identifier)
    gone = client_of(server, user.token)
    refused(lambda: gone.disks.list(), 401, "unauthorized")
    gone.close()
    refused(lambda: disk.remove_token_user(user.identifier), 404, "not_found")
    refused(lambda: disk.add_user({"type": "awssts", "principal": "x"}), 501, "not_implemented")


def test_commits_say_who(client: archil.Archil, server: Running, disk: Any) -> None:
    import anyio

    import fanout

    user = disk.create_token("build bot")
    mine = client_of(server, user.token)
    mine.disks.get(disk.id).exec("touch f")
    mine.close()

    async def authors() -> list[str]:
        async with fanout.connect(store=server.store) as fo:
            return [commit.author async for commit in (await fo.disks.get(disk.id)).log()]

    assert anyio.run(authors) == ["build bot"]


def test_account_tokens(client: archil.Archil, server: Running) -> None:
    made = client.tokens.create(name="ci", description="for the pipeline")
    assert made.token is not None
    listed = next(each for each in client.tokens.list() if each.id == made.id)
    assert (listed.name, listed.description, listed.token) == ("ci", "for the pipeline", None)
    other = client_of(server, made.token)
    other.disks.list()
    client.tokens.delete(made.id)
    refused(lambda: other.disks.list(), 401, "unauthorized")
    other.close()
    refused(lambda: client.tokens.delete(made.id), 404, "not_found")
    refused(lambda: client.tokens.delete("../master"), 404, "not_found")


def test_allowed_ips(disk: Any) -> None:
    assert disk.get_allowed_ips() == []
    assert disk.set_allowed_ips([]) == []
    assert "addresses" in refused(lambda: disk.add_allowed_ip("10.0.0.1"), 501, "not_implemented")


# -- links ---------------------------------------------------------------------------------------------------------


def test_share_links(client: archil.Archil, server: Running, disk: Any) -> None:
    disk.exec("mkdir 'a b'; printf 'caf\\303\\251' > 'a b/ü?.html'; head -c 6000000 /dev/zero > big")
    link = disk.share("a b/ü?.html")
    assert link.expires_in == 86_400
    answer = httpx.get(link.url)
    assert (answer.status_code, answer.content) == (200, b"caf\xc3\xa9")
    assert answer.headers["content-disposition"].startswith("attachment")
    assert len(httpx.get(disk.share("big", expires_in=60).url).content) == 6_000_000
    for bad in (link.url.replace("a%20b", "a%20c"), link.url[:-1], link.url.replace("expires=", "expires=9")):
        assert httpx.get(bad).status_code == 403, bad
    assert httpx.get(link.url.partition("?")[0]).status_code == 400
    refused(lambda: disk.share("missing"), 404, "not_found")
    refused(lambda: disk.share("../x"), 400, "invalid")
    refused(lambda: disk.share("big", expires_in=604_801), 400, "invalid")


def test_a_link_dies_with_its_key(client: archil.Archil, server: Running, disk: Any) -> None:
    disk.exec("echo 1 > f")
    user = disk.create_token("x")
    mine = client_of(server, user.token)
    url = mine.disks.get(disk.id).share("f").url
    mine.close()
    assert httpx.get(url).text == "1\n"
    disk.remove_token_user(user.identifier)
    assert httpx.get(url).status_code == 403


# -- what is not there ---------------------------------------------------------------------------------------------


def test_sandboxes_and_images_say_so(client: archil.Archil) -> None:
    assert "use exec" in refused(lambda: client.sandboxes.list(), 501, "not_implemented")
    refused(lambda: client.sandboxes.create(name="x"), 501, "not_implemented")
    refused(lambda: client.sandboxes.get("sbx-1"), 501, "not_implemented")
    refused(lambda: client.images.get("img-1"), 501, "not_implemented")
    refused(lambda: client.images.build(source="debian:12"), 501, "not_implemented")
