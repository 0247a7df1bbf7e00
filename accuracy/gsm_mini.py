"""gsm-mini: grade-school word problems from a seeded grammar, written as gsm8k writes them.

A scheme draws names, objects, phrasings and numbers and tells a story of one to six exact integer steps; every
step appears in the worked answer as `a*b = <<a*b=c>>c`. Numbers stay small enough for a small model to learn the
arithmetic: sums and differences to four digits, products and quotients of one digit (or 10, or 100) with up to three.

Which side of the train/held-out split a problem is on depends only on its scheme and the numbers in its question
(as a sorted list), so no held-out problem shares these with any training problem.

The same seed gives the same problems on every machine and Python version: all chance comes from
`random.Random.getrandbits`, and the split from SHA-256.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from types import MappingProxyType
from typing import Literal, TypeVar

Split = Literal["train", "heldout"]
T = TypeVar("T")

STOP: list[str] = ["Question", "<|endoftext|>"]
HELDOUT_PERCENT = 6
MAX_NUMBER = 9999


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One problem: `worked` is the text between "Answer: " and "#### answer", one step a line."""

    scheme: str
    question: str
    worked: str
    answer: int


def shot(problem: Problem) -> str:
    """The problem with its answer, as it stands in a prompt before the question that is asked."""
    return f"Question: {problem.question}\nAnswer: {problem.worked}\n#### {problem.answer}\n\n"


def prompt(problem: Problem, shots: Sequence[Problem]) -> str:
    """The shots, then the question; the model continues with " " and the worked answer."""
    return "".join(shot(s) for s in shots) + f"Question: {problem.question}\nAnswer:"


def extract_answer(text: str) -> int | None:
    """The last run of digits, commas removed; None where there is no digit."""
    runs = re.findall(r"\d+", text.replace(",", ""))
    return int(runs[-1]) if runs else None


def stream(split: Split, seed: int, schemes: Sequence[str] = ()) -> Iterator[Problem]:
    """Problems without end: each of a scheme drawn evenly, redrawn until it is on the side asked for.

    `schemes` are the names to draw from, where one may stand more than once; all of them when it is empty.
    """
    rng = random.Random(seed)
    names = tuple(schemes or SCHEMES)
    while True:
        name = names[rng.getrandbits(32) * len(names) >> 32]
        yield _draw_problem(name, split, rng)


def problems(split: Split, seed: int, count: int) -> list[Problem]:
    """The first `count` problems of `stream`."""
    return list(islice(stream(split, seed), count))


def few_shot(seed: int = 0, count: int = 5) -> list[Problem]:
    """Fixed shots for prompts: training problems of different schemes."""
    chosen: dict[str, Problem] = {}
    drawn = stream("train", seed)
    while len(chosen) < min(count, len(SCHEMES)):
        problem = next(drawn)
        chosen.setdefault(problem.scheme, problem)
    return list(chosen.values())


def split_of(scheme: str, question: str) -> Split:
    """The side of the split that a question is on, by its scheme and its sorted numbers."""
    numbers = sorted(int(n) for n in re.findall(r"\d+", question))
    digest = hashlib.sha256(f"{scheme}:{numbers}".encode()).digest()
    return "heldout" if int.from_bytes(digest[:4], "big") % 100 < HELDOUT_PERCENT else "train"


def _draw_problem(name: str, split: Split, rng: random.Random) -> Problem:
    while True:
        try:
            story = SCHEMES[name](Draw(rng))
        except _OutOfRangeError:
            continue
        if split_of(name, story.question) == split:
            answer = story.steps[-1].value
            return Problem(scheme=name, question=story.question, worked="\n".join(story.lines), answer=answer)


# --- Steps -----------------------------------------------------------------------------------------------------------


class _OutOfRangeError(Exception):
    """The numbers drawn lead to a step that is not allowed; the problem is drawn again."""


@dataclass(frozen=True, slots=True)
class Step:
    """One operation; its text is what stands in the worked answer."""

    expression: str
    value: int

    def __str__(self) -> str:
        return f"{self.expression} = <<{self.expression}={self.value}>>{self.value}"


Number = int | Step


def _value(number: Number) -> int:
    return number.value if isinstance(number, Step) else number


def _require(condition: bool) -> None:
    if not condition:
        raise _OutOfRangeError


def plus(a: Number, b: Number) -> Step:
    """a + b, to four digits."""
    x, y = _value(a), _value(b)
    _require(x + y <= MAX_NUMBER)
    return Step(f"{x}+{y}", x + y)


def minus(a: Number, b: Number) -> Step:
    """a - b, positive."""
    x, y = _value(a), _value(b)
    _require(0 <= y < x <= MAX_NUMBER)
    return Step(f"{x}-{y}", x - y)


def times(a: Number, b: Number) -> Step:
    """a * b, where the smaller is a digit, 10 or 100 and the product has at most four digits."""
    x, y = _value(a), _value(b)
    _require(((min(x, y) <= 10 and max(x, y) <= 999) or 100 in (x, y)) and 0 < x * y <= MAX_NUMBER)
    return Step(f"{x}*{y}", x * y)


def over(a: Number, b: Number) -> Step:
    """a / b without remainder, where b is a digit, 10 or 100."""
    x, y = _value(a), _value(b)
    _require((1 < y <= 10 or y == 100) and x % y == 0 and 0 < x <= MAX_NUMBER)
    return Step(f"{x}/{y}", x // y)


@dataclass(frozen=True, slots=True)
class Story:
    """A question, the lines of its worked answer, and the steps in those lines in order (the last is the answer)."""

    question: str
    lines: tuple[str, ...]
    steps: tuple[Step, ...]


def tell(question: str, *pairs: tuple[str, Step]) -> Story:
    """A story from lines in which "{}" stands for the line's step."""
    lines = tuple(line.replace("{}", str(step)) for line, step in pairs)
    return Story(question, lines, tuple(step for _, step in pairs))


# --- Drawing ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Person:
    """A name and its pronouns."""

    name: str
    he: str
    his: str

    def __str__(self) -> str:
        return self.name

    @property
    def He(self) -> str:  # noqa: N802 (the pronoun as it begins a sentence)
        return self.he.capitalize()


def _words(*lines: str) -> tuple[str, ...]:
    return tuple(word for line in lines for word in line.split())


_WOMEN = _words(
    "Ana Bella Chloe Daisy Elena Fatima Grace Hana Irene Julia Kate Lena Maria Nora Olivia Priya Rosa Sara Tina Uma",
    "Vera Wendy Yuki Zoe Alice Emma Mia Ruth Naomi Leila Ingrid Carmen Amara Beth Jane",
)
_MEN = _words(
    "Adam Ben Carlos David Eric Felix George Hugo Ivan Jack Kenji Liam Marco Nathan Omar Paul Raj Sam Tom Victor",
    "Walter Yusuf Zack Ahmed Bruno Dmitri Henry Jamal Leo Max Noah Oscar Peter Simon Theo",
)
_PEOPLE = tuple([Person(n, "she", "her") for n in _WOMEN] + [Person(n, "he", "his") for n in _MEN])
_THINGS = _words(
    "marbles stickers stamps shells cards buttons beads coins badges pencils crayons balloons ribbons postcards",
    "magnets comics puzzles dolls toys books photos keys erasers rocks feathers posters notebooks candles cups plates",
)
_BAKED = _words("cookies muffins bagels cupcakes donuts pretzels pancakes rolls pies cakes")
_FOODS = (
    *_words("apples oranges pears plums peaches lemons grapes cherries figs eggs tomatoes carrots mangoes sandwiches"),
    *_BAKED[:6],
)
_GOODS: tuple[tuple[str, str], ...] = tuple(
    (one, one + "s")
    for one in _words(
        "shirt hat scarf belt jacket sweater book pen ruler mug lamp chair pillow blanket towel basket ball kite game",
        "puzzle vase clock bag wallet umbrella plant poster candle bottle plate",
    )
)
_SHOPS = ("store", "shop", "market", "mall", "fair", "bakery")
_DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
_COLORS = ("red", "blue", "green", "yellow", "white", "black", "purple", "orange")


class Draw:
    """The chance behind one problem."""

    __slots__ = ("_rng",)

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def num(self, low: int, high: int) -> int:
        """A whole number from low to high, both included."""
        return low + (self._rng.getrandbits(32) * (high - low + 1) >> 32)

    def pick(self, *options: T) -> T:
        """One of the options."""
        return options[self.num(0, len(options) - 1)]

    def some(self, options: Sequence[T], count: int) -> list[T]:
        """`count` different options, in the order drawn."""
        indices: list[int] = []
        while len(indices) < count:
            index = self.num(0, len(options) - 1)
            if index not in indices:
                indices.append(index)
        return [options[i] for i in indices]

    def chance(self, percent: int) -> bool:
        """True in so many of a hundred cases."""
        return self.num(1, 100) <= percent

    def person(self) -> Person:
        return _PEOPLE[self.num(0, len(_PEOPLE) - 1)]

    def people(self, count: int) -> list[Person]:
        return self.some(_PEOPLE, count)

    def thing(self) -> str:
        """A plural: something to collect or to eat."""
        return self.pick(*(_THINGS if self.chance(60) else _FOODS))

    def food(self) -> str:
        return self.pick(*_FOODS)

    def goods(self, count: int) -> list[tuple[str, str]]:
        """Different things to buy, each as (singular, plural)."""
        return self.some(_GOODS, count)

    def aside(self, person: Person) -> str:
        """In one of four cases a sentence (with a space before it) whose number is not needed, else nothing."""
        if not self.chance(25):
            return ""
        p = person
        sentence = self.pick(
            f"{p} is {self.num(8, 60)} years old.",
            f"{p} lives at number {self.num(2, 99)} on a quiet street.",
            f"It is {self.num(11, 30)} degrees outside.",
            f"{p} has {self.num(2, 9)} cousins.",
            f"{p} woke up {self.num(2, 9)} hours ago.",
            f"{p}'s neighbor owns {self.num(2, 40)} {self.pick(*_THINGS)}.",
            f"The radio has been on for {self.num(10, 90)} minutes.",
            f"{p}'s street has {self.num(10, 80)} houses.",
            f"{p}'s {self.pick('brother', 'sister', 'uncle', 'aunt')} is {self.num(3, 70)}.",
            f"{p} walked {self.num(2, 9)} miles yesterday.",
            f"{p} drank {self.num(2, 6)} glasses of water this morning.",
            f"{p}'s bus is number {self.num(2, 99)}.",
        )
        return " " + sentence


Scheme = Callable[[Draw], Story]


# --- Collections: more, fewer, times as many ------------------------------------------------------------------------


def more_than(d: Draw) -> Story:
    (a, b), t, n, k = d.people(2), d.thing(), d.num(5, 480), d.num(3, 240)
    both = d.pick(
        f"{a} has {n} {t}. {b} has {k} more {t} than {a}.{d.aside(b)} How many {t} do they have together?",
        f"{b} owns {k} more {t} than {a}, who owns {n}.{d.aside(a)} How many {t} do the two of them own in total?",
        f"{a} found {n} {t} and {b} found {k} more than that. How many {t} did they find altogether?",
    )
    more = plus(n, k)
    return tell(both, (f"{b} has {{}} {t}.", more), (f"Together they have {{}} {t}.", plus(n, more)))


def fewer_than(d: Draw) -> Story:
    (a, b), t, n, k = d.people(2), d.thing(), d.num(30, 700), d.num(3, 300)
    q = d.pick(
        f"{a} has {n} {t}. {b} has {k} fewer {t} than {a}.{d.aside(a)} How many {t} do they have in all?",
        f"{b} collected {k} fewer {t} than {a}.{d.aside(b)} {a} collected {n}. How many {t} did both collect?",
    )
    fewer = minus(n, k)
    return tell(q, (f"{b} has {{}} {t}.", fewer), (f"In all they have {{}} {t}.", plus(n, fewer)))


def times_as_many(d: Draw) -> Story:
    (a, b), t, n, k = d.people(2), d.thing(), d.num(4, 320), d.num(3, 9)
    q = d.pick(
        f"{a} has {n} {t}. {b} has {k} times as many.{d.aside(a)} How many {t} do they have together?",
        f"{b} has {k} times as many {t} as {a}.{d.aside(b)} If {a} has {n} {t}, how many do they have in total?",
    )
    many = times(n, k)
    return tell(q, (f"{b} has {{}} {t}.", many), (f"Together they have {{}} {t}.", plus(many, n)))


def half_as_many(d: Draw) -> Story:
    a, t, half = d.person(), d.thing(), d.num(6, 400)
    one, two = d.some(("April", "May", "June", "July", "March", "August"), 2)
    q = d.pick(
        f"{a} sold {2 * half} {t} in {one}, and then {a} sold half as many {t} in {two}.{d.aside(a)} "
        f"How many {t} did {a} sell altogether in {one} and {two}?",
        f"In {one}, {a} made {2 * half} {t}. In {two} {a} made half as many.{d.aside(a)} "
        f"How many {t} did {a} make in both months?",
    )
    second = over(2 * half, 2)
    return tell(q, (f"In {two} the number was {{}}.", second), ("In both months it was {}.", plus(2 * half, second)))


def twice_and_more(d: Draw) -> Story:
    (a, b), t, n, k = d.people(2), d.thing(), d.num(5, 300), d.num(2, 60)
    word, factor = d.pick(("twice", 2), ("three times", 3), ("four times", 4))
    more = d.chance(50)
    q = (
        f"{a} has {n} {t}. {b} has {k} {'more' if more else 'fewer'} than {word} the number of {t} that {a} has."
        f"{d.aside(b)} How many {t} does {b} have?"
    )
    base = times(factor, n)
    last = plus(base, k) if more else minus(base, k)
    return tell(q, (f"{word.capitalize()} as many is {{}} {t}.", base), (f"{b} has {{}} {t}.", last))


def three_people(d: Draw) -> Story:
    (a, b, c), t, n, k, m = d.people(3), d.thing(), d.num(5, 200), d.num(2, 90), d.num(2, 6)
    q = f"{a} has {n} {t}. {b} has {k} more than {a}, and {c} has {m} times as many as {b}.{d.aside(c)} " + d.pick(
        f"How many {t} do the three have in total?", f"How many {t} do {a}, {b} and {c} have altogether?"
    )
    second = plus(n, k)
    third = times(m, second)
    pair = plus(n, second)
    return tell(
        q,
        (f"{b} has {{}} {t}.", second),
        (f"{c} has {{}} {t}.", third),
        (f"{a} and {b} have {{}} {t}.", pair),
        (f"In total there are {{}} {t}.", plus(pair, third)),
    )


def difference_of_two(d: Draw) -> Story:
    (a, b), t = d.people(2), d.thing()
    x, y, n, m = d.num(2, 9), d.num(2, 9), d.num(5, 90), d.num(5, 90)
    boxes = d.pick("boxes", "bags", "jars", "cases")
    q = (
        f"{a} has {x} {boxes} with {n} {t} in each. {b} has {y} {boxes} with {m} {t} in each.{d.aside(a)} "
        f"How many more {t} does {a} have than {b}?"
    )
    first, second = times(x, n), times(y, m)
    return tell(
        q, (f"{a} has {{}} {t}.", first), (f"{b} has {{}} {t}.", second), (f"{a} has {{}} more.", minus(first, second))
    )


def event_chain(d: Draw) -> Story:
    a, t, start = d.person(), d.thing(), d.num(20, 300)
    question, pairs, now = [f"{a} had {start} {t}."], [], _Last(start)
    for _ in range(d.num(2, 5)):
        sentence, line, step = _event(d, a, t, now.number)
        question.append(sentence)
        pairs.append((line, step))
        now.number = step
    aside = d.aside(a).strip()
    question += [aside] * bool(aside) + [d.pick(f"How many {t} does {a} have now?", f"How many {t} are left?")]
    return tell(" ".join(question), *pairs)


@dataclass(slots=True)
class _Last:
    """The number that a chain has come to."""

    number: Number


def _event(d: Draw, a: Person, t: str, now: Number) -> tuple[str, str, Step]:
    """One thing that happens to `now` things: its sentence, its worked line and its step."""
    (b,), n, value = d.people(1), d.num(2, 120), _value(now)
    match d.num(0, 7):
        case 0:
            return f"{b} gave {a} {n} more.", f"After the gift {a} had {{}} {t}.", plus(now, n)
        case 1:
            return f"Then {a} bought {n} {t}.", f"After buying {a} had {{}} {t}.", plus(now, n)
        case 2:
            return f"{a} lost {n} of them.", f"After the loss {a} had {{}} {t}.", minus(now, n)
        case 3:
            return f"{a} sold {n} {t}.", f"After the sale {a} had {{}} {t}.", minus(now, n)
        case 4:
            return f"{a} gave {n} to {b}.", f"After giving {a} had {{}} {t}.", minus(now, n)
        case 5 if value <= 400:
            return f"Then {a} doubled what {a} had.", f"Doubled, this was {{}} {t}.", times(now, 2)
        case 6:
            _require(value % 2 == 0)
            return f"{a} gave half of them to {b}.", f"Half of them is {{}} {t}.", over(now, 2)
        case _:
            k = d.pick(3, 4, 5)
            _require(value % k == 0)
            return f"{a} kept only one of every {k}.", f"One of every {k} is {{}} {t}.", over(now, k)


def two_colors(d: Draw) -> Story:
    a, t, (c1, c2, c3) = d.person(), d.pick(*_THINGS), d.some(_COLORS, 3)
    total, n, m = d.num(60, 900), d.num(10, 300), d.num(10, 300)
    q = (
        f"{a} has {total} {t}. {n} of them are {c1}, {m} are {c2} and the rest are {c3}.{d.aside(a)} "
        f"How many {c3} {t} does {a} have?"
    )
    pair = plus(n, m)
    return tell(q, (f"{c1.capitalize()} and {c2} make {{}}.", pair), ("The rest is {}.", minus(total, pair)))


def difference_then_total(d: Draw) -> Story:
    (a, b), t, half, k = d.people(2), d.thing(), d.num(10, 300), d.num(2, 60)
    total = 2 * half + k
    q = f"{a} and {b} have {total} {t} together. {a} has {k} more than {b}.{d.aside(b)} How many {t} does {b} have?"
    rest = minus(total, k)
    return tell(q, (f"Without the extra ones there are {{}} {t}.", rest), (f"{b} has {{}} {t}.", over(rest, 2)))


# --- Containers and sharing -----------------------------------------------------------------------------------------


def boxes_given_away(d: Draw) -> Story:
    a, t, x, n, k = d.person(), d.thing(), d.num(2, 9), d.num(4, 150), d.num(2, 200)
    box = d.pick("boxes", "bags", "jars", "baskets", "crates")
    q = d.pick(
        f"{a} has {x} {box} of {t}. Each holds {n} {t}.{d.aside(a)} {a} gives {k} {t} away. How many {t} are left?",
        f"There are {n} {t} in each of {a}'s {x} {box}.{d.aside(a)} After giving away {k}, how many {t} remain?",
    )
    full = times(x, n)
    return tell(q, (f"At first there are {{}} {t}.", full), (f"Then {{}} {t} are left.", minus(full, k)))


def nested_boxes(d: Draw) -> Story:
    a, t, x, y, n = d.person(), d.thing(), d.num(2, 9), d.num(2, 9), d.num(3, 60)
    q = (
        f"{a} orders {x} crates. In each crate there are {y} boxes, and in each box {n} {t}.{d.aside(a)} "
        f"How many {t} does {a} get?"
    )
    per = times(y, n)
    return tell(q, (f"Each crate holds {{}} {t}.", per), (f"All crates hold {{}} {t}.", times(x, per)))


def share_equally(d: Draw) -> Story:
    a, t, k, each, kept = d.person(), d.thing(), d.num(2, 9), d.num(3, 120), d.num(2, 60)
    q = d.pick(
        f"{a} has {k * each + kept} {t}. {a} keeps {kept} and shares the rest equally among {k} friends.{d.aside(a)} "
        f"How many {t} does each friend get?",
        f"After putting {kept} aside, {a} split {k * each + kept} {t} evenly between {k} friends.{d.aside(a)} "
        f"How many {t} went to each friend?",
    )
    rest = minus(k * each + kept, kept)
    return tell(q, (f"There are {{}} {t} to share.", rest), (f"Each friend gets {{}} {t}.", over(rest, k)))


def packs_needed(d: Draw) -> Story:
    a, t, pack, packs = d.person(), d.food(), d.num(2, 9), d.num(4, 60)
    each = d.num(2, 6)
    _require(pack * packs % each == 0)
    guests = pack * packs // each
    q = (
        f"{a} invites {guests} guests. Each guest will eat {each} {t}, and {t} come in packs of {pack}.{d.aside(a)} "
        f"How many packs does {a} need?"
    )
    need = times(guests, each)
    return tell(q, (f"The guests eat {{}} {t}.", need), (f"{a} needs {{}} packs.", over(need, pack)))


def pack_cost(d: Draw) -> Story:
    a, t, pack, packs, cost = d.person(), d.thing(), d.num(2, 9), d.num(3, 60), d.num(2, 9)
    q = (
        f"{t.capitalize()} are sold in packs of {pack} for ${cost} a pack. {a} needs {pack * packs} {t}.{d.aside(a)} "
        f"How many dollars will {a} spend?"
    )
    need = over(pack * packs, pack)
    return tell(q, (f"{a} needs {{}} packs.", need), ("They cost {} dollars.", times(need, cost)))


def dozens(d: Draw) -> Story:
    a, t, x, broken, each = d.person(), d.food(), d.num(2, 9), d.num(2, 11), d.num(2, 6)
    q = d.pick(
        f"{a} buys {x} dozen {t}. {broken} of them are bad.{d.aside(a)} {a} sells the good ones for ${each} each. "
        f"How many dollars does {a} get?",
        f"Of {x} dozen {t}, {broken} were spoiled. {a} sold the others at ${each} apiece.{d.aside(a)} "
        f"How much money in dollars did {a} make?",
    )
    full = times(x, 12)
    good = minus(full, broken)
    return tell(
        q,
        (f"There are {{}} {t}.", full),
        (f"{{}} {t} are good.", good),
        ("They bring {} dollars.", times(good, each)),
    )


def move_between(d: Draw) -> Story:
    a, t, n, m, k = d.person(), d.pick("books", "boxes", "jars", "files"), d.num(20, 400), d.num(20, 400), d.num(3, 90)
    q = (
        f"One shelf holds {n} {t} and another holds {m} {t}. {a} moves {k} {t} from the first shelf to the second."
        f"{d.aside(a)} How many more {t} does the second shelf hold than the first now?"
    )
    first, second = minus(n, k), plus(m, k)
    return tell(
        q,
        (f"The first shelf holds {{}} {t}.", first),
        (f"The second shelf holds {{}} {t}.", second),
        (f"The difference is {{}} {t}.", minus(second, first)),
    )


# --- Money ----------------------------------------------------------------------------------------------------------


def two_items(d: Draw) -> Story:
    a, ((_, x), (_, y)), n, m = d.person(), d.goods(2), d.num(2, 9), d.num(2, 9)
    p, r = d.num(2, 90), d.num(2, 90)
    q = d.pick(
        f"{a} buys {n} {x} at ${p} each and {m} {y} at ${r} each.{d.aside(a)} How many dollars does {a} spend?",
        f"At the {d.pick(*_SHOPS)} {x} cost ${p} and {y} cost ${r}.{d.aside(a)} {a} gets {n} {x} and {m} {y}. "
        f"What is the total cost in dollars?",
    )
    first, second = times(n, p), times(m, r)
    return tell(
        q,
        (f"The {x} cost {{}} dollars.", first),
        (f"The {y} cost {{}} dollars.", second),
        ("The total is {} dollars.", plus(first, second)),
    )


def three_items(d: Draw) -> Story:
    a, ((_, x), (_, y), (_, z)) = d.person(), d.goods(3)
    n, m, k, p, r, s = d.num(2, 9), d.num(2, 9), d.num(2, 9), d.num(2, 40), d.num(2, 40), d.num(2, 40)
    q = (
        f"{a} buys {n} {x}, {m} {y} and {k} {z}.{d.aside(a)} "
        + d.pick(
            f"The {x} are ${p} each, the {y} ${r} each and the {z} ${s} each.",
            f"Each of the {x} costs ${p}, each of the {y} ${r} and each of the {z} ${s}.",
        )
        + f" How many dollars does {a} pay?"
    )
    first, second, third = times(n, p), times(m, r), times(k, s)
    pair = plus(first, second)
    return tell(
        q,
        (f"The {x} cost {{}} dollars.", first),
        (f"The {y} cost {{}} dollars.", second),
        (f"The {z} cost {{}} dollars.", third),
        (f"The {x} and {y} cost {{}} dollars.", pair),
        (f"Altogether {a} pays {{}} dollars.", plus(pair, third)),
    )


def change_back(d: Draw) -> Story:
    a, ((_, x),), n, p, paid = d.person(), d.goods(1), d.num(2, 9), d.num(2, 95), d.pick(20, 50, 100, 200, 500)
    q = d.pick(
        f"{a} buys {n} {x} for ${p} each and pays with ${paid}.{d.aside(a)} How many dollars of change does {a} get?",
        f"{x.capitalize()} cost ${p} each. {a} takes {n} of them and hands over ${paid}.{d.aside(a)} "
        f"How much change in dollars should {a} receive?",
    )
    cost = times(n, p)
    return tell(q, (f"The {x} cost {{}} dollars.", cost), ("The change is {} dollars.", minus(paid, cost)))


def price_list(d: Draw) -> Story:
    """A long question: a list of prices of which three are needed."""
    a, goods = d.person(), d.goods(6)
    prices = [d.num(2, 80) for _ in goods]
    listed = ", ".join(f"a {one} ${price}" for (one, _), price in zip(goods, prices, strict=True))
    i, j, k = d.some(range(6), 3)
    n = d.num(2, 9)
    q = (
        f"At the {d.pick(*_SHOPS)} the prices are: {listed}.{d.aside(a)} "
        f"{a} buys {n} {goods[i][1]}, one {goods[j][0]} and one {goods[k][0]}. How many dollars does {a} spend?"
    )
    first = times(n, prices[i])
    pair = plus(first, prices[j])
    return tell(
        q,
        (f"The {goods[i][1]} cost {{}} dollars.", first),
        (f"With the {goods[j][0]} it is {{}} dollars.", pair),
        (f"With the {goods[k][0]} it is {{}} dollars.", plus(pair, prices[k])),
    )


def diary(d: Draw) -> Story:
    """A long question: a number for every day of the week, of which three are needed."""
    a, counts = d.person(), [d.num(5, 250) for _ in _DAYS]
    verb, what = d.pick(("walked", "blocks"), ("picked", "berries"), ("sold", "cups"), ("read", "lines"))
    listed = ", ".join(f"{n} on {day}" for n, day in zip(counts, _DAYS, strict=True))
    i, j, k = d.some(range(7), 3)
    q = (
        f"In one week {a} {verb} this many {what}: {listed}.{d.aside(a)} "
        f"How many {what} is that on {_DAYS[i]}, {_DAYS[j]} and {_DAYS[k]} together?"
    )
    pair = plus(counts[i], counts[j])
    return tell(
        q,
        (f"{_DAYS[i]} and {_DAYS[j]} make {{}} {what}.", pair),
        (f"With {_DAYS[k]} it is {{}} {what}.", plus(pair, counts[k])),
    )


def storehouse(d: Draw) -> Story:
    """A long question: boxes in five rooms, two of which are needed."""
    a, t = d.person(), d.thing()
    rooms = d.some(_ROOMS, 5)
    boxes, each = [d.num(2, 9) for _ in rooms], [d.num(3, 90) for _ in rooms]
    listed = ". ".join(
        f"In the {room} there are {x} boxes with {n} {t} each" for room, x, n in zip(rooms, boxes, each, strict=True)
    )
    i, j = d.some(range(5), 2)
    q = (
        f"{a} looks after {t}. {listed}.{d.aside(a)} "
        f"How many {t} are there in the {rooms[i]} and the {rooms[j]} together?"
    )
    first, second = times(boxes[i], each[i]), times(boxes[j], each[j])
    return tell(
        q,
        (f"The {rooms[i]} has {{}} {t}.", first),
        (f"The {rooms[j]} has {{}} {t}.", second),
        (f"Together they have {{}} {t}.", plus(first, second)),
    )


_ROOMS = _words("attic cellar kitchen garage office hall library shed")


def weekly_saving(d: Draw) -> Story:
    a, start, per, weeks = d.person(), d.num(10, 600), d.num(4, 95), d.num(2, 9)
    q = d.pick(
        f"{a} has ${start} and saves ${per} every week.{d.aside(a)} "
        f"How many dollars will {a} have after {weeks} weeks?",
        f"Each week {a} puts ${per} into a box that already holds ${start}.{d.aside(a)} "
        f"How many dollars are in the box after {weeks} weeks?",
    )
    saved = times(weeks, per)
    return tell(q, ("The savings are {} dollars.", saved), ("In all it is {} dollars.", plus(start, saved)))


def saving_goal(d: Draw) -> Story:
    a, ((one, _),), per, weeks, have = d.person(), d.goods(1), d.num(2, 9), d.num(3, 90), d.num(5, 200)
    q = d.pick(
        f"{a} wants a {one} that costs ${per * weeks + have}. {a} has ${have} and saves ${per} a week.{d.aside(a)} "
        f"How many weeks will it take to save enough?",
        f"A {one} costs ${per * weeks + have}. {a} already has ${have}.{d.aside(a)} "
        f"Saving ${per} each week, how many weeks must {a} save?",
    )
    missing = minus(per * weeks + have, have)
    return tell(q, (f"{a} still needs {{}} dollars.", missing), ("This takes {} weeks.", over(missing, per)))


def two_savers(d: Draw) -> Story:
    (a, b), x, y, p, r, w = d.people(2), d.num(20, 300), d.num(20, 300), d.num(2, 40), d.num(2, 40), d.num(2, 9)
    q = (
        f"{a} has ${x} and saves ${p} a week. {b} has ${y} and saves ${r} a week.{d.aside(b)} "
        f"After {w} weeks, how many more dollars does {a} have than {b}?"
    )
    s1, s2 = times(w, p), times(w, r)
    t1, t2 = plus(x, s1), plus(y, s2)
    return tell(
        q,
        (f"{a} saves {{}} dollars.", s1),
        (f"{a} then has {{}} dollars.", t1),
        (f"{b} saves {{}} dollars.", s2),
        (f"{b} then has {{}} dollars.", t2),
        ("The difference is {} dollars.", minus(t1, t2)),
    )


def hourly_pay(d: Draw) -> Story:
    a, (one, two), h, g, w = d.person(), d.some(_DAYS, 2), d.num(2, 9), d.num(2, 9), d.num(8, 60)
    q = d.pick(
        f"{a} earns ${w} an hour. {a} works {h} hours on {one} and {g} hours on {two}.{d.aside(a)} "
        f"How many dollars does {a} earn?",
        f"On {one} {a} works {h} hours, on {two} {g} hours, for ${w} an hour.{d.aside(a)} What is the pay in dollars?",
    )
    first, second = times(h, w), times(g, w)
    return tell(
        q,
        (f"On {one} {a} earns {{}} dollars.", first),
        (f"On {two} {a} earns {{}} dollars.", second),
        ("The pay is {} dollars.", plus(first, second)),
    )


def overtime(d: Draw) -> Story:
    a, h, extra, w, k = d.person(), d.num(10, 60), d.num(2, 9), d.num(3, 9), d.num(2, 9)
    q = (
        f"{a} is paid ${w} an hour for the first {h} hours and ${k} more for every hour after that.{d.aside(a)} "
        f"{a} worked {h + extra} hours. How many dollars did {a} earn?"
    )
    base, rate, over_hours = times(h, w), plus(w, k), minus(h + extra, h)
    bonus = times(over_hours, rate)
    return tell(
        q,
        ("The first hours pay {} dollars.", base),
        ("There are {} extra hours.", over_hours),
        ("Each pays {} dollars.", rate),
        ("Together they pay {} dollars.", bonus),
        (f"{a} earned {{}} dollars.", plus(base, bonus)),
    )


def stand_profit(d: Draw) -> Story:
    a, t, n, p, c = d.person(), d.pick(*_BAKED), d.num(10, 300), d.num(2, 9), d.num(5, 200)
    q = d.pick(
        f"{a} sells {n} {t} at ${p} each. The ingredients cost ${c}.{d.aside(a)} "
        f"How many dollars of profit does {a} make?",
        f"To make {t} {a} spent ${c}. {a} then sold {n} of them for ${p} each.{d.aside(a)} "
        f"What is the profit in dollars?",
    )
    sales = times(n, p)
    return tell(q, ("The sales are {} dollars.", sales), ("The profit is {} dollars.", minus(sales, c)))


def profit_each(d: Draw) -> Story:
    a, ((_, x),), n, c, m = d.person(), d.goods(1), d.num(4, 300), d.num(3, 60), d.num(2, 9)
    q = (
        f"{a} buys {n} {x} for ${c} each and sells them for ${c + m} each.{d.aside(a)} "
        f"How many dollars does {a} make in all?"
    )
    each = minus(c + m, c)
    return tell(q, (f"On each {a} makes {{}} dollars.", each), ("On all it is {} dollars.", times(n, each)))


def split_bill(d: Draw) -> Story:
    a, k, each, x = d.person(), d.num(2, 9), d.num(6, 90), d.num(5, 150)
    y = k * each - x
    _require(y > 0)
    q = (
        f"{a} and {k - 1} friends share a bill equally. The food costs ${x} and the drinks cost ${y}.{d.aside(a)} "
        f"How many dollars does each of them pay?"
    )
    total, heads = plus(x, y), plus(k - 1, 1)
    return tell(
        q,
        ("The bill is {} dollars.", total),
        ("They are {} people.", heads),
        ("Each pays {} dollars.", over(total, heads)),
    )


def coins(d: Draw) -> Story:
    a, n, m, k = d.person(), d.num(2, 9), d.num(2, 30), d.num(2, 30)
    q = f"{a} has {n} quarters, {m} dimes and {k} nickels.{d.aside(a)} " + d.pick(
        f"How many cents does {a} have?", "How many cents is that altogether?"
    )
    first, second, third = times(n, 25), times(m, 10), times(k, 5)
    pair = plus(first, second)
    return tell(
        q,
        ("The quarters are {} cents.", first),
        ("The dimes are {} cents.", second),
        ("The nickels are {} cents.", third),
        ("Quarters and dimes make {} cents.", pair),
        ("All coins make {} cents.", plus(pair, third)),
    )


def base_and_extra(d: Draw) -> Story:
    a, base, free, extra, p = d.person(), d.num(10, 90), d.num(5, 200), d.num(3, 90), d.num(2, 9)
    unit, plan = d.pick(("minutes", "phone"), ("gigabytes", "data"), ("rides", "bus"), ("visits", "gym"))
    q = (
        f"A {plan} plan costs ${base} and includes {free} {unit}. Each of the {unit} beyond that costs ${p}."
        f"{d.aside(a)} {a} used {free + extra} {unit}. How many dollars does {a} pay?"
    )
    beyond = minus(free + extra, free)
    charge = times(beyond, p)
    return tell(
        q,
        (f"{a} used {{}} extra {unit}.", beyond),
        ("They cost {} dollars.", charge),
        (f"{a} pays {{}} dollars.", plus(base, charge)),
    )


def rental(d: Draw) -> Story:
    a, fee, per, n = d.person(), d.num(10, 200), d.num(10, 120), d.num(2, 9)
    what = d.pick("car", "boat", "bike", "tent", "truck", "cabin")
    coupon = d.num(3, 60)
    q = (
        f"Renting a {what} costs ${per} a day plus a fee of ${fee}.{d.aside(a)} {a} rents it for {n} days and has a "
        f"coupon for ${coupon} off. How many dollars does {a} pay?"
    )
    days = times(n, per)
    total = plus(days, fee)
    return tell(
        q,
        ("The days cost {} dollars.", days),
        ("With the fee it is {} dollars.", total),
        ("With the coupon it is {} dollars.", minus(total, coupon)),
    )


def tickets(d: Draw) -> Story:
    a, n, m, p, r = d.person(), d.num(2, 9), d.num(2, 9), d.num(6, 80), d.num(2, 40)
    place = d.pick("zoo", "museum", "theater", "park", "concert", "circus")
    q = d.pick(
        f"Tickets to the {place} cost ${p} for adults and ${r} for children.{d.aside(a)} {a} buys {n} adult tickets "
        f"and {m} child tickets. How many dollars does {a} pay?",
        f"{n} adults and {m} children go to the {place}. An adult pays ${p} and a child pays ${r}. "
        f"How many dollars do they pay in total?",
    )
    first, second = times(n, p), times(m, r)
    return tell(
        q,
        ("The adults cost {} dollars.", first),
        ("The children cost {} dollars.", second),
        ("The total is {} dollars.", plus(first, second)),
    )


def wallet_day(d: Draw) -> Story:
    a, start, x, y, z, k = d.person(), d.num(100, 900), d.num(5, 90), d.num(5, 90), d.num(5, 90), d.num(2, 6)
    ((one, _), (_, many)) = d.goods(2)
    q = (
        f"{a} leaves home with ${start}. {a} buys a {one} for ${x} and {k} {many} for ${y} each. "
        f"Then a friend pays back ${z} to {a}.{d.aside(a)} How many dollars does {a} have at the end?"
    )
    left = minus(start, x)
    cost = times(k, y)
    after = minus(left, cost)
    return tell(
        q,
        (f"After the {one} {a} has {{}} dollars.", left),
        (f"The {many} cost {{}} dollars.", cost),
        (f"Then {a} has {{}} dollars.", after),
        (f"At the end {a} has {{}} dollars.", plus(after, z)),
    )


# --- Percent and fractions ------------------------------------------------------------------------------------------


def _percent(whole: int, percent: int, what: str) -> list[tuple[str, Step]]:
    """Worked lines for `percent` of `whole`: quarters and halves by division, else tenths times a digit."""
    if percent in (25, 50):
        return [(f"{percent} percent of the {what} is {{}}.", over(whole, 100 // percent))]
    tenth = over(whole, 10)
    if percent == 10:
        return [(f"10 percent of the {what} is {{}}.", tenth)]
    return [
        (f"10 percent of the {what} is {{}}.", tenth),
        (f"{percent} percent of the {what} is {{}}.", times(tenth, percent // 10)),
    ]


def _percent_and_whole(d: Draw, low: int, high: int) -> tuple[int, int]:
    """A percentage and a whole of which it is a whole number."""
    percent = d.pick(10, 20, 25, 30, 40, 50, 60, 70, 80, 90)
    unit = {25: 4, 50: 2}.get(percent, 10)
    return percent, unit * d.num(-(-low // unit), high // unit)


def discount(d: Draw) -> Story:
    a, ((one, _),), (percent, price) = d.person(), d.goods(1), _percent_and_whole(d, 20, 900)
    q = d.pick(
        f"A {one} costs ${price}. It is on sale for {percent}% off.{d.aside(a)} How many dollars does {a} pay for it?",
        f"{a} has a coupon for {percent}% off a {one} priced at ${price}.{d.aside(a)} What does {a} pay, in dollars?",
    )
    pairs = _percent(price, percent, "price")
    return tell(q, *pairs, (f"{a} pays {{}} dollars.", minus(price, pairs[-1][1])))


def price_rise(d: Draw) -> Story:
    a, (percent, rent), k = d.person(), _percent_and_whole(d, 40, 600), d.num(2, 9)
    q = (
        f"{a}'s {d.pick('rent', 'fee', 'pay', 'bill')} was ${rent} a month. It goes up by {percent}%.{d.aside(a)} "
        f"How many dollars is it for {k} months now?"
    )
    pairs = _percent(rent, percent, "amount")
    new = plus(rent, pairs[-1][1])
    return tell(q, *pairs, ("Now it is {} dollars a month.", new), ("In all it is {} dollars.", times(k, new)))


def percent_of_group(d: Draw) -> Story:
    (percent, total), what = _percent_and_whole(d, 40, 900), d.pick("students", "workers", "visitors", "players")
    group, other = d.pick(("girls", "boys"), ("adults", "children"), ("beginners", "experts"))
    a = d.person()
    q = (
        f"A {d.pick('school', 'club', 'town', 'camp')} has {total} {what}. {percent}% of them are {group} and the rest "
        f"are {other}.{d.aside(a)} How many {other} are there?"
    )
    pairs = _percent(total, percent, "group")
    return tell(q, *pairs, (f"There are {{}} {other}.", minus(total, pairs[-1][1])))


def percent_score(d: Draw) -> Story:
    (a, b), (percent, total), k = d.people(2), _percent_and_whole(d, 20, 400), d.num(2, 40)
    q = (
        f"A test has {total} questions. {a} gets {percent}% of them right. {b} gets {k} fewer right than {a}."
        f"{d.aside(b)} How many questions does {b} get right?"
    )
    pairs = _percent(total, percent, "questions")
    return tell(q, *pairs, (f"{b} gets {{}} right.", minus(pairs[-1][1], k)))


def tip(d: Draw) -> Story:
    a, x, y, percent = d.person(), d.num(1, 40), d.num(1, 40), d.pick(10, 20, 30)
    first = d.num(5, 90)
    second = 10 * (x + y) - first
    _require(second > 0)
    q = (
        f"{a} orders a meal for ${first} and another for ${second}. {a} adds a tip of {percent}% of the bill."
        f"{d.aside(a)} How many dollars does {a} pay in total?"
    )
    bill = plus(first, second)
    pairs = _percent(bill.value, percent, "bill")
    return tell(q, ("The bill is {} dollars.", bill), *pairs, ("In total it is {} dollars.", plus(bill, pairs[-1][1])))


_PARTS = (("half", 2), ("a third", 3), ("a quarter", 4), ("a fifth", 5), ("a sixth", 6), ("an eighth", 8))


def fraction_left(d: Draw) -> Story:
    a, t, (word, k), n = d.person(), d.thing(), d.pick(*_PARTS), d.num(3, 120)
    q = d.pick(
        f"{a} has {k * n} {t} and gives {word} of them to a friend.{d.aside(a)} How many {t} does {a} have left?",
        f"Of {k * n} {t}, {a} gave {word} away.{d.aside(a)} How many {t} did {a} keep?",
    )
    part = over(k * n, k)
    return tell(q, (f"{a} gives {{}} {t}.", part), (f"{a} has {{}} {t} left.", minus(k * n, part)))


def several_parts(d: Draw) -> Story:
    a, n = d.person(), d.num(3, 120)
    k, m = d.pick((3, 2), (4, 3), (5, 2), (5, 3), (5, 4), (6, 5), (8, 3), (8, 5), (7, 3), (7, 4))
    t, extra = d.thing(), d.num(2, 90)
    q = (
        f"{a} had {k * n} {t}. {a} sold {m}/{k} of them and then found {extra} more.{d.aside(a)} "
        f"How many {t} does {a} have now?"
    )
    part = over(k * n, k)
    sold = times(part, m)
    left = minus(k * n, sold)
    return tell(
        q,
        (f"One part is {{}} {t}.", part),
        (f"{a} sold {{}} {t}.", sold),
        (f"Then {{}} {t} were left.", left),
        (f"Now {a} has {{}} {t}.", plus(left, extra)),
    )


def part_of_rest(d: Draw) -> Story:
    a, t, (w1, k1), (w2, k2) = d.person(), d.thing(), d.pick(*_PARTS), d.pick(*_PARTS)
    total = k1 * k2 * d.num(1, 30)
    _require(total <= 999)
    q = (
        f"{a} has {total} {t}. {a} uses {w1} of them on {d.pick(*_DAYS)} and then {w2} of what is left.{d.aside(a)} "
        f"How many {t} remain?"
    )
    first = over(total, k1)
    rest = minus(total, first)
    second = over(rest, k2)
    return tell(
        q,
        (f"First {{}} {t} are used.", first),
        (f"Then {{}} {t} are left.", rest),
        (f"Next {{}} {t} are used.", second),
        (f"So {{}} {t} remain.", minus(rest, second)),
    )


def two_parts(d: Draw) -> Story:
    a, (w1, k1), (w2, k2), n = d.person(), d.pick(*_PARTS), d.pick(*_PARTS), d.num(1, 40)
    total = k1 * k2 * n
    _require(k1 != k2 and total <= 999)
    what = d.pick("income", "prize money", "allowance")
    q = (
        f"{a}'s {what} is ${total}. {a} spends {w1} of it on food and {w2} of it on clothes.{d.aside(a)} "
        f"How many dollars are left?"
    )
    first, second = over(total, k1), over(total, k2)
    rest = minus(total, first)
    return tell(
        q,
        ("Food costs {} dollars.", first),
        ("Clothes cost {} dollars.", second),
        ("After food {} dollars are left.", rest),
        ("After clothes {} dollars are left.", minus(rest, second)),
    )


def ratio_parts(d: Draw) -> Story:
    a, (c1, c2), x, y, n = d.person(), d.some(_COLORS, 2), d.num(1, 5), d.num(1, 5), d.num(4, 90)
    t = d.pick("beads", "tiles", "buttons", "flowers", "balloons")
    q = (
        f"For every {x} {c1} {t} {a} uses {y} {c2} {t}. {a} uses {n * (x + y)} {t} in all.{d.aside(a)} "
        f"How many of them are {c2}?"
    )
    group = plus(x, y)
    count = over(n * (x + y), group)
    return tell(
        q,
        (f"A group has {{}} {t}.", group),
        ("There are {} groups.", count),
        (f"So {{}} {t} are {c2}.", times(count, y)),
    )


# --- Time, distance, rates ------------------------------------------------------------------------------------------


def two_legs(d: Draw) -> Story:
    a, v, w, h, g = d.person(), d.num(10, 90), d.num(10, 90), d.num(2, 9), d.num(2, 9)
    q = d.pick(
        f"{a} drives {h} hours at {v} miles per hour and then {g} hours at {w} miles per hour.{d.aside(a)} "
        f"How many miles does {a} drive?",
        f"At {v} miles an hour {a} rides for {h} hours; then at {w} miles an hour for {g} hours.{d.aside(a)} "
        f"How far is that in miles?",
    )
    first, second = times(h, v), times(g, w)
    return tell(
        q,
        ("The first part is {} miles.", first),
        ("The second part is {} miles.", second),
        ("In all it is {} miles.", plus(first, second)),
    )


def remaining_trip(d: Draw) -> Story:
    a, v, h, g, k = d.person(), d.num(3, 9), d.num(2, 9), d.num(2, 9), d.num(2, 9)
    v *= k
    _require(v <= 70)
    far = v * h + k * g
    q = (
        f"A trip is {far} miles long. {a} travels {h} hours at {v} miles per hour and then slows down to {k} miles per "
        f"hour.{d.aside(a)} How many more hours does {a} need?"
    )
    done = times(h, v)
    rest = minus(far, done)
    return tell(
        q,
        (f"{a} has gone {{}} miles.", done),
        ("There are {} miles left.", rest),
        (f"{a} needs {{}} hours.", over(rest, k)),
    )


def fuel(d: Draw) -> Story:
    a, per, gallons, p = d.person(), d.pick(10, 5, 8, 9, 7), d.num(3, 60), d.num(2, 6)
    _require(per * gallons % 2 == 0)
    one_way = per * gallons // 2
    q = (
        f"{a}'s van goes {per} miles on a gallon of fuel. {a} drives {one_way} miles to the coast and back the same "
        f"way.{d.aside(a)} Fuel costs ${p} a gallon. How many dollars does the fuel cost?"
    )
    both = times(2, one_way)
    used = over(both, per)
    return tell(
        q,
        ("The whole drive is {} miles.", both),
        ("It takes {} gallons.", used),
        ("The fuel costs {} dollars.", times(used, p)),
    )


def hours_and_minutes(d: Draw) -> Story:
    a, h, m, k = d.person(), d.num(1, 9), d.num(5, 55), d.num(5, 59)
    what = d.pick("film", "flight", "concert", "game", "lesson", "show")
    q = d.pick(
        f"A {what} lasts {h} hours and {m} minutes. There is also a break of {k} minutes.{d.aside(a)} "
        f"How many minutes does it all take?",
        f"{a} goes to a {what} of {h} hours and {m} minutes, and the way there takes {k} minutes.{d.aside(a)} "
        f"How many minutes is that in total?",
    )
    hours = times(h, 60)
    long = plus(hours, m)
    return tell(
        q,
        ("The hours are {} minutes.", hours),
        (f"The {what} takes {{}} minutes.", long),
        ("In total it is {} minutes.", plus(long, k)),
    )


def time_left(d: Draw) -> Story:
    a, h, x, y, n = d.person(), d.num(2, 9), d.num(10, 55), d.num(5, 40), d.num(2, 5)
    q = (
        f"{a} has {h} hours. Cleaning takes {x} minutes, and each of {n} phone calls takes {y} minutes.{d.aside(a)} "
        f"How many minutes are left?"
    )
    total, calls = times(h, 60), times(n, y)
    busy = plus(x, calls)
    return tell(
        q,
        (f"{a} has {{}} minutes.", total),
        ("The calls take {} minutes.", calls),
        ("Everything takes {} minutes.", busy),
        ("There are {} minutes left.", minus(total, busy)),
    )


def daily_for_weeks(d: Draw) -> Story:
    a, n, w, k = d.person(), d.num(2, 60), d.num(2, 9), d.num(2, 90)
    verb, what = d.pick(("reads", "pages"), ("writes", "lines"), ("does", "push-ups"), ("bakes", "rolls"))
    q = (
        f"{a} {verb} {n} {what} every day for {w} weeks.{d.aside(a)} Before that there were {k} {what} already. "
        f"How many {what} is that in total?"
    )
    week = times(7, n)
    total = times(w, week)
    return tell(
        q,
        (f"In a week it is {{}} {what}.", week),
        (f"In {w} weeks it is {{}} {what}.", total),
        (f"In total it is {{}} {what}.", plus(total, k)),
    )


def pages_left(d: Draw) -> Story:
    a, per, days, more = d.person(), d.num(4, 90), d.num(2, 9), d.num(5, 400)
    q = d.pick(
        f"A book has {per * days + more} pages. {a} reads {per} pages a day for {days} days.{d.aside(a)} "
        f"How many pages are left to read?",
        f"{a} reads {per} pages each day of a book with {per * days + more} pages.{d.aside(a)} "
        f"How many pages are still unread after {days} days?",
    )
    read = times(days, per)
    return tell(q, (f"{a} reads {{}} pages.", read), ("There are {} pages left.", minus(per * days + more, read)))


def days_to_finish(d: Draw) -> Story:
    a, x, n, per, days = d.person(), d.num(2, 9), d.num(4, 60), d.num(2, 9), d.num(3, 60)
    what = d.pick("pages", "exercises", "letters", "songs")
    q = (
        f"{a} must finish {x * n + per * days} {what}. In the first {x} days {a} finishes {n} {what} a day, and after "
        f"that {per} {what} a day.{d.aside(a)} How many more days does {a} need after the first {x}?"
    )
    done = times(x, n)
    rest = minus(x * n + per * days, done)
    return tell(
        q,
        (f"At first {a} finishes {{}} {what}.", done),
        (f"Then {{}} {what} are left.", rest),
        (f"{a} needs {{}} days.", over(rest, per)),
    )


def machines(d: Draw) -> Story:
    a, m, h, n, bad = d.person(), d.num(2, 9), d.num(2, 9), d.num(3, 100), d.num(2, 60)
    t = d.pick("toys", "bottles", "screws", "boxes", "cans", "lamps", "shoes")
    q = (
        f"A factory has {m} machines. Each makes {n} {t} an hour. They run for {h} hours.{d.aside(a)} "
        f"{bad} of the {t} are broken. How many good {t} are made?"
    )
    hour = times(m, n)
    total = times(h, hour)
    return tell(
        q,
        (f"In an hour {{}} {t} are made.", hour),
        (f"In {h} hours it is {{}} {t}.", total),
        (f"{{}} {t} are good.", minus(total, bad)),
    )


def water_tank(d: Draw) -> Story:
    a, start, fill, leak, m = d.person(), d.num(10, 400), d.num(6, 60), d.num(2, 9), d.num(2, 9)
    q = (
        f"A tank holds {start} liters of water. A pipe adds {fill} liters a minute while {leak} liters a minute leak "
        f"out.{d.aside(a)} How many liters are in the tank after {m} minutes?"
    )
    net = minus(fill, leak)
    gain = times(m, net)
    return tell(
        q,
        ("Each minute the tank gains {} liters.", net),
        (f"In {m} minutes it gains {{}} liters.", gain),
        ("Then it holds {} liters.", plus(start, gain)),
    )


def work_together(d: Draw) -> Story:
    (a, b), x, y, h = d.people(2), d.num(3, 60), d.num(3, 60), d.num(2, 9)
    what = d.pick("bricks", "envelopes", "baskets", "parcels", "bags")
    need = d.num(2, 200)
    q = (
        f"{a} packs {x} {what} an hour and {b} packs {y} an hour. They need {(x + y) * h + need} {what} and work for "
        f"{h} hours.{d.aside(a)} How many {what} are still missing?"
    )
    hour = plus(x, y)
    done = times(h, hour)
    return tell(
        q,
        (f"In an hour they pack {{}} {what}.", hour),
        (f"In {h} hours they pack {{}} {what}.", done),
        (f"{{}} {what} are missing.", minus((x + y) * h + need, done)),
    )


def exercise(d: Draw) -> Story:
    a, x, y, w = d.person(), d.num(10, 60), d.num(10, 90), d.num(2, 6)
    what = d.pick("runs", "swims", "dances", "practices piano", "rides a bike", "draws")
    q = (
        f"{a} {what} {x} minutes on each of the 5 weekdays and {y} minutes on each of the 2 weekend days.{d.aside(a)} "
        f"How many minutes is that in {w} weeks?"
    )
    first, second = times(5, x), times(2, y)
    week = plus(first, second)
    return tell(
        q,
        ("On weekdays it is {} minutes.", first),
        ("On weekend days it is {} minutes.", second),
        ("In a week it is {} minutes.", week),
        (f"In {w} weeks it is {{}} minutes.", times(w, week)),
    )


def rising_days(d: Draw) -> Story:
    a, n, k, days = d.person(), d.num(3, 200), d.num(2, 40), d.num(3, 4)
    verb, what = d.pick(("walks", "blocks"), ("picks", "berries"), ("sells", "tickets"), ("paints", "tiles"))
    q = (
        f"On the first day {a} {verb} {n} {what}. Each day after that it is {k} more than the day before.{d.aside(a)} "
        f"How many {what} is it in {days} days?"
    )
    pairs: list[tuple[str, Step]] = []
    today: Number = n
    total: Number = n
    for day in range(2, days + 1):
        today = plus(today, k)
        total = plus(total, today)
        pairs += [(f"Day {day}: {{}}.", today), ("So far: {}.", total)]
    return tell(q, *pairs)


def doubling(d: Draw) -> Story:
    a, n, k = d.person(), d.num(3, 99), d.num(2, 4)
    what = d.pick("cells", "rabbits", "members", "followers", "plants")
    lost = d.num(2, 9)
    q = (
        f"{a} starts with {n} {what}. Their number doubles every month for {k} months.{d.aside(a)} "
        f"Then {lost} are taken away. How many {what} are there?"
    )
    pairs: list[tuple[str, Step]] = []
    now: Number = n
    for month in range(1, k + 1):
        now = times(now, 2)
        pairs.append((f"After month {month} there are {{}}.", now))
    return tell(q, *pairs, ("In the end there are {}.", minus(now, lost)))


# --- Ages, school, sport, home --------------------------------------------------------------------------------------


def age_sum(d: Draw) -> Story:
    (a, b), n, k, y = d.people(2), d.num(4, 60), d.num(2, 30), d.num(2, 20)
    q = (
        f"{a} is {n} years old. {b} is {k} years older than {a}."
        + d.pick("", f" They have known each other for {d.num(2, 3)} years.")
        + f" What will be the sum of their ages in {y} years?"
    )
    older = plus(n, k)
    first, second = plus(n, y), plus(older, y)
    return tell(
        q,
        (f"{b} is {{}} years old.", older),
        (f"In {y} years {a} will be {{}}.", first),
        (f"In {y} years {b} will be {{}}.", second),
        ("The sum will be {}.", plus(first, second)),
    )


def age_times(d: Draw) -> Story:
    (a, b, c), n, k, m = d.people(3), d.num(3, 25), d.num(2, 4), d.num(2, 12)
    q = (
        f"{a} is {n} years old. {b} is {k} times as old as {a}. {c} is {m} years younger than {b}.{d.aside(c)} "
        f"How old is {c}?"
    )
    older = times(k, n)
    return tell(q, (f"{b} is {{}} years old.", older), (f"{c} is {{}} years old.", minus(older, m)))


def age_past(d: Draw) -> Story:
    (a, b), k, then, y = d.people(2), d.num(2, 6), d.num(3, 15), d.num(2, 20)
    q = f"{y} years ago {a} was {then} years old, and {b} was {k} times as old as {a}.{d.aside(a)} How old is {b} now?"
    old = times(k, then)
    return tell(q, (f"At that time {b} was {{}}.", old), (f"Now {b} is {{}}.", plus(old, y)))


def class_buses(d: Draw) -> Story:
    a, x, n, away, k = d.person(), d.num(2, 9), d.num(12, 40), d.num(2, 30), d.num(4, 9)
    _require((x * n - away) > 0 and (x * n - away) % k == 0)
    q = (
        f"A school has {x} classes with {n} students each. {away} students are ill.{d.aside(a)} "
        f"The others ride in vans that take {k} students each. How many vans are needed?"
    )
    total = times(x, n)
    there = minus(total, away)
    return tell(
        q,
        ("The school has {} students.", total),
        ("{} students ride.", there),
        ("They need {} vans.", over(there, k)),
    )


def bus_stops(d: Draw) -> Story:
    a, start, x, y, z, w = d.person(), d.num(15, 60), d.num(2, 14), d.num(2, 25), d.num(2, 14), d.num(2, 25)
    bus = d.pick("bus", "train", "ferry", "tram")
    q = (
        f"A {bus} starts with {start} people. At the first stop {x} get off and {y} get on. At the second stop {z} get "
        f"off and {w} get on.{d.aside(a)} How many people are on the {bus} now?"
    )
    s1 = minus(start, x)
    s2 = plus(s1, y)
    s3 = minus(s2, z)
    return tell(
        q,
        (f"After {x} get off there are {{}}.", s1),
        (f"After {y} get on there are {{}}.", s2),
        (f"After {z} get off there are {{}}.", s3),
        (f"After {w} get on there are {{}}.", plus(s3, w)),
    )


def average_three(d: Draw) -> Story:
    a, x, y, mean = d.person(), d.num(5, 300), d.num(5, 300), d.num(5, 300)
    z = 3 * mean - x - y
    _require(0 < z <= 400)
    what = d.pick("points", "pages", "miles", "steps", "dollars")
    d1, d2, d3 = d.some(_DAYS, 3)
    q = (
        f"{a} counts {x} {what} on {d1}, {y} on {d2} and {z} on {d3}.{d.aside(a)} "
        f"What is the average number of {what} a day?"
    )
    pair = plus(x, y)
    total = plus(pair, z)
    return tell(
        q,
        (f"Two days make {{}} {what}.", pair),
        (f"Three days make {{}} {what}.", total),
        (f"The average is {{}} {what}.", over(total, 3)),
    )


def average_wanted(d: Draw) -> Story:
    a, x, y, mean = d.person(), d.num(40, 99), d.num(40, 99), d.num(50, 95)
    what = d.pick("tests", "games", "rounds", "quizzes")
    q = (
        f"{a} scored {x} and {y} in two {what}.{d.aside(a)} "
        f"What must {a} score in the third to have an average of {mean} over all 3 {what}?"
    )
    need, have = times(3, mean), plus(x, y)
    return tell(
        q,
        ("The scores must add up to {}.", need),
        ("So far they add up to {}.", have),
        ("The third must be {}.", minus(need, have)),
    )


def basketball(d: Draw) -> Story:
    a, n, m, k = d.person(), d.num(2, 20), d.num(2, 15), d.num(2, 20)
    q = (
        f"{a} makes {n} shots worth 2 points, {m} shots worth 3 points and {k} free throws worth 1 point.{d.aside(a)} "
        f"How many points does {a} score?"
    )
    first, second = times(n, 2), times(m, 3)
    pair = plus(first, second)
    return tell(
        q,
        ("The first shots give {} points.", first),
        ("The long shots give {} points.", second),
        ("Together that is {} points.", pair),
        ("With free throws it is {} points.", plus(pair, k)),
    )


def league_points(d: Draw) -> Story:
    a, w, t, rival = d.person(), d.num(3, 25), d.num(2, 20), d.num(2, 30)
    q = (
        f"A win gives 3 points and a draw gives 1 point. {a}'s team has {w} wins and {t} draws.{d.aside(a)} "
        f"The rival has {rival} points fewer. How many points does the rival have?"
    )
    wins = times(w, 3)
    total = plus(wins, t)
    return tell(
        q,
        ("The wins give {} points.", wins),
        ("The team has {} points.", total),
        ("The rival has {} points.", minus(total, rival)),
    )


def legs(d: Draw) -> Story:
    a, n, m = d.person(), d.num(3, 200), d.num(3, 200)
    two, four = d.pick("chickens", "ducks", "geese", "turkeys"), d.pick("cows", "sheep", "goats", "pigs", "horses")
    q = d.pick(
        f"A farm has {n} {two} and {m} {four}.{d.aside(a)} How many legs do the animals have in total?",
        f"{a} sees {m} {four} and {n} {two} in a field.{d.aside(a)} How many legs is that altogether?",
    )
    first, second = times(n, 2), times(m, 4)
    return tell(
        q,
        (f"The {two} have {{}} legs.", first),
        (f"The {four} have {{}} legs.", second),
        ("In total there are {} legs.", plus(first, second)),
    )


def wheels(d: Draw) -> Story:
    a, n, m, k = d.person(), d.num(2, 60), d.num(2, 60), d.num(2, 60)
    q = (
        f"In a garage there are {n} bicycles, {m} tricycles and {k} cars.{d.aside(a)} "
        f"How many wheels are there{d.pick('', ' in total', ' altogether')}?"
    )
    first, second, third = times(n, 2), times(m, 3), times(k, 4)
    pair = plus(first, second)
    return tell(
        q,
        ("The bicycles have {} wheels.", first),
        ("The tricycles have {} wheels.", second),
        ("The cars have {} wheels.", third),
        ("Bicycles and tricycles have {} wheels.", pair),
        ("In total there are {} wheels.", plus(pair, third)),
    )


def seats(d: Draw) -> Story:
    a, x, n, empty, p = d.person(), d.num(3, 9), d.num(8, 99), d.num(2, 20), d.num(2, 9)
    q = (
        f"A hall has {x} rows of {n} seats. {empty} seats are empty.{d.aside(a)} Each guest paid ${p}. "
        f"How many dollars did the guests pay?"
    )
    full = times(x, n)
    taken = minus(full, empty)
    return tell(
        q,
        ("The hall has {} seats.", full),
        ("{} seats are taken.", taken),
        ("The guests paid {} dollars.", times(taken, p)),
    )


def garden(d: Draw) -> Story:
    a, x, n, each, eaten = d.person(), d.num(2, 9), d.num(3, 12), d.num(2, 9), d.num(2, 40)
    plant, fruit = d.pick(("bushes", "berries"), ("vines", "melons"), ("trees", "pears"), ("plants", "peppers"))
    q = (
        f"{a}'s garden has {x} rows of {n} {plant}. Each of the {plant} bears {each} {fruit}.{d.aside(a)} "
        f"Birds eat {eaten} {fruit}. How many {fruit} can {a} pick?"
    )
    count = times(x, n)
    total = times(count, each)
    return tell(
        q,
        (f"There are {{}} {plant}.", count),
        (f"They bear {{}} {fruit}.", total),
        (f"{a} can pick {{}} {fruit}.", minus(total, eaten)),
    )


def area_cost(d: Draw) -> Story:
    a, x, y, p = d.person(), d.num(2, 9), d.num(3, 60), d.num(2, 9)
    what, cover = d.pick(("room", "carpet"), ("wall", "paint"), ("field", "grass"), ("floor", "tile"))
    q = (
        f"A {what} is {x} meters by {y} meters. The {cover} costs ${p} a square meter.{d.aside(a)} "
        f"How many dollars does {a} pay to cover the {what}?"
    )
    area = times(x, y)
    return tell(q, ("The area is {} square meters.", area), ("It costs {} dollars.", times(area, p)))


def fence(d: Draw) -> Story:
    a, x, y, p = d.person(), d.num(3, 90), d.num(3, 90), d.num(2, 9)
    what = d.pick("garden", "yard", "pool", "playground", "field")
    q = (
        f"{a} wants a fence around a {what} that is {x} meters long and {y} meters wide.{d.aside(a)} "
        f"A meter of fence costs ${p}. How many dollars does the fence cost?"
    )
    side = plus(x, y)
    around = times(2, side)
    return tell(
        q,
        ("Length and width make {} meters.", side),
        ("All around it is {} meters.", around),
        ("The fence costs {} dollars.", times(around, p)),
    )


def cut_rope(d: Draw) -> Story:
    a, k, n, waste, p = d.person(), d.num(2, 9), d.num(4, 90), d.num(2, 30), d.num(2, 9)
    what, piece = d.pick(("rope", "pieces"), ("ribbon", "bows"), ("wire", "loops"), ("cloth", "flags"))
    q = (
        f"{a} has {k * n + waste} feet of {what} and throws {waste} feet away. The rest is cut into {piece} of {k} "
        f"feet, which are sold for ${p} each.{d.aside(a)} How many dollars does {a} get?"
    )
    good = minus(k * n + waste, waste)
    count = over(good, k)
    return tell(
        q,
        ("There are {} feet to use.", good),
        (f"They make {{}} {piece}.", count),
        (f"{a} gets {{}} dollars.", times(count, p)),
    )


def recipe(d: Draw) -> Story:
    a, each, n, have = d.person(), d.num(2, 9), d.num(2, 120), d.num(2, 60)
    what, of = d.pick(("eggs", "cake"), ("lemons", "jug"), ("apples", "pie"), ("cups of flour", "loaf"))
    q = (
        f"A {of} needs {each} {what}. {a} wants to make {n} of that kind and already has {have} {what}.{d.aside(a)} "
        f"How many more {what} does {a} need?"
    )
    need = times(n, each)
    return tell(q, (f"{a} needs {{}} {what}.", need), (f"{a} must get {{}} more.", minus(need, have)))


def bake_sale(d: Draw) -> Story:
    a, t, trays, per, bag, p = d.person(), d.pick(*_BAKED), d.num(2, 9), d.num(6, 48), d.num(2, 9), d.num(2, 9)
    _require(trays * per % bag == 0)
    q = (
        f"{a} bakes {trays} trays of {per} {t} and puts them in bags of {bag}. A bag sells for ${p}.{d.aside(a)} "
        f"How many dollars does {a} make when every bag is sold?"
    )
    total = times(trays, per)
    bags = over(total, bag)
    return tell(
        q,
        (f"There are {{}} {t}.", total),
        ("They fill {} bags.", bags),
        (f"{a} makes {{}} dollars.", times(bags, p)),
    )


def teams(d: Draw) -> Story:
    a, k, n, boys, each = d.person(), d.num(2, 9), d.num(3, 60), d.num(2, 200), d.num(2, 6)
    girls = k * n - boys
    _require(girls > 0)
    q = (
        f"{boys} boys and {girls} girls form teams of {k}.{d.aside(a)} Every team gets {each} balls. "
        f"How many balls are given out?"
    )
    total = plus(boys, girls)
    count = over(total, k)
    return tell(
        q,
        ("There are {} children.", total),
        ("They form {} teams.", count),
        ("{} balls are given out.", times(count, each)),
    )


def farm_sale(d: Draw) -> Story:
    a, hens, per, own, p, days = d.person(), d.num(3, 30), d.num(1, 3), d.num(2, 9), d.num(2, 5), d.num(2, 7)
    q = (
        f"{a}'s {hens} hens lay {per} eggs each a day. {a} eats {own} eggs a day and sells the rest for ${p} each."
        f"{d.aside(a)} How many dollars does {a} earn in {days} days?"
    )
    laid = times(hens, per)
    sold = minus(laid, own)
    day = times(sold, p)
    return tell(
        q,
        ("The hens lay {} eggs a day.", laid),
        (f"{a} sells {{}} eggs a day.", sold),
        ("A day brings {} dollars.", day),
        (f"In {days} days {a} earns {{}} dollars.", times(day, days)),
    )


def level_change(d: Draw) -> Story:
    a, start, up, h, down = d.person(), d.num(20, 900), d.num(3, 90), d.num(2, 9), d.num(5, 200)
    what, unit = d.pick(("balloon", "meters"), ("river", "millimeters"), ("climber", "feet"), ("drone", "feet"))
    q = (
        f"A {what} is at {start} {unit}. It rises {up} {unit} an hour for {h} hours and then falls by {down} {unit}."
        f"{d.aside(a)} At how many {unit} is the {what} now?"
    )
    rise = times(h, up)
    top = plus(start, rise)
    return tell(
        q,
        (f"It rises {{}} {unit}.", rise),
        (f"At the top it is at {{}} {unit}.", top),
        (f"Now it is at {{}} {unit}.", minus(top, down)),
    )


def left_over_money(d: Draw) -> Story:
    a, ((_, x), (_, y)), n, p, m, rest = d.person(), d.goods(2), d.num(2, 9), d.num(3, 60), d.num(2, 9), d.num(2, 90)
    r = d.num(2, 60)
    q = (
        f"{a} had ${n * p + m * r + rest}. {a} bought {n} {x} for ${p} each and spent the rest, except ${rest}, on {m} "
        f"{y}.{d.aside(a)} How many dollars did each of the {y} cost?"
    )
    first = times(n, p)
    after = minus(n * p + m * r + rest, first)
    spent = minus(after, rest)
    return tell(
        q,
        (f"The {x} cost {{}} dollars.", first),
        ("After that {} dollars were left.", after),
        (f"The {y} cost {{}} dollars together.", spent),
        ("Each cost {} dollars.", over(spent, m)),
    )


def one_step(d: Draw) -> Story:
    (a, b), t = d.people(2), d.thing()
    match d.num(0, 3):
        case 0:
            n, m = d.num(20, 4900), d.num(20, 4900)
            q = f"{a} has {n} {t} and {b} has {m} {t}.{d.aside(a)} How many {t} do they have together?"
            return tell(q, (f"Together they have {{}} {t}.", plus(n, m)))
        case 1:
            n, m = d.num(50, 9900), d.num(20, 4900)
            q = f"A store had {n} {t} and sold {m} of them.{d.aside(a)} How many {t} does the store have left?"
            return tell(q, (f"The store has {{}} {t} left.", minus(n, m)))
        case 2:
            n, m = d.num(2, 9), d.num(11, 999)
            q = f"There are {m} {t} in a crate.{d.aside(a)} How many {t} are in {n} crates?"
            return tell(q, (f"There are {{}} {t}.", times(n, m)))
        case _:
            n, m = d.num(2, 9), d.num(11, 500)
            q = f"{a} packs {n * m} {t} into {n} equal boxes.{d.aside(b)} How many {t} are in each box?"
            return tell(q, (f"Each box holds {{}} {t}.", over(n * m, n)))


# fmt: off
_ALL: tuple[Scheme, ...] = (
    more_than, fewer_than, times_as_many, half_as_many, twice_and_more, three_people, difference_of_two,
    event_chain, two_colors, difference_then_total,
    boxes_given_away, nested_boxes, share_equally, packs_needed, pack_cost, dozens, move_between,
    two_items, three_items, change_back, price_list, diary, storehouse, weekly_saving, saving_goal, two_savers,
    hourly_pay, overtime, stand_profit, profit_each, split_bill, coins, base_and_extra, rental, tickets,
    wallet_day, left_over_money,
    discount, price_rise, percent_of_group, percent_score, tip,
    fraction_left, several_parts, part_of_rest, two_parts, ratio_parts,
    two_legs, remaining_trip, fuel, hours_and_minutes, time_left, daily_for_weeks, pages_left,
    days_to_finish, machines, water_tank, work_together, exercise, rising_days, doubling,
    age_sum, age_times, age_past, class_buses, bus_stops, average_three, average_wanted,
    basketball, league_points, legs, wheels, seats, garden, area_cost, fence, cut_rope,
    recipe, bake_sale, teams, farm_sale, level_change, one_step,
)
# fmt: on

SCHEMES: Mapping[str, Scheme] = MappingProxyType({scheme.__name__: scheme for scheme in _ALL})


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m accuracy.gsm_mini", description="Prints problems with answers.")
    parser.add_argument("--count", type=int, default=3, help="how many (3)")
    parser.add_argument("--seed", type=int, default=0, help="which ones (0)")
    parser.add_argument("--shots", type=int, default=0, help="solved problems before each, as in a prompt (0)")
    options = parser.parse_args()
    for problem in problems("heldout", options.seed, options.count):
        print("".join(map(shot, [*few_shot(count=options.shots), problem])), end="")


if __name__ == "__main__":
    main()
