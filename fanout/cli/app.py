"""The root command: global options, how errors become one line and an exit code, and how a session is opened.

Owns what all commands share. Knows none of them.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import click

if TYPE_CHECKING:
    from fanout import Fanout, Settings

__all__ = ["App", "Globals", "disk_argument", "json_option", "run_async", "session", "settings"]

#: The exit code of a command ended by a signal is 128 plus the signal, as in a shell.
_INTERRUPTED = 128 + signal.SIGINT
_BROKEN_PIPE = 128 + signal.SIGPIPE


@dataclass(frozen=True, slots=True)
class Globals:
    """The options given before the command's name; None means not given."""

    store: str | None = None
    engine: str | None = None
    cache_dir: str | None = None
    url: str | None = None

    def embedded(self) -> dict[str, Any]:
        """Return the settings of an embedded connection that were given."""
        return {"store": self.store, "engine": self.engine, "cache_dir": self.cache_dir}


class _Stopped(Exception):
    """A signal ended the command; `code` is the exit code it asks for. click has ways of its own with the built-in."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


class _PipeGone(Exception):
    """Who read our output has gone."""


class App(click.Group):
    """A group whose every failure is one line on stderr and an exit code of `fanout.errors.TABLE`."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        **extra: Any,
    ) -> Any:
        """Run the command line and exit; `standalone_mode=False` raises instead, as click documents."""
        if not standalone_mode:
            return super().main(args, prog_name, complete_var, False, **extra)
        try:
            returned = super().main(args, prog_name, complete_var, False, **extra)
            sys.stdout.flush()
        except click.exceptions.Exit as error:
            sys.exit(error.exit_code)
        except click.ClickException as error:
            _fail(_usage(error), 64)
        except (_Stopped, KeyboardInterrupt, click.Abort) as error:
            code = error.code if isinstance(error, _Stopped) else _INTERRUPTED
            _fail("interrupted; nothing is left running", code)
        except (_PipeGone, BrokenPipeError):
            _leave_pipe()
        except Exception as error:
            _fail_with(error)
        sys.exit(returned if isinstance(returned, int) else 0)


def run_async(work: Callable[[], Coroutine[Any, Any, int | None]]) -> int:
    """Run a command's coroutine on a fresh event loop and return its exit code.

    SIGINT, SIGTERM and SIGHUP cancel it, and so does a reader of ours who leaves: what it started has stopped when
    this raises.
    The second signal ends the process at once.
    """
    import asyncio

    received: list[int] = []

    async def guarded() -> int | None:
        task, loop = asyncio.current_task(), asyncio.get_running_loop()
        assert task is not None
        # What is ignored (by nohup, in a shell's background job) stays ignored.
        ends = [s for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if signal.getsignal(s) is not signal.SIG_IGN]

        def stop(number: int) -> None:
            received.append(number)
            for each in ends:
                loop.remove_signal_handler(each)
                signal.signal(each, signal.SIG_DFL)
            task.cancel()

        if threading.current_thread() is threading.main_thread():
            for each in ends:
                loop.add_signal_handler(each, stop, each)
        return await work()

    try:
        returned = asyncio.run(guarded()) or 0
        sys.stdout.flush()
        return returned
    except (KeyboardInterrupt, asyncio.CancelledError):
        raise _Stopped(128 + (received[0] if received else signal.SIGINT)) from None
    except BrokenPipeError:
        raise _PipeGone from None
    except BaseExceptionGroup as group:
        first = _first(group)
        raise (_PipeGone() if isinstance(first, BrokenPipeError) else first) from group


def session(context: click.Context, **given: Any) -> AbstractAsyncContextManager[Fanout]:
    """Return the connection that the global options, the environment and `given` (None: not given) ask for."""
    import fanout

    options = context.find_object(Globals) or Globals()
    return fanout.connect(options.url, **{**options.embedded(), **given})


def settings(context: click.Context) -> Settings:
    """Return the values that `session` goes by, checked."""
    from fanout.config import Settings

    options = context.find_object(Globals) or Globals()
    loaded = Settings.load(url=options.url, **options.embedded())
    here = options.store is not None and options.url is None  # what is asked for goes before FANOUT_URL
    return loaded.model_copy(update={"url": None}) if here else loaded


def disk_argument(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the argument DISK to a command, checked, passed as `spec`."""

    def check(context: click.Context, parameter: click.Parameter, value: str) -> str:
        from fanout.cli.spec import parse_disk

        return str(parse_disk(value))

    return click.argument("spec", metavar="DISK", callback=check)(command)


def json_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add `--json` to a command, passed as `as_json`."""
    return click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")(command)


def _usage(error: click.ClickException) -> str:
    context = getattr(error, "ctx", None)
    hint = f" (see: {context.command_path} --help)" if context is not None else ""
    return error.format_message().rstrip(".") + hint


def _first(error: BaseException) -> BaseException:
    """Return the error that a user can act on: the first leaf of a group."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _fail_with(error: BaseException) -> NoReturn:
    from fanout.errors import FanoutError, meaning

    if os.environ.get("FANOUT_DEBUG"):
        import traceback

        traceback.print_exception(error)
    if isinstance(error, FanoutError):
        _fail("; ".join([str(error), *getattr(error, "__notes__", ())]), meaning(error).exit)
    if isinstance(error, OSError):
        what = f"{error.filename!r}: {error.strerror}" if error.filename is not None else str(error)
        _fail(what, 66 if isinstance(error, FileNotFoundError) else 74)
    _fail(f"internal error: {type(error).__name__}: {error} (FANOUT_DEBUG=1 shows where)", meaning(error).exit)


def _fail(message: str, code: int) -> NoReturn:
    from fanout.cli.render import safe

    try:
        sys.stdout.flush()
    except BrokenPipeError:
        _leave_pipe()
    except OSError:  # what the message is about, most likely
        _drop_output()
    try:
        print(f"fanout: {safe(message)}", file=sys.stderr, flush=True)
    except BrokenPipeError:
        pass
    sys.exit(code)


def _leave_pipe() -> NoReturn:
    """The reader of our output is gone, which is its right: say nothing."""
    _drop_output()
    sys.exit(_BROKEN_PIPE)


def _drop_output() -> None:
    """Let what is unwritten go nowhere, so that the interpreter does not fail over it when it ends."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
