"""A deterministic model of prefill and decode workers with bounded prefix caches, and a skewed trace to drive it with.

No real time and no network: requests arrive at times of the model, policies choose for them as in the router, and each
target's load is what its worker would report.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from common.config import Role, WorkerAddress
from router.affinity import Affinity
from router.loads import SEQUENCE_TOKENS, Share
from router.policies import Policy
from router.targets import Target, make_targets
from router.workers import make_worker

BLOCK_TOKENS = 64
REPORT_S = 1.0

Block = tuple[int, int]


# The trace


@dataclass(frozen=True, slots=True)
class Request:
    """prompt: token ids. blocks: of the prompt, equal where prompts are. grown: of prompt and answer."""

    at_s: float
    prompt: list[int]
    blocks: list[Block]
    grown: list[Block]
    answer_tokens: int


@dataclass(slots=True)
class Conversation:
    number: int
    system: int
    tokens: list[int]
    num_shared: int
    turns_left: int

    def blocks(self) -> list[Block]:
        """Whole ones only. Those of the shared beginning have its name."""
        return [
            (-1 - self.system, i) if (i + 1) * BLOCK_TOKENS <= self.num_shared else (self.number, i)
            for i in range(len(self.tokens) // BLOCK_TOKENS)
        ]


def skewed_trace(
    *, num_requests: int, num_conversations: int, num_systems: int, gap_s: float, seed: int
) -> list[Request]:
    """Conversations of several turns behind shared system prompts. Which one goes on, and which system prompt it has,
    is distributed by Zipf's law; an ended one is followed by another in its place."""
    rng = random.Random(seed)
    numbers = itertools.count()
    systems = [list(rng.randbytes(rng.randrange(256, 1025))) for _ in range(num_systems)]
    places = [_conversation(next(numbers), systems, rng) for _ in range(num_conversations)]
    popularity = _zipf(num_conversations, 1.0)
    now, trace = 0.0, []
    for place in rng.choices(range(num_conversations), popularity, k=num_requests):
        now += rng.expovariate(1 / gap_s)
        if places[place].turns_left == 0:
            places[place] = _conversation(next(numbers), systems, rng)
        trace.append(_next_turn(places[place], now, rng))
    return trace


def _conversation(number: int, systems: list[list[int]], rng: random.Random) -> Conversation:
    (system,) = rng.choices(range(len(systems)), _zipf(len(systems), 1.2))
    tokens = list(systems[system])
    return Conversation(number, system, tokens, len(tokens), rng.randrange(3, 13))


def _next_turn(conversation: Conversation, now: float, rng: random.Random) -> Request:
    conversation.turns_left -= 1
    conversation.tokens += rng.randbytes(rng.randrange(20, 400))
    prompt, blocks = list(conversation.tokens), conversation.blocks()
    answer_tokens = rng.randrange(20, 300)
    conversation.tokens += rng.randbytes(answer_tokens)
    return Request(now, prompt, blocks, conversation.blocks(), answer_tokens)


def _zipf(count: int, exponent: float) -> list[float]:
    return [1 / (rank + 1) ** exponent for rank in range(count)]


def best_hit_rate(trace: Sequence[Request], cache_blocks: int) -> float:
    """Of one worker with a cache of that size that serves all of them in this order: no placement can do better with
    caches of that size together that forget what was least recently used."""
    cache, hits = Cache(cache_blocks), 0
    for request in trace:
        hits += cache.hit_tokens(request.blocks)
        cache.add(request.blocks)
    return hits / sum(len(request.prompt) for request in trace)


# The workers


def imbalance(nodes: Sequence[Node]) -> float:
    """Work of the busiest one over the mean."""
    return max(node.work for node in nodes) * len(nodes) / sum(node.work for node in nodes)


class Cache:
    """Of blocks; the least recently used goes first, and never one before what comes after it in a prompt."""

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._held: OrderedDict[Block, None] = OrderedDict()

    def hit_tokens(self, blocks: Sequence[Block]) -> int:
        return BLOCK_TOKENS * sum(1 for _ in itertools.takewhile(self._held.__contains__, blocks))

    def add(self, blocks: Sequence[Block]) -> None:
        for block in reversed(blocks):
            self._held[block] = None
            self._held.move_to_end(block)
        while len(self._held) > self._num_blocks:
            self._held.popitem(last=False)


@dataclass(slots=True, eq=False)
class Node:
    """A worker with one rank. work: done by it, in tokens: computed in prefill, made in decode.

    running: (end, tokens) of what it has in flight.
    """

    target: Target
    cache: Cache
    free_s: float = 0.0
    work: float = 0.0
    num_requests: int = 0
    hit_tokens: int = 0
    running: list[tuple[float, int]] = field(default_factory=list)


TOKENS_S = 8000.0
DECODE_STEP_S = 0.02
OVERHEAD_TOKENS = 64
"""Of a prefill, whatever its length."""


class Fleet:
    """As many prefill as decode workers. policies: of the two roles. Loads reach the router once a second."""

    def __init__(self, size: int, cache_blocks: int, policies: tuple[Policy, Policy]) -> None:
        self.prefill, self.decode = ([_node(role, i, cache_blocks) for i in range(size)] for role in _ROLES)
        self._policies = policies
        self._ends: list[tuple[float, int, Share]] = []
        self._numbers = itertools.count()
        self._report_s = 0.0
        self.prompt_tokens = 0

    @property
    def hit_rate(self) -> float:
        """Which part of all prompt tokens prefill did not compute."""
        return sum(node.hit_tokens for node in self.prefill) / self.prompt_tokens

    def run(self, trace: Sequence[Request]) -> None:
        for request in trace:
            self._advance(request.at_s)
            self._serve(request)

    def _advance(self, now: float) -> None:
        while self._report_s <= now:
            self._end_shares(self._report_s)
            for node in (*self.prefill, *self.decode):
                node.running = [entry for entry in node.running if entry[0] > self._report_s]
                tokens = sum(tokens for _, tokens in node.running)
                node.target.load.report(node.target.load.ask(), tokens)
            self._report_s += REPORT_S
        self._end_shares(now)

    def _end_shares(self, now: float) -> None:
        while self._ends and self._ends[0][0] <= now:
            heapq.heappop(self._ends)[2].end()

    def _serve(self, request: Request) -> None:
        affinity = Affinity({"input_ids": request.prompt})
        self.prompt_tokens += len(request.prompt)
        prefill, decode = (self._choose(role, affinity) for role in (0, 1))
        computed = OVERHEAD_TOKENS + len(request.prompt) - self._hit(prefill, request.blocks, request.blocks)
        prefill_end = max(prefill.free_s, request.at_s) + computed / TOKENS_S
        prefill.free_s = prefill_end
        self._hit(decode, request.blocks, request.grown)
        self._begin(prefill, affinity, prefill_end, computed)
        self._begin(decode, affinity, prefill_end + request.answer_tokens * DECODE_STEP_S, request.answer_tokens)

    def _choose(self, role: int, affinity: Affinity) -> Node:
        nodes = (self.prefill, self.decode)[role]
        chosen = self._policies[role].choose([node.target for node in nodes], affinity)
        return next(node for node in nodes if node.target is chosen)

    def _hit(self, node: Node, blocks: list[Block], kept: list[Block]) -> int:
        hit = node.cache.hit_tokens(blocks)
        node.cache.add(kept)
        node.hit_tokens += hit
        return hit

    def _begin(self, node: Node, affinity: Affinity, end_s: float, work: float) -> None:
        node.num_requests += 1
        node.work += work
        node.running.append((end_s, affinity.num_tokens + SEQUENCE_TOKENS))
        heapq.heappush(self._ends, (end_s, next(self._numbers), node.target.load.begin(affinity.weight)))


_ROLES = (Role.PREFILL, Role.DECODE)


def _node(role: Role, number: int, cache_blocks: int) -> Node:
    worker = make_worker(role, WorkerAddress(url=f"http://{role.value}-{number}:1", bootstrap_port=1))
    return Node(make_targets(worker, 1)[0], Cache(cache_blocks))
