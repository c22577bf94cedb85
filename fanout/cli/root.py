"""The `fanout` command: every subcommand in one place.

Owns the list of commands. Importing a command's module must cost nothing: what a command needs, it imports when run.
"""

from __future__ import annotations

import os
import sys

import click

from fanout.cli import files, history, maintain, run
from fanout.cli.app import App, Globals
from fanout.cli.bench import bench
from fanout.cli.demo import demo
from fanout.cli.disk import disk
from fanout.cli.doctor import doctor
from fanout.cli.grep import grep
from fanout.cli.keys import keys
from fanout.cli.serve import serve

__all__ = ["cli", "main"]


@click.group(cls=App, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.option("--store", metavar="URL", help="file://, s3:// or memory:// URL. [FANOUT_STORE]")
@click.option("--engine", metavar="NAME", help="auto, bubblewrap or qemu. [FANOUT_ENGINE]")
@click.option("--cache-dir", metavar="DIR", help="Where this host keeps copies of disks. [FANOUT_CACHE_DIR]")
@click.option("--url", metavar="URL", help="A fanout server to use instead of this host. [FANOUT_URL]")
@click.version_option(package_name="fanout", prog_name="fanout", message="%(prog)s %(version)s")
@click.pass_context
def cli(context: click.Context, store: str | None, engine: str | None, cache_dir: str | None, url: str | None) -> None:
    """Run many commands at once on one shared, versioned, S3-backed disk.

    \b
    DISK is name, name@branch or name@checkpoint.
    MOUNT (-d) is DISK, or NAME=DISK to see it at /mnt/NAME, then :ro, :conditional or :shared.
    """
    context.obj = Globals(store=store, engine=engine, cache_dir=cache_dir, url=url)


for _command in (
    demo,
    disk,
    *files.COMMANDS,
    *run.COMMANDS,
    grep,
    *history.COMMANDS,
    *maintain.COMMANDS,
    serve,
    keys,
    doctor,
    bench,
):
    cli.add_command(_command)


def main() -> None:
    """Run the command line of this process and exit."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # closed by whoever started us
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 - for the life of the process
        else:
            # A terminal that cannot show a character must not stop us from saying the rest.
            stream.reconfigure(errors="backslashreplace")
    cli.main(prog_name="fanout")
