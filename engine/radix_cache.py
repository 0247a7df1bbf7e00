"""The prefix cache of a hybrid model: KV pages and recurrent states of prefixes, in one tree.

KV can be cut after any page, a recurrent state only where one was saved. So a prefix may be held deeper than it can be
resumed, and a match answers both depths. With page_size 16 and cache_chunk 64, when two prompts of 128 and 192 tokens
had their first 112 in common (● is a saved state):

    root ──[4 pages]── 64 ● ──[3 pages]── 112 ──[1 page]── 128 ●
                                           └────[5 pages]── 192 ●

The first prompt was stored as one node, its state at 128. The second one found 112 tokens of KV and no state, so it
computed from 0 and saved a state at its branch position, ⌊112 / 64⌋ · 64. The third one with those 112 resumes at 64.

A node is a run of whole pages, its edge. Children are keyed by their first page of tokens, so two of them may share
less than a page. A state belongs to the end of its node. Positions count tokens from the start of the sequence.

Who owns what: a page or slot that was donated by `insert` is the tree's (owner "cache" in the allocators) until it is
evicted, dropped or flushed. A request that goes on using it holds a lock. Running and finished requests donate alike.

Two orders of use, KV and states, each evicted from its oldest end. KV leaves go before their parents, because whatever
uses a node uses its ancestors right after it. A lock takes a node out of its order; giving it back counts as use.
Locks on KV reach from a node to the root; a lock on a state covers its KV too, a lock on KV leaves states evictable.

One thread calls it. Torch-free: it moves numbers, never bytes. Wrong calls are bugs of this project: AssertionError.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence, Set
from dataclasses import asdict, dataclass, field

from engine.allocator import PageAllocator, SlotAllocator

CACHE_OWNER = "cache"

Key = tuple[str | None, tuple[int, ...]]  # namespace (extra_key), first page of tokens


@dataclass(slots=True, eq=False, kw_only=True)
class Node:
    """A run of pages, and the handle that callers lock. It keeps its end: a split makes a new node of its upper half.

    parent: None for the root and for a node that was evicted. tokens: those of `pages`, in order. end: the position
    after its last token. slot: the state at `end`, if any. num_state_uses: states offered here and matches that resumed
    here, ever. ends_prompt: some prompt's last tracked position.
    """

    extra_key: str | None
    parent: Node | None
    tokens: tuple[int, ...]
    pages: list[int]
    end: int
    kv_locks: int = 0
    children: dict[Key, Node] = field(default_factory=dict)
    slot: int | None = None
    state_locks: int = 0
    num_state_uses: int = 0
    ends_prompt: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """What the tree holds of a token sequence. Good until the next call that may evict; to keep it, lock its nodes.

    kv_pages: pages of the longest cached prefix, num_kv_tokens = page_size · len(kv_pages), possibly all tokens.
    state_position: the deepest saved state inside it that leaves a token to compute; 0, and state_slot None, if none.
    branch_position: where a state would have let this request resume deeper than it can; 0 if nowhere.
    kv_node, state_node: the nodes that end at num_kv_tokens and at state_position; the root for 0.
    """

    kv_pages: list[int]
    num_kv_tokens: int
    state_position: int
    state_slot: int | None
    branch_position: int
    kv_node: Node
    state_node: Node


@dataclass(frozen=True, slots=True, kw_only=True)
class InsertResult:
    """pages_now: the tree's pages of the inserted tokens, in order; what the caller uses from now on.

    duplicate_pages, duplicate_slot: what the tree had already; still the caller's, to free when nothing writes there.
    node: ends at the last inserted token; the root when there was none.
    """

    pages_now: list[int]
    duplicate_pages: list[int]
    duplicate_slot: int | None
    node: Node


@dataclass(frozen=True, slots=True, eq=False)
class Lock:
    """One hold on a node's KV and its ancestors', and, with state=True, on the node's state."""

    node: Node
    state: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Flushed:
    num_pages: int
    num_slots: int


@dataclass(slots=True, kw_only=True)
class CacheCounters:
    """Totals since the start. A hit is a counted match that can resume: hit_tokens is the sum of its state positions.

    kv_hit_tokens: what counted matches found of KV, resumable or not.
    """

    hits: int = 0
    misses: int = 0
    hit_tokens: int = 0
    kv_hit_tokens: int = 0
    evicted_pages: int = 0
    evicted_slots: int = 0


class RadixCache:
    """cache_chunk: the grid on which states are saved, a multiple of page_size. Units of both: tokens."""

    def __init__(self, pages: PageAllocator, slots: SlotAllocator, *, page_size: int, cache_chunk: int) -> None:
        assert page_size > 0 and cache_chunk > 0 and cache_chunk % page_size == 0, (page_size, cache_chunk)
        self.page_size = page_size
        self.cache_chunk = cache_chunk
        self.counters = CacheCounters()
        self.num_evictable_pages = 0
        self._pages = pages
        self._slots = slots
        self._root = Node(extra_key=None, parent=None, tokens=(), pages=[], end=0)
        self._cached_pages: set[int] = set()
        self._cached_slots: set[int] = set()
        self._locks: set[Lock] = set()
        self._idle_nodes: OrderedDict[Node, None] = OrderedDict()  # without KV locks, oldest use first
        self._idle_states: OrderedDict[Node, None] = OrderedDict()  # with a state and without state locks

    @property
    def num_cached_pages(self) -> int:
        return len(self._cached_pages)

    @property
    def num_cached_slots(self) -> int:
        return len(self._cached_slots)

    @property
    def num_evictable_slots(self) -> int:
        return len(self._idle_states)

    @property
    def cached_pages(self) -> Set[int]:
        return self._cached_pages

    @property
    def cached_slots(self) -> Set[int]:
        return self._cached_slots

    @property
    def locks(self) -> Set[Lock]:
        """All that were given out and not given back."""
        return self._locks

    # -- looking up and donating -------------------------------------------------------------------

    def match(self, tokens: Sequence[int], *, extra_key: str | None, count: bool = True) -> Match:
        """The longest cached prefix of `tokens` in the namespace `extra_key`.

        It counts as use of that KV and of the state where the caller would resume, of no shallower state. count=False:
        leave the hit counters alone, as when a waiting request looks again.
        """
        node = self._find(tuple(tokens), extra_key)
        path = self._path(node)
        limit = max(0, len(tokens) - 1)
        state_node = next((n for n in path if n.slot is not None and n.end <= limit), self._root)
        branch = min(node.end, limit) // self.cache_chunk * self.cache_chunk
        self._use_kv(node)
        self._use_state(state_node)
        match = Match(
            kv_pages=_pages_of(path),
            num_kv_tokens=node.end,
            state_position=state_node.end,
            state_slot=state_node.slot,
            branch_position=branch if branch > state_node.end else 0,
            kv_node=node,
            state_node=state_node,
        )
        if count:
            self._count(match)
        return match

    def insert(
        self,
        tokens: Sequence[int],
        pages: Sequence[int],
        slot: int | None,
        *,
        extra_key: str | None,
        ends_prompt: bool = False,
    ) -> InsertResult:
        """Donate the KV of `tokens`, whole pages, and with a slot the state after the last of them.

        pages: one for every page_size tokens, in order: the caller's own, or the tree's where the caller uses those.
        slot: needs len(tokens) to be a multiple of cache_chunk. ends_prompt: `drop_state` will leave this state alone.
        What the tree lacked is the tree's on return; unlocked, so lock the node before anything may evict.
        """
        tokens = tuple(tokens)
        assert len(tokens) == len(pages) * self.page_size, f"{len(pages)} pages do not hold {len(tokens)} tokens"
        self._check_donated_slot(len(tokens), slot)
        node = self._find(tokens, extra_key)
        held = _pages_of(self._path(node))
        duplicates = [given for given, kept in zip(pages, held, strict=False) if given != kept]
        new = list(pages[len(held) :])
        elsewhere = self._cached_pages.intersection([*duplicates, *new])
        assert not elsewhere, f"pages that the tree holds for other tokens: {sorted(elsewhere)}"
        if new:
            node = self._append(node, tokens[node.end :], new, extra_key)
        self._use_kv(node)
        node.ends_prompt |= ends_prompt
        return InsertResult(
            pages_now=held + new,
            duplicate_pages=duplicates,
            duplicate_slot=self._donate_slot(node, slot),
            node=node,
        )

    def drop_state(self, node: Node) -> bool:
        """Free a request's older checkpoint, now that it donated a newer one. False when it stays or was gone before.

        It stays while it is locked, when it ends a prompt, when another request saved or resumed there, and when the
        paths of several requests part below it before the next state: it is then the deepest that they share.
        """
        if node.slot is None or node.state_locks or node.ends_prompt or self._is_shared(node):
            return False
        self._free_state(node)
        return True

    def state(self) -> dict[str, int]:
        """Sizes and counters, for /server_info."""
        return {
            "pages_cached": self.num_cached_pages,
            "slots_cached": self.num_cached_slots,
            "pages_evictable": self.num_evictable_pages,
            "slots_evictable": self.num_evictable_slots,
            **asdict(self.counters),
        }

    def prefixes(self, limit: int) -> tuple[list[dict[str, int]], int]:
        """The `limit` largest families of prefixes, and how many are left out: sizes alone, no token of them.

        A family is all that begins with the same page. longest_tokens: of its prefixes; tokens: of all, common ones
        once; branches: where it ends; states: where it can be resumed; in_use: nodes that requests hold.
        """
        families = [self._family(node) for node in self._root.children.values()]
        families.sort(key=lambda family: family["tokens"], reverse=True)
        return families[:limit], max(0, len(families) - limit)

    def _family(self, top: Node) -> dict[str, int]:
        nodes = self._nodes(top)
        return {
            "tokens": self.page_size * sum(len(node.pages) for node in nodes),
            "longest_tokens": max(node.end for node in nodes),
            "branches": sum(not node.children for node in nodes),
            "states": sum(node.slot is not None for node in nodes),
            "in_use": sum(node.kv_locks > 0 for node in nodes),
        }

    # -- locks -------------------------------------------------------------------------------------

    def lock(self, node: Node, *, state: bool = False) -> Lock:
        """Keep a node's KV and its ancestors' from eviction, and with state=True the node's state, until `unlock`."""
        assert node is self._root or node.parent is not None, "the node was evicted: lock right after match or insert"
        assert not state or node.slot is not None, "there is no state here"
        lock = Lock(node, state)
        self._locks.add(lock)
        for each in self._path(node):
            each.kv_locks += 1
            if each.kv_locks == 1:
                del self._idle_nodes[each]
                self.num_evictable_pages -= len(each.pages)
        if state:
            node.state_locks += 1
            self._idle_states.pop(node, None)
        return lock

    def unlock(self, lock: Lock) -> None:
        """Give a lock back, once. What nobody else holds becomes the most recently used."""
        assert lock in self._locks, "unlocked twice"
        self._locks.remove(lock)
        for each in self._path(lock.node):
            each.kv_locks -= 1
            if each.kv_locks == 0:
                self._idle_nodes[each] = None
                self.num_evictable_pages += len(each.pages)
        if lock.state:
            lock.node.state_locks -= 1
            if lock.node.state_locks == 0:
                self._idle_states[lock.node] = None

    # -- eviction ----------------------------------------------------------------------------------

    def evict_pages(self, count: int) -> int:
        """Free at least `count` pages if so many are unlocked: whole leaves, with their states. Returns how many."""
        before = self.num_cached_pages, self.num_cached_slots
        while before[0] - self.num_cached_pages < count and self._idle_nodes:
            self._remove_leaf(next(iter(self._idle_nodes)))
        num_pages = before[0] - self.num_cached_pages
        self.counters.evicted_pages += num_pages
        self.counters.evicted_slots += before[1] - self.num_cached_slots
        return num_pages

    def evict_slots(self, count: int) -> int:
        """Free `count` slots if so many are unlocked; their KV stays. Returns how many."""
        num_slots = min(max(count, 0), len(self._idle_states))
        for _ in range(num_slots):
            self._free_state(next(iter(self._idle_states)))
        self.counters.evicted_slots += num_slots
        return num_slots

    def take_state(self, node: Node, owner: str) -> int:
        """Make the slot of an unlocked state the property of `owner`, with what is in it; its KV stays."""
        assert node.slot is not None and not node.state_locks, "no state to be had here"
        slot, node.slot = node.slot, None
        self._slots.transfer(slot, owner)
        self._cached_slots.remove(slot)
        del self._idle_states[node]
        self.counters.evicted_slots += 1
        return slot

    def flush(self) -> Flushed:
        """Free every page and every slot that is not locked. Not counted as evictions."""
        before = self.num_cached_pages, self.num_cached_slots
        while self._idle_states:
            self._free_state(next(iter(self._idle_states)))
        while self._idle_nodes:
            self._remove_leaf(next(iter(self._idle_nodes)))
        return Flushed(num_pages=before[0] - self.num_cached_pages, num_slots=before[1] - self.num_cached_slots)

    # -- the tree ----------------------------------------------------------------------------------

    def _key(self, extra_key: str | None, tokens: tuple[int, ...], start: int = 0) -> Key:
        return extra_key, tokens[start : start + self.page_size]

    def _path(self, node: Node) -> list[Node]:
        """The node and its ancestors, deepest first, without the root."""
        path = []
        while node.parent is not None:
            path.append(node)
            node = node.parent
        return path

    def _find(self, tokens: tuple[int, ...], extra_key: str | None) -> Node:
        """The node where the longest cached prefix ends. Splits the edge there if need be; the caller then uses it."""
        node = self._root
        while (child := node.children.get(self._key(extra_key, tokens, node.end))) is not None:
            num_pages = self._num_common_pages(child, tokens[node.end : child.end])
            if num_pages < len(child.pages):
                return self._split(child, num_pages)
            node = child
        return node

    def _num_common_pages(self, child: Node, tokens: tuple[int, ...]) -> int:
        if child.tokens == tokens:
            return len(child.pages)
        size = self.page_size
        starts = range(0, len(child.tokens), size)
        return next(i for i, at in enumerate(starts) if child.tokens[at : at + size] != tokens[at : at + size])

    def _split(self, node: Node, num_pages: int) -> Node:
        """Make a node of the first `num_pages` pages of an edge. Every lock below holds it too; it has no state."""
        assert node.parent is not None
        at = num_pages * self.page_size
        upper = Node(
            extra_key=node.extra_key,
            parent=node.parent,
            tokens=node.tokens[:at],
            pages=node.pages[:num_pages],
            end=node.parent.end + at,
            kv_locks=node.kv_locks,
        )
        node.parent.children[self._key(upper.extra_key, upper.tokens)] = upper
        node.parent, node.tokens, node.pages = upper, node.tokens[at:], node.pages[num_pages:]
        upper.children[self._key(node.extra_key, node.tokens)] = node
        if not upper.kv_locks:
            self._idle_nodes[upper] = None
        return upper

    def _append(self, parent: Node, tokens: tuple[int, ...], pages: list[int], extra_key: str | None) -> Node:
        self._pages.transfer(pages, CACHE_OWNER)
        self._cached_pages.update(pages)
        node = Node(extra_key=extra_key, parent=parent, tokens=tokens, pages=pages, end=parent.end + len(tokens))
        parent.children[self._key(extra_key, tokens)] = node
        self._idle_nodes[node] = None
        self.num_evictable_pages += len(pages)
        return node

    def _remove_leaf(self, node: Node) -> None:
        """Free the oldest node that nobody locks. It has no children: whoever used one used this node after it."""
        assert node.parent is not None and not node.children and not node.kv_locks
        if node.slot is not None:
            self._free_state(node)
        del node.parent.children[self._key(node.extra_key, node.tokens)]
        node.parent = None
        del self._idle_nodes[node]
        self.num_evictable_pages -= len(node.pages)
        self._cached_pages.difference_update(node.pages)
        self._pages.free(node.pages)

    # -- states and orders of use ------------------------------------------------------------------

    def _check_donated_slot(self, position: int, slot: int | None) -> None:
        if slot is not None:
            assert position > 0 and position % self.cache_chunk == 0, f"no state can be saved at {position}"
            assert slot not in self._cached_slots, f"slot {slot} is the tree's already"

    def _donate_slot(self, node: Node, slot: int | None) -> int | None:
        """Returns the slot when there is a state here already."""
        if slot is None:
            return None
        duplicate = node.slot is not None
        if not duplicate:
            self._slots.transfer(slot, CACHE_OWNER)
            self._cached_slots.add(slot)
            node.slot = slot
            self._idle_states[node] = None
        self._use_state(node)
        return slot if duplicate else None

    def _is_shared(self, node: Node) -> bool:
        if node.num_state_uses > 1:
            return True
        while len(node.children) == 1:
            (node,) = node.children.values()
            if node.slot is not None:
                return False
        return bool(node.children)

    def _free_state(self, node: Node) -> None:
        assert node.slot is not None and not node.state_locks
        self._slots.free(node.slot)
        self._cached_slots.remove(node.slot)
        del self._idle_states[node]
        node.slot = None

    def _use_kv(self, node: Node) -> None:
        """Deepest first, so that a parent is always newer than its children."""
        for each in self._path(node):
            if each in self._idle_nodes:
                self._idle_nodes.move_to_end(each)

    def _use_state(self, node: Node) -> None:
        node.num_state_uses += 1
        if node in self._idle_states:
            self._idle_states.move_to_end(node)

    def _count(self, match: Match) -> None:
        if match.state_position:
            self.counters.hits += 1
        else:
            self.counters.misses += 1
        self.counters.hit_tokens += match.state_position
        self.counters.kv_hit_tokens += match.num_kv_tokens

    # -- integrity ---------------------------------------------------------------------------------

    def check_integrity(self, *, request_pages: Iterable[int], request_slots: Iterable[int]) -> None:
        """AssertionError unless tree, allocators and requests agree. Slow: it looks at everything.

        request_pages, request_slots: what the requests own themselves, without what they use of the tree's.
        """
        nodes = self._nodes()
        for node in nodes:
            self._check_node(node)
        self._check_locks(nodes)
        self._check_orders(nodes)
        cached_pages = [page for node in nodes for page in node.pages]
        cached_slots = [node.slot for node in nodes if node.slot is not None]
        _check_owners("page", self._pages, cached_pages, self._cached_pages, list(request_pages))
        _check_owners("slot", self._slots, cached_slots, self._cached_slots, list(request_slots))

    def _nodes(self, top: Node | None = None) -> list[Node]:
        """All but the root; top: it and those below it."""
        nodes, todo = ([], [self._root]) if top is None else ([top], [top])
        while todo:
            children = list(todo.pop().children.values())
            nodes += children
            todo += children
        return nodes

    def _check_node(self, node: Node) -> None:
        parent = node.parent
        assert parent is not None, f"in the tree without a parent: {node.pages}"
        assert parent.children.get(self._key(node.extra_key, node.tokens)) is node, f"wrong key: {node.tokens}"
        assert parent is self._root or parent.extra_key == node.extra_key, "a path through two namespaces"
        assert node.tokens and len(node.tokens) == len(node.pages) * self.page_size, "not a run of whole pages"
        assert node.end == parent.end + len(node.tokens), f"ends at {node.end}, not after its tokens"
        assert node.slot is None or node.end % self.cache_chunk == 0, f"a state at {node.end}, off the grid"

    def _check_locks(self, nodes: list[Node]) -> None:
        kv = Counter(each for lock in self._locks for each in self._path(lock.node))
        states = Counter(lock.node for lock in self._locks if lock.state)
        assert kv.keys() <= set(nodes), "locked and evicted"
        for node in nodes:
            assert node.kv_locks == kv[node], f"{node.kv_locks} KV locks counted, {kv[node]} held"
            assert node.state_locks == states[node], f"{node.state_locks} state locks counted, {states[node]} held"
            assert node.slot is not None or not node.state_locks, "the state of a lock is gone"

    def _check_orders(self, nodes: list[Node]) -> None:
        idle = {node for node in nodes if not node.kv_locks}
        idle_states = {node for node in nodes if node.slot is not None and not node.state_locks}
        num_pages = sum(len(node.pages) for node in idle)
        assert self._idle_nodes.keys() == idle, "unlocked nodes are not those in the order of use"
        assert self._idle_states.keys() == idle_states, "unlocked states are not those in the order of use"
        assert self.num_evictable_pages == num_pages, f"{self.num_evictable_pages} pages counted, {num_pages} evictable"
        age = {node: i for i, node in enumerate(self._idle_nodes)}
        for node in self._idle_nodes:
            assert node.parent not in age or age[node] < age[node.parent], "a parent older than its child"


def _pages_of(path: list[Node]) -> list[int]:
    """The pages of a path that is given deepest first, in the order of the tokens."""
    return [page for node in reversed(path) for page in node.pages]


def _check_owners(
    what: str, allocator: PageAllocator | SlotAllocator, cached: list[int], known: set[int], others: list[int]
) -> None:
    """free + owned by requests + cached = all, each once."""
    allocator.check_integrity()
    owned = allocator.owned()
    assert len(set(cached)) == len(cached) and set(cached) == known, f"{what}s cached: {cached}, {known}"
    assert known <= set(owned.get(CACHE_OWNER, [])), f"{what}s cached and owned by others"
    everyones = sorted(item for items in owned.values() for item in items)
    assert everyones == sorted([*cached, *others]), f"{what}s leaked or owned twice: {everyones}, {cached}, {others}"
