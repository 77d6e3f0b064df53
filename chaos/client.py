"""Calls the API as a patient user does: by either manager, again and again until one answers."""

import asyncio
from typing import Any

import httpx

PAUSE_S = 0.3
TIMEOUT_S = 15.0


class Unplanned(Exception):
    """The service answered something that no fault explains."""


class Client:
    """One key's view of the API."""

    def __init__(self, urls: list[str], key: str) -> None:
        self.key = key
        self._urls = list(urls)
        self._http = httpx.AsyncClient(headers={"Authorization": f"Bearer {key}"}, timeout=TIMEOUT_S, trust_env=False)

    async def close(self) -> None:
        await self._http.aclose()

    async def call(self, method: str, path: str, **options: Any) -> httpx.Response:
        """The first answer that is no error of the service's own (5xx), however long it takes to come."""
        return await self._patiently(method, f"/v1{path}", **options)

    async def tinker(self, method: str, path: str, **options: Any) -> httpx.Response:
        """The same of the Tinker protocol."""
        return await self._patiently(method, f"/api/v1{path}", **options)

    async def _patiently(self, method: str, path: str, **options: Any) -> httpx.Response:
        while True:
            try:
                answer = await self._http.request(method, self._urls[0] + path, **options)
                if answer.status_code < 500:
                    return answer
            except httpx.TransportError:
                pass
            self._urls.append(self._urls.pop(0))
            await asyncio.sleep(PAUSE_S)

    async def get(self, path: str, **params: Any) -> Any:
        """None if there is no such thing. Raises Unplanned for every other refusal."""
        answer = await self.call("GET", path, params=params)
        return None if answer.status_code == 404 else _good(answer)

    async def post(self, path: str, body: Any, **headers: str) -> Any:
        """Raises Unplanned for a refusal."""
        return _good(await self.call("POST", path, json=body, headers=headers))

    async def upload(self, name: str, content: bytes) -> str:
        """Id of a new file of items. Raises Unplanned."""
        options: Any = {"files": {"file": (name, content)}, "data": {"purpose": "fine-tune"}}
        return _good(await self.call("POST", "/files", **options))["id"]

    async def pages(self, path: str) -> list[Any]:
        """All rows of a list, newest first."""
        rows, more = list[Any](), {"limit": "100"}
        while True:
            page = await self.get(path, **more)
            rows += page["data"]
            if not page["has_more"]:
                return rows
            more["after"] = rows[-1]["id"]


def _good(answer: httpx.Response) -> Any:
    if answer.status_code >= 400:
        raise Unplanned(f"{answer.request.method} {answer.request.url}: {answer.status_code} {answer.text[:300]}")
    return answer.json()
