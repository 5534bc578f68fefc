"""What a model writes, on the page: Markdown while it streams, long answers, hostile ones, and
conversations that are kept in the browser. In a real browser, with an engine that says what it is
told.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from quire.checkpoints.sources import resolve
from quire.load import open_tokenizer
from tests.server.browser import PATIENCE, expect
from tests.server.harness import Server

pytestmark = pytest.mark.slow

MIXED = """# A title

Some **bold** and *slanted* text with `code`, a [link](https://example.org/a), <b>no markup</b> and snake_case_names.

1. first
   - nested **item**
2. second

| Name | Size |
|:-----|-----:|
| a    | 1    |
| b    | 22   |

```python
def f(x):  # doubles
    return "<b>" * 2
```

> quoted

$$\\frac{a^2}{\\sqrt{b_1}} \\leq \\alpha$$ and then \\(x + y\\), for $5 and $6.

שלום עולם

- [x] done
- [ ] open
"""
HOSTILE = [
    "<script>window.hacked = 1</script><img src=x onerror='window.hacked = 2'>",
    "[click](javascript:window.hacked=3) ![x](https://example.org/x.png) ![y](data:image/svg+xml,<svg>)",
    "[a](JaVaScRiPt:alert(1)) <a href='javascript:1'>b</a> [c](\tjavascript:1) <javascript:1>",
    ">" * 20_000 + " deep",
    "\n".join("  " * depth + "- item" for depth in range(500)),
    "[" * 20_000 + "]" * 20_000 + "(x)",
    "*a **b _c " * 10_000,
    "`" * 9_999 + " `` " * 3_000,
    "x" * 1_000_000,
    "| a " * 50_000 + "\n" + "|---" * 50_000 + "\n" + "| b " * 50_000,
    "$" + "{" * 5_000 + "$ \\(" + "\\frac" * 5_000 + "\\)",
    "```\n" + "<script>window.hacked = 4</script>\n" * 20_000,
    "![" * 10_000 + "](" * 10_000,
    "\\[" * 10_000 + "$$" * 9_999,
]


@pytest.fixture(scope="module")
def told(small_model: str) -> Iterator[Server]:
    with Server(
        model=small_model,
        engine={},
        engine_module="tests.server.scripted_engine",
        environment={"QUIRE_TEST_CONTEXT": "65536"},
    ) as server:
        yield server


@pytest.fixture(scope="module")
def say(told: Server, small_model: str) -> Callable[[str], int]:
    """Has the next answers be this text; how many tokens those are."""
    tokenizer = open_tokenizer(resolve(small_model))

    def say(text: str) -> int:
        tokens = [*tokenizer.encode(text), tokenizer.encode("<|im_end|>")[0]]
        told.fault_file.write_text(f"say {' '.join(map(str, tokens))}")
        return len(tokens)

    return say


@pytest.fixture
def page(browser: Any, told: Server) -> Iterator[Any]:
    """In a browser that has kept nothing."""
    with browser.new_context(viewport={"width": 1280, "height": 800}) as context:
        context.set_default_timeout(PATIENCE)
        page = context.new_page()
        problems: list[str] = []
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("console", lambda said: problems.append(said.text) if said.type == "error" else 0)
        page.on("dialog", lambda dialog: dialog.accept())
        page.goto(told.url)
        expect(page.locator("#parameters input").first).to_be_visible()
        yield page
        assert not problems, problems


def ask(page: Any, question: str) -> Any:
    """The answer's element, when it is complete."""
    before = page.locator(".turn.assistant").count()
    page.fill("#question", question)
    page.press("#question", "Enter")
    answer = page.locator(".turn.assistant").nth(before)
    expect(answer.locator(".actions")).to_be_visible()
    return answer


def markdown(page: Any, text: str, pieces: int) -> str:
    """The HTML that a text becomes if it comes in so many pieces."""
    html: str = page.evaluate(
        """async ([text, pieces]) => {
            const { MarkdownStream } = await import("/page/markdown.js");
            const element = document.createElement("div");
            const stream = new MarkdownStream(element);
            const size = Math.ceil(text.length / pieces);
            for (let at = 0; at < text.length; at += size) stream.push(text.slice(at, at + size));
            stream.end();
            return element.innerHTML;
        }""",
        [text, pieces],
    )
    return html


def test_markdown_is_shown_as_it_is_meant(page: Any, say: Callable[[str], int]) -> None:
    say(MIXED)
    text = ask(page, "Show me.").locator(".text")
    assert text.locator("h3").text_content() == "A title"
    assert text.locator("strong").first.text_content() == "bold"
    assert text.locator("a").get_attribute("href") == "https://example.org/a"
    assert "<b>no markup</b> and snake_case_names" in text.locator("p").first.text_content()
    assert text.locator("ol > li").count() == 2
    assert text.locator("ol ul li strong").text_content() == "item"
    assert text.locator("tbody tr").count() == 2
    assert text.locator("td.number").last.text_content() == "22"
    assert text.locator("pre code").text_content() == (
        'def f(x):  # doubles\n    return "<b>" * 2\n'
    )
    assert text.locator("pre .hl-keyword").all_text_contents() == ["def", "return"]
    assert text.locator("pre .hl-comment").text_content() == "# doubles"
    assert text.locator("mfrac").count() == 1
    assert text.locator("math").count() == 2
    assert "for $5 and $6." in text.text_content()
    hebrew = text.locator("p", has_text="שלום")
    assert hebrew.evaluate("(one) => getComputedStyle(one).direction") == "rtl"
    assert text.locator("li input[type=checkbox]").count() == 2
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    text.locator("figure.code button").click()
    expect(text.locator("figure.code button")).to_have_text("Copied")
    assert page.evaluate("() => navigator.clipboard.readText()").startswith("def f(x)")


def test_pieces_of_any_size_become_the_same(page: Any) -> None:
    whole = markdown(page, MIXED, 1)
    for pieces in (2, 7, 50, len(MIXED)):
        assert markdown(page, MIXED, pieces) == whole


@pytest.mark.parametrize("number", range(len(HOSTILE)))
def test_hostile_text_does_nothing_and_is_quick(page: Any, number: int) -> None:
    """In one piece and in a hundred, as loaded and as streamed."""
    found = page.evaluate(
        """async (text) => {
            const { MarkdownStream } = await import("/page/markdown.js");
            const place = document.body.appendChild(document.createElement("div"));
            const started = performance.now();
            for (const pieces of [1, 100]) {
                const element = place.appendChild(document.createElement("div"));
                const stream = new MarkdownStream(element);
                const size = Math.ceil(text.length / pieces);
                for (let at = 0; at < text.length; at += size) stream.push(text.slice(at, at + size));
                stream.end();
            }
            const seconds = (performance.now() - started) / 1000;
            let deepest = 0;
            for (const leaf of place.querySelectorAll("*")) {
                let depth = 0;
                for (let one = leaf; one !== place; one = one.parentNode) depth++;
                deepest = Math.max(deepest, depth);
            }
            await new Promise((done) => setTimeout(done, 50));
            const links = [...place.querySelectorAll("a")].map((one) => one.protocol);
            const count = place.querySelectorAll("script, img, iframe, style, object, embed, svg").length;
            place.remove();
            return { seconds, deepest, links, count, hacked: window.hacked ?? null };
        }""",
        HOSTILE[number],
    )
    assert found["hacked"] is None
    assert found["count"] == 0
    assert set(found["links"]) <= {"http:", "https:", "mailto:"}
    assert found["deepest"] < 100
    assert found["seconds"] < 10, found


def test_no_task_of_a_long_answer_holds_the_page_up(
    page: Any, browser: Any, say: Callable[[str], int]
) -> None:
    """8,000 tokens: no task takes 50 ms of the browser's main thread, and the last quarter of the
    answer no more of it than the second. Counted in processor time: what else this machine does
    is not the page's.
    """
    paragraph = "Some **bold** words and a `name`, then more of the same text to read. " * 6
    say("Short.")
    ask(page, "Before: what a browser does once is not measured.")
    count = say("\n\n".join(f"{number}. {paragraph}" for number in range(1, 26)))
    assert count >= 8000
    browser.start_tracing(page=page, categories=TRACED)
    ask(page, "At length.")
    events = json.loads(browser.stop_tracing())["traceEvents"]
    tasks = main_thread_tasks(events)
    longest = max(seconds for _, seconds in tasks)
    quarters = work_by_quarter(tasks)
    print(
        f"{count} tokens: {sum(quarters):.2f} s of work, by quarter {quarters}, longest {longest}"
    )
    assert longest < 0.05
    assert quarters[3] < 2.5 * quarters[1] + 0.1


TRACED = ["toplevel", "disabled-by-default-devtools.timeline", "__metadata"]


def main_thread_tasks(events: list[dict[str, Any]]) -> list[tuple[float, float]]:
    """When each task of the page's main thread began, and the processor time it took, in seconds."""
    mains = {
        (event["pid"], event["tid"])
        for event in events
        if event["name"] == "thread_name" and event["args"]["name"] == "CrRendererMain"
    }
    tasks = [
        (event["ts"] / 1e6, event["tdur"] / 1e6)
        for event in events
        if event["name"] in ("RunTask", "ThreadControllerImpl::RunTask")
        and event.get("tdur")
        and (event["pid"], event["tid"]) in mains
    ]
    assert tasks, "Chromium's trace names no tasks"
    return tasks


def work_by_quarter(tasks: list[tuple[float, float]]) -> list[float]:
    first, last = min(tasks)[0], max(tasks)[0]
    quarters = [0.0] * 4
    for begin, seconds in tasks:
        quarters[min(3, int(4 * (begin - first) / (last - first)))] += seconds
    return [round(one, 3) for one in quarters]


def test_a_conversation_survives_a_reload_an_export_and_an_import(
    page: Any, say: Callable[[str], int], tmp_path: Path
) -> None:
    say("A **first** answer.")
    page.fill("[name=temperature]", "0.5")
    ask(page, "What is first?")
    page.reload()
    answer = page.locator(".turn.assistant")
    expect(answer.locator("strong")).to_have_text("first")
    expect(page.locator("[name=temperature]")).to_have_value("0.5")
    # It goes on, and what was said before is sent along; an answer from before can be verified.
    page.click("text=Verify this answer")
    expect(answer.locator(".verdict")).to_contain_text("✓ Recomputed")
    say("A second one.")
    ask(page, "And then?")
    titles = page.locator("#conversation-list .title")
    expect(titles).to_have_text(["What is first?"])
    # A branch goes its own way.
    page.locator(".turn.assistant").first.locator("text=Branch").click()
    expect(page.locator(".turn")).to_have_count(2)
    ask(page, "Otherwise?")
    expect(titles).to_have_text(["What is first? (branch)", "What is first?"])
    # A name of its own, and search by what was said.
    page.locator("#conversation-list li").last.hover()
    page.locator("#conversation-list li").last.locator("text=Rename").click()
    page.fill("#conversation-list input", "Firsts")
    page.keyboard.press("Enter")
    expect(titles).to_have_text(["What is first? (branch)", "Firsts"])
    page.fill("#search", "and THEN")
    expect(titles).to_have_text(["Firsts"])
    page.fill("#search", "")
    expect(titles).to_have_count(2)
    # Out, deleted, and in again.
    page.click("summary:has-text('Kept in this browser')")
    with page.expect_download() as started:
        page.click("#export-all")
    file = tmp_path / "kept.json"
    started.value.save_as(file)
    page.click("#delete-all")
    expect(titles).to_have_count(0)
    expect(page.locator(".turn")).to_have_count(0)
    page.set_input_files("#import-file", file)
    expect(page.locator("#conversations-status")).to_have_text("Imported 2 conversations")
    page.set_input_files("#import-file", file)
    expect(page.locator("#conversations-status")).to_contain_text("2 were here already")
    titles.filter(has_text="Firsts").click()
    expect(page.locator(".turn")).to_have_count(4)
    expect(page.locator(".turn.assistant strong")).to_have_text("first")
    page.reload()
    expect(page.locator(".turn")).to_have_count(4)
    page.locator("#conversation-list li.current").locator("text=Delete").click()
    expect(titles).to_have_count(1)
    expect(page.locator(".turn")).to_have_count(0)


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "[]",
        '{"quire_conversations": 1, "conversations": [{"title": 3, "turns": []}]}',
        '{"quire_conversations": 1, "conversations": [{"title": "a", "turns": [{"role": "x"}]}]}',
    ],
)
def test_a_file_that_is_none_is_refused(page: Any, tmp_path: Path, content: str) -> None:
    file = tmp_path / "bad.json"
    file.write_text(content)
    page.set_input_files("#import-file", file)
    expect(page.locator("#conversations-status")).to_contain_text("bad.json was not imported:")
    expect(page.locator("#conversation-list li")).to_have_count(0)


def test_the_alternatives_go_with_their_token(page: Any, say: Callable[[str], int]) -> None:
    """Also where the token leaves the page, and no pointer ever leaves it."""
    say("Some words.")
    page.check("[name=logprobs]")
    answer = ask(page, "Which?")
    answer.locator(".token").nth(1).hover()
    expect(page.locator("#alternatives")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.locator("#alternatives")).to_be_hidden()
    answer.locator(".token").first.focus()
    expect(page.locator("#alternatives")).to_be_visible()
    page.evaluate("() => document.getElementById('new-chat').click()")
    expect(page.locator("#alternatives")).to_be_hidden()
