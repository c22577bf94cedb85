"""A real server process for tests, and what is needed to talk to it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

__all__ = ["Running", "running_server"]


@dataclass
class Running:
    """A server that runs. `token` is its administrator's (that of the first server on the store made it).

    `s3_url` is a port on which all is S3; `access_key` and `secret_key` are the token's for S3. `log` holds what the
    server logged.
    """

    url: str
    s3_url: str
    token: str
    access_key: str
    secret_key: str
    store: str
    process: subprocess.Popen[str]
    log: Path
    client: httpx.Client

    def running(self) -> int:
        """How many execs hold a slot."""
        text = self.client.get(f"{self.url}/metrics").text
        return int(float(re.findall(r'^fanout_execs\{state="running"\} (\S+)$', text, re.M)[0]))

    def call(self, method: str, path: str, body: object = None, token: str | None = None) -> httpx.Response:
        """Make one REST call below /api, with the administrator's token by default."""
        headers = {"Authorization": self.token if token is None else token}
        return self.client.request(method, f"{self.url}/api{path}", json=body, headers=headers)

    @contextmanager
    def meanwhile(self, call: Callable[[], Any]) -> Iterator[threading.Thread]:
        """Have a call that runs an exec made in another thread, from the moment its command holds a slot."""
        before = self.running()
        thread = threading.Thread(target=call)
        thread.start()
        while self.running() == before and thread.is_alive():
            time.sleep(0.02)
        yield thread
        thread.join()

    def lines(self, message: str = "request") -> list[dict[str, Any]]:
        """Return what was logged under a message."""
        told = [json.loads(line) for line in self.log.read_text().splitlines()]
        return [line for line in told if line["message"] == message]

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Send a signal and wait for the end; returns the exit code."""
        self.process.send_signal(number)
        return self.process.wait(60)


@contextmanager
def running_server(
    directory: Path,
    *arguments: str,
    store: str | None = None,
    token: str | None = None,
    environ: Mapping[str, str] | None = None,
    options: Sequence[str] = (),
) -> Iterator[Running]:
    """Run `fanout serve` in a process of its own, on free ports, below `directory`; it is stopped in the end.

    `arguments` go to `serve`, `options` before it. `store` (default: a directory) and `token`: those of another server
    to share a bucket with.
    """
    directory.mkdir(parents=True, exist_ok=True)
    store = store or f"file://{directory / 'store'}"
    log = Path(tempfile.mkstemp(prefix="server-", suffix=".log", dir=directory)[1])
    command = [sys.executable, "-m", "fanout", "--store", store, "--engine", "bubblewrap"]
    command += ["--cache-dir", tempfile.mkdtemp(dir=directory)]
    command += [*options, "serve", "--port", "0", "--s3-port", "0", *arguments]
    with log.open("w") as errors:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, env={**os.environ, **(environ or {})}
        )
    try:
        assert process.stdout is not None
        told = process.stdout.readline()
        found = re.search(r"at (http://\S+) \(S3: (http://\S+),", told)
        assert found, f"the server did not start: {told}{log.read_text()}"
        if token is None and "--no-auth" not in arguments:
            token = process.stdout.readline().split()[-1]
        access_key, secret_key = _s3_credentials(store, token) if token else ("", "")
        with httpx.Client(timeout=120, trust_env=False) as client:
            yield Running(found[1], found[2], token or "", access_key, secret_key, store, process, log, client)
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
        process.communicate()


def _s3_credentials(store: str, token: str) -> tuple[str, str]:
    from fanout.runtime import system
    from fanout.server.keys import Keys
    from fanout.store.open import open_store

    opened = open_store(store)
    try:
        key_id = token.split("-")[1]
        return key_id, Keys(opened, system).s3_secret(key_id)
    finally:
        opened.close()
