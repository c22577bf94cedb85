"""The remote connection: the public interface over HTTP. `connection.RemoteFanout` is it."""

from fanout.client.connection import RemoteFanout

__all__ = ["RemoteFanout"]
