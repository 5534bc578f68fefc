"""The page in a real browser: Chromium as Debian packages it, driven by Playwright."""

from __future__ import annotations

import base64
import json
import os
import re
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from tests.server.browser import PATIENCE, expect
from tests.server.gate import Gate
from tests.server.harness import Server, wait_for

pytestmark = pytest.mark.slow

LONG = '{"type": "string", "minLength": 900}'
"""A schema that keeps the small model writing until its tokens run out."""


@pytest.fixture(scope="module")
def gate(shared_small_server: Server) -> Iterator[Gate]:
    gate = Gate(shared_small_server.port)
    yield gate
    gate.shut()


@pytest.fixture(scope="module")
def context(browser: Any) -> Iterator[Any]:
    with browser.new_context(viewport={"width": 1200, "height": 800}) as context:
        context.set_default_timeout(PATIENCE)
        yield context


@pytest.fixture(scope="module")
def tab(context: Any) -> Any:
    tab = context.new_page()
    tab.problems = []
    tab.on("pageerror", lambda error: tab.problems.append(str(error)))
    tab.on(
        "console",
        lambda message: tab.problems.append(message.text) if message.type == "error" else None,
    )
    return tab


@pytest.fixture
def page(tab: Any, gate: Gate) -> Iterator[Any]:
    """The page, opened anew; nothing in it may go wrong without being noticed, what its policy
    forbids included.
    """
    kept = {"origin": gate.url, "storageTypes": "all"}
    tab.context.new_cdp_session(tab).send("Storage.clearDataForOrigin", kept)
    tab.goto(gate.url)
    expect(tab.locator("#model")).to_have_text("small")
    expect(tab.locator("#parameters input").first).to_be_attached()
    yield tab
    problems, tab.problems = tab.problems, []
    tab.goto("about:blank")
    assert not problems, problems


def ask(page: Any, question: str, **settings: str) -> Any:
    """Sends a question; the answer's element."""
    for name, value in settings.items():
        page.fill(f"[name={name}]", value)
    before = page.locator(".turn.assistant").count()
    page.fill("#question", question)
    page.press("#question", "Enter")
    return page.locator(".turn.assistant").nth(before)


def text_of(answer: Any) -> str:
    expect(answer.locator(".same-answer")).to_be_visible()
    text: str = answer.locator(".text").last.text_content()
    return text


def num_answered(page: Any) -> int:
    """Tokens of the last answer, as the page says."""
    said = re.match(r"Answered: (\d+) token", page.locator("#talk-status").text_content())
    assert said is not None
    return int(said.group(1))


def test_talk_and_the_same_answer_again(page: Any, context: Any) -> None:
    page.check("[name=logprobs]")
    answer = ask(page, "Why?", system="Be brief.", max_tokens="24", temperature="0.7", seed="1")
    text = text_of(answer)
    assert answer.locator(".token").count() == num_answered(page) > 1
    token = answer.locator(".token").first
    token.focus()
    page.keyboard.press("ArrowRight")
    expect(page.locator("#alternatives tr.chosen")).to_have_count(1)
    assert page.locator("#alternatives tr").count() in (5, 6)
    page.keyboard.press("Escape")
    answer.locator(".token").nth(1).hover()
    expect(page.locator("#alternatives tr.chosen")).to_be_visible()
    # A conversation goes on, with what was said before.
    second = ask(page, "And then?")
    text_of(second)
    told = f"The same answer as the link's, bit for bit: {num_answered(page)} token"
    link = second.locator(".same-answer").get_attribute("href")
    other = context.new_page()
    posts: list[str] = []
    other.on("request", lambda one: posts.append(one.url) if one.method == "POST" else None)
    other.goto(link)
    # Nothing is asked before the reader wants it: it is their key that pays.
    expect(other.locator("#link-offer")).to_be_visible()
    expect(other.locator(".turn.user")).to_have_count(2)
    expect(other.locator(".turn.assistant")).to_have_count(1)
    assert posts == []
    other.click("#link-ask")
    expect(other.locator("#link-offer")).to_be_hidden()
    expect(other.locator(".turn.assistant p.good")).to_contain_text(told)
    assert len(posts) == 1
    assert text_of(other.locator(".turn.assistant").last) == text_of(second)
    assert other.locator(".turn.assistant").first.locator(".text").last.text_content() != ""
    other.close()
    assert text == text_of(page.locator(".turn.assistant").first)
    # A link to another answer, as the server sees it: the page says so.
    said = json.loads(base64.urlsafe_b64decode(link.partition("#answer=")[2] + "=="))
    made = base64.urlsafe_b64encode(json.dumps(said | {"digest": "0" * 16}).encode()).decode()
    other = context.new_page()
    other.goto(link.partition("#")[0] + "#answer=" + made.rstrip("="))
    other.click("#link-ask")
    expect(other.locator(".turn.assistant p.bad")).to_contain_text("Not the answer of the link")
    other.close()


def test_regenerate_verify_and_edit(page: Any) -> None:
    answer = page.locator(".turn.assistant")
    first = text_of(ask(page, "One?", max_tokens="16"))
    seed = answer.locator(".seed").text_content()
    expect(answer.locator(".speed")).to_contain_text("tokens/s")
    # Computed once more, the same: whatever its text, every token.
    page.click("text=Verify this answer")
    expect(answer.locator(".verdict")).to_contain_text("✓ Recomputed")
    assert answer.locator(".text").last.text_content() == first
    # Another answer has another seed, even if the old one stands in the settings.
    page.click(".seed")
    assert f"seed {page.input_value('[name=seed]')}" == seed
    page.click("text=Regenerate")
    expect(answer.locator(".seed")).not_to_have_text(seed)
    expect(answer.locator(".text").last).not_to_have_text(first)
    # A seed that was typed since counts.
    page.fill("[name=seed]", seed.removeprefix("seed "))
    page.click("text=Regenerate")
    expect(answer.locator(".seed")).to_have_text(seed)
    assert text_of(answer) == first
    page.click("text=Edit")
    page.fill(".edit textarea", "Two?")
    page.click("text=Ask")
    expect(page.locator(".turn.user .text")).to_have_text("Two?")
    text_of(page.locator(".turn.assistant"))
    assert page.locator(".turn").count() == 2


def test_stop(page: Any, gate: Gate, shared_small_server: Server) -> None:
    """The small model is quick: its process is held as soon as the answer has begun, until the page
    has let it go.
    """
    before = num_aborted(shared_small_server)
    engine = shared_small_server.engine_pid
    held = threading.Event()

    def hold() -> None:
        os.kill(engine, signal.SIGSTOP)
        held.set()

    gate.when_said(10_000, hold)
    try:
        answer = ask(page, "At length, please.", schema=LONG)
        assert held.wait(60)
        expect(answer.locator(".text").last).to_have_text(re.compile(r".{20}", re.DOTALL))
        page.keyboard.press("Escape")
        expect(page.locator("#talk-status")).to_contain_text("Stopped after")
    finally:
        gate.when_said(0, None)
        os.kill(engine, signal.SIGCONT)
    expect(answer.locator(".same-answer")).to_have_count(0)
    expect(page.locator("#send")).to_be_visible()
    wait_for(lambda: num_aborted(shared_small_server) == before + 1, what="the engine to be told")


def num_aborted(server: Server) -> float:
    return sum(
        map(
            float,
            re.findall(
                r"^quire_answers_not_finished_total\S+ (\S+)$", server.get("/metrics").text, re.M
            ),
        )
    )


def test_a_schema_and_one_that_is_none(page: Any) -> None:
    schema = {"type": "object", "properties": {"city": {"enum": ["Rome"]}}, "required": ["city"]}
    answer = ask(page, "Where?", schema=json.dumps(schema | {"additionalProperties": False}))
    assert json.loads(text_of(answer)) == {"city": "Rome"}
    ask(page, "Where?", schema="{")
    expect(page.locator("#settings-error")).to_contain_text("not JSON")
    # beside the field, not at the form's end
    expect(page.locator("#settings-error")).to_be_in_viewport()
    expect(page.locator("[name=schema]")).to_be_focused()
    expect(page.locator("#talk-status")).to_contain_text("Not sent: the JSON schema is not JSON")
    expect(page.locator("#question")).to_have_value("Where?")  # nothing is lost
    assert page.locator(".turn.user").count() == 1
    failed = ask(page, "Where?", schema='{"type": 3}')
    expect(failed.locator("[role=alert]")).to_contain_text("response_format")
    page.problems.clear()  # the browser writes every 400 down


def test_tools_are_shown_as_they_are_called(page: Any) -> None:
    parameters: dict[str, Any] = {
        "type": "object",
        "properties": {"city": {"enum": ["Oslo"]}},
        "required": ["city"],
    }
    tool = {
        "type": "function",
        "function": {"name": "weather", "parameters": parameters | {"additionalProperties": False}},
    }
    page.select_option("[name=tool_choice]", "required")
    answer = ask(page, "Rain?", tools=json.dumps([tool]))
    expect(answer.locator(".call strong")).to_have_text("weather")
    expect(answer.locator(".call code")).to_have_text('{"city": "Oslo"}')
    page.fill("form.call textarea", "Rain.")
    page.select_option("[name=tool_choice]", "none")
    page.fill("[name=max_tokens]", "8")
    page.click("text=Send results")
    expect(page.locator(".turn.tool")).to_have_count(1)
    text_of(page.locator(".turn.assistant").nth(1))


class Crowd:
    """Requests, one after the other in each of several threads, until the block ends."""

    def __init__(self, server: Server, size: int) -> None:
        self._server = server
        self._is_over = threading.Event()
        self._threads = [
            threading.Thread(target=self._ask, args=(number,)) for number in range(size)
        ]

    def __enter__(self) -> None:
        for thread in self._threads:
            thread.start()

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join()

    def _ask(self, number: int) -> None:
        with self._server.client() as client:
            while not self._is_over.is_set():
                body = {
                    "prompt": "said to all " * 20 + str(number),
                    "max_tokens": 200,
                    "ignore_eos": True,
                }
                client.post("/v1/completions", json=body)


def test_watch_under_load_scrub_and_explain(page: Any, shared_small_server: Server) -> None:
    with Crowd(shared_small_server, 20):  # four more than run at once
        page.click("#tab-watch")
        state = page.locator("#requests tr")
        expect(state.filter(has_text="answering").first).to_be_visible()
        expect(state.filter(has_text="waiting").first).to_be_visible()
        expect(page.locator("#blocks")).to_have_attribute(
            "aria-label", re.compile(r"[1-9]\d* blocks in use, [1-9]")
        )
        expect(page.locator("#step-text")).to_contain_text("16 running")
        expect(page.locator("#tiles div").filter(has_text="Running").locator("dd")).to_contain_text(
            "16"
        )
        assert page.locator("#requests tr").count() <= 60
        # A running request, by the keyboard; one that ends between the two is gone, and the next
        # one is taken.
        for _ in range(10):
            state.filter(has_text="answering").first.locator("button").press("Enter")
            page.wait_for_timeout(300)
            if page.locator("#explain").is_visible():
                break
        expect(page.locator("#explain pre")).to_contain_text("Where the time went")
        expect(page.locator("#explain pre")).to_contain_text(
            re.compile(r"answer tokens.*(It still runs|It ended)", re.DOTALL)
        )
        page.keyboard.press("Escape")
        expect(page.locator("#explain")).not_to_be_visible()
    # Back to the beginning, with all that was there then, and forth again.
    expect(page.locator("#tiles div").filter(has_text="Running").locator("dd")).to_have_text("0 ")
    there = page.locator("#blocks").get_attribute("aria-label")
    page.focus("#time")
    page.keyboard.press("Home")
    expect(page.locator("#moment")).to_contain_text("s back")
    expect(page.locator("#live")).to_have_attribute("aria-pressed", "false")
    back = page.locator("#blocks").get_attribute("aria-label")
    assert back != there
    page.keyboard.press("End")
    expect(page.locator("#live")).to_have_attribute("aria-pressed", "true")
    for _ in range(30):  # the crowd has just left
        page.keyboard.press("ArrowLeft")
        if state.filter(has_text="answering").count():
            break
    expect(state.filter(has_text="answering").first).to_be_visible()
    expect(page.locator("#moment")).to_contain_text("s back")
    page.click("#live")
    expect(page.locator("#blocks")).to_have_attribute("aria-label", there)
    expect(state.filter(has_text="ended: length").first).to_be_visible()
    page.fill("#block", "1")
    expect(page.locator("#block-text")).to_contain_text("Block 1:")
    page.focus("#step")
    page.keyboard.press("ArrowLeft")
    expect(page.locator("#step-text")).to_contain_text("blocks free")


def test_a_server_that_goes_away_and_comes_back(page: Any, gate: Gate) -> None:
    gate.when_said(20_000, gate.shut)
    answer = ask(page, "At length, please.", schema=LONG)
    expect(answer.locator("[role=alert]")).to_contain_text("before the answer was complete")
    expect(page.locator("#connection")).to_contain_text("can't be reached")
    page.fill("[name=schema]", "")
    page.fill("[name=max_tokens]", "8")
    page.click("text=Try again")
    gate.open()
    expect(page.locator("#connection")).to_have_text("Connected again")
    text_of(page.locator(".turn.assistant"))
    page.click("#tab-watch")
    expect(page.locator("#requests tr").first).to_be_visible()
    gate.shut()
    expect(page.locator("#connection")).to_contain_text("can't be reached")
    gate.open()
    expect(page.locator("#connection")).to_have_text("Connected again")
    page.click("#tab-talk")
    text_of(ask(page, "Still there?"))
    page.click("#tab-watch")
    expect(page.locator("#requests tr").first).to_contain_text("ended: ")
    page.problems.clear()  # the browser writes every connection down that fails


def test_a_phone_s_width_is_enough(page: Any) -> None:
    page.set_viewport_size({"width": 360, "height": 700})
    page.click("#settings-panel summary")
    text_of(ask(page, "Fits?", max_tokens="30"))
    assert page.evaluate("() => document.documentElement.scrollWidth") == 360
    page.click("#tab-watch")
    expect(page.locator("#step-text")).to_contain_text("Step")
    assert page.evaluate("() => document.documentElement.scrollWidth") == 360
    light = page.evaluate("() => getComputedStyle(document.body).backgroundColor")
    page.emulate_media(color_scheme="dark")
    assert page.evaluate("() => getComputedStyle(document.body).backgroundColor") != light
