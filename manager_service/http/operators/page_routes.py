"""GET /: the web page, and the files that it needs at /page. GET /openapi.json, and GET /docs: the same document as a page.

Neither page asks anything of another server. The web page's files are in manager_service/http/page: no build makes them. What tenants
wrote is shown as text only, and the headers forbid to run it. All is made once, for anybody may ask for it, as often as they like.
"""

import base64
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from html import escape
from pathlib import Path
from typing import Any

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
STYLE = """body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}
summary{cursor:pointer}table{border-collapse:collapse}td{padding:0 1rem 0 0;vertical-align:top}
code,pre{font:14px/1.4 ui-monospace,monospace}details{margin:.3rem 0}"""
SOURCES = {
    "default-src": "'none'",
    "script-src": "'self'",
    "style-src": f"'self' 'sha256-{base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()}'",  # and that of /docs
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
    """Adds the paths to an application that is complete. Of the disk nothing but the page's files can be asked for."""
    for file in sorted(FOLDER.iterdir()):
        if file.suffix in TYPES:
            path = "/" if file.name == "index.html" else f"/page/{file.name}"
            _serve(app, path, file.read_bytes, TYPES[file.suffix], HEADERS)
    _serve(app, "/openapi.json", lambda: json.dumps(app.openapi()).encode(), "application/json", HEADERS)
    _serve(app, "/docs", lambda: page(app.openapi()).encode(), "text/html", HEADERS)


def _serve(app: FastAPI, path: str, content: Callable[[], bytes], media_type: str, headers: Mapping[str, str]) -> None:
    @cache
    def made() -> tuple[bytes, dict[str, str]]:
        body = content()
        return body, {**headers, "ETag": f'"{hashlib.sha256(body).hexdigest()[:16]}"'}

    async def answer(request: Request) -> Response:
        body, own = made()
        if request.headers.get("if-none-match") == own["ETag"]:
            return Response(status_code=304, headers=own)
        return Response(body, media_type=media_type, headers=own)

    app.add_route(path, answer, include_in_schema=False)


# ---- the document ---------------------------------------------------------------------------------------------------


def page(document: dict[str, Any]) -> str:
    """The page of an OpenAPI document."""
    info = document["info"]
    return "\n".join(
        [
            f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(info["title"])}</title>',
            f"<style>{STYLE}</style><h1>{escape(info['title'])} {escape(info['version'])}</h1>",
            f"<p>{escape(info['description'])}</p>",
            '<p>For programs: <a href="openapi.json">openapi.json</a></p>',
            *_operations(document),
            "<h2>Objects</h2>",
            *(_object(name, schema) for name, schema in sorted(document["components"]["schemas"].items())),
            "</html>",
        ]
    )


def _operations(document: dict[str, Any]) -> Iterator[str]:
    tag = ""
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            first = operation.get("tags", ["others"])[0]
            if first != tag:
                yield f"<h2>{escape(first)}</h2>"
            tag = first
            yield _operation(f"{method.upper()} {path}", operation)


def _operation(name: str, operation: dict[str, Any]) -> str:
    rows = [(one["name"], one["in"], _kind(one["schema"])) for one in operation.get("parameters", [])]
    rows += [("body", kind, _kind(each["schema"])) for kind, each in _contents(operation.get("requestBody", {}))]
    for status, answer in operation["responses"].items():
        shown = [_kind(each.get("schema", {})) for _, each in _contents(answer)]
        rows.append((status, answer["description"], " or ".join(filter(None, shown))))
    return _details(name, operation.get("description", ""), rows)


def _contents(part: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    return list(part.get("content", {}).items())


def _object(name: str, schema: dict[str, Any]) -> str:
    needed = schema.get("required", [])
    rows = [
        (field, "required" if field in needed else "", _kind(value))
        for field, value in schema.get("properties", {}).items()
    ]
    return f'<div id="{escape(name)}">{_details(name, schema.get("description", ""), rows)}</div>'


def _details(name: str, description: str, rows: list[tuple[str, str, str]]) -> str:
    """`rows`: a name, a word about it, and HTML."""
    table = "".join(f"<tr><td><code>{escape(a)}</code><td>{escape(b)}<td>{c}" for a, b, c in rows)
    return (
        f"<details><summary><code>{escape(name)}</code></summary><p>{escape(description)}</p>"
        f"<table>{table}</table></details>"
    )


def _kind(schema: dict[str, Any]) -> str:
    """A schema in a few words of HTML."""
    if "$ref" in schema:
        name = escape(schema["$ref"].rsplit("/", 1)[1])
        return f'<a href="#{name}">{name}</a>'
    if choices := schema.get("anyOf") or schema.get("oneOf"):
        return " or ".join(map(_kind, choices))
    if "const" in schema or "enum" in schema:
        return escape(", ".join(map(repr, schema.get("enum") or [schema["const"]])))
    about = f" ({escape(schema['description'])})" if "description" in schema else ""
    inner = f" of {_kind(schema['items'])}" if "items" in schema else ""
    return escape(str(schema.get("type", "any"))) + inner + about
