"""A rank process without a model: speaks the whole protocol and repeats the prompt as its answer.

Run as a rank is run, with `--mode` first: `ok`, `start-failed`, `dies` (before it is ready), `loads` (for ever),
`stuck` (ignores Shutdown and SIGTERM). Requests steer it through sampling parameters that nothing else here needs:

    frequency_penalty 1   one token in 30 ms instead of all at once
    presence_penalty 1    fails with a WorkerError after two tokens
    min_p 0.5             never says a word
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from pathlib import Path

import msgspec

from cli.lifeline import die_with_parent
from common.config import NodeConfig, Role
from common.errors import AbortedError, ConfigError, RequestError, WorkerError
from common.sampling import FinishReason, TokenLogprob
from node.ipc import RankSockets
from node.messages import (
    Abort,
    Failure,
    FromRank,
    Ping,
    Pong,
    Query,
    Ready,
    Reply,
    Shutdown,
    StartFailed,
    Submit,
    Timing,
    Update,
    Updates,
)
from node.tokenizer import load_eos_token_ids, load_tokenizer

TOKEN_S = 0.03
CONTEXT_LENGTH = 256
MAX_TOTAL_TOKENS = 200


class FakeSequence:
    def __init__(self, submit: Submit) -> None:
        self.submit = submit
        self.output: list[int] = []
        self.next_s = time.monotonic()


class FakeRank:
    def __init__(self, config: NodeConfig, rank: int) -> None:
        self.config = config
        self.rank = rank
        self.tokenizer = load_tokenizer(config.model.path)
        self.eos_ids = load_eos_token_ids(config.model.path)
        self.sequences: dict[str, FakeSequence] = {}
        self.aborted: list[str] = []
        self.outbox: list[FromRank] = []
        self.is_silent = False

    def ready(self) -> Ready:
        is_prefill = self.config.role is Role.PREFILL
        return Ready(
            pid=os.getpid(),
            fingerprint="0123456789abcdef",
            transport="fake",
            control_address=("127.0.0.1", 1) if is_prefill else None,
            context_length=CONTEXT_LENGTH,
            max_total_tokens=MAX_TOTAL_TOKENS,
            vocab_size=self.tokenizer.vocab_size,
            info={"rank": self.rank},
        )

    def handle(self, message: Submit | Abort | Query | Ping) -> None:
        match message:
            case Ping(ticket=ticket):
                self.outbox.append(Pong(ticket=ticket))
            case Submit():
                self.sequences[message.rid] = FakeSequence(message)
            case Abort(rid=rid, message=text):
                for found in [rid] if rid is not None else list(self.sequences):
                    self.aborted.append(found)
                    if self.sequences.pop(found, None) is not None:
                        self.outbox.append(Failure(rid=found, error=AbortedError(text).record()))
            case Query():
                self.outbox.append(self.reply(message))

    def reply(self, query: Query) -> Reply:
        if query.what == "flush" and self.sequences:
            error = RequestError(f"{len(self.sequences)} requests run").record()
            return Reply(ticket=query.ticket, payload={}, error=error)
        payload = {"rank": self.rank, "num_running": len(self.sequences), "aborted": self.aborted}
        if query.what == "debug":
            payload["limit"] = query.limit
        return Reply(ticket=query.ticket, payload=payload)

    def step(self) -> None:
        now = time.monotonic()
        due = [s for s in self.sequences.values() if s.next_s <= now and s.submit.sampling.min_p != 0.5]
        updates = [self.advance(sequence, now) for sequence in due]
        if any(updates):
            self.outbox.append(Updates([update for update in updates if update is not None]))

    def advance(self, sequence: FakeSequence, now: float) -> Update | None:
        submit, sampling = sequence.submit, sequence.submit.sampling
        sequence.next_s = now + (TOKEN_S if sampling.frequency_penalty == 1 else 0.0)
        if sampling.presence_penalty == 1 and len(sequence.output) == 2:
            del self.sequences[submit.rid]
            self.outbox.append(Failure(rid=submit.rid, error=WorkerError("made to fail").record()))
            return None
        is_first = not sequence.output
        new = [] if sampling.max_new_tokens == 0 else [submit.token_ids[len(sequence.output) % len(submit.token_ids)]]
        sequence.output += new
        finish = self.finish(sequence)
        if finish is not None:
            del self.sequences[submit.rid]
        return Update(
            rid=submit.rid,
            token_ids=new,
            logprobs=[self.logprob(submit, token_id, -0.5) for token_id in new] if submit.logprobs.wanted else [],
            num_cached_tokens=0,
            input_logprobs=self.input_logprobs(submit) if is_first else None,
            finish=finish,
            timing=Timing(queue_s=0.1, prefill_s=0.2, transfer_s=0.3, decode_s=0.4, transfer_bytes={"kv": 7})
            if finish is not None
            else None,
        )

    def finish(self, sequence: FakeSequence) -> FinishReason | None:
        sampling, output = sequence.submit.sampling, sequence.output
        length = min(sampling.max_new_tokens, 1) if self.config.role is Role.PREFILL else sampling.max_new_tokens
        if output and (
            output[-1] in sampling.stop_token_ids or (output[-1] in self.eos_ids and not sampling.ignore_eos)
        ):
            return FinishReason(type="stop", matched=output[-1])
        if len(output) >= sampling.min_new_tokens:
            text = self.tokenizer.decode(output, sampling.skip_special_tokens)
            for stop in sampling.stop:
                if stop in text:
                    return FinishReason(type="stop", matched=stop)
        return FinishReason(type="length", length=len(output)) if len(output) >= length else None

    def input_logprobs(self, submit: Submit) -> list[TokenLogprob] | None:
        if not submit.logprobs.wanted:
            return None
        if submit.logprobs.start_len < 0:
            return []
        found = [self.logprob(submit, token_id, -1.5) for token_id in submit.token_ids]
        found[0] = TokenLogprob(logprob=None, token_id=submit.token_ids[0])
        return found[submit.logprobs.start_len :]

    def logprob(self, submit: Submit, token_id: int, value: float) -> TokenLogprob:
        top = tuple((value - i, token_id) for i in range(submit.logprobs.top_num))
        return TokenLogprob(logprob=value, token_id=token_id, top=top)


def run(rank: FakeRank, sockets: RankSockets, *, stuck: bool) -> None:
    while True:
        message = sockets.receive(wait_ms=1 if rank.sequences else 100)
        while message is not None:
            if isinstance(message, Shutdown):
                while stuck:
                    time.sleep(1)
                print("told to shut down", file=sys.stderr, flush=True)
                return
            rank.handle(message)
            message = sockets.receive()
        rank.step()
        for reply in rank.outbox:
            sockets.send(reply)
        rank.outbox.clear()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mode", default="ok")
    parser.add_argument("--ipc", type=Path, required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--front", type=int, required=True)
    arguments = parser.parse_args()
    die_with_parent(arguments.front)
    config = msgspec.json.decode(sys.stdin.buffer.read(), type=NodeConfig)
    sockets = RankSockets(arguments.ipc, arguments.rank)
    is_again = (arguments.ipc / f"started{arguments.rank}").exists()
    (arguments.ipc / f"started{arguments.rank}").touch()
    if arguments.mode in ("loads-again", "fails-again"):
        arguments.mode = {"loads-again": "loads", "fails-again": "start-failed"}[arguments.mode] if is_again else "ok"
    if arguments.mode == "dies":
        print("first line\nthe last words of the rank", file=sys.stderr, flush=True)
        os._exit(7)
    if arguments.mode == "start-failed":
        sockets.send(StartFailed(pid=os.getpid(), error=ConfigError("--dtype float7: no such type").record()))
        sockets.close(linger_ms=2000)
        time.sleep(1)  # as an interpreter with torch in it takes its time to end
        sys.exit(1)
    if arguments.mode == "loads":
        print("loading", file=sys.stderr, flush=True)
        time.sleep(60)
    if arguments.mode == "stuck":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    rank = FakeRank(config, arguments.rank)
    sockets.send(rank.ready())
    if arguments.mode == "dies-when-ready" and is_again:
        sockets.close(linger_ms=1000)
        os._exit(7)
    run(rank, sockets, stuck=arguments.mode == "stuck")
    sockets.close(linger_ms=1000)


if __name__ == "__main__":
    main()
