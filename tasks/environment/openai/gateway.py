"""The OpenAI-compatible endpoint of an environment worker.

Every episode has an API key of its own, so that a base URL and a key are all an agent needs. A key dies with
its episode: calls under way are cut off, further ones get 410. Errors have OpenAI's form and say that they
are not worth another try (`x-should-retry: false`), since no answer of ours changes by itself.
"""

import asyncio
import json
import logging
import secrets
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

from aiohttp import web

from infra.clock import now
from tasks.environment.openai import answers
from tasks.environment.openai.offers import Offers
from tasks.environment.openai.requests import Refused, chat_request, completion_request, taking
from tasks.environment.openai.run import AgentRun
from tasks.environment.sources.agent import AgentFailed, result_of

logger = logging.getLogger(__name__)

MODEL = "policy"
_DEAD_KEYS = 100_000
_MAX_BODY_BYTES = 64 << 20


class GatewayError(RuntimeError):
    """Agents cannot be served; the message names the option to change."""


class _Open:
    """An episode whose key is good."""

    def __init__(self, run: AgentRun):
        self.run = run
        self.calls: set[asyncio.Task[Any]] = set()


class AgentGateway:
    """Serves the episodes that are being run. Made by `start`."""

    def __init__(self, token: str | None = None) -> None:
        self.offers = Offers()
        self._token = token
        self._open: dict[str, _Open] = {}
        self._dead: OrderedDict[str, None] = OrderedDict()
        self._runner: web.AppRunner | None = None
        self.base_url = ""

    @classmethod
    async def start(cls, host: str, port: int = 0, token: str | None = None) -> "AgentGateway":
        """Listen on an address of this machine, by which agents reach it. Raises `GatewayError`.

        Whoever shows `token` may take episodes that are offered; without one nobody may.
        """
        gateway = cls(token)
        app = web.Application(client_max_size=_MAX_BODY_BYTES)
        app.add_routes(
            [
                web.post("/v1/chat/completions", gateway._route(gateway._chat)),
                web.post("/v1/completions", gateway._route(gateway._complete)),
                web.get("/v1/models", gateway._route(gateway._models)),
                web.get("/v1/models/{model}", gateway._route(gateway._model)),
                web.post("/tutti/v1/episodes", gateway._take),
                web.post("/tutti/v1/result", gateway._route(gateway._result)),
                web.route("*", "/{path:.*}", gateway._route(gateway._nothing)),
            ]
        )
        # An agent that hangs up cancels its call: what it never saw must not be trained.
        gateway._runner = web.AppRunner(
            app, access_log=None, handle_signals=False, handler_cancellation=True, shutdown_timeout=1.0
        )
        await gateway._runner.setup()
        try:
            await web.TCPSite(gateway._runner, host, port).start()
        except OSError as error:
            await gateway.close()
            raise GatewayError(
                f"cannot serve agents on {host}: {error}: set environment.gateway_host to an address of the "
                "machine"
            ) from error
        shown = f"[{host}]" if ":" in host else host
        gateway.base_url = f"http://{shown}:{gateway._runner.addresses[0][1]}/v1"
        return gateway

    async def close(self) -> None:
        for opened in self._open.values():
            for call in opened.calls:
                call.cancel()
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    @contextmanager
    def serving(self, run: AgentRun) -> Iterator[dict[str, Any]]:
        """Give access to `run`: base_url, api_key and model. It ends with the block."""
        key = f"sk-tutti-{secrets.token_urlsafe(24)}"
        opened = self._open[key] = _Open(run)
        try:
            yield {"base_url": self.base_url, "api_key": key, "model": MODEL}
        finally:
            del self._open[key]
            self._dead[key] = None
            if len(self._dead) > _DEAD_KEYS:
                self._dead.popitem(last=False)
            for call in opened.calls:
                call.cancel()

    # ---- inside

    def _route(
        self, answer: Callable[[web.Request, _Open], Awaitable[web.StreamResponse]]
    ) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        async def handle(request: web.Request) -> web.StreamResponse:
            try:
                opened = self._authorized(request)
                return await self._call(answer(request, opened), opened)
            except Refused as refused:
                return _refusal(refused)
            except (ConnectionResetError, asyncio.CancelledError, web.HTTPException):
                raise
            except Exception as error:
                logger.exception("a call of an agent failed")
                return _refusal(Refused(500, "internal", f"{type(error).__name__}: {error}"))

        return handle

    async def _call(self, answer: Awaitable[web.StreamResponse], opened: _Open) -> web.StreamResponse:
        """In a task of its own, which ends with the episode; the agent is then told so."""
        task: asyncio.Task[web.StreamResponse] = asyncio.ensure_future(answer)
        opened.calls.add(task)
        task.add_done_callback(opened.calls.discard)
        try:
            await asyncio.wait({task})
        finally:
            task.cancel()
        if task.cancelled():
            raise _gone()
        return task.result()

    def _authorized(self, request: web.Request) -> _Open:
        scheme, _, key = request.headers.get("Authorization", "").partition(" ")
        opened = self._open.get(key) if scheme == "Bearer" else None
        if opened is not None:
            return opened
        if key in self._dead:
            raise _gone()
        raise Refused(401, "invalid_api_key", "there is no episode with this API key")

    async def _chat(self, request: web.Request, opened: _Open) -> web.StreamResponse:
        asked = chat_request(await _body(request))
        answered = await opened.run.chat(asked, int(now()))
        if asked.sampling.stream:
            return await _stream(request, answers.chat_chunks(answered, asked.sampling.usage_in_stream))
        return web.json_response(answers.chat_completion(answered))

    async def _complete(self, request: web.Request, opened: _Open) -> web.StreamResponse:
        asked = completion_request(await _body(request))
        answered = await opened.run.complete(asked, int(now()))
        echo = opened.run.prompt_text(asked) if asked.echo else ""
        if asked.sampling.stream:
            usage = asked.sampling.usage_in_stream
            return await _stream(request, answers.completion_chunks(answered, usage, echo))
        return web.json_response(answers.completion(answered, echo))

    async def _models(self, _: web.Request, __: _Open) -> web.StreamResponse:
        return web.json_response({"object": "list", "data": [_described(MODEL)]})

    async def _model(self, request: web.Request, _: _Open) -> web.StreamResponse:
        return web.json_response(_described(request.match_info["model"]))

    async def _take(self, request: web.Request) -> web.StreamResponse:
        """An episode to play, for the token: base_url, api_key, model, domain and task. 204 where there is
        none within `wait_s`."""
        given = request.headers.get("Authorization", "").encode()
        if not self._token or not secrets.compare_digest(given, f"Bearer {self._token}".encode()):
            return _refusal(Refused(401, "invalid_token", "episodes are given for the token only"))
        try:
            domain, wait_s = taking(await _body(request) if request.can_read_body else {})
        except Refused as refused:
            return _refusal(refused)
        offer = await self.offers.take(domain, wait_s)
        if offer is None:
            return web.Response(status=204)
        return web.json_response({**offer.access, "domain": offer.domain, "task": json.loads(offer.task)})

    async def _result(self, request: web.Request, _: _Open) -> web.StreamResponse:
        """The end of an episode, for its key: `{"reward", "info"}`, or `{"error"}`."""
        body = await _body(request)
        error = body.get("error") if isinstance(body, dict) else None
        try:
            result = str(error) if error else result_of(body, json.dumps(body))
        except AgentFailed as wrong:
            raise Refused(400, "invalid_value", str(wrong)) from None
        if not self.offers.end(request.headers["Authorization"].partition(" ")[2], result):
            raise _gone()
        return web.json_response({"ended": True})

    async def _nothing(self, request: web.Request, _: _Open) -> web.StreamResponse:
        raise Refused(404, "unknown_url", f"{request.method} {request.path} is not served here")


def _described(model: str) -> dict[str, Any]:
    return {"id": model, "object": "model", "created": 0, "owned_by": "tutti"}


def _gone() -> Refused:
    return Refused(410, "episode_over", "the episode of this API key is over")


def _refusal(refused: Refused) -> web.Response:
    return web.json_response(refused.body(), status=refused.status, headers={"x-should-retry": "false"})


async def _body(request: web.Request) -> Any:
    try:
        return json.loads(await request.read())
    except (ValueError, RecursionError) as error:
        raise Refused(400, "invalid_json", f"the body is not JSON: {error}") from None


async def _stream(request: web.Request, chunks: Iterator[bytes]) -> web.StreamResponse:
    response = web.StreamResponse(
        headers={"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
    )
    await response.prepare(request)
    for chunk in chunks:
        await response.write(chunk)
    await response.write_eof()
    return response
