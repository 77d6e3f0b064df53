"""Redis behind a proxy, so that its address stays while it is killed, started again, or replaced by a replica."""

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import redis

from harness.proxy import Proxy
from harness.redis_server import RedisServer

LOST_S = 1.0
"""Seconds of writes that the replica has not heard when it takes the primary's place."""


class ReplaceableRedis:
    """One Redis at a time, with a file of its own to which it appends every write at once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._number = 0
        self.server = self._new()
        self.link = Proxy(self.server.port)

    @property
    def url(self) -> str:
        """The one that stays."""
        return f"redis://127.0.0.1:{self.link.port}/0"

    def client(self) -> "redis.Redis":
        """A connection around the proxy; it answers in text."""
        return redis.Redis(port=self.server.port, decode_responses=True)

    def delete(self, key: str) -> bool:
        """False if there is no such key, or while Redis is away."""
        with contextlib.suppress(redis.RedisError), self.client() as client:
            return client.delete(key) == 1
        return False

    async def restart(self) -> None:
        await asyncio.to_thread(self.server.restart)

    async def replace(self) -> None:
        """Lets a replica follow, cuts it off, and a second later kills the primary and puts the replica in its place."""
        replica, primary = self._new(), self.server
        with redis.Redis(port=replica.port) as client:
            client.replicaof("127.0.0.1", primary.port)
            while not _follows(client):
                await asyncio.sleep(0.05)
            client.replicaof("NO", "ONE")
        await asyncio.sleep(LOST_S)
        primary.stop()
        self.server = replica
        self.link.target_port = replica.port
        self.link.cut()

    def stop(self) -> None:
        self.server.stop()

    def _new(self) -> RedisServer:
        self._number += 1
        folder = self._folder / f"redis-{self._number}"
        folder.mkdir()
        return RedisServer.start(folder)


def _follows(client: "redis.Redis") -> bool:
    """Has the replica all that the primary has, and has it written that into its own file?"""
    info: Any = client.info()
    copied = info["master_link_status"] == "up" and not info["master_sync_in_progress"]
    return copied and not info["aof_rewrite_in_progress"] and not info["aof_rewrite_scheduled"]
