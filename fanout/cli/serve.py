"""`fanout serve`: this host's disks and execs for others, over REST and S3."""

from __future__ import annotations

import click

from fanout.cli.app import settings

__all__ = ["serve"]

_LOOPBACK = ("127.0.0.1", "::1", "localhost")


@click.command(short_help="Serve disks and execs over HTTP (REST and S3).")
@click.option("--host", default="127.0.0.1", show_default=True, help="The address to listen on.")
@click.option("--port", type=click.IntRange(0, 65535), default=7070, show_default=True, help="0 takes a free one.")
@click.option("--s3-port", type=click.IntRange(0, 65535), help="A second port on which all is S3.")
@click.option(
    "--max-in-flight", type=click.IntRange(1, 100_000), metavar="N", help="Execs that run at once. [8 per core]"
)
@click.option("--grace", type=click.FloatRange(0), default=30.0, show_default=True, metavar="SECONDS",
              help="What running execs get to finish at SIGTERM.")  # fmt: skip
@click.option("--max-queued", type=click.IntRange(0), default=1000, show_default=True, metavar="N",
              help="Execs that may wait for their turn; more are refused (429).")  # fmt: skip
@click.option("--log-level", type=click.Choice(["DEBUG", "INFO", "WARNING", "ERROR"], case_sensitive=False),
              default="INFO", show_default=True, help="INFO logs every request, as JSON on stderr.")  # fmt: skip
@click.option("--no-auth", is_flag=True, help="Ask nobody for a key; only on a loopback address.")
@click.pass_context
def serve(
    context: click.Context, host: str, port: int, s3_port: int | None, max_in_flight: int | None, grace: float,
    max_queued: int, log_level: str, no_auth: bool,
) -> int:  # fmt: skip
    """Serve the store's disks, and execs on this host, to clients on other machines.

    Without a key in the store yet, one for an administrator is made and shown, once.
    """
    import sys

    import anyio.to_thread
    import uvloop

    from fanout.errors import Invalid
    from fanout.server import logs
    from fanout.server.serve import Listening
    from fanout.server.serve import serve as run
    from fanout.server.state import ServerLimits, State

    if no_auth and host not in _LOOPBACK:
        raise Invalid.argument("--host", host, "with --no-auth a loopback address: whoever reaches it can do anything")
    logs.configure(log_level)
    chosen = settings(context)
    if chosen.url is not None:
        raise Invalid(f"a server serves a store, not another server: leave the URL {chosen.url} out")
    if max_in_flight is not None:
        chosen = chosen.model_copy(update={"max_in_flight": max_in_flight})

    async def work() -> None:
        state = await State(
            chosen, ServerLimits(grace_s=grace, queued_execs=max_queued), authenticate=not no_auth
        ).open()
        try:
            made = None
            if not no_auth and not await anyio.to_thread.run_sync(state.keys.any):
                made = await anyio.to_thread.run_sync(lambda: state.keys.create(nickname="admin", right="admin"))

            def ready(at: Listening) -> None:
                print(f"fanout serves {chosen.store} at {at.url} (S3: {at.s3_url}, API: {at.url}/docs)")
                if made is not None:
                    print(f"key of the administrator, shown this once: {made.token}")
                sys.stdout.flush()

            await run(state, host, port, s3_port, ready)
        finally:
            await state.close()

    uvloop.run(work())
    return 0
