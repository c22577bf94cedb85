"""`fanout doctor`: what works here, what does not, and what would help."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import click

from fanout.cli.app import json_option, settings

if TYPE_CHECKING:
    from fanout.config import Settings

__all__ = ["doctor"]

_ENGINES = ("bubblewrap", "qemu")
_MARKS = {"ok": "ok", "bad": "NO", "note": "--"}


@click.command(short_help="Check engines, store and cache.")
@click.option("--fix", is_flag=True, help="Make what VMs need: installs packages as root, assembles the guest's image.")
@json_option
@click.pass_context
def doctor(context: click.Context, as_json: bool, fix: bool) -> int:
    """Check which engines work here, whether the store keeps its promises, and the cache.

    Runs a trial command in each engine and races a few small objects in the store; boots a VM with KVM once after each
    boot of the host. With --url, a trial command on the server instead. Exits with 69 if nothing could run.
    """
    from fanout.cli.render import json_document, safe
    from fanout.errors import TABLE

    values = settings(context)
    if fix:
        _fix(values)
    found = list(_checks(values))
    usable = any(each["state"] == "ok" for each in found if each["check"] in (*_ENGINES, "server"))
    healthy = usable and all(each["state"] == "ok" for each in found if each["check"] in ("store", "cache"))
    if as_json:
        json_document({"ok": healthy, "checks": found})
    else:
        for each in found:
            print(f"{_MARKS[each['state']]}  {each['check']:<10}  {safe(each['text'])}")
    return 0 if healthy else TABLE["unavailable"].exit


def _checks(values: Settings) -> Iterator[dict[str, Any]]:
    import platform

    import fanout

    host = f"fanout {fanout.__version__}, Python {platform.python_version()}, Linux {platform.release()}"
    user = "root" if os.geteuid() == 0 else f"uid {os.geteuid()}"
    yield _check("host", "note", f"{host}, {len(os.sched_getaffinity(0))} cores, {user}")
    if values.url is not None:
        yield _guarded("server", lambda: _server(values))
        return
    yield _check("execs", "note", f"at most {values.max_in_flight} at once (FANOUT_MAX_IN_FLIGHT)")
    yield _guarded("bubblewrap", lambda: _engine(values, "bubblewrap"))
    yield _network()
    yield _guarded("image", lambda: _image(values))
    yield _guarded("kvm", lambda: _kvm(values))
    yield _guarded("qemu", lambda: _qemu(values))
    yield _guarded("store", lambda: _store(values))
    yield _guarded("cache", lambda: _cache(values))


def _check(check: str, state: str, text: str, **more: Any) -> dict[str, Any]:
    return {"check": check, "state": state, "text": text, **more}


def _guarded(check: str, ask: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    from fanout.errors import FanoutError

    try:
        return ask()
    except (FanoutError, OSError) as error:
        return _check(check, "bad", str(error))


def _server(values: Settings) -> dict[str, Any]:
    import asyncio

    from fanout.client import RemoteFanout
    from fanout.runtime import system

    async def ask() -> dict[str, Any]:
        fo = RemoteFanout(values)
        async with fo:
            began = system.monotonic()
            about = await fo.about()
            answer_ms = (system.monotonic() - began) * 1e3
            run = await fo.exec("true")
            exec_ms = (system.monotonic() - began) * 1e3 - answer_ms
        if not run.ok:
            return _check("server", "bad", f"{values.url}: `true` ended with {run.exit_code} ({run.status})")
        text = f"{values.url}: fanout {about.version} answers in {answer_ms:.0f} ms; a fresh {run.engine} sandbox on "
        text += f"{run.host} takes {exec_ms:.0f} ms"
        times = {"answer_ms": round(answer_ms, 1), "exec_ms": round(exec_ms, 1)}
        return _check("server", "ok", text, url=values.url, version=about.version, **times)

    return asyncio.run(ask())


def _fix(values: Settings) -> None:
    """Install and make what is missing for VMs, telling each step on stderr."""
    from fanout.engine.qemu.command import find_qemu
    from fanout.engine.qemu.image import assemble
    from fanout.engine.qemu.packages import install
    from fanout.engine.qemu.share import find_virtiofsd
    from fanout.errors import EngineUnavailable

    def say(line: str) -> None:
        click.echo(line, err=True)

    for find, package in ((find_qemu, "qemu-system-x86"), (find_virtiofsd, "virtiofsd")):
        try:
            find()
        except EngineUnavailable:  # where QEMU brings its own virtiofsd, it is there by now
            install([package], say)
    assemble(values.cache_dir, say)


def _image(values: Settings) -> dict[str, Any]:
    from fanout.engine.qemu.image import find

    found = find(values.cache_dir)
    if found is None:
        return _check("image", "note", "no kernel for VMs yet: `fanout doctor --fix` or the first exec in one makes it")
    return _check("image", "ok", found.version, path=os.fspath(found.kernel.parent))


def _kvm(values: Settings) -> dict[str, Any]:
    from fanout.engine.qemu.accel import probe
    from fanout.engine.qemu.image import find

    image = find(values.cache_dir)
    if image is None:
        return _check("kvm", "note", "only a VM that boots tells, and there is no kernel for one yet")
    found = probe(values.cache_dir, image)
    return _check("kvm", "ok" if found.kvm else "note", found.reason, kvm=found.kvm)


def _qemu(values: Settings) -> dict[str, Any]:
    from fanout.engine.qemu.command import find_qemu
    from fanout.engine.qemu.image import find
    from fanout.engine.qemu.share import find_virtiofsd

    find_qemu()
    find_virtiofsd()
    if find(values.cache_dir) is None:
        return _check("qemu", "note", "QEMU and virtiofsd are here, a kernel for VMs is not: `fanout doctor --fix`")
    return _engine(values, "qemu")


def _engine(values: Settings, name: str) -> dict[str, Any]:
    from fanout.engine.base import Spec
    from fanout.engine.open import open_engine
    from fanout.runtime import system

    engine = open_engine(values.model_copy(update={"engine": name}))
    try:
        engine.probe()
        began = system.monotonic()
        ended = engine.start(Spec(("/bin/true",), env={"PATH": os.defpath})).wait(lambda stream, data: None)
        ms = (system.monotonic() - began) * 1e3
        as_root: str = getattr(engine, "runs_as_root", "")
    finally:
        engine.close()
    if ended.exit_code != 0:
        return _check(name, "bad", f"/bin/true ended with {ended.exit_code} ({ended.status}) in the sandbox")
    text = f"works; a fresh sandbox takes {ms:.0f} ms"
    if as_root:
        text += f"; sandboxes run as this host's root in a user namespace, for {as_root} (docs/SECURITY.md)"
    return _check(name, "ok", text, start_ms=round(ms, 1))


def _network() -> dict[str, Any]:
    from fanout.engine.network import MISSING, find

    found = find()
    if found is None:
        return _check("network", "note", MISSING)
    return _check("network", "ok", f"network=True leads out through {found.program}", path=found.program)


def _store(values: Settings) -> dict[str, Any]:
    from dataclasses import asdict

    from fanout.runtime import system
    from fanout.store.open import open_store
    from fanout.store.probe import probe

    store = open_store(values.store, s3_endpoint=values.s3_endpoint)
    try:
        began = system.monotonic()
        capabilities = probe(store, system)
        ms = (system.monotonic() - began) * 1e3
    finally:
        store.close()
    text = f"{store.url}: create-only puts have one winner, reads and lists are fresh (probed in {ms:.0f} ms)"
    if abs(capabilities.clock_offset_ms) > 5_000:
        text += f"; its clock is {capabilities.clock_offset_ms / 1e3:+.0f} s from this host's"
    return _check("store", "ok", text, url=store.url, **asdict(capabilities))


def _cache(values: Settings) -> dict[str, Any]:
    import shutil

    from fanout.cli.render import size

    path = values.cache_dir
    path.mkdir(parents=True, exist_ok=True)
    if not os.access(path, os.W_OK | os.X_OK):
        return _check("cache", "bad", f"{path} cannot be written; choose another with FANOUT_CACHE_DIR")
    free = shutil.disk_usage(path).free
    text = f"{path}: at most {size(values.cache_bytes)}, {size(free)} free there"
    if free < min(values.cache_bytes, 1 << 30):
        text += "; that is little: choose another place with FANOUT_CACHE_DIR"
    return _check("cache", "ok", text, path=os.fspath(path), free_bytes=free, cache_bytes=values.cache_bytes)
