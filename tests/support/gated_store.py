"""An object storage that answers when a test lets it."""

import asyncio

from common.store.objects import InThread, Objects


class GatedStore(Objects):
    """A store that answers the calls about payloads only once the gate is open."""

    def __init__(self, folder: Objects) -> None:
        super().__init__(folder._backend)  # pyright: ignore[reportPrivateUsage]
        self.gate = asyncio.Event()
        self.asked: list[str] = []
        self.written: list[str] = []

    async def write(self, path: str, data: bytes) -> None:
        self.asked.append(path)
        await super().write(path, data)
        self.written.append(path)
        await self.gate.wait()

    def payloads(self) -> list[str]:
        """Payloads that were asked for."""
        return [path for path in self.asked if path.startswith("payloads/")]

    async def get(self, path: str, beside: InThread = asyncio.to_thread) -> bytes:
        if path.startswith("payloads/") or path.endswith("/00000001/manifest.json"):
            self.asked.append(path)
            await self.gate.wait()
        return await super().get(path, beside)
