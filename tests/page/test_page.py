"""The status page of a real router with real nodes, in a real Chromium: what a person sees, clicks and hears.

Needs Debian's package `chromium` and the Python package `playwright`.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.stack import Server, Stack, free_port, generate, running, stack, wait_healthy

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
playwright = pytest.importorskip("playwright.sync_api", reason="the status page needs playwright (pip)")
if CHROMIUM is None:
    pytest.skip("the status page needs Chromium (apt-get install chromium)", allow_module_level=True)

ADMIN, USER = "admin-key-of-this-test-0123456789", "user-key-of-this-test-01234567890"
ODD_RID = '<img src=x onerror="document.title=1">'
expect = playwright.expect
expect.set_options(timeout=15_000)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with stack(tmp_path_factory.mktemp("page"), extra=["--transport", "loopback"]) as found:
        yield found


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        try:
            yield chromium
        finally:
            chromium.close()


@pytest.fixture(scope="module")
def blank(browser: Any, served: Stack) -> Iterator[Any]:
    """A page of the router's, to run its scripts in."""
    page = browser.new_page()
    page.goto(f"{served.router.url}/page/icon.svg")
    yield page
    page.close()


@contextmanager
def opened(browser: Any, url: str, **settings: Any) -> Iterator[Any]:
    """A page of its own. Nothing may go wrong in it, and it may ask nobody else."""
    context = browser.new_context(**settings)
    page = context.new_page()
    faults: list[str] = []
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("console", lambda message: faults.append(message.text) if "Content Security" in message.text else None)
    page.on("request", lambda asked: faults.append(asked.url) if not asked.url.startswith(url) else None)
    page.goto(url)
    try:
        yield page
    finally:
        context.close()
    assert not faults


def ask(url: str, **fields: Any) -> httpx.Response:
    body = {"text": "A shop sells apples. " * 20, "sampling_params": {"max_new_tokens": 8, "ignore_eos": True}}
    return generate(url, body | fields)


def row(page: Any, rid: str) -> Any:
    return page.locator("#requests tr", has=page.get_by_role("button", name=rid, exact=True))


def test_what_workers_do_and_where_requests_spent_their_time(browser: Any, served: Stack) -> None:
    url = served.router.url
    with opened(browser, url) as page:
        expect(page.locator("#health")).to_have_text("serving")
        expect(page.locator("#workers tr")).to_have_count(2)
        prefill = page.get_by_role("row").filter(has_text=served.prefill.url)
        expect(prefill).to_contain_text("alive")
        expect(prefill).to_contain_text("127 of 127 free")
        print_ = httpx.get(f"{served.prefill.url}/server_info").json()["fingerprint"]
        expect(prefill).to_contain_text(print_[:10])

        assert ask(url, rid="first", stream=True).status_code == 200
        mine = row(page, "first")
        expect(mine).to_contain_text("ok")
        expect(mine).to_contain_text("→ 8")
        said = mine.get_by_role("img").get_attribute("aria-label")
        assert all(word in said for word in ("queue", "prefill", "transfer", "decode"))
        expect(page.locator("#prefixes")).to_contain_text("tokens")

        assert ask(url, rid="wrong", sampling_params={"temperature": -1}).status_code == 400
        assert ask(url, rid=ODD_RID).status_code == 200
        expect(page.get_by_role("button", name=ODD_RID[:15])).to_be_visible()
        assert page.title() == "Tandem router", "a client's words are no HTML"
        expect(row(page, "wrong")).to_contain_text("invalid request")
        page.get_by_role("radio", name="failed").check()
        expect(row(page, "first")).to_have_count(0)
        expect(row(page, "wrong")).to_have_count(1)


TIMING = {"queue_s": 1, "prefill_s": 2, "transfer_s": 0, "decode_s": 4}
ENDED = {"running": False, "code": "ok", "wait_s": 1, "opened_s": 1, "e2e_s": 9, "retries": 0, "resumes": 0}


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        (ENDED | {"timing": TIMING}, "wait 0-1 queue 1-2 prefill 2-4 decode 4-8 other 8-9"),
        (ENDED | {"timing": TIMING | {"decode_s": 99}}, "wait 0-1 queue 1-2 prefill 2-4 decode 4-9"),
        (
            ENDED | {"timing": TIMING, "opened_s": 2, "retries": 1, "e2e_s": 5},
            "wait 0-1 earlier 1-2 queue 2-3 prefill 3-5",
        ),
        (ENDED | {"timing": None, "code": "rank_died"}, "wait 0-1 failed 1-9"),
        (ENDED | {"timing": None, "code": "queue_full", "wait_s": None, "opened_s": None}, "failed 0-9"),
        (ENDED | {"timing": None, "running": True, "wait_s": None, "opened_s": None}, "wait 0-9"),
        (ENDED | {"timing": None, "running": True}, "wait 0-1 running 1-9"),
    ],
)
def test_parts_of_a_time_line(blank: Any, request_: dict[str, Any], expected: str) -> None:
    found = blank.evaluate("async (r) => (await import('/page/waterfall.js')).parts(r)", request_)
    assert " ".join(f"{part['name']} {part['from']}-{part['to']}" for part in found) == expected


def test_with_a_keyboard_alone(browser: Any, served: Stack) -> None:
    assert ask(served.router.url, rid="keys").status_code == 200
    with opened(browser, served.router.url, reduced_motion="reduce") as page:
        expect(row(page, "keys")).to_be_visible()
        page.keyboard.press("Tab")
        expect(page.get_by_role("link", name="Skip to the content")).to_be_focused()
        page.keyboard.press("Tab")
        page.keyboard.press("Enter")
        pause = page.locator("#pause")
        expect(pause).to_be_focused()
        expect(pause).to_have_attribute("aria-pressed", "true")
        page.keyboard.press("Tab")
        expect(page.get_by_role("radio", name="all")).to_be_focused()
        page.keyboard.press("Tab")
        newest = page.locator("#requests .more").first
        expect(newest).to_be_focused()
        page.keyboard.press("Enter")
        expect(newest).to_have_attribute("aria-expanded", "true")
        details = page.locator("#" + str(newest.get_attribute("aria-controls")))
        expect(details).to_contain_text(served.decode.url)
        page.keyboard.press("Enter")
        expect(details).to_be_hidden()
        asked = threading.Event()
        page.on("request", lambda _: asked.set())
        page.wait_for_timeout(1500)
        assert not asked.is_set(), "paused"
        pause.press("Space")
        expect(pause).to_have_text("Pause")
        with page.expect_response("**/status.json*"):
            """It asks again."""
        newest.focus()
        assert ask(served.router.url, rid="later").status_code == 200
        expect(row(page, "later")).to_be_visible()
        expect(row(page, "keys").locator(".more")).to_be_focused()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_on_a_small_screen_nothing_is_cut_off(browser: Any, served: Stack, scheme: str) -> None:
    assert ask(served.router.url, rid="r" * 200).status_code == 200
    size = {"width": 375, "height": 700}
    with opened(browser, served.router.url, viewport=size, color_scheme=scheme) as page:
        page.locator("#requests .more").first.click()
        expect(page.locator(".details:visible")).to_contain_text("r" * 200)
        assert page.evaluate("document.documentElement.scrollWidth") <= 375
        cut_off = page.evaluate(CUT_OFF)
        assert not cut_off
        assert page.get_by_role("table").count() == 2 and page.get_by_role("columnheader").count() == 13
        contrast = page.evaluate(CONTRAST)
        assert not contrast, f"text that can hardly be read: {contrast}"
        for width in (320, 640, 821, 1000):
            page.set_viewport_size({"width": width, "height": 700})
            assert page.evaluate("document.documentElement.scrollWidth") <= width


CUT_OFF = """() => [...document.querySelectorAll('body *')]
  .filter((e) => e.checkVisibility() && !e.closest('.unseen, .skip, thead, svg'))
  .filter((e) => e.getBoundingClientRect().right > 375)
  .map((e) => `${e.tagName}.${e.className} ${e.textContent.slice(0, 40)}`)"""
CONTRAST = """() => {
  const numbers = (colour) => (colour.match(/[\\d.]+/g) ?? []).map(Number);
  const light = ([r, g, b]) => [r, g, b].map((c) => (c /= 255) <= .04045 ? c / 12.92 : ((c + .055) / 1.055) ** 2.4)
    .reduce((sum, c, i) => sum + c * [.2126, .7152, .0722][i], 0);
  const ground = (e) => { for (; e; e = e.parentElement) {
    const found = numbers(getComputedStyle(e).backgroundColor);
    if (found.length === 3 || found[3] === 1) return found;
  } return numbers(getComputedStyle(document.body).backgroundColor); };
  const poor = [];
  for (const e of document.querySelectorAll('body *')) {
    const own = [...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim());
    if (!own || !e.checkVisibility() || e.closest('.unseen, .skip, noscript, thead')) continue;
    const [a, b] = [light(numbers(getComputedStyle(e).color)), light(ground(e))].sort((x, y) => y - x);
    const ratio = (a + .05) / (b + .05);
    if (ratio < 4.5) poor.push([e.textContent.slice(0, 30), ratio.toFixed(2)]);
  }
  return poor;
}"""


@contextmanager
def told(browser: Any, served: Stack, changes: dict[str, Any], **settings: Any) -> Iterator[Any]:
    """The page of a router that says this besides what it really says."""
    said = httpx.get(f"{served.router.url}/status.json").json() | changes
    with opened(browser, served.router.url, **settings) as page:
        page.route("**/status.json*", lambda route: route.fulfill(json=said))
        page.reload()
        yield page


def test_a_router_that_has_just_begun_says_how_to_add_a_worker(browser: Any, served: Stack) -> None:
    totals = httpx.get(f"{served.router.url}/status.json").json()["totals"] | {"prompt_tokens": 0, "cached_tokens": 0}
    nothing = {"workers": [], "requests": [], "serving": False, "why_not": "no prefill worker is alive"}
    with told(browser, served, nothing | {"totals": totals}) as page:
        expect(page.locator("#trouble")).to_contain_text(
            f"no workers yet: start nodes with --router {served.router.url}"
        )
        expect(page.locator("#trouble")).to_contain_text("POST /workers")
        expect(page.locator(".tile", has_text="Prompt tokens cached").locator(".value")).to_have_text("–")


def test_a_line_is_drawn_from_two_points_on(browser: Any, served: Stack) -> None:
    said = httpx.get(f"{served.router.url}/status.json").json()
    asked, times = [0], 2  # of two times comes one rate

    def answer(route: Any) -> None:
        asked[0] += 1
        route.fulfill(json=said | {"now": said["now"] + min(asked[0], times)})

    with opened(browser, served.router.url) as page:
        page.route("**/status.json*", answer)
        page.reload()
        line = page.locator(".tile polyline").first
        for _ in range(3):
            with page.expect_response("**/status.json*"):
                """The next one."""
        assert asked[0] >= 3 and line.get_attribute("points") is None
        times = 9
        expect(line).to_have_attribute("points", re.compile("^58,.* 59,"))


def test_ranks_that_are_dead_are_shown(browser: Any, served: Stack) -> None:
    workers = httpx.get(f"{served.router.url}/status.json").json()["workers"]
    assert [(worker["ranks"], worker["ranks_alive"]) for worker in workers] == [(1, 1), (1, 1)]
    workers[1] |= {"ranks": 2}
    with told(browser, served, {"workers": workers}) as page:
        whole, half = page.locator("#workers tr").all()
        expect(half.get_by_text("1 of 2 ranks")).to_be_visible()
        expect(whole.locator(".chip.warn")).to_be_hidden()


def test_an_id_keeps_its_line_beside_a_long_result(browser: Any, served: Stack) -> None:
    assert ask(served.router.url).status_code == 200
    request = httpx.get(f"{served.router.url}/status.json").json()["requests"][0]
    failed = request | {"id": "chatcmpl-0123456789abcdef0123456789abcdef", "code": "context_length_exceeded"}
    running = request | {"id": "cmpl-", "running": True, "timing": None, "code": "running", "began_at": 0}
    with told(browser, served, {"requests": [failed, running]}, viewport={"width": 375, "height": 700}) as page:
        button = page.get_by_role("button", name="0123456789abcde…")
        expect(button).to_have_attribute("title", failed["id"])
        assert button.bounding_box()["height"] < 34
        badge = page.get_by_text("context length exceeded")
        assert (
            badge.bounding_box()["height"] < 30
            and badge.bounding_box()["y"] > button.bounding_box()["y"] + button.bounding_box()["height"]
        )
        expect(page.get_by_role("button", name="cmpl-", exact=True)).to_be_visible()
        colours = [
            page.locator(f".legend .p-{name}").evaluate("(e) => getComputedStyle(e).backgroundImage")
            for name in ("running", "failed")
        ]
        assert all("repeating-linear-gradient" in colour for colour in colours) and colours[0] != colours[1]


@contextmanager
def lone_router(served: Stack, folder: Path, *extra: str) -> Iterator[Server]:
    """Another router of the same nodes."""
    port = free_port()
    bootstrap = httpx.get(f"{served.prefill.url}/server_info").json()["bootstrap_port"]
    arguments = ["router", "--port", str(port), "--decode", served.decode.url, *extra]
    arguments += ["--prefill", served.prefill.url, str(bootstrap)]
    with running("router", arguments, f"http://127.0.0.1:{port}", folder) as router:
        wait_healthy(router)
        yield router


def test_it_says_when_a_worker_and_when_the_router_is_gone(browser: Any, served: Stack, tmp_path: Path) -> None:
    dead = f"http://127.0.0.1:{free_port()}"
    with ExitStack() as exits:
        router = exits.enter_context(lone_router(served, tmp_path, "--decode", dead))
        page = exits.enter_context(opened(browser, router.url))
        worker = page.get_by_role("row").filter(has_text=dead)
        expect(worker).to_contain_text("dead")
        expect(worker).to_contain_text("refused")
        expect(page.locator("#stale")).to_be_hidden()
        os.kill(router.process.pid, signal.SIGSTOP)
        try:
            expect(page.locator("#stale")).to_be_visible()
            expect(page.get_by_role("status")).to_have_text("The router does not answer.")
            expect(page.locator("#stale")).to_contain_text(re.compile(r"What is shown is of \d\d:\d\d:\d\d"))
            expect(page.locator("#health")).to_have_text("no answer")
        finally:
            os.kill(router.process.pid, signal.SIGCONT)
        expect(page.locator("#stale")).to_be_hidden()
        expect(page.get_by_role("status")).to_have_text("The router answers again.")


def test_with_keys_it_asks_for_one(browser: Any, served: Stack, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"admin boss {ADMIN}\nuser somebody {USER}\n")
    keys.chmod(0o600)
    with lone_router(served, tmp_path, "--api-key-file", str(keys)) as router, opened(browser, router.url) as page:
        field = page.get_by_label("Admin key")
        expect(field).to_be_focused()
        expect(page.locator("#content")).to_be_hidden()
        expect(page.get_by_role("link", name="Metrics")).to_be_hidden()
        field.fill(USER)
        page.keyboard.press("Enter")
        expect(page.locator("#ask")).to_contain_text("This key was refused")
        field.fill(ADMIN)
        page.keyboard.press("Enter")
        expect(page.locator("#workers tr")).to_have_count(2)
        page.reload()
        expect(page.locator("#workers tr")).to_have_count(2)
        raw, address = page.get_by_role("dialog"), page.url
        for name, said in (("Metrics", "# TYPE tandem_router_requests"), ("Requests as JSON", '"kept": 250')):
            page.get_by_role("link", name=name).click()
            expect(raw.get_by_role("heading")).to_have_text(name)
            expect(raw).to_contain_text(said)
            page.keyboard.press("Escape")
            expect(raw).to_be_hidden()
        page.get_by_role("link", name="Status as JSON").click()
        expect(raw).to_contain_text('"uptime_s"')
        raw.get_by_role("button", name="Close").click()
        expect(raw).to_be_hidden()
        assert page.url == address
        assert ADMIN not in page.content() and page.evaluate("localStorage.length") == 0
        page.get_by_role("button", name="Forget the key").click()
        expect(field).to_be_focused()
        assert page.evaluate("sessionStorage.length") == 0
