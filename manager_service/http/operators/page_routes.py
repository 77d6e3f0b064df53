"""GET /: the web page, and the files that it needs at /page. It shows what the API answers, and asks nothing of another server.

Its files are plain ones, in manager_service/page: no build makes them. What tenants wrote is shown as text alone, and the headers
forbid whatever else could run it.
"""

import hashlib
from pathlib import Path

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

FOLDER = Path(__file__).resolve().parent.parent / "page"
TYPES = {
    ".html": "text/html",
    ".js": "text/javascript",
    ".css": "text/css",
    ".txt": "text/plain",
    ".svg": "image/svg+xml",
}
SOURCES = {
    "default-src": "'none'",
    "script-src": "'self'",
    "style-src": "'self'",
    "img-src": "'self'",
    "connect-src": "'self'",
    "base-uri": "'none'",
    "form-action": "'none'",
    "frame-ancestors": "'none'",
    "require-trusted-types-for": "'script'",
    "trusted-types": "'none'",
}
HEADERS = {
    "Content-Security-Policy": "; ".join(f"{name} {value}" for name, value in SOURCES.items()),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def install(app: FastAPI) -> None:
    """Adds a path for each file: nothing else of the disk can be asked for."""
    for file in sorted(FOLDER.iterdir()):
        if file.suffix in TYPES:
            _serve(app, "/" if file.name == "index.html" else f"/page/{file.name}", file)


def _serve(app: FastAPI, path: str, file: Path) -> None:
    content = file.read_bytes()
    headers = {**HEADERS, "ETag": f'"{hashlib.sha256(content).hexdigest()[:16]}"'}

    async def answer(request: Request) -> Response:
        if request.headers.get("if-none-match") == headers["ETag"]:
            return Response(status_code=304, headers=headers)
        return Response(content, media_type=TYPES[file.suffix], headers=headers)

    app.add_route(path, answer, include_in_schema=False)
