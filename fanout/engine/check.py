"""The conformance suite of engines: what every engine must do, as checks that anybody can run.

Owns the checks; the bench they run on is `bench.py`. Knows no engine: it is given one. A check fails by raising
`CheckFailed`. The sandbox needs /bin/sh and the usual core utilities, the host a file system that takes an overlay's
upper layer.

    for check in CHECKS:
        check(Bench(engine, scratch_directory))
"""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from fanout.engine.base import Engine, Limits, Mount, Spec
from fanout.engine.bench import Bench, CheckFailed, Outcome, completed, fail, refused, same
from fanout.errors import EngineUnavailable

__all__ = ["CHECKS", "Bench", "Check", "CheckFailed", "Outcome", "completed", "failures"]

MIB = 1024 * 1024

Check = Callable[[Bench], None]

#: Every check, in the order written.
CHECKS: list[Check] = []


def failures(engine: Engine, scratch: Path) -> dict[str, str]:
    """Run every check; return the names of those that failed, with the reason."""
    found: dict[str, str] = {}
    for i, check in enumerate(CHECKS):
        top = scratch / f"check-{i}"
        top.mkdir()
        try:
            check(Bench(engine, top))
        except Exception as error:
            found[check.__name__] = f"{type(error).__name__}: {error}"
    return found


# --- how commands end ---------------------------------------------------------------------------------------------


@CHECKS.append
def exit_codes_are_the_command_s_own(bench: Bench) -> None:
    for code in (0, 1, 3, 126, 255):
        completed(bench.run(f"exit {code}"), code)


@CHECKS.append
def a_signal_of_the_command_s_own_doing_is_128_plus_n(bench: Bench) -> None:
    for number in (6, 9, 11, 15):
        completed(bench.run(f"kill -{number} $$"), 128 + number)


@CHECKS.append
def a_program_that_cannot_be_run_is_data(bench: Bench) -> None:
    missing = completed(bench.run(["/no/such/program"]), 127)
    if b"/no/such/program" not in missing.stderr:
        fail(f"stderr does not name the program: {missing.stderr!r}")
    same(missing.stdout, b"", "stdout")
    completed(bench.run(["/dev/null"]), 126)
    completed(bench.run(["true"], env={"PATH": "/nowhere:/bin:/usr/bin"}), 0)


@CHECKS.append
def times_and_usage_are_of_the_command(bench: Bench) -> None:
    before = bench.runtime.monotonic()
    ended = completed(bench.run("sleep 0.3")).exit
    after = bench.runtime.monotonic()
    if not before <= ended.started_s <= ended.ended_s <= after or ended.ended_s - ended.started_s < 0.25:
        fail(f"started {ended.started_s}, ended {ended.ended_s}, called {before}, returned {after}")
    if ended.cpu_s < 0 or ended.max_rss_bytes < 0:
        fail(f"usage is negative: {ended}")


@CHECKS.append
def a_timeout_kills_everything_and_keeps_the_output(bench: Bench) -> None:
    word = bench.sleep_word()
    script = f"echo partial; sleep {word} & (setsid sleep {word} &); setsid sh -c '(sleep {word} &) & wait' & wait"
    before = bench.runtime.monotonic()
    outcome = bench.run(script, limits=Limits(timeout_s=0.5))
    took_s = bench.runtime.monotonic() - before
    same((outcome.exit.status, outcome.exit.exit_code), ("timed_out", None), "end of the command")
    same(outcome.stdout, b"partial\n", "stdout")
    if not 0.4 < took_s < 0.5 + Limits().grace_s + 2:
        fail(f"a timeout of 0.5 s took {took_s:.2f} s")
    bench.gone(word)


@CHECKS.append
def a_timeout_is_not_held_up_by_a_command_that_ignores_signals(bench: Bench) -> None:
    word = bench.sleep_word()
    outcome = bench.run(f"trap '' TERM INT HUP; while :; do sleep {word}; done", limits=Limits(timeout_s=0.3))
    same(outcome.exit.status, "timed_out", "status")
    bench.gone(word)


@CHECKS.append
def background_children_die_with_the_leader(bench: Bench) -> None:
    word = bench.sleep_word()
    before = bench.runtime.monotonic()
    outcome = completed(bench.run(f"(sleep {word} &); (setsid sleep {word} &); echo hi"))
    if bench.runtime.monotonic() - before > 10:
        fail("a background child held up the end")
    same(outcome.stdout, b"hi\n", "stdout")
    bench.gone(word)


@CHECKS.append
def kill_ends_everything_from_any_thread(bench: Bench) -> None:
    word = bench.sleep_word()
    process = bench.engine.start(Spec(["/bin/sh", "-c", f"echo up; sleep {word} & sleep {word}"]))
    up = threading.Event()
    killer = threading.Thread(target=lambda: (up.wait(30), process.kill(), process.kill()))
    killer.start()
    ended = process.wait(lambda _, chunk: up.set())
    killer.join()
    process.kill()
    same((ended.status, ended.exit_code), ("killed", None), "end of the command")
    bench.gone(word)


@CHECKS.append
def a_kill_before_wait_is_kept(bench: Bench) -> None:
    process = bench.engine.start(Spec(["/bin/sleep", "60"]))
    process.kill()
    same(process.wait(lambda *_: None).status, "killed", "status")


@CHECKS.append
def a_kill_after_the_end_changes_nothing(bench: Bench) -> None:
    process = bench.engine.start(Spec(["/bin/sh", "-c", "exit 3"]))
    bench.runtime.sleep(1)
    process.kill()
    ended = process.wait(lambda *_: None)
    same((ended.status, ended.exit_code), ("completed", 3), "end of the command")


@CHECKS.append
def a_sink_that_raises_kills_the_command(bench: Bench) -> None:
    word = bench.sleep_word()

    def sink(stream: str, chunk: bytes) -> None:
        raise ZeroDivisionError

    try:
        bench.engine.start(Spec(["/bin/sh", "-c", f"yes | head -c 1000000; sleep {word}"])).wait(sink)
    except ZeroDivisionError:
        bench.gone(word)
    else:
        fail("the sink's exception was lost")


@CHECKS.append
def many_at_once_keep_their_codes_and_leave_no_zombies(bench: Bench) -> None:
    def one(i: int) -> int | None:
        return bench.run(f"for i in 1 2 3; do (sleep 0.0{i % 10} &) ; done; exit {i % 7}").exit.exit_code

    before = len(os.listdir("/proc/self/fd"))
    with ThreadPoolExecutor(50) as pool:
        codes = list(pool.map(one, range(200)))
    same(codes, [i % 7 for i in range(200)], "exit codes")
    same(_zombies_of(os.getpid()), [], "zombies of this process")
    if len(os.listdir("/proc/self/fd")) > before + 20:  # other threads of this process may open some
        fail("open files were left behind")


def _zombies_of(parent: int) -> list[str]:
    found = []
    for entry in Path("/proc").iterdir():
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if fields[0] == "Z" and fields[1] == str(parent):
            found.append(entry.name)
    return found


# --- streams ------------------------------------------------------------------------------------------------------


@CHECKS.append
def without_stdin_there_is_an_end_of_file(bench: Bench) -> None:
    for stdin in (None, b""):
        same(completed(bench.run("cat; echo end", stdin=stdin)).stdout, b"end\n", f"stdout with stdin {stdin!r}")


@CHECKS.append
def ten_mebibytes_through_stdin_and_back(bench: Bench) -> None:
    data = bench.runtime.token_bytes(10 * MIB)
    if completed(bench.run("cat", stdin=data)).stdout != data:
        fail("cat did not return its stdin")


@CHECKS.append
def stdin_that_nobody_reads_does_not_block(bench: Bench) -> None:
    data = bytes(10 * MIB)
    completed(bench.run("exit 4", stdin=data), 4)
    same(completed(bench.run("head -c 5; exec 0<&-; sleep 0.1", stdin=data)).stdout, bytes(5), "stdout")


@CHECKS.append
def both_streams_are_whole_and_apart(bench: Bench) -> None:
    script = "head -c 1048576 /dev/zero | tr '\\0' o & head -c 1048576 /dev/zero | tr '\\0' e >&2 & wait"
    outcome = completed(bench.run(script))
    if outcome.stdout != b"o" * MIB or outcome.stderr != b"e" * MIB:
        fail(f"{len(outcome.stdout)} bytes on stdout and {len(outcome.stderr)} on stderr, or mixed")


@CHECKS.append
def sixteen_mebibytes_of_output_arrive(bench: Bench) -> None:
    outcome = completed(bench.run("head -c 16777216 /dev/zero; exit 9"), 9)
    if outcome.stdout != bytes(16 * MIB):
        fail(f"{len(outcome.stdout)} bytes arrived")


@CHECKS.append
def output_arrives_while_the_command_runs(bench: Bench) -> None:
    arrived: list[float] = []
    process = bench.engine.start(Spec(["/bin/sh", "-c", "echo one >&2; sleep 0.5; echo two >&2"]))
    ended = process.wait(lambda *_: arrived.append(bench.runtime.monotonic()))
    if not arrived or ended.ended_s - arrived[0] < 0.3:
        fail("output was kept back until the end")


# --- environment and directory ------------------------------------------------------------------------------------


@CHECKS.append
def the_environment_is_exact(bench: Bench) -> None:
    env = {
        "QUOTES": "a 'b' \"c\" `d` $(e) \\",
        "LINES": "one\ntwo\r\n\ttab ",
        "EMOJI": "☕ 🙂",
        "EQUALS": "=a=b=",
        "EMPTY": "",
        "BYTES": "\udcff\udcfe",
        "LONG": "x" * 100_000,
        "-dash": "1",
        "with space": "2",
    }
    found = completed(bench.run(["/usr/bin/env", "-0"], env=env)).stdout.split(b"\0")[:-1]
    wanted = {os.fsencode(f"{name}={value}") for name, value in env.items()}
    same({word for word in found if not word.startswith(b"PWD=")}, wanted, "environment")


@CHECKS.append
def arguments_are_exact(bench: Bench) -> None:
    words = [b"", b" ", b"--", b"-x", b"\xff\xfe", "☕".encode(), b"a\nb", b"$(id)"]
    found = completed(bench.run(["/usr/bin/printf", "%s|", *words])).stdout
    same(found, b"".join(word + b"|" for word in words), "arguments")


@CHECKS.append
def bad_names_in_the_environment_are_refused(bench: Bench) -> None:
    for name in ("", "a=b", "a;b", "a\0b"):
        refused(bench, "env", env={name: "1"})
    refused(bench, "env", env={"A": "a\0b"})
    refused(bench, "argv", command=[])
    refused(bench, "argv[1]", command=["/bin/echo", "a\0b"])
    refused(bench, "argv[1]", command=["/bin/echo", "x" * 200_000])


@CHECKS.append
def the_directory_is_where_the_command_starts(bench: Bench) -> None:
    lower = bench.directory({"a dir/x": "", "new\nline/x": "", "file": ""})
    (lower / "link").symlink_to("a dir")
    for name in ("a dir", "new\nline"):
        outcome = completed(bench.run("pwd -P; ls", bench.writable(lower), cwd=f"/mnt/work/{name}"))
        same(outcome.stdout, f"/mnt/work/{name}\nx\n".encode(), "pwd and ls")
    same(completed(bench.run("ls", bench.writable(lower), cwd="/mnt/work/link")).stdout, b"x\n", "ls through a link")
    for name in ("missing", "file", "a dir/missing"):
        refused(bench, f"/mnt/work/{name}", bench.writable(lower), cwd=f"/mnt/work/{name}")
    for cwd in ("", "relative", "a\0b"):
        refused(bench, "cwd", cwd=cwd)


# --- mounts -------------------------------------------------------------------------------------------------------


@CHECKS.append
def read_only_mounts_refuse_writes(bench: Bench) -> None:
    base, delta = bench.directory({"f": "base", "g": "base"}), bench.directory({"f": "delta"})
    for lowers in ((base,), (base, delta)):
        mount = Mount("/mnt/ro", tuple(map(str, lowers)))
        outcome = completed(bench.run("cat f g; touch new || chmod 600 f || rm g", mount, cwd="/mnt/ro"), 1)
        same(outcome.stdout, b"basebase" if len(lowers) == 1 else b"deltabase", "content")
        same(outcome.stderr.lower().count(b"read-only file system"), 3, f"refusals in {outcome.stderr!r}")
    same(sorted(os.listdir(base)), ["f", "g"], "the lower layer")


@CHECKS.append
def writes_go_to_the_upper_layer_only(bench: Bench) -> None:
    base = bench.directory({"keep": "1", "change": "old", "remove": "x", "tree/a": "1", "tree/b": "2"})
    mount = bench.writable(base)
    script = "echo new > change; echo n > made; rm remove; rm -r tree; mkdir tree; echo c > tree/c; ls tree keep"
    same(completed(bench.run(script, mount, cwd="/mnt/work")).stdout, b"keep\n\ntree:\nc\n", "ls")
    upper = Path(str(mount.upper))
    same(sorted(os.listdir(upper)), ["change", "made", "remove", "tree"], "the upper layer")
    same((upper / "change").read_text(), "new\n", "content of a changed file")
    found = (upper / "remove").lstat()
    same((stat.S_ISCHR(found.st_mode), found.st_rdev), (True, 0), "the whiteout of a removed file")
    opaque = os.getxattr(upper / "tree", f"{bench.engine.xattr_prefix}opaque")
    same((opaque, sorted(os.listdir(upper / "tree"))), (b"y", ["c"]), "the opaque directory")
    same(sorted(os.listdir(base)), ["change", "keep", "remove", "tree"], "the lower layer")
    same((base / "change").read_text(), "old", "content in the lower layer")


@CHECKS.append
def whiteouts_in_a_lower_layer_hide(bench: Bench) -> None:
    base = bench.directory({"gone": "1", "kept": "1", "tree/old": "1"})
    delta = bench.directory({"tree/new": "2", "more": "2"})
    os.mknod(delta / "gone", stat.S_IFCHR | 0o600, os.makedev(0, 0))
    os.setxattr(delta / "tree", f"{bench.engine.xattr_prefix}opaque", b"y")
    for mount in (bench.writable(base, delta), Mount("/mnt/work", (str(base), str(delta)))):
        outcome = completed(bench.run("ls -d *; ls tree", mount, cwd="/mnt/work"))
        same(outcome.stdout, b"kept\nmore\ntree\nnew\n", "ls over a delta")


@CHECKS.append
def several_mounts_and_odd_layer_names_work(bench: Bench) -> None:
    odd = bench.directory({"x,y:z\\w 'q\"/f": "odd"}) / "x,y:z\\w 'q\""
    plain = bench.directory({"f": "plain"})
    mounts = [bench.writable(odd), bench.writable(odd, plain, target="/mnt/b"), Mount("/data/ro", (str(odd),))]
    mounts.append(Mount("/mnt/two", (str(plain), str(odd))))
    script = "cat /mnt/work/f /mnt/b/f /data/ro/f /mnt/two/f; echo 1 > /mnt/work/w; echo 2 > /mnt/b/w"
    same(completed(bench.run(script, *mounts)).stdout, b"oddplainoddodd", "content")
    written = [Path(str(mount.upper), "w").read_text() for mount in mounts[:2]]
    same(written, ["1\n", "2\n"], "what went to each upper layer")


@CHECKS.append
def fifty_at_once_share_a_lower_layer(bench: Bench) -> None:
    lower = bench.directory({f"f{i}": str(i) for i in range(50)})
    mounts = [bench.writable(lower) for _ in range(50)]

    def one(i: int) -> bytes:
        script = f"cat f{i}; echo {i} > mine; rm f{i}; sleep 0.1; ls | wc -l"
        return completed(bench.run(script, mounts[i], cwd="/mnt/work")).stdout

    with ThreadPoolExecutor(50) as pool:
        found = list(pool.map(one, range(50)))
    same(found, [f"{i}50\n".encode() for i in range(50)], "what each saw")
    for i, mount in enumerate(mounts):
        same(Path(str(mount.upper), "mine").read_text(), f"{i}\n", "what each wrote")


@CHECKS.append
def bad_mounts_are_refused(bench: Bench) -> None:
    lower = str(bench.directory())
    for target in ("relative", "/", "/mnt/../etc", "/mnt/a/", "//mnt", "/mnt/a\0b"):
        refused(bench, "target", Mount(target, (lower,)))
    refused(bench, "/mnt/a/b", Mount("/mnt/a", (lower,)), Mount("/mnt/a/b", (lower,)))
    refused(bench, "/mnt/a", Mount("/mnt/a", ()))
    refused(bench, "upper", Mount("/mnt/a", (lower,), upper=lower))
    used = bench.writable(Path(lower))
    Path(str(used.work), "x").touch()
    refused(bench, str(used.work), used)
    refused(bench, lower + "/missing", Mount("/mnt/a", (lower + "/missing",)))


@CHECKS.append
def bad_limits_are_refused(bench: Bench) -> None:
    for value in (0, -1, float("nan")):
        refused(bench, "timeout_s", limits=Limits(timeout_s=value))
        refused(bench, "cpus", limits=Limits(cpus=value))
    for count in (0, -1, 1000):
        refused(bench, "memory_bytes", limits=Limits(memory_bytes=count))


# --- isolation ----------------------------------------------------------------------------------------------------


@CHECKS.append
def only_the_three_streams_are_open(bench: Bench) -> None:
    same(completed(bench.run("ls /proc/$$/fd; true")).stdout.split(), [b"0", b"1", b"2"], "open files")


@CHECKS.append
def the_host_s_processes_and_files_are_out_of_sight(bench: Bench) -> None:
    secret = bench.directory({"secret": "s"}) / "secret"
    outcome = completed(bench.run(f"test ! -e {secret} && ls /proc | grep -c '^[0-9]'"))
    if int(outcome.stdout) > 20:
        fail(f"{int(outcome.stdout)} processes are in sight")
    completed(bench.run(f"kill -9 {os.getpid()}; kill -0 {os.getpid()}"), 1)


@CHECKS.append
def scratch_space_is_private_and_fresh(bench: Bench) -> None:
    for _ in range(2):
        completed(bench.run("for d in /tmp /dev/shm; do test ! -e $d/mark && echo 1 > $d/mark || exit 5; done"))


@CHECKS.append
def a_network_is_given_or_refused(bench: Bench) -> None:
    """Asking for what an engine cannot give is refused before anything starts, or given."""
    try:
        completed(bench.run("exit 0", network=True))
    except EngineUnavailable as error:
        if "network" not in str(error):
            fail(f"the refusal does not say why: {error}")
