"""The client of the ranks against a rank that is a pair of sockets in this process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from common.errors import AbortedError, RequestError, WorkerError
from common.handoff import RoomAddress
from common.sampling import FinishReason, LogprobOptions, SamplingParams
from node.ipc import RankSockets, ipc_directory
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
    Submit,
    Update,
    Updates,
)
from node.rank_client import MESSAGES_PER_WAKE, Mailbox, RankClient

DONE = FinishReason(type="length", length=1)


class SocketRank:
    """The other ends of a client's sockets."""

    def __init__(self, ipc_dir: Path, rank: int) -> None:
        self.sockets = RankSockets(ipc_dir, rank)

    def send(self, *messages: FromRank) -> None:
        for message in messages:
            self.sockets.send(message)

    def receive(self) -> object:
        message = self.sockets.receive(wait_ms=2000)
        assert message is not None, "nothing came"
        return message


@pytest.fixture
async def pair() -> AsyncIterator[tuple[RankClient, SocketRank]]:
    with ipc_directory() as ipc_dir:
        client = RankClient(ipc_dir, silence_timeout_s=30.0, liveness_timeout_s=30.0)
        client.start()
        rank = SocketRank(ipc_dir, 0)
        client.add_rank(0, 1234)
        yield client, rank
        client.close()
        rank.sockets.close(linger_ms=0)


def ready(pid: int = 1234) -> Ready:
    return Ready(
        pid=pid,
        fingerprint="f",
        transport="t",
        control_address=None,
        context_length=1,
        max_total_tokens=1,
        vocab_size=1,
        info={},
    )


def submit(rid: str, room: int | None = None) -> Submit:
    return Submit(
        rid=rid,
        token_ids=[1],
        sampling=SamplingParams(),
        logprobs=LogprobOptions(),
        room=None if room is None else RoomAddress(host="h", port=1, room=room),
        arrival_s=0.0,
    )


def update(rid: str, token_id: int, finish: FinishReason | None = None) -> Updates:
    return Updates([Update(rid=rid, token_ids=[token_id], logprobs=[], num_cached_tokens=0, finish=finish)])


async def take(mailbox: Mailbox, count: int) -> list[Update | Failure]:
    items: list[Update | Failure] = []
    async with asyncio.timeout(5):
        while len(items) < count:
            items += await mailbox.take()
    return items


async def test_many_messages_at_once_all_arrive_in_order(pair: tuple[RankClient, SocketRank]) -> None:
    client, rank = pair
    mailbox = Mailbox()
    client.submit([submit("a")], mailbox, groups=[None], rank=None)
    count = 5 * MESSAGES_PER_WAKE + 3
    rank.send(*(update("a", i) for i in range(count)))
    assert rank.receive() == submit("a")  # and by now the messages wait in our socket
    items = await take(mailbox, count)
    assert [item.token_ids[0] for item in items if isinstance(item, Update)] == list(range(count))


async def test_all_sequences_start_or_none(pair: tuple[RankClient, SocketRank]) -> None:
    client, rank = pair
    client.submit([submit("a", room=5)], Mailbox(), groups=[None], rank=None)
    for bad in (submit("a"), submit("c", room=5)):
        with pytest.raises(RequestError):
            client.submit([submit("b"), bad], Mailbox(), groups=[None, None], rank=None)
    assert client.num_running == 1 and rank.receive() == submit("a", room=5)
    assert not rank.sockets.inbox.poll(50)


async def test_a_sequence_is_running_until_its_rank_says_that_it_ended(pair: tuple[RankClient, SocketRank]) -> None:
    client, rank = pair
    for rid, last in (("a", update("a", 1, DONE)), ("b", Failure(rid="b", error=AbortedError("x").record()))):
        mailbox = Mailbox()
        client.submit([submit(rid)], mailbox, groups=[None], rank=None)
        client.abort([rid], "why")
        assert client.num_running == 1
        rank.send(last)
        await take(mailbox, 1)
        assert client.num_running == 0
    client.abort(["a", "never heard of"], "why")
    assert [type(rank.receive()) for _ in range(4)] == [Submit, Abort, Submit, Abort]
    assert not rank.sockets.inbox.poll(50)


async def test_what_comes_for_nobody_is_dropped(pair: tuple[RankClient, SocketRank]) -> None:
    client, rank = pair
    rank.send(update("unknown", 1), Failure(rid="unknown", error=AbortedError("x").record()))
    rank.send(Reply(ticket=99, payload={}), ready())
    assert [r.pid for r in await asyncio.wait_for(client.wait_ready(), 5)] == [1234]


async def test_a_group_is_found_by_its_name(pair: tuple[RankClient, SocketRank]) -> None:
    client, _ = pair
    client.submit([submit("g_0"), submit("g_1")], Mailbox(), groups=["g", "g"], rank=None)
    client.submit([submit("g_9")], Mailbox(), groups=[None], rank=None)
    for named, rids in (
        (["g"], ["g_0", "g_1"]),
        (["g_9", "g_9"], ["g_9"]),
        (["x"], []),
        (["g_9", "g"], ["g_0", "g_1", "g_9"]),
    ):
        assert client.rids_of(named) == rids


async def test_questions_get_their_answer_their_error_or_a_time_out(pair: tuple[RankClient, SocketRank]) -> None:
    client, rank = pair
    first = asyncio.create_task(client.query(0, "state", timeout_s=5))
    second = asyncio.create_task(client.query(0, "flush", timeout_s=5))
    await asyncio.sleep(0)
    asked = [rank.receive(), rank.receive()]
    assert [q.what for q in asked if isinstance(q, Query)] == ["state", "flush"]
    state, flush = (q.ticket for q in asked if isinstance(q, Query))
    rank.send(
        Reply(ticket=flush, payload={}, error=RequestError("busy").record()), Reply(ticket=state, payload={"x": 1})
    )
    assert await first == {"x": 1}
    with pytest.raises(RequestError, match="busy"):
        await second
    with pytest.raises(WorkerError, match=r"no answer in 0\.05 s"):
        await client.query(0, "state", timeout_s=0.05)


async def test_a_death_fails_everything_of_that_rank(pair: tuple[RankClient, SocketRank]) -> None:
    client, _ = pair
    mailbox = Mailbox()
    client.submit([submit("a", room=0)], mailbox, groups=[None], rank=None)
    question = asyncio.create_task(client.query(0, "state", timeout_s=5))
    await asyncio.sleep(0)
    client.on_rank_death(0, WorkerError("dead", code="rank_died"))
    (failure,) = await take(mailbox, 1)
    assert isinstance(failure, Failure) and failure.error.code == "rank_died"
    for attempt in (question, client.query(0, "state", timeout_s=5), client.wait_ready()):
        with pytest.raises(WorkerError, match="dead"):
            await attempt
    with pytest.raises(WorkerError, match="dead"):
        client.submit([submit("a", room=0)], Mailbox(), groups=[None], rank=None)
    assert client.num_running == 0 and len(client.errors()) == 1


async def test_a_stranger_that_is_ready_is_no_rank(pair: tuple[RankClient, SocketRank]) -> None:
    client, rank = pair
    rank.send(ready(pid=1))
    with pytest.raises(WorkerError, match="none of our ranks"):
        await asyncio.wait_for(client.wait_ready(), 5)


async def test_a_closed_mailbox_gives_its_error_to_the_reader() -> None:
    mailbox = Mailbox()
    reader = asyncio.create_task(mailbox.take())
    await asyncio.sleep(0)
    mailbox.put(Failure(rid="a", error=AbortedError("x").record()))
    mailbox.close(AbortedError("gone"))
    with pytest.raises(AbortedError, match="gone"):
        await reader


async def test_an_abandoned_request_ends_no_later_one_of_the_same_id(pair: tuple[RankClient, SocketRank]) -> None:
    client, rank = pair
    first, second = Mailbox(), Mailbox()
    client.submit([submit("a")], first, groups=[None], rank=None)
    client.abort(["a"], "why", of=second)
    client.abort(["a"], "why", of=first)
    assert [type(rank.receive()) for _ in range(2)] == [Submit, Abort] and not rank.sockets.inbox.poll(50)


async def test_an_id_that_is_being_ended_is_waited_for(pair: tuple[RankClient, SocketRank]) -> None:
    client, rank = pair
    client.submit([submit("a")], Mailbox(), groups=[None], rank=None)
    client.abort(["a"], "why")
    waiting = asyncio.create_task(client.let_end([submit("a")]))
    await asyncio.sleep(0.2)
    assert not waiting.done()
    rank.send(Failure(rid="a", error=AbortedError("x").record()))
    await asyncio.wait_for(waiting, 1)
    client.submit([submit("a")], Mailbox(), groups=[None], rank=None)
    await asyncio.wait_for(client.let_end([submit("a")]), 1)  # that one runs: no use to wait
    with pytest.raises(RequestError) as refused:
        client.submit([submit("a")], Mailbox(), groups=[None], rank=None)
    assert refused.value.code == "rid_in_use"


# -- silence ---------------------------------------------------------------------------------------

LIVENESS_S = 0.4
NOBODY = 10**8  # no process has it


@asynccontextmanager
async def watched(pid: int = NOBODY) -> AsyncIterator[tuple[RankClient, SocketRank]]:
    """A client with a short patience and a rank that is ready and answers only when the test does."""
    with ipc_directory() as ipc_dir:
        client = RankClient(ipc_dir, silence_timeout_s=30.0, liveness_timeout_s=LIVENESS_S)
        client.start()
        rank = SocketRank(ipc_dir, 0)
        client.add_rank(0, pid)
        rank.send(ready(pid))
        try:
            await client.wait_ready()
            yield client, rank
        finally:
            client.close()
            rank.sockets.close(linger_ms=0)


async def until(condition: Callable[[], bool], within_s: float = 3.0) -> None:
    async with asyncio.timeout(within_s):
        while not condition():  # noqa: ASYNC110 - nothing tells of it
            await asyncio.sleep(0.01)


async def test_a_silent_rank_fails_what_it_runs_until_it_speaks_again() -> None:
    async with watched() as (client, rank):
        mailbox = Mailbox()
        client.submit([submit("a", room=5)], mailbox, groups=[None], rank=None)
        start = time.monotonic()
        (failure,) = await take(mailbox, 1)
        assert isinstance(failure, Failure) and failure.error.code == "rank_silent" and failure.error.retryable
        assert LIVENESS_S * 0.9 < time.monotonic() - start < 4 * LIVENESS_S
        assert [error.code for error in client.errors()] == ["rank_silent"] and not client.all_dead
        with pytest.raises(WorkerError, match="rank 0"):
            client.submit([submit("b")], Mailbox(), groups=[None], rank=0)
        with pytest.raises(WorkerError, match="rank 0"):
            await client.query(0, "state", timeout_s=5)
        assert client.num_running == 1, "the rank may still be at it"
        rank.send(Pong(ticket=0), update("a", 7), Failure(rid="a", error=AbortedError("x").record()))
        await until(lambda: not client.errors() and client.num_running == 0)
        client.submit([submit("a", room=5)], Mailbox(), groups=[None], rank=None)


async def test_a_rank_that_answers_pings_is_not_silent() -> None:
    async with watched() as (client, rank):
        for _ in range(10):
            await asyncio.sleep(LIVENESS_S / 4)
            while rank.sockets.inbox.poll(0):
                message = rank.receive()
                assert isinstance(message, Ping)
                rank.send(Pong(ticket=message.ticket))
            assert client.errors() == []


async def test_a_rank_in_a_long_step_is_not_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu_s = iter(range(1, 1000))
    monkeypatch.setattr("node.rank_client.cpu_seconds", lambda pid: float(next(cpu_s)))
    async with watched() as (client, _):
        await asyncio.sleep(3 * LIVENESS_S)
        assert client.errors() == []
        monkeypatch.setattr("node.rank_client.cpu_seconds", lambda pid: 1000.0)
        await until(lambda: bool(client.errors()))


async def test_a_front_that_was_held_up_judges_nobody() -> None:
    async with watched() as (client, _):
        time.sleep(3 * LIVENESS_S)  # noqa: ASYNC251 - the point
        await asyncio.sleep(LIVENESS_S / 4)
        assert client.errors() == []


@asynccontextmanager
async def two_ranks(*, by_room: bool = False) -> AsyncIterator[tuple[RankClient, list[SocketRank]]]:
    with ipc_directory() as ipc_dir:
        client = RankClient(ipc_dir, silence_timeout_s=30.0, liveness_timeout_s=30.0, by_room=by_room)
        client.start()
        ranks = [SocketRank(ipc_dir, number) for number in range(2)]
        for number in range(2):
            client.add_rank(number, 1000 + number)
            ranks[number].send(ready(1000 + number))
        async with asyncio.timeout(5):
            await client.wait_ready()
        try:
            yield client, ranks
        finally:
            client.close()
            for rank in ranks:
                rank.sockets.close(linger_ms=0)


def loads(client: RankClient) -> list[int]:
    return [load["num_reqs"] for load in client.loads()]


async def test_a_batch_is_spread() -> None:
    async with two_ranks() as (client, _):
        client.submit([submit(f"r{i}", room=2 * i) for i in range(6)], Mailbox(), groups=[None] * 6, rank=None)
        assert loads(client) == [3, 3]
        client.submit([submit(f"s{i}") for i in range(4)], Mailbox(), groups=[None] * 4, rank=1)
        assert loads(client) == [3, 7]
        client.submit([submit(f"t{i}") for i in range(4)], Mailbox(), groups=[None] * 4, rank=None)
        assert loads(client) == [7, 7]


async def test_on_a_prefill_node_the_room_says_which_rank() -> None:
    async with two_ranks(by_room=True) as (client, _):
        client.submit([submit("a", room=5), submit("b", room=7)], Mailbox(), groups=[None] * 2, rank=0)
        assert loads(client) == [0, 2]
        client.on_rank_death(1, WorkerError("gone", code="rank_died"))
        with pytest.raises(WorkerError, match="gone"):
            client.submit([submit("c", room=9)], Mailbox(), groups=[None], rank=None)
        client.submit([submit("d", room=8)], Mailbox(), groups=[None], rank=None)
        assert loads(client) == [1, 0]


async def test_a_dead_rank_is_out_of_rotation_until_another_process_is_ready_in_its_place() -> None:
    async with two_ranks() as (client, ranks):
        back = asyncio.Event()
        client.on_return = lambda rank, _: back.set()
        mailbox = Mailbox()
        client.submit([submit("a")], mailbox, groups=[None], rank=1)
        client.on_rank_death(1, WorkerError("gone", code="rank_died"))
        (failure,) = await take(mailbox, 1)
        assert isinstance(failure, Failure) and failure.error.code == "rank_died"
        client.check_usable()
        client.submit([submit("b"), submit("c")], Mailbox(), groups=[None] * 2, rank=1)
        assert loads(client) == [2, 0] and client.usable() == [0] and not client.all_dead
        client.replace_rank(1, 2001)
        client.submit([submit("d")], Mailbox(), groups=[None], rank=None)
        assert loads(client) == [3, 0], "it still loads"
        ranks[1].send(ready(2001))
        async with asyncio.timeout(5):
            await back.wait()
        assert client.usable() == [0, 1]
        client.submit([submit("e")], Mailbox(), groups=[None], rank=None)
        assert loads(client) == [3, 1]
        client.on_rank_death(0, WorkerError("gone", code="rank_died"))
        client.on_rank_death(1, WorkerError("gone", code="rank_died"))
        assert client.all_dead
        with pytest.raises(WorkerError, match="gone"):
            client.check_usable()


async def test_a_process_of_another_model_is_not_taken_back() -> None:
    async with two_ranks() as (client, ranks):
        client.on_rank_death(1, WorkerError("gone", code="rank_died"))
        client.replace_rank(1, 2001)
        ranks[1].send(msgspec.structs.replace(ready(2001), fingerprint="another"))
        assert isinstance(await asyncio.to_thread(ranks[1].receive), Shutdown)
        assert client.usable() == [0]
