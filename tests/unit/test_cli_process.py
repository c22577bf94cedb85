"""What only a process of its own shows: start-up, signals, pipes and a terminal."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
import tty
from collections.abc import Callable, Iterator
from pathlib import Path
from struct import pack
from typing import Any

import pytest
from click.testing import CliRunner

from fanout.cli.root import cli

COMMAND = (sys.executable, "-m", "fanout")
#: As long as a loaded machine may take for what should take a second.
PATIENCE_S = 30.0


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    return {
        **os.environ,
        "FANOUT_STORE": f"file://{tmp_path}/store",
        "FANOUT_CACHE_DIR": f"{tmp_path}/cache",
        "TERM": "xterm-256color",
        "COLUMNS": "",
        "PYTHONUNBUFFERED": "",
        "LC_ALL": "C.UTF-8",
    }


@pytest.fixture
def start(environ: dict[str, str]) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Starts `fanout WORDS`; ends it when the test is over."""
    started: list[subprocess.Popen[bytes]] = []

    def run(*words: str, **options: Any) -> subprocess.Popen[bytes]:
        given = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
        started.append(subprocess.Popen([*COMMAND, *words], env=environ, **given))
        return started[-1]

    yield run
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def here(environ: dict[str, str]) -> Callable[..., bytes]:
    """Runs `fanout WORDS` in this process, which is quicker; returns its standard output."""
    runner = CliRunner(env=environ)

    def run(*words: str, stdin: bytes = b"") -> bytes:
        result = runner.invoke(cli, list(words), input=stdin, prog_name="fanout")
        assert result.exit_code == 0, (words, result.output)
        return result.stdout_bytes

    return run


@pytest.fixture
def ws(here: Callable[..., bytes]) -> str:
    here("disk", "create", "ws")
    return "ws"


Start = Callable[..., "subprocess.Popen[bytes]"]
Here = Callable[..., bytes]


def alive(marker: str) -> list[int]:
    """The processes that have `marker` as an argument of their own."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                arguments = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if marker.encode() in arguments:
                found.append(int(entry.name))
    return found


def eventually(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def test_help_loads_nothing_heavy() -> None:
    """What keeps `fanout --help` under 0.3 s: counted in modules, which no other load on the machine changes."""
    script = (
        "import sys\nfrom fanout.cli import main\nsys.argv = ['fanout', '--help']\ntry:\n    main()\n"
        "except SystemExit as end:\n    assert end.code == 0\nprint(*sys.modules, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    loaded = set(done.stderr.split())
    assert "Commands:" in done.stdout
    heavy = {
        "boto3",
        "botocore",
        "rich",
        "httpx",
        "ray",
        "fanout.local",
        "fanout.run.exec",
        "fanout.store.s3",
        "zstandard",
    }
    assert not loaded & heavy


def test_python_dash_m_and_exit_code(start: Start) -> None:
    process = start("exec", "exit 9")
    assert process.wait(PATIENCE_S) == 9


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_ends_everything(start: Start, ws: str, number: signal.Signals, code: int, here: Here) -> None:
    marker = f"7{os.getpid()}.{number:d}"
    process = start("map", "-d", ws, "echo {} > f{}; sleep " + marker, "1", "2")
    eventually(lambda: len(alive(marker)) >= 2, "the commands start")
    process.send_signal(number)
    _, stderr = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == code
    assert stderr == b"fanout: interrupted; nothing is left running\n"
    assert alive(marker) == []
    assert here("ls", ws) == b""


def test_ignored_interrupts_stay_ignored(start: Start) -> None:
    process = start(
        "exec", "echo on; sleep 1; echo done", preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN)
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"on\n"
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=PATIENCE_S)[0] == b"done\n"
    assert process.returncode == 0


def test_a_reader_who_leaves_is_no_error(start: Start, ws: str) -> None:
    process = start("exec", "-d", ws, "echo x > f; yes")
    assert process.stdout is not None
    assert process.stdout.read(4) == b"y\ny\n"
    process.stdout.close()
    process.stdout = None
    _, stderr = process.communicate(timeout=PATIENCE_S)
    assert stderr == b""
    assert process.returncode == 141


def test_a_listing_may_be_cut_short(start: Start, ws: str, tmp_path: Path, here: Here) -> None:
    (tmp_path / "many").mkdir()
    for number in range(1000):
        (tmp_path / "many" / f"{number:0100d}").touch()
    here("put", ws, str(tmp_path / "many"), "/")
    for words in (("ls", ws), ("ls", ws, "--json")):
        process = start(*words)
        assert process.stdout is not None
        process.stdout.read(10)
        process.stdout.close()
        process.stdout = None
        assert process.communicate(timeout=PATIENCE_S)[1] == b""
        assert process.returncode == 141


def test_output_comes_as_it_is_written(start: Start) -> None:
    process = start("exec", "echo first; sleep 1.5; head -c 300000 /dev/zero; echo last >&2")
    assert process.stdout is not None
    assert process.stdout.readline() == b"first\n"
    arrived_s = time.monotonic()
    stdout, stderr = process.communicate(timeout=PATIENCE_S)
    assert time.monotonic() - arrived_s > 1
    assert stdout == bytes(300_000)
    assert stderr == b"last\n"


def test_a_conflict_says_what_to_do(start: Start, ws: str, here: Here) -> None:
    here("branch", ws, "side")
    process = start("exec", "-d", "w=ws@side", "echo ready; sleep 3; echo mine > f")
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    here("put", "ws@side", "-", "f", stdin=b"theirs")
    _, stderr = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 75
    (line,) = stderr.decode().splitlines()
    advice = re.fullmatch(
        r"fanout: 1 conflicting path\(s\) on disk 'ws': 'f'; the changes are kept on branch '(\S+)'; "
        r"see them: (fanout diff ws side \1); take them: (fanout merge ws@side \1 --on-conflict theirs)",
        line,
    )
    assert advice is not None, line
    diff, merge = (advice[group].split()[1:] for group in (2, 3))
    assert here(*diff) == b"M f\n"
    here(*merge)
    assert here("cat", "ws@side", "f") == b"mine\n"


def test_locks_are_shown_and_broken(start: Start, ws: str, here: Here) -> None:
    """A held checkout keeps others off its path; broken, its holder's commit fails."""
    holder = start("exec", "-d", ws, "--checkout", "src", "echo ready; sleep 12; echo 1 > src")
    assert holder.stdout is not None
    assert holder.stdout.readline() == b"ready\n"
    (held,) = json.loads(here("locks", ws, "--json"))
    assert held["paths"] == ["/src"]
    assert held["id"] in here("locks", ws).decode()
    waiter = start("exec", "-d", ws, "--checkout", "ws:/src", "--queue-ms", "50", "true")
    _, stderr = waiter.communicate(timeout=PATIENCE_S)
    assert waiter.returncode == 75, stderr
    assert here("locks", ws, "--break", held["id"]) == b""
    _, stderr = holder.communicate(timeout=PATIENCE_S)
    assert holder.returncode == 75, stderr
    assert stderr.startswith(b"fanout: ")
    assert here("ls", ws) == b""


def test_an_interrupted_demo_leaves_no_disk(start: Start, tmp_path: Path, here: Here) -> None:
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "test_a.py").touch()
    marker = f"8{os.getpid()}.0"
    process = start("demo", str(tmp_path / "project"), "--command", f"sleep {marker} # {{}}")
    eventually(lambda: alive(marker), "the command starts")
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130
    assert alive(marker) == []
    assert here("disk", "ls") == b""


def test_output_that_cannot_be_written_is_an_error(start: Start, ws: str, here: Here) -> None:
    here("put", ws, __file__, "/")
    for words in (("ls", ws), ("cat", ws, Path(__file__).name), ("exec", "echo out")):
        with open("/dev/full", "wb") as full:
            process = start(*words, stdout=full)
            _, stderr = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 74
        assert stderr == b"fanout: [Errno 28] No space left on device\n"


def test_a_terminal_without_unicode(start: Start, ws: str, environ: dict[str, str], tmp_path: Path, here: Here) -> None:
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "☕").touch()
    here("put", ws, str(tmp_path / "tree"), "/")
    environ["PYTHONIOENCODING"] = "ascii"
    assert start("ls", ws).communicate(timeout=PATIENCE_S)[0] == b"\\u2615\n"


def test_closed_output(environ: dict[str, str], ws: str) -> None:
    shell = f"exec {sys.executable} -m fanout disk ls >&- 2>&-"
    assert subprocess.run(["/bin/sh", "-c", shell], env=environ).returncode == 0


# -- on a terminal ----------------------------------------------------------------------------------------------


def on_terminal(start: Start, *words: str, columns: int = 80, answer: bytes = b"") -> tuple[int, str]:
    """Run on a terminal of 24 lines; returns the exit code and everything that was written to it."""
    import fcntl
    import termios

    master, slave = pty.openpty()
    tty.setraw(slave)
    fcntl.ioctl(slave, termios.TIOCSWINSZ, pack("HHHH", 24, columns, 0, 0))
    process = start(*words, stdin=slave, stdout=slave, stderr=slave, start_new_session=True)
    os.close(slave)
    if answer:
        os.write(master, answer)
    written = b""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        if select.select([master], [], [], 0.1)[0]:
            try:
                chunk = os.read(master, 1 << 16)
            except OSError:  # everybody has closed the other side
                break
            if not chunk:
                break
            written += chunk
    os.close(master)
    return process.wait(PATIENCE_S), written.decode()


def plain(text: str) -> list[str]:
    """The lines of what a terminal was sent, colours taken out."""
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text).replace("\r", "").split("\n")


def test_terminal_summary_of_an_exec(start: Start, ws: str) -> None:
    code, text = on_terminal(start, "exec", "-d", ws, "echo out; echo 1 > f; exit 3")
    lines = plain(text)
    assert code == 3
    assert lines[0] == "out"
    assert re.fullmatch(r"exit 3 · queue \S+ ms · execute \S+ ms · commit \S+ ms · ws: 1 path, commit 1", lines[1])
    assert plain(on_terminal(start, "exec", "-q", "echo out")[1]) == ["out", ""]


def test_terminal_progress_and_table(start: Start) -> None:
    items = [f"item-{number}-{'x' * 60}" for number in range(30)]
    code, text = on_terminal(start, "map", "-n", "4", "sleep 0.1; echo result of {}", *items)
    assert code == 0
    assert "queued" in text
    assert "running" in text
    assert "of 30 done" in text
    lines = plain(text)
    (header,) = [i for i, line in enumerate(lines) if line.split()[-4:] == ["queue", "execute", "commit", "result"]]
    rows = lines[header + 1 : header + 31]
    assert [row.split("-")[1] for row in rows] == [str(number) for number in range(30)]
    assert all(len(row) <= 80 for row in rows)
    # The live lines are gone, and the cursor is back.
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")


def test_terminal_is_not_commanded_by_names(start: Start, ws: str, tmp_path: Path, here: Here) -> None:
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "\x1b]0;owned\x07\u202e").touch()
    here("put", ws, str(tmp_path / "tree"), "/")
    for words in (("ls", ws), ("ls", "-lR", ws), ("log", "-c", ws), ("diff", ws, "0"), ("rm", ws, "\x1b]0;owned")):
        _, text = on_terminal(start, *words)
        assert "\x1b]" not in text
        assert "\x07" not in text
        assert "\u202e" not in text
        assert "\\x1b]0;owned" in text
    _, text = on_terminal(start, "map", "printf '\\033]0;owned\\007%s' {}", "\x1b]0;item")
    assert "\x1b]" not in text


def test_terminal_is_asked_before_a_disk_goes(start: Start, ws: str, here: Here) -> None:
    code, text = on_terminal(start, "disk", "rm", ws, answer=b"n\n")
    assert "Delete ws with all history?" in text
    assert code == 130
    assert here("disk", "ls").startswith(b"ws ")
    assert on_terminal(start, "disk", "rm", ws, answer=b"y\n")[0] == 0
    assert here("disk", "ls") == b""
