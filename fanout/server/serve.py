"""Running the application: sockets, the HTTP server, signals, and shutting down without losing anything.

Owns the order in which a server stops. Knows no routes.
"""

from __future__ import annotations

import contextlib
import signal
import socket
from collections.abc import Callable, Generator
from dataclasses import dataclass

import anyio
import anyio.to_thread
import uvicorn

from fanout.errors import Invalid
from fanout.server.app import create_app
from fanout.server.protocol import bounded
from fanout.server.state import State

__all__ = ["Listening", "serve"]

#: How long an idle connection is kept, in seconds: longer than clients keep it, so that none is closed under a request.
_IDLE_S = 75
#: Connections that may wait to be accepted.
_BACKLOG = 2048
#: What other requests get to be answered once all execs are over, in seconds.
_LAST_ANSWERS_S = 10


@dataclass(frozen=True, slots=True)
class Listening:
    """Where a server can be reached."""

    url: str
    s3_url: str


class _Server(uvicorn.Server):
    """uvicorn without its own signal handling: when to stop is decided below."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


async def serve(state: State, host: str, port: int, s3_port: int | None, ready: Callable[[Listening], None]) -> None:
    """Serve an opened state until SIGTERM or SIGINT. Port 0 takes a free one; `ready` is told which.

    At the first signal the server says that it is not ready, starts no execs and lets those under way finish; at the
    second it stops at once. Either way nothing is half committed.
    """
    app = create_app(state)
    sockets = [_bind(host, port)]
    if s3_port is not None:
        sockets.append(_bind(host, s3_port))
        app.s3_port = sockets[1].getsockname()[1]
    config = uvicorn.Config(
        app,
        http=bounded(state.limits.header_bytes, state.limits.header_s),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        limit_concurrency=state.limits.connections,
        timeout_keep_alive=_IDLE_S,
        timeout_graceful_shutdown=_LAST_ANSWERS_S,
    )
    server = _Server(config)
    async with anyio.create_task_group() as group:
        group.start_soon(_stop_on_signals, state, server, group.cancel_scope)
        urls = [f"http://{_shown(host)}:{each.getsockname()[1]}" for each in sockets]
        ready(Listening(urls[0], urls[-1]))
        await server.serve(sockets)
        group.cancel_scope.cancel()


async def _stop_on_signals(state: State, server: _Server, everything: anyio.CancelScope) -> None:
    with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async with anyio.create_task_group() as group:
            received = 0
            async for _ in signals:
                received += 1
                if received == 1:
                    group.start_soon(_drain, state, server)
                else:
                    server.force_exit = server.should_exit = True
                    everything.cancel()


async def _drain(state: State, server: _Server) -> None:
    if not await state.drain():
        await anyio.to_thread.run_sync(state.fanout.stop_execs)
    server.should_exit = True  # what else is under way is answered, or cut after a while


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # By name: asyncio turns Nagle's algorithm off only where the protocol is told, and it costs 40 ms an answer.
    listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
        listening.listen(_BACKLOG)  # now: whoever is told that the server is ready finds it so
    except OSError as error:
        listening.close()
        raise Invalid(f"cannot listen on {host}:{port}: {error.strerror or error}") from error
    listening.set_inheritable(False)
    return listening


def _shown(host: str) -> str:
    name = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, host)
    return f"[{name}]" if ":" in name and not name.startswith("[") else name
