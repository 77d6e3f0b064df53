"""Serves an environment: `/schema`, and a session for each connection to `/ws`."""

# pyright: reportMissingImports=false

import inspect
import json
from collections.abc import Callable
from typing import Any

from fastapi import FastAPI, WebSocket, WebSocketDisconnect
from pydantic import ValidationError


def create_app(
    environment: Callable[[], Any], action: Any, observation: Any, *, env_name: str = "", max_concurrent_envs: int = 1
) -> FastAPI:
    app = FastAPI(title=env_name)
    sessions: set[Any] = set()

    @app.get("/schema")
    async def schema() -> dict[str, Any]:  # pyright: ignore[reportUnusedFunction]
        return {"action": action.model_json_schema(), "observation": observation.model_json_schema(), "state": {}}

    @app.websocket("/ws")
    async def session(websocket: WebSocket) -> None:  # pyright: ignore[reportUnusedFunction]
        await websocket.accept()
        if len(sessions) >= max_concurrent_envs:
            await websocket.send_text(_error("CAPACITY_REACHED", "Server at capacity"))
            await websocket.close()
            return
        sessions.add(environment_of_session := environment())
        try:
            while (message := json.loads(await websocket.receive_text()))["type"] != "close":
                await websocket.send_text(_answer(environment_of_session, action, message))
        except WebSocketDisconnect:
            return
        finally:
            environment_of_session.close()
            sessions.discard(environment_of_session)

    return app


def _answer(environment: Any, action: Any, message: dict[str, Any]) -> str:
    try:
        if message["type"] == "reset":
            found = environment.reset(**_known(environment.reset, message["data"]))
        else:
            found = environment.step(action.model_validate(message["data"]))
    except ValidationError as error:
        return _error("VALIDATION_ERROR", "Invalid message", errors=json.loads(error.json(include_url=False)))
    except Exception as error:
        return _error("EXECUTION_ERROR", str(error))
    shown = found.model_dump(exclude={"reward", "done"})
    return json.dumps(
        {"type": "observation", "data": {"observation": shown, "reward": found.reward, "done": found.done}}
    )


def _known(method: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    parameters = inspect.signature(method).parameters
    if any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values()):
        return arguments
    return {name: value for name, value in arguments.items() if name in parameters}


def _error(code: str, message: str, **more: Any) -> str:
    return json.dumps({"type": "error", "data": {"message": message, "code": code, **more}})
