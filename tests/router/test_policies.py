"""Policies, loads, the prefix tree and what is known of a request, each alone."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Iterable
from typing import Any

import pytest

from common.config import PolicyName, Role, RouterConfig, WorkerAddress
from router.affinity import EDGES, MAX_BYTES, Affinity, make_path
from router.loads import SEQUENCE_TOKENS, Load, RankLoad, Share, ask_all, report_all
from router.pairing import Pair, Pairing, Possible
from router.policies import (
    Decisions,
    LeastLoad,
    Policy,
    PowerOfTwo,
    PrefixAware,
    Random,
    RoundRobin,
    Sticky,
    make_policy,
)
from router.prefix_tree import ENTRY_BYTES, MAX_TREE_BYTES, PrefixTree
from router.targets import MAX_RANKS, Target, make_targets
from router.worker import Worker, make_worker


def targets_of(count: int, num_ranks: int = 1) -> list[Target]:
    workers = [make_worker(Role.DECODE, WorkerAddress(url=f"http://127.0.0.1:{port}")) for port in range(1, count + 1)]
    return [target for worker in workers for target in make_targets(worker, num_ranks)]


def request(text: str = "hi", **fields: Any) -> Affinity:
    return Affinity({"text": text} | fields)


def rng() -> random.Random:
    return random.Random(0)


def chosen(policy: Policy, targets: list[Target], requests: Iterable[Affinity]) -> list[int]:
    """Places in `targets`."""
    return [targets.index(policy.choose(targets, each)) for each in requests]


def prefix_aware(*, max_bytes: int = 2**20, hits_save_work: bool = True) -> PrefixAware:
    return PrefixAware(PrefixTree(max_bytes), Decisions(), rng(), hits_save_work=hits_save_work)


@pytest.mark.parametrize("name", PolicyName)
def test_every_policy_takes_one_of_those_that_it_is_given(name: PolicyName) -> None:
    policy = make_policy(name, Role.DECODE, Decisions(), rng())
    targets = targets_of(5)
    for size in (1, 2, 5, 3, 1):
        for number in range(20):
            some = targets[:size]
            assert policy.choose(some, Affinity({"text": "x" * 50 * number, "routing_key": f"{number % 3}"})) in some


# By turns, at random


def test_round_robin_takes_everybody_once_before_anybody_twice() -> None:
    places = chosen(RoundRobin(rng()), targets_of(4), [request()] * 400)
    rounds = [tuple(places[i : i + 4]) for i in range(0, 400, 4)]
    assert all(sorted(each) == [0, 1, 2, 3] for each in rounds)
    assert len(set(rounds)) > 15


def test_round_robin_goes_on_when_a_target_comes_or_goes() -> None:
    policy, targets = RoundRobin(rng()), targets_of(3)
    seen = Counter(chosen(policy, targets, [request()] * 2) + chosen(policy, targets[:2], [request()] * 40))
    assert min(seen[0], seen[1]) >= 19
    late = targets_of(4)[3]
    assert 0 < chosen(policy, [*targets, late], [request()] * 40).count(3) <= 11


def test_random_takes_all_alike() -> None:
    seen = Counter(chosen(Random(rng()), targets_of(4), [request()] * 4000))
    assert all(900 < count < 1100 for count in seen.values())


# By load


def test_least_load_takes_the_least_and_any_of_equals() -> None:
    policy, targets = LeastLoad(rng()), targets_of(4)
    for target, tokens in zip(targets, (500, 100, 100, 300), strict=True):
        target.load.begin(tokens)
    assert set(chosen(policy, targets, [request()] * 50)) == {1, 2}


def test_power_of_two_never_takes_the_most_loaded() -> None:
    policy, targets = PowerOfTwo(rng()), targets_of(3)
    for target, tokens in zip(targets, (10, 20, 30), strict=True):
        target.load.begin(tokens)
    seen = Counter(chosen(policy, targets, [request()] * 3000))
    assert set(seen) == {0, 1}
    assert 1.7 < seen[0] / seen[1] < 2.3


def test_loads_without_reports_are_what_this_router_has_open() -> None:
    load = Load()
    first, second = load.begin(100), load.begin(50)
    assert (load.tokens, load.num_shares) == (150, 2)
    first.end()
    first.end()
    assert (load.tokens, load.num_shares) == (50, 1)
    second.end()
    assert load.tokens == 0


def test_a_report_counts_others_and_is_corrected_by_what_comes_and_ends_after_it() -> None:
    load = Load()
    old = load.begin(100)
    ask = load.ask()
    meanwhile = load.begin(30)  # the node may have counted it or not
    load.report(ask, 1000)
    assert load.tokens == 1030
    after = load.begin(7)
    assert load.tokens == 1037
    for share, left in ((old, 937), (meanwhile, 907), (after, 900)):
        share.end()
        assert load.tokens == left
    load.report(load.ask(), 20)
    assert load.tokens == 20


def test_shares_that_were_estimated_too_high_take_no_more_than_was_reported() -> None:
    load = Load()
    shares = [load.begin(1000) for _ in range(4)]
    load.report(load.ask(), 400)
    for share, left in zip(shares, (300, 200, 100, 0), strict=True):
        share.end()
        assert load.tokens == pytest.approx(left)


def test_reports_that_arrive_out_of_order_do_not_count() -> None:
    load = Load()
    first, second = load.ask(), load.ask()
    load.report(second, 5)
    load.report(first, 900)
    assert load.tokens == 5


def test_a_report_of_random_traffic_is_exact_when_estimates_are() -> None:
    numbers, load, shares, true = random.Random(1), Load(), [], 0
    for _ in range(3000):
        match numbers.randrange(5):
            case 0 | 1 | 2:
                shares.append(load.begin(numbers.randrange(1, 1000)))
                true += shares[-1].tokens
            case 3 if shares:
                share = shares.pop(numbers.randrange(len(shares)))
                true -= share.tokens
                share.end()
            case _:
                load.report(load.ask(), true)
        assert load.tokens == pytest.approx(true)


def test_ranks_get_their_own_reports() -> None:
    targets = targets_of(1, num_ranks=3)
    asks = ask_all(targets)
    report_all(
        targets, asks, [RankLoad(dp_rank=2, num_reqs=2, num_tokens=10), RankLoad(num_tokens=4), RankLoad(dp_rank=9)]
    )
    assert [target.load.tokens for target in targets] == [4, 0, 10 + 2 * SEQUENCE_TOKENS]
    report_all(targets, ask_all(targets), [RankLoad(num_reqs=-5, num_tokens=-100)])
    assert targets[0].load.tokens == 0


def test_targets_of_a_worker() -> None:
    assert [(target.rank, target.name) for target in targets_of(1, 2)] == [
        (0, "http://127.0.0.1:1#0"),
        (1, "http://127.0.0.1:1#1"),
    ]
    for nonsense in (0, -1, MAX_RANKS + 1, 10**18):
        assert len(targets_of(1, nonsense)) == 1


# Beginnings of prompts


def test_blocks_end_where_they_should() -> None:
    sizes = [end - begin for begin, end in zip((0, *EDGES), EDGES, strict=False)]
    assert sizes[:32] == [256] * 32
    assert sizes[32:64] == [512] * 32
    assert EDGES[-1] <= MAX_BYTES < EDGES[-1] + 2 * sizes[-1]
    assert len(EDGES) < 300


def test_paths_agree_exactly_as_far_as_prompts_do() -> None:
    numbers = random.Random(2)
    for _ in range(200):
        text = numbers.randbytes(numbers.randrange(20_000))
        cut = numbers.randrange(len(text) + 1)
        other = text[:cut] + b"\x00other" + numbers.randbytes(numbers.randrange(3000))
        ours, theirs = make_path(text).hashes, make_path(other).hashes
        agreed = sum(mine == their for mine, their in zip(ours, theirs, strict=False))
        same = len(text[:cut]) + (text[cut : cut + 1] == b"\x00")
        assert agreed in (sum(end <= cut for end in EDGES), sum(end <= same + 5 for end in EDGES))
        assert ours[:agreed] == theirs[:agreed]
        assert make_path(text).num_bytes == len(text)


SAME_PROMPTS: list[tuple[dict[str, Any], dict[str, Any], bool]] = [
    ({"text": "a" * 500}, {"text": "a" * 500, "stream": True, "sampling_params": {}}, True),
    ({"text": "a" * 500}, {"text": ["a" * 500, "b"]}, True),
    ({"text": "a" * 500}, {"prompt": "a" * 500}, True),
    ({"text": "é" * 500}, {"prompt": ["é" * 500]}, True),
    ({"input_ids": [7] * 500}, {"input_ids": [[7] * 500, [8]]}, True),
    ({"input_ids": [7] * 500}, {"prompt": [7] * 500}, True),
    ({"input_ids": [7] * 500}, {"prompt": [[7] * 500]}, True),
    ({"text": "a" * 500}, {"text": "b" * 500}, False),
    ({"input_ids": [7] * 500}, {"input_ids": [8] * 500}, False),
    ({"text": "a" * 500}, {"text": "a" * 500, "extra_key": "k"}, False),
    ({"text": "a" * 500, "extra_key": "k"}, {"text": ["a" * 500], "extra_key": ["k"]}, True),
    ({"text": "a" * 500, "extra_key": "k"}, {"text": "a" * 500, "extra_key": "l"}, False),
    ({"prompt": "a" * 500, "extra_key": "k"}, {"prompt": "a" * 500, "cache_salt": "k"}, True),
    ({"prompt": "a" * 500}, {"prompt": "a" * 500, "cache_salt": "k"}, False),
]


@pytest.mark.parametrize(("one", "other", "same"), SAME_PROMPTS)
def test_which_requests_begin_alike(one: dict[str, Any], other: dict[str, Any], same: bool) -> None:
    ours, theirs = Affinity(one).path, Affinity(other).path
    assert ours.hashes
    assert (ours.hashes == theirs.hashes) is same
    assert same or ours.hashes[0] != theirs.hashes[0]


def test_a_conversation_begins_like_its_next_turn() -> None:
    system = {"role": "system", "content": "s" * 300}
    turns = [{"role": "user", "content": f"question {i} " * 30} for i in range(4)]
    parts = [{"role": "user", "content": [{"type": "text", "text": "in parts " * 50}]}]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}] * 3
    for extra in ({}, {"tools": tools}):
        one = Affinity({"messages": [system, turns[0], *parts]} | extra).path
        two = Affinity({"messages": [system, turns[0], *parts, *turns[1:]]} | extra).path
        assert len(one.hashes) > 3
        assert one.hashes == two.hashes[: len(one.hashes)]
        assert len(two.hashes) > len(one.hashes)
    assert Affinity({"messages": [system, turns[1]]}).path.hashes[0] == one.hashes[0] or extra
    assert (
        Affinity({"messages": [system], "tools": tools}).path.hashes[0]
        != Affinity({"messages": [system]}).path.hashes[0]
    )


NO_PROMPTS: list[dict[str, Any]] = [
    {},
    {"text": None},
    {"text": ""},
    {"text": 3},
    {"text": {"a": 1}},
    {"text": []},
    {"input_ids": ["x", 3]},
    {"input_ids": []},
    {"input_ids": [[]]},
    {"messages": []},
    {"messages": [None, 3, {"role": 4}]},
    {"messages": "x" * 500},
    {"text": "short", "extra_key": [3]},
    {"text": "short", "extra_key": []},
    {"prompt": [[{"a": 1}]]},
]


@pytest.mark.parametrize("fields", NO_PROMPTS)
def test_what_is_no_prompt_or_too_short_begins_like_nothing(fields: dict[str, Any]) -> None:
    affinity = Affinity(fields)
    assert affinity.path.hashes == ()
    assert affinity.num_tokens >= 0
    targets = targets_of(3)
    assert len(set(chosen(prefix_aware(), targets, [affinity] * 30))) == 3


@pytest.mark.parametrize("item", [2**70, 1.5, None, True, {}, -1])
def test_odd_token_ids_have_paths(item: Any) -> None:
    """The nodes refuse them."""
    assert (
        Affinity({"input_ids": [1] * 300 + [item] * 300}).path.hashes[:2]
        == Affinity({"input_ids": [1] * 500}).path.hashes[:2]
    )


def test_odd_strings_have_paths() -> None:
    assert Affinity({"text": "\ud800" * 300}).path.hashes
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    assert Affinity({"messages": [{"role": "user", "content": deep}]}).path is not None


def test_how_large_a_request_is() -> None:
    assert Affinity({"text": "x" * 400}).num_tokens == 100
    assert Affinity({"input_ids": [1] * 70}).num_tokens == 70
    assert Affinity({"text": ["x" * 400, "x" * 40]}, num_sequences=2).num_tokens == 110
    assert Affinity({"text": ["x" * 400, "x" * 40]}, num_sequences=6).num_tokens == 330
    assert Affinity({"input_ids": [1] * 70}, num_sequences=3).weight == 210 + 3 * SEQUENCE_TOKENS
    assert Affinity({"messages": [{"role": "user", "content": "x" * 400}] * 2}, num_sequences=3).num_tokens == 600


def test_no_more_is_looked_at_than_can_matter() -> None:
    """However large a body is, its beginning is enough."""
    messages = [{"role": "user", "content": "wordword"}] * 100_000
    assert Affinity({"messages": messages}).num_tokens == 2 * 4096
    assert Affinity({"messages": messages}).path.num_bytes == 4096 * len("user\nwordword\n")
    assert Affinity({"messages": [messages[0], {"role": "user", "content": "x" * 2**22}]}).path.num_bytes == MAX_BYTES
    for prompt in ("x" * 2**22, [12345] * 2**20):
        assert Affinity({"prompt": prompt}).path.num_bytes == MAX_BYTES
    ids = [12345] * 2**18
    assert Affinity({"prompt": [*ids, 7]}).path == Affinity({"prompt": [*ids, 8, 9]}).path


# The tree


def test_a_tree_knows_for_each_target_how_far_a_prompt_was_sent() -> None:
    tree = PrefixTree()
    long, short = make_path(b"a" * 4000), make_path(b"a" * 1800)
    tree.add(short, salt=1)
    tree.add(long, salt=2)
    assert [tree.match(long, salt) for salt in (1, 2, 3)] == [7, 15, 0]
    assert [tree.match(short, salt) for salt in (1, 2, 3)] == [7, 7, 0]
    assert long.shared(7) == 7 * 256 / 4000
    assert tree.match(make_path(b"a" * 600 + b"b" * 1800), 2) == 2
    assert tree.match(make_path(b""), 1) == make_path(b"").shared(0) == 0


def test_a_full_tree_gives_up_what_was_used_least_recently_and_ends_before_beginnings() -> None:
    tree = PrefixTree(max_bytes=20 * ENTRY_BYTES)
    first, second, third = (make_path(bytes([number]) * 256 * 8) for number in range(3))
    tree.add(first, 0)
    tree.add(second, 0)
    tree.add(first, 0)
    tree.add(third, 0)
    assert [tree.match(path, 0) for path in (first, second, third)] == [8, 4, 8]
    assert len(tree) == 20


def test_the_size_of_an_entry_is_what_it_takes() -> None:
    import tracemalloc

    numbers = random.Random(4)
    paths = [make_path(numbers.randbytes(256 * 32)) for _ in range(2000)]
    max_bytes = MAX_TREE_BYTES // 16
    tracemalloc.start()
    tree = PrefixTree(max_bytes)
    sizes = []
    for path in paths:
        tree.add(path, 12345)
        sizes.append(tracemalloc.get_traced_memory()[0])
    tracemalloc.stop()
    assert len(tree) == max_bytes // ENTRY_BYTES, "all are replaced several times"
    assert 0.5 * max_bytes < max(sizes) <= max_bytes


# By prefix


def conversation(number: int, turns: int) -> Affinity:
    return request(f"conversation {number} " * 60 + "more words " * 30 * turns)


def test_turns_of_a_conversation_stay_where_they_began() -> None:
    policy, targets = prefix_aware(), targets_of(4)
    homes: dict[int, set[int]] = {}
    for turn in range(5):
        for number in range(40):
            homes.setdefault(number, set()).update(chosen(policy, targets, [conversation(number, turn)]))
    assert sum(len(home) == 1 for home in homes.values()) > 36
    assert set().union(*homes.values()) == {0, 1, 2, 3}


def test_a_shared_beginning_does_not_pull_everything_to_one_target() -> None:
    policy, targets = prefix_aware(), targets_of(4)
    system = "a long system prompt " * 40
    places = Counter(chosen(policy, targets, [request(system + f"question {i} " * 100) for i in range(400)]))
    assert max(places.values()) <= 1.3 * 100


def test_one_hot_prompt_stays_in_an_idle_fleet_and_spreads_in_a_busy_one() -> None:
    hot = request("the same " * 300)
    assert len(set(chosen(prefix_aware(), targets_of(4), [hot] * 400))) == 1
    policy, targets, places, running = prefix_aware(), targets_of(4), Counter[str](), deque[Share]()
    for _ in range(400):
        target = policy.choose(targets, hot)
        places[target.name] += 1
        running.append(target.load.begin(hot.weight))
        if len(running) > 160:
            running.popleft().end()
    assert max(places.values()) <= 1.5 * 100
    assert max(target.load.num_shares for target in targets) <= 1.5 * 40


def test_a_busy_target_loses_even_what_it_has() -> None:
    policy, targets = prefix_aware(), targets_of(2)
    (home,) = chosen(policy, targets, [conversation(1, 0)])
    assert chosen(policy, targets, [conversation(1, 1)]) == [home]
    share = targets[home].load.begin(10**6)
    assert chosen(policy, targets, [conversation(1, 2)]) == [1 - home]
    share.end()


def test_who_is_new_is_not_given_everything() -> None:
    policy, targets = prefix_aware(), targets_of(3)
    chosen(policy, targets, [conversation(number, 0) for number in range(300)])
    more = [*targets, targets_of(4)[3]]
    places = Counter(chosen(policy, more, [conversation(number, 0) for number in range(1000, 1040)]))
    assert 5 <= places[3] <= 16


def test_what_is_forgotten_pulls_nothing() -> None:
    policy, targets = prefix_aware(), targets_of(4)
    (home,) = chosen(policy, targets, [conversation(1, 0)])
    tree, path = policy.tree, conversation(1, 0).path
    assert tree.match(path, targets[home].salt) == len(path.hashes) > 2
    targets[home].forget_prefixes()
    assert tree.match(path, targets[home].salt) == 0


def test_decisions_are_counted() -> None:
    decisions = Decisions()
    policy = PrefixAware(PrefixTree(), decisions, rng(), hits_save_work=True)
    chosen(policy, targets_of(2), [request("x" * 4096)] * 2)
    assert (decisions.prompt_tokens, decisions.hit_tokens) == (2048, 1024)


# By key


def keyed(key: str | None) -> Affinity:
    return Affinity({"text": "hi", "routing_key": key})


def test_a_key_stays_and_a_lost_target_moves_its_own_keys_alone() -> None:
    policy, targets = Sticky(rng()), targets_of(4)
    keys = [f"user-{number}" for number in range(1000)]
    before = {key: policy.choose(targets, keyed(key)) for key in keys}
    assert all(policy.choose(targets_of(4)[::-1], keyed(key)).name == target.name for key, target in before.items())
    left = targets[:2] + targets[3:]
    for key, target in before.items():
        if target is not targets[2]:
            assert policy.choose(left, keyed(key)) is target
    assert all(200 < count < 300 for count in Counter(target.name for target in before.values()).values())
    moved = Counter(policy.choose(left, keyed(key)).name for key, target in before.items() if target is targets[2])
    assert len(moved) == 3


def test_without_a_key_the_least_loaded_is_taken() -> None:
    targets = targets_of(3)
    for target in targets[1:]:
        target.load.begin(10)
    assert set(chosen(Sticky(rng()), targets, [keyed(None)] * 10)) == {0}
    assert Sticky(rng()).choose(targets, keyed("\ud800")) in targets


def test_names_of_policies() -> None:
    assert PolicyName("cache_aware") is PolicyName.PREFIX_AWARE
    assert PolicyName("manual") is PolicyName.STICKY
    with pytest.raises(ValueError, match="bucket"):
        PolicyName("bucket")


# Who may serve


def fleet_of(count: int) -> tuple[list[Worker], list[Worker]]:
    roles = [
        [make_worker(role, WorkerAddress(url=f"http://{role.value}-{i}:1", bootstrap_port=1)) for i in range(count)]
        for role in (Role.PREFILL, Role.DECODE)
    ]
    for worker in (*roles[0], *roles[1]):
        worker.alive = worker.resumes = True
    return roles[0], roles[1]


def pair_of(prefill: Worker, decode: Worker) -> Pair:
    return Pair(prefill, decode, prefill.targets[0], decode.targets[0])


def test_only_pairs_that_fit_and_live_are_possible() -> None:
    prefill, decode = fleet_of(3)
    prefill[0].fingerprint = decode[0].fingerprint = "old"
    prefill[1].fingerprint = "of nobody else"
    decode[2].alive = False
    possible = Possible(prefill, decode)
    assert possible.prefill() == [prefill[0], prefill[2]]
    assert (possible.partners(prefill[0]), possible.partners(prefill[2])) == ([decode[0]], [decode[1]])
    pairing = Pairing(RouterConfig(policy=PolicyName.RANDOM))
    met = {pairing.pick(possible, request())[:2] for _ in range(60)}
    assert met == {(prefill[0], decode[0]), (prefill[2], decode[1])}
    decode[0].alive = prefill[2].alive = False
    assert not Possible(prefill, decode)


def test_who_goes_on_with_answers_of_others() -> None:
    prefill, decode = fleet_of(2)
    prefill[0].resumes = decode[1].resumes = False
    possible = Possible(prefill, decode, resumes=True)
    assert (possible.prefill(), possible.partners(prefill[1])) == ([prefill[1]], [decode[0]])
    assert len(Possible(prefill, decode).prefill()) == 2
    decode[0].resumes = False
    assert not Possible(prefill, decode, resumes=True)


def test_pairs_that_failed_are_not_tried_again_and_new_workers_come_first() -> None:
    prefill, decode = fleet_of(2)
    failed = [pair_of(prefill[0], decode[0])]
    possible = Possible(prefill, decode, failed)
    assert (possible.prefill(), possible.partners(prefill[1])) == ([prefill[1]], [decode[1]])
    failed.append(pair_of(prefill[1], decode[1]))
    possible = Possible(prefill, decode, failed)
    assert (possible.partners(prefill[0]), possible.partners(prefill[1])) == ([decode[1]], [decode[0]])
    failed += [pair_of(prefill[0], decode[1]), pair_of(prefill[1], decode[0])]
    assert not Possible(prefill, decode, failed)


def test_after_the_death_of_a_rank_the_others_of_its_node_are_tried() -> None:
    (prefill, *_), (decode, *_) = fleet_of(1)
    decode.num_ranks = 2
    decode.renew_targets()
    pairing = Pairing(RouterConfig())
    failed = [pairing.pick(Possible([prefill], [decode]), request())]
    again = pairing.pick(Possible([prefill], [decode], failed), request())
    assert again.decode_target is not failed[0].decode_target
    again.decode_target.alive = False
    assert pairing.pick(Possible([prefill], [decode], failed), request()).decode_target is failed[0].decode_target


def test_a_decode_rank_that_a_client_names_is_taken_where_there_is_one() -> None:
    prefill, decode = fleet_of(2)
    decode[1].num_ranks = 2
    decode[1].renew_targets()
    pairing, possible = Pairing(RouterConfig()), Possible(prefill, decode)
    for _ in range(20):
        assert pairing.pick(possible, request(routed_dp_rank=1)).decode_target is decode[1].targets[1]
        assert pairing.pick(possible, request(data_parallel_rank=0)).decode_target.rank == 0
        assert pairing.pick(possible, request(routed_dp_rank=9)).decode in decode


def test_the_roles_do_not_go_in_step() -> None:
    prefill, decode = fleet_of(2)
    pairing, possible = Pairing(RouterConfig(policy=PolicyName.PREFIX_AWARE)), Possible(prefill, decode)
    met = Counter(pairing.pick(possible, request())[:2] for _ in range(400))
    assert len(met) == 4 and min(met.values()) > 40
