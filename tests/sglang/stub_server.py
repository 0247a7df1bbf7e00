"""What `python -m sglang.launch_server` is in these tests: SGLang's flags and HTTP contract, without a model.

Token i of an answer is (state + i) % 1000 and reads `<id>`; the state is the sum of the prompt, as `states.py` here
computes it: from a prefix cache, and wrongly where that version would. What else is to happen is in the environment:

    STUB_FAULT     exit: prints and ends at once. hang: never opens its port. slow_stop: ignores SIGTERM. deaf: stops
                   answering once POST /stub/fault has asked for it
    STUB_TRANSFER  1: a decode server waits for the state of its room, from the prefill server's bootstrap port
    STUB_QUESTIONS of gsm-mini, five-shot, so many are answered as the state has it: right with a right one
    STUB_PACE_S    of each token
    STUB_NATIVE    a model's folder for our own engine, which then is the server

Like the real one it has a process of its own below it (a scheduler), which would live on when it is killed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
from typing import Any, NoReturn

import aiohttp
from aiohttp import web

from tests.sglang.states import States

VERSION = os.environ.get("STUB_VERSION", "0.5.17")
PACE_S = float(os.environ.get("STUB_PACE_S", "0"))
"""Of a token; 0.05 where 777 is in the prompt."""


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=True)
    for flag in ("--model-path", "--served-model-name", "--chat-template", "--dtype", "--mamba-ssm-dtype"):
        parser.add_argument(flag)
    for flag in ("--load-format", "--log-level", "--ssl-certfile", "--ssl-keyfile", "--device"):
        parser.add_argument(flag)
    for flag in ("--grammar-backend", "--mem-fraction-static", "--cuda-graph-max-bs-decode"):
        parser.add_argument(flag)
    parser.add_argument("--skip-tokenizer-init", action="store_true")
    parser.add_argument("--cuda-graph-bs-decode", nargs="+")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--disaggregation-mode", default="null", choices=["null", "prefill", "decode"])
    parser.add_argument("--disaggregation-transfer-backend", choices=["mooncake", "mooncake_tcp", "nixl"])
    parser.add_argument("--disaggregation-ib-device")
    for flag, default in (("--port", 30000), ("--page-size", 1), ("--tp-size", 1), ("--dp-size", 1), ("--pp-size", 1)):
        parser.add_argument(flag, type=int, default=default)
    for flag in ("--max-total-tokens", "--max-mamba-cache-size", "--max-running-requests", "--chunked-prefill-size"):
        parser.add_argument(flag, type=int)
    for flag in ("--context-length", "--mamba-track-interval", "--prefill-max-requests", "--base-gpu-id"):
        parser.add_argument(flag, type=int)
    parser.add_argument("--disaggregation-bootstrap-port", type=int, default=8998)
    for flag in ("--disable-radix-cache", "--disable-overlap-schedule", "--enable-mixed-chunk", "--skip-server-warmup"):
        parser.add_argument(flag, action="store_true")
    parser.add_argument("--mamba-radix-cache-strategy", default="auto")
    return parser.parse_args(argv)


class Stub:
    """One server. seen: what was asked of /generate; aborts: of /abort_request."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.seen: list[dict[str, Any]] = []
        self.aborts: list[dict[str, Any]] = []
        self.running: dict[str, asyncio.Event] = {}
        self.deaf = False
        self.made = 0
        self.states = States(
            strategy="none" if args.disable_radix_cache else args.mamba_radix_cache_strategy,
            mixes=int(VERSION.split(".")[2]) < 20,
            at_once=args.prefill_max_requests or 64,
        )
        self.rooms: dict[int, asyncio.Future[tuple[int, int]]] = {}
        self.labels = _labels(int(os.environ.get("STUB_QUESTIONS", "0")))

    @property
    def mode(self) -> str:
        return str(self.args.disaggregation_mode)

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/health", self.health)
        app.router.add_get("/health_generate", self.health_generate)
        for path in ("/server_info", "/get_server_info"):
            app.router.add_get(path, self.server_info)
        for path in ("/model_info", "/get_model_info"):
            app.router.add_get(path, self.model_info)
        app.router.add_post("/generate", self.generate)
        app.router.add_post("/v1/{what:.*}", self.openai)
        app.router.add_post("/abort_request", self.abort)
        app.router.add_route("*", "/flush_cache", self.flush)
        app.router.add_post("/stub/fault", self.fault)
        app.router.add_get("/stub/seen", self.tell)
        app.router.add_get("/stub/state/{room}", self.state)
        return app

    async def health(self, _: web.Request) -> web.Response:
        if self.deaf:
            await asyncio.Event().wait()
        return web.Response()

    async def health_generate(self, request: web.Request) -> web.Response:
        self.made += 1
        return await self.health(request)

    async def server_info(self, _: web.Request) -> web.Response:
        told = vars(self.args) | {"version": VERSION, "revision": None, "quantization": None, "startup_time": 0.1}
        return web.json_response(told | {"internal_states": [{"last_gen_throughput": 0.0}]})

    async def model_info(self, _: web.Request) -> web.Response:
        return web.json_response(
            {"model_path": self.args.model_path, "is_generation": True, "weight_version": "default"}
        )

    async def flush(self, _: web.Request) -> web.Response:
        if not self.running:
            self.states.flush()
        return web.Response(text="Cache flushed.\n", status=400 if self.running else 200)

    async def state(self, request: web.Request) -> web.Response:
        """Of a room, once it is there."""
        return web.json_response(await self._room(int(request.match_info["room"])))

    def _room(self, room: int) -> asyncio.Future[tuple[int, int]]:
        return self.rooms.setdefault(room, asyncio.get_running_loop().create_future())

    async def _prefilled(self, item: dict[str, Any]) -> None:
        """State and cached tokens into the item: computed here, or by the prefill server."""
        is_passed_on = bool(os.environ.get("STUB_TRANSFER")) and item["room"] is not None
        if is_passed_on and self.mode == "decode":
            url = f"http://{item['host']}:{item['port']}/stub/state/{item['room']}"
            async with aiohttp.ClientSession() as session, session.get(url) as answer:
                item["state"], item["cached"] = await answer.json()
        else:
            item["state"], item["cached"] = await self.states.prefill(item["prompt"])
        if is_passed_on and self.mode == "prefill":
            self._room(item["room"]).set_result((item["state"], item["cached"]))
        label = self.labels.get(item["text"] or "")
        if label is not None:
            item["reply"] = f" #### {label + item['state'] - sum(item['prompt'])}"
            item["max_new_tokens"] = len(item["reply"])

    async def openai(self, request: web.Request) -> web.Response:
        self.seen.append(await request.json())
        return web.json_response({"choices": []})

    async def fault(self, _: web.Request) -> web.Response:
        self.deaf = True
        return web.Response()

    async def tell(self, _: web.Request) -> web.Response:
        told = {"seen": self.seen, "aborts": self.aborts, "running": list(self.running), "made": self.made}
        names = [n for n in os.environ if n.startswith(("MC_", "MOONCAKE_", "SGLANG_"))]
        return web.json_response(told | {"env": {n: os.environ[n] for n in names}, "argv": sys.argv[1:]})

    async def abort(self, request: web.Request) -> web.Response:
        """As SGLang has it: of one sequence, by its whole id; 200 whatever is found."""
        asked = await request.json()
        self.aborts.append(asked)
        if not isinstance(asked.get("rid") or "", str):
            return web.Response(status=422)
        for rid, event in self.running.items():
            if asked.get("abort_all") or rid == asked.get("rid"):
                event.set()
        return web.Response()

    async def generate(self, request: web.Request) -> web.StreamResponse:
        """A prefill leg waits for nobody here: it answers at once, with the first token."""
        body = await request.json()
        self.seen.append(body)
        try:
            items = _items(body, self.mode)
            if self.args.skip_tokenizer_init and any(item["text"] is not None for item in items):
                raise ValueError("The engine initialized with skip_tokenizer_init=True cannot accept text prompts.")
        except ValueError as error:
            return web.json_response({"error": {"message": str(error)}}, status=400)
        rids = [item["rid"] for item in items]
        for rid in rids:
            self.running[rid] = asyncio.Event()
        try:
            await asyncio.gather(*(self._prefilled(item) for item in items))
            for item in items:
                item["has_text"] = not self.args.skip_tokenizer_init
            if body.get("stream"):
                return await self._stream(request, items)
            answers = [await self._whole(item) for item in items]
            is_list = isinstance(body.get("text"), list) or _is_batch(body.get("input_ids")) or len(items) > 1
            return web.json_response(answers if is_list else answers[0])
        finally:
            for rid in rids:
                self.running.pop(rid, None)

    async def _whole(self, item: dict[str, Any]) -> dict[str, Any]:
        count = 1 if self.mode == "prefill" else item["max_new_tokens"]
        made = 0
        while made < count and not self.running[item["rid"]].is_set():
            made += 1
            if item["pace_s"]:
                await asyncio.sleep(item["pace_s"])
        return _answer(item, made, count, aborted=self.running[item["rid"]].is_set())

    async def _stream(self, request: web.Request, items: list[dict[str, Any]]) -> web.StreamResponse:
        reply = web.StreamResponse(headers={"content-type": "text/event-stream; charset=utf-8"})
        await reply.prepare(request)
        for made in range(1, max(item["max_new_tokens"] for item in items) + 1):
            for index, item in enumerate(items):
                if made <= item["max_new_tokens"]:
                    told = _answer(item, made, item["max_new_tokens"], aborted=self.running[item["rid"]].is_set())
                    told |= {"index": index} if len(items) > 1 else {}
                    await reply.write(b"data: " + json.dumps(told).encode() + b"\n\n")
                await asyncio.sleep(item["pace_s"])
            if all(self.running[item["rid"]].is_set() for item in items):
                break
        await reply.write(b"data: [DONE]\n\n")
        return reply


def _is_batch(ids: object) -> bool:
    return isinstance(ids, list) and bool(ids) and isinstance(ids[0], list)


def _items(body: dict[str, Any], mode: str) -> list[dict[str, Any]]:
    """The sequences of a body: n of each prompt, as SGLang orders them. Raises ValueError as SGLang's answer 400."""
    text, ids = body.get("text"), body.get("input_ids")
    if (text is None) == (ids is None):
        raise ValueError("Either text, input_ids or input_embeds should be provided.")
    is_batch = isinstance(text, list) or _is_batch(ids)
    prompts = (text if text is not None else ids) if is_batch else [text if text is not None else ids]
    texts = [p if isinstance(p, str) else None for p in prompts]
    prompts = [[ord(c) for c in p] if isinstance(p, str) else p for p in prompts]
    sampling = body.get("sampling_params") or {}
    n = sampling.get("n", 1) if isinstance(sampling, dict) else 1
    count = len(prompts) * n
    if n > 1 and mode != "null":
        raise ValueError("n: the real one would take one room for all samples of a prompt")
    rooms = body.get("bootstrap_room")
    if mode != "null":
        if rooms is None:
            raise ValueError("Disaggregated request received without boostrap room id.")
        rooms = rooms if isinstance(rooms, list) else [rooms + i for i in range(count)]
        if len(rooms) != count or len(set(rooms)) != count:
            raise ValueError(f"bootstrap_room: {count} different rooms, got {rooms}")
    if sampling.get("temperature", 1.0) < 0:
        raise ValueError("temperature must be non-negative, got " + str(sampling["temperature"]))
    if mode != "decode" and any(max(p, default=0) == 666 for p in prompts):
        raise ValueError("refused on purpose")
    rid = body.get("rid") or f"r{id(body)}"
    if isinstance(rid, list) and len(rid) != len(prompts):
        raise ValueError("The specified rids length mismatch with the batch_size for batch processing.")
    rids = rid if isinstance(rid, list) else [rid if count == 1 else f"{rid}_{i}" for i in range(count)]
    return [
        {
            "prompt": prompts[i % len(prompts)],
            "text": texts[i % len(prompts)],
            "reply": None,
            "room": rooms[i] if rooms is not None else None,
            "host": _one_of(body.get("bootstrap_host"), i),
            "port": _one_of(body.get("bootstrap_port"), i),
            "top": body.get("top_logprobs_num") or 0,
            "rid": rids[i],
            "max_new_tokens": sampling.get("max_new_tokens", 128),
            "pace_s": 0.05 if 777 in prompts[i % len(prompts)] else PACE_S,
            "logprobs": bool(body.get("return_logprob")),
            "start": body.get("logprob_start_len", -1),
            "mode": mode,
        }
        for i in range(count)
    ]


def _one_of(value: Any, place: int) -> Any:
    return value[place] if isinstance(value, list) else value


def _labels(count: int) -> dict[str, int]:
    """Prompts of gsm-mini and the right answers."""
    if not count:
        return {}
    from accuracy.tasks import gsm_mini_task

    return {question.prompt: question.label for question in gsm_mini_task(seed=0, count=count, shots=5).questions}


def _answer(item: dict[str, Any], made: int, count: int, *, aborted: bool) -> dict[str, Any]:
    ids = [(item["state"] + i) % 1000 for i in range(made)]
    text = "".join(f"<{i}>" for i in ids)
    reason: dict[str, Any] | None = {"type": "length", "length": made} if made >= count else None
    if item["reply"] is not None:
        text = item["reply"][:made]
        ids = [ord(c) for c in text]
        reason = {"type": "stop", "matched": 0} if reason else None
    if aborted and made < count:
        reason = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
    meta: dict[str, Any] = {
        "id": item["rid"],
        "finish_reason": reason,
        "prompt_tokens": len(item["prompt"]),
        "completion_tokens": made,
        "cached_tokens": item["cached"],
        "weight_version": "default",
    }
    if item["logprobs"]:
        meta["output_token_logprobs"] = [[-0.5, i, None] for i in ids]
        if item["top"]:
            others = [-3.0 - i for i in range(item["top"] - 1)]
            meta["output_top_logprobs"] = [
                [[p, (i + n) % 1000, None] for n, p in enumerate([-0.5, *others])] for i in ids
            ]
        start = item["start"]
        told = item["prompt"][start:] if start >= 0 and item["mode"] != "decode" else []
        meta["input_token_logprobs"] = [[None if not i else -1.0 - i, t, None] for i, t in enumerate(told)]
    return ({"text": text} if item["has_text"] else {}) | {"output_ids": ids, "meta_info": meta}


async def _serve(stub: Stub) -> None:
    runner = web.AppRunner(stub.app(), handler_cancellation=True, shutdown_timeout=0.2)
    await runner.setup()
    await web.TCPSite(runner, stub.args.host, stub.args.port).start()
    if stub.mode == "prefill" and os.environ.get("STUB_TRANSFER"):
        await web.TCPSite(runner, stub.args.host, stub.args.disaggregation_bootstrap_port).start()
    ended = asyncio.Event()
    if os.environ.get("STUB_FAULT") != "slow_stop":
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    print("The server is fired up and ready to roll!", flush=True)
    await ended.wait()
    await runner.cleanup()


def _be_native(model: str, args: argparse.Namespace) -> NoReturn:
    words = ["unified", "--model-path", model, "--host", args.host, "--port", str(args.port), "--dtype", "bfloat16"]
    os.execv(sys.executable, [sys.executable, "-m", "cli.main", *words])


def main(argv: list[str]) -> None:
    args = parse(argv)
    if model := os.environ.get("STUB_NATIVE"):
        _be_native(model, args)
    fault = os.environ.get("STUB_FAULT")
    if fault == "exit":
        print("torch.OutOfMemoryError: CUDA out of memory.", flush=True)
        sys.exit(3)
    if fault == "slow_stop":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    scheduler = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    print(f"scheduler {scheduler.pid}", flush=True)
    if fault == "hang":
        signal.pause()
    asyncio.run(_serve(Stub(args)))
    scheduler.terminate()
    scheduler.wait()


if __name__ == "__main__":
    main(sys.argv[1:])
