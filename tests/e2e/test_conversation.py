"""A conversation through the router: short turns are computed on decode, long ones bring only what decode lacks.

What a node holds is followed by hand: a prompt's state is saved at the last multiple of CHUNK, a decoded one's at every
multiple of TRACK_INTERVAL, and pages are kept as far as the newest saved state.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from accuracy.gsm_mini import problems, shot
from node.tokenizer import load_tokenizer
from tests.support.stack import MODEL, Stack, generate, stack

CHUNK, PAGE, TRACK_INTERVAL, LOCAL_PREFILL_MAX = 64, 16, 256, 256
TIE, TOLERANCE = 1e-4, 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """new_tokens: what the client adds. is_long: whether decode lacks too much of the prompt to compute it itself."""

    new_tokens: int
    answer_tokens: int
    is_long: bool


TURNS = [
    Turn(new_tokens=700, answer_tokens=32, is_long=True),
    Turn(new_tokens=40, answer_tokens=30, is_long=False),
    Turn(new_tokens=1, answer_tokens=24, is_long=False),
    Turn(new_tokens=330, answer_tokens=40, is_long=True),
    Turn(new_tokens=100, answer_tokens=150, is_long=False),
    Turn(new_tokens=300, answer_tokens=20, is_long=True),
    Turn(new_tokens=77, answer_tokens=212, is_long=False),  # ends 7 positions after a state that decode saves,
    Turn(new_tokens=6, answer_tokens=16, is_long=False),  # so that this turn depends on it
]


@dataclass(slots=True, kw_only=True)
class Held:
    """Positions up to which each node holds the conversation, its state included."""

    prefill: int = 0
    decode: int = 0

    def missing_pages(self, num_prompt_tokens: int) -> int:
        return -(-num_prompt_tokens // PAGE) - self.decode // PAGE

    def after(self, turn: Turn, num_prompt_tokens: int) -> Held:
        saved = num_prompt_tokens // CHUNK * CHUNK
        decoded = (num_prompt_tokens + turn.answer_tokens - 1) // TRACK_INTERVAL * TRACK_INTERVAL
        return Held(prefill=saved if turn.is_long else self.prefill, decode=max(saved, decoded, self.decode))


def texts(count: int) -> list[int]:
    """Token ids to take the client's words from."""
    return load_tokenizer(MODEL).encode("".join(shot(p) for p in problems("train", 17, count)))


def ask(url: str, prompt: list[int], answer_tokens: int) -> dict[str, Any]:
    sampling = {"temperature": 0, "max_new_tokens": answer_tokens, "ignore_eos": True}
    body = {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True, "top_logprobs_num": 2}
    answer = generate(url, body)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def ask_cold(url: str, prompt: list[int], answer_tokens: int) -> dict[str, Any]:
    assert httpx.post(f"{url}/flush_cache", timeout=10).status_code == 200
    answer = ask(url, prompt, answer_tokens)
    assert answer["meta_info"]["cached_tokens"] == 0
    return answer


def difference(ours: dict[str, Any], cold: dict[str, Any]) -> str | None:
    """The first token that is another one although its rivals are no tie, or whose log-probability is another one."""
    meta = cold["meta_info"]
    pairs = zip(ours["meta_info"]["output_token_logprobs"], meta["output_token_logprobs"], strict=True)
    for at, ((logprob, token, _), (expected, expected_token, _)) in enumerate(pairs):
        if token != expected_token:
            first, second = (alternative[0] for alternative in meta["output_top_logprobs"][at])
            return None if first - second < TIE else f"token {at}: {token} instead of {expected_token}"
        if abs(logprob - expected) > TOLERANCE:
            return f"token {at}: log p {logprob} instead of {expected}"
    return None


def row(number: int, turn: Turn, num_prompt_tokens: int, meta: dict[str, Any]) -> str:
    parts = meta["transfer_bytes"]
    wire = ", ".join(f"{name} {parts[name]:,}" for name in ("kv", "conv", "ssm", "track")) if parts else "nothing"
    where = "prefill" if turn.is_long else "decode"
    return f"{number:4}  {num_prompt_tokens:6}  {meta['cached_tokens']:6}  {where:8}  {wire}"


def test_eight_turns_through_the_router(shared_stack: Stack) -> None:
    assert shared_stack.unified is not None
    assert httpx.post(f"{shared_stack.router.url}/flush_cache", timeout=10).status_code == 200
    words, conversation, held = texts(60), list[int](), Held()
    first: dict[str, int] = {}
    print("\nturn  prompt  cached  computed  bytes over the wire")
    for number, turn in enumerate(TURNS, start=1):
        prompt = conversation + words[: turn.new_tokens]
        words = words[turn.new_tokens :]
        assert (len(prompt) - held.decode > LOCAL_PREFILL_MAX) == turn.is_long, "the turn is not of the kind it claims"
        answer = ask(shared_stack.router.url, prompt, turn.answer_tokens)
        meta = answer["meta_info"]
        print(row(number, turn, len(prompt), meta))
        first = first or meta["transfer_bytes"]
        assert meta["cached_tokens"] == (held.prefill if turn.is_long else held.decode)
        assert meta["cached_tokens_details"]["decode"] == held.decode
        assert number == 1 or meta["cached_tokens"] > 0
        assert meta["transfer_bytes"] == (expected_bytes(held, len(prompt), first) if turn.is_long else {})
        cold = ask_cold(shared_stack.unified.url, prompt, turn.answer_tokens)
        assert difference(answer, cold) is None, (number, difference(answer, cold))
        conversation, held = prompt + answer["output_ids"], held.after(turn, len(prompt))


def expected_bytes(held: Held, num_prompt_tokens: int, first: dict[str, int]) -> dict[str, int]:
    """The pages that decode lacks and the whole state. first: what the first turn's hand-off brought."""
    page_bytes, rest = divmod(first["kv"], Held().missing_pages(TURNS[0].new_tokens))
    assert rest == 0 and first["track"] == first["conv"] + first["ssm"] > 0
    return {**first, "kv": page_bytes * held.missing_pages(num_prompt_tokens)}


def test_a_short_turn_depends_on_the_state_that_decode_saved(tmp_path: Path, shared_stack: Stack) -> None:
    """With digests off and zeros in place of the saved state, the turn that came with it is right, the next is not.

    The state is of position 704 and the second prompt ends soon after it: a state fades with what follows.
    """
    assert shared_stack.unified is not None
    words, url = texts(20), shared_stack.unified.url
    options = ["--transport", "loopback", "--verify", "off", "--fault-zero", "track"]
    with stack(tmp_path, extra=options) as corrupted:
        prompt = words[:706]
        answer = ask(corrupted.router.url, prompt, 4)
        assert difference(answer, ask_cold(url, prompt, 4)) is None
        prompt = prompt + answer["output_ids"] + words[706:710]
        answer = ask(corrupted.router.url, prompt, 32)
        assert answer["meta_info"]["cached_tokens"] == 704 and answer["meta_info"]["transfer_bytes"] == {}
    cold = ask_cold(url, prompt, 32)
    assert answer["output_ids"] != cold["output_ids"] and difference(answer, cold) is not None
