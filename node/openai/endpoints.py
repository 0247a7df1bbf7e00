"""OpenAI's endpoints of a node, of any role: chat and text completions, models; and /tokenize, /detokenize.

    body ──► Call ──► (/generate's own checks) ──► sequences ──► answer objects ──► OpenAI's objects or chunks

As a leg of a disaggregated request a body has the same `bootstrap_…` fields as at /generate.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable
from typing import Any

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from common.config import Role
from common.errors import RequestError
from common.json_body import decode_object
from common.reasoning import ReasoningParser
from node.answers import Answer
from node.chat_template import ChatTemplate
from node.generate import LONG_TEXT_CHARACTERS, EventStream, Generator, json_response
from node.limits import ServingLimits
from node.openai.answers import OpenAIAnswer
from node.openai.calls import Call
from node.openai.chat import ChatModel, read_chat
from node.openai.chat_text import ChatText
from node.openai.choices import ChatChoice, Choices, NewPart, TextChoice
from node.openai.completions import read_completion
from node.openai.fields import in_openai_names
from node.openai.logprobs import TextLogprobs, TokenNames
from node.openai.tokens import detokenize, read_texts
from node.requests import GenerateRequest, ParsedRequest, parse
from node.tokenizer import Tokenizer

CHAT, TEXT = "chat.completion", "text_completion"
_ID_PREFIX = {CHAT: "chatcmpl-", TEXT: "cmpl-"}


class OpenAIEndpoints:
    """Holds no request. served_name: of the model. chat_template: None where the model has none."""

    def __init__(
        self,
        generator: Generator,
        limits: ServingLimits,
        tokenizer: Tokenizer,
        *,
        served_name: str,
        chat_template: ChatTemplate | None,
        reasoning: ReasoningParser,
    ) -> None:
        self._generator = generator
        self._limits = limits
        self._tokenizer = tokenizer
        self._names = TokenNames(tokenizer)
        self._served_name = served_name
        self._chat_template = chat_template
        self._chat_model = ChatModel(
            template=chat_template,
            reasoning=reasoning,
            special_tokens=tokenizer.special_tokens,
            tag_tokens=tokenizer.tag_tokens,
        )
        self._started_at = int(time.time())

    def add_to(self, app: FastAPI) -> None:
        for path, method, endpoint in (
            ("/v1/chat/completions", "POST", self.chat),
            ("/v1/completions", "POST", self.complete),
            ("/v1/models", "GET", self.models),
            ("/v1/models/{name:path}", "GET", self.model),
            ("/tokenize", "POST", self.tokenize),
            ("/detokenize", "POST", self.detokenize),
        ):
            app.add_route(path, endpoint, methods=[method])

    # Completions

    async def chat(self, request: Request) -> Response:
        return await self._respond(request, CHAT, lambda raw: read_chat(raw, self._chat_model))

    async def complete(self, request: Request) -> Response:
        return await self._respond(request, TEXT, read_completion)

    async def _respond(self, request: Request, kind: str, read: Callable[[dict[str, Any]], Call]) -> Response:
        """Raises ServingError when there is no answer."""
        arrival_s = time.monotonic()
        self._generator.check_open()
        call = await self._read(request, read)
        call.body.setdefault("rid", _ID_PREFIX[kind] + uuid.uuid4().hex)
        parsed, generate = await self._prepare(call, arrival_s)
        answer = self._answer(kind, call, parsed, generate)
        exchange = await self._generator.start(generate)
        if self._generator.streams(generate):
            return EventStream(exchange, answer)
        async with exchange.while_connected(request.receive):
            found = await exchange.result()
            objects = found if isinstance(found, list) else [found]
            if call.wishes.echo and call.wishes.logprobs:  # many tokens to write out
                return json_response(await asyncio.to_thread(answer.whole, objects))
            return json_response(answer.whole(objects))

    async def _read(self, request: Request, read: Callable[[dict[str, Any]], Call]) -> Call:
        body = await self._generator.read(request)
        if len(body) > LONG_TEXT_CHARACTERS:
            return await asyncio.to_thread(read, decode_object(body))
        return read(decode_object(body))

    async def _prepare(self, call: Call, arrival_s: float) -> tuple[ParsedRequest, GenerateRequest]:
        try:
            parsed = parse(call.body, self._limits)
            generate = await self._generator.prepare(parsed, arrival_s, special_tokens=call.special_tokens)
        except RequestError as error:
            raise in_openai_names(error, call.names) from error
        return parsed, generate

    def _answer(self, kind: str, call: Call, parsed: ParsedRequest, generate: GenerateRequest) -> OpenAIAnswer:
        rid = call.body["rid"]
        choice = self._chat_choice if kind == CHAT else self._text_choice
        return OpenAIAnswer(
            kind,
            rid if isinstance(rid, str) else parsed.rids[0],
            call.wishes.model or self._served_name,
            [choice(place, call, parsed, generate) for place in range(len(generate.submits))],
            samples=parsed.num_samples,
            options=call.wishes.stream_options,
        )

    def _chat_choice(self, place: int, call: Call, parsed: ParsedRequest, generate: GenerateRequest) -> Choices:
        wishes = call.wishes
        text = ChatText(call.parts, generate.submits[place].rid)
        shown = self._shown(generate, place)
        text.push(shown, is_last=False)
        return ChatChoice(
            place,
            NewPart(len(shown), len(generate.resume.output_ids)),
            text,
            names=self._names if wishes.logprobs else None,
            token_ids=wishes.return_token_ids,
            begun=call.body["resume"] is not None,
        )

    def _text_choice(self, place: int, call: Call, parsed: ParsedRequest, generate: GenerateRequest) -> Choices:
        wishes = call.wishes
        prompt = self._prompt(parsed, place) if wishes.echo else ""
        skips = generate.submits[place].sampling.skip_special_tokens
        return TextChoice(
            place,
            NewPart(len(self._shown(generate, place)), len(generate.resume.output_ids)),
            prompt=prompt,
            prompt_logprobs=self._text_logprobs(0, skips=False) if wishes.echo and wishes.logprobs else None,
            logprobs=self._text_logprobs(len(prompt), skips=skips) if wishes.logprobs else None,
            token_ids=wishes.return_token_ids,
            shows_output=self._limits.role is not Role.PREFILL,
        )

    def _shown(self, generate: GenerateRequest, place: int) -> str:
        """The text that a resumed answer begins with, which its client has."""
        if not generate.resume.output_ids:
            return ""
        begun = Answer(generate.submits[place], self._tokenizer, return_text=False, resume=generate.resume)
        return str(begun.object()["text"])

    def _text_logprobs(self, offset: int, *, skips: bool) -> TextLogprobs:
        return TextLogprobs(self._names, self._tokenizer, skip_special_tokens=skips, offset=offset)

    def _prompt(self, parsed: ParsedRequest, place: int) -> str:
        prompt = parsed.prompts[place // parsed.num_samples]
        return prompt if isinstance(prompt, str) else self._tokenizer.decode(prompt, skip_special_tokens=False)

    # Models and tokens

    async def models(self, request: Request) -> Response:
        return json_response({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name != self._served_name:
            raise RequestError(
                f"model: {name:.200} is not served here, {self._served_name} is",
                code="model_not_found",
                param="model",
                status=404,
            )
        return json_response(self._model())

    def _model(self) -> dict[str, Any]:
        return {
            "id": self._served_name,
            "object": "model",
            "created": self._started_at,
            "owned_by": "tandem",
            "root": self._served_name,
            "max_model_len": self._limits.context_length,
        }

    async def tokenize(self, request: Request) -> Response:
        raw = decode_object(await self._generator.read(request))
        asked = read_texts(raw, self._chat_template)
        try:
            tokens = await self._generator.tokenise(asked.texts, special_tokens=asked.special_tokens)
        except RequestError as error:
            raise in_openai_names(error, {"text": asked.field}) from error
        return json_response(asked.answer(tokens, self._names, self._limits.context_length))

    async def detokenize(self, request: Request) -> Response:
        raw = decode_object(await self._generator.read(request))
        return json_response(detokenize(raw, self._tokenizer, self._limits.vocab_size))
