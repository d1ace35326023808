"""The door of a vLLM server: an ASGI middleware that vLLM is given by its `--middleware` option.

vLLM's own `--api-key` guards its OpenAI and token routes only; the control routes (pause, weights, RPC to the
workers) have no authentication. This one guards every route, and adds one of ours.
"""

import json
import secrets
from typing import Any

PROGRESS = "/tutti/progress"
SAMPLED = "/tutti/sampled"


class Door:
    """Refuses every HTTP request and WebSocket without `Authorization: Bearer TOKEN`.

    GET /tutti/progress answers with the count of tokens sampled so far by each request in flight, by request
    id. POST /tutti/sampled {id: start} answers with what requests have sampled from token `start` on: {id:
    {"tokens", "logprobs", "weight_versions": [[version, first token], ...] of the whole request}}.
    """

    token: str  # set before vLLM makes the instance, which it does without arguments of ours

    def __init__(self, app: Any):
        self._app = app

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif not self._admits(dict(scope["headers"]).get(b"authorization", b"")):
            await _refuse(scope["type"], send)
        elif scope["type"] == "http" and scope["path"] == PROGRESS:
            await _answer(send, 200, _progress(scope["app"].state.engine_client))
        elif scope["type"] == "http" and scope["path"] == SAMPLED:
            since = json.loads(await _body(receive))
            await _answer(send, 200, _sampled(scope["app"].state.engine_client, since))
        else:
            await self._app(scope, receive, send)

    def _admits(self, header: bytes) -> bool:
        return secrets.compare_digest(header, f"Bearer {self.token}".encode())


def _progress(engine_client: Any) -> dict[str, int]:
    states = engine_client.output_processor.request_states.values()
    return {state.external_req_id: state.detokenizer.num_output_tokens() for state in states}


def _sampled(engine_client: Any, since: dict[str, int]) -> dict[str, Any]:
    found = {}
    for state in engine_client.output_processor.request_states.values():
        start = since.get(state.external_req_id)
        if start is None:
            continue
        tokens = state.detokenizer.token_ids
        logprobs = state.logprobs_processor.logprobs
        found[state.external_req_id] = {
            "tokens": list(tokens[start:]),
            "logprobs": [logprobs[index][tokens[index]].logprob for index in range(start, len(tokens))],
            "weight_versions": state.weight_version_starts,
        }
    return found


async def _body(receive: Any) -> bytes:
    body, more = b"", True
    while more:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
    return body


async def _refuse(kind: str, send: Any) -> None:
    if kind == "websocket":
        await send({"type": "websocket.close", "code": 1008, "reason": "missing or wrong bearer token"})
    else:
        await _answer(send, 401, {"error": "missing or wrong bearer token"})


async def _answer(send: Any, status: int, content: Any) -> None:
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps(content).encode()})
