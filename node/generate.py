"""POST /generate of a node: from the raw request to the JSON answer or the event stream."""

from __future__ import annotations

import asyncio
import time
from typing import Any, Protocol

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from common.config import NodeConfig, Role
from common.errors import ServingError
from common.http_server import read_body
from common.json_body import decode_object
from node.answers import DONE_EVENT, error_event, event, json_bytes
from node.exchange import Exchange
from node.grammars import GrammarChecker
from node.limits import ServingLimits
from node.rank_client import RankClient
from node.requests import GenerateRequest, ParsedRequest, check_text_sizes, expand, parse
from node.tokenizer import Tokenizer

LONG_TEXT_CHARACTERS = 20_000


class Generator:
    """What answers /generate. Holds no request."""

    def __init__(
        self,
        config: NodeConfig,
        limits: ServingLimits,
        tokenizer: Tokenizer,
        client: RankClient,
        grammars: GrammarChecker,
    ) -> None:
        self._limits = limits
        self._grammars = grammars
        self._tokenizer = tokenizer
        self._client = client
        self._server = config.server

    async def respond(self, request: Request) -> Response:
        """Raises ServingError when there is no answer."""
        arrival_s = time.monotonic()
        self.check_open()
        raw = decode_object(await self.read(request))
        generate = await self.prepare(parse(raw, self._limits), arrival_s)
        exchange = await self.start(generate)
        if self.streams(generate):
            return EventStream(exchange, AnswerEvents())
        async with exchange.while_connected(request.receive):
            body = json_bytes(await exchange.result())
        # From a prefill leg that it asked for a stream sglang-router reads JSON, mini_lb what follows five characters.
        return Response(b" " * len(b"data:") + body if generate.stream else body, media_type="application/json")

    def streams(self, generate: GenerateRequest) -> bool:
        """A prefill node never does: it makes one token."""
        return generate.stream and self._limits.role is not Role.PREFILL

    def check_open(self) -> None:
        """Raises WorkerError when nothing new is taken."""
        self._client.check_open()

    async def start(self, generate: GenerateRequest) -> Exchange:
        """The request at the ranks. Raises ServingError."""
        exchange = Exchange(self._client, self._tokenizer, generate)
        await exchange.start()
        return exchange

    async def read(self, request: Request) -> bytes:
        """The body, within the server's limits of size and time."""
        server = self._server
        return await read_body(
            request.scope, request.receive, max_bytes=server.max_body_bytes, timeout_s=server.upload_timeout_s
        )

    async def prepare(self, parsed: ParsedRequest, arrival_s: float, *, special_tokens: bool = True) -> GenerateRequest:
        """Tokenise, check grammars and lengths. special_tokens: whether a text gets those that the tokenizer adds."""
        if parsed.field != "text":
            token_ids = [prompt for prompt in parsed.prompts if isinstance(prompt, list)]
        else:
            texts = [prompt for prompt in parsed.prompts if isinstance(prompt, str)]
            token_ids = await self.tokenise(texts, special_tokens=special_tokens)
        if any(one.grammar is not None for one in parsed.sampling):
            parsed = msgspec.structs.replace(parsed, sampling=await self._grammars.resolve(parsed.sampling))
        return expand(parsed, token_ids, self._limits, arrival_s=arrival_s)

    async def tokenise(self, texts: list[str], *, special_tokens: bool = True) -> list[list[int]]:
        """Up to the first text that is too long. What cannot fit is refused first; long texts go through a thread."""
        check_text_sizes(texts, self._tokenizer.longest_token_bytes, self._limits)
        if sum(map(len, texts)) > LONG_TEXT_CHARACTERS:
            return await asyncio.to_thread(self._encode_long, texts, special_tokens)
        return [self._tokenizer.encode(text, special_tokens=special_tokens) for text in texts]

    def _encode_long(self, texts: list[str], special_tokens: bool) -> list[list[int]]:
        """Stops after the first text that is too long: it is refused, so nobody needs those after it."""
        token_ids: list[list[int]] = []
        for text in texts:
            token_ids.append(self._tokenizer.encode_long(text, special_tokens=special_tokens))
            if len(token_ids[-1]) >= self._limits.context_length:
                break
        return token_ids


class Events(Protocol):
    """What answer objects are in a stream."""

    def events(self, answers: list[dict[str, Any]], *, is_last: bool) -> bytes:
        """The events of objects that are due. is_last: nothing comes after them."""
        ...


class AnswerEvents:
    """The objects as they are."""

    def events(self, answers: list[dict[str, Any]], *, is_last: bool) -> bytes:
        return b"".join(map(event, answers))


class EventStream(Response):
    """Server-sent events of one request. The status line waits for the first token, so that an early error has its own.

    A client that reads slowly gets fewer, larger events: what came while one was being sent goes into the next.
    """

    def __init__(self, exchange: Exchange, events: Events) -> None:
        super().__init__(media_type="text/event-stream", headers={"cache-control": "no-cache"})
        del self.headers["content-length"]
        self._exchange = exchange
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._exchange.while_connected(receive):
            rids = await self._exchange.advance()  # an error here is answered with its status
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            last = await self._send_events(send, rids)
            await send({"type": "http.response.body", "body": last + DONE_EVENT})

    async def _send_events(self, send: Send, rids: list[str]) -> bytes:
        """Send all events but the last batch of them, which is returned."""
        try:
            while True:
                is_last = self._exchange.is_finished
                body = self._events.events(self._exchange.due_objects(rids), is_last=is_last)
                if is_last:
                    return body
                if body:
                    await send({"type": "http.response.body", "body": body, "more_body": True})
                rids = await self._exchange.advance()
        except ServingError as error:
            return error_event(error.record())


def json_response(value: object, status: int = 200) -> Response:
    return Response(json_bytes(value), status_code=status, media_type="application/json")
