"""What a model writes, on the page: Markdown while it streams, long answers, hostile ones, and
conversations that are kept in the browser. In a real browser, with an engine that says what it is
told.
"""

from __future__ import annotations

import json
import re
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


def test_a_long_answer_streams_with_linear_work(page: Any, say: Callable[[str], int]) -> None:
    """8,000 tokens: what the browser does for the second half is no more than for the first, and
    what it does for one frame fits between two.
    """
    paragraph = "Some **bold** words and a `name`, then more of the same text to read. " * 6
    count = say("\n\n".join(f"{number}. {paragraph}" for number in range(1, 200)))
    assert count > 8000
    session = page.context.new_cdp_session(page)
    session.send("Performance.enable")
    page.evaluate(
        """() => {
            window.slow = [];
            new PerformanceObserver((list) => window.slow.push(...list.getEntries().map((one) => one.duration)))
                .observe({ type: "long-animation-frame" });
        }"""
    )
    ask(page, "At length.")
    names = ("ScriptDuration", "LayoutDuration", "RecalcStyleDuration")
    found = {one["name"]: one["value"] for one in session.send("Performance.getMetrics")["metrics"]}
    work = sum(found[name] for name in names)
    slow = page.evaluate("() => window.slow")
    said = page.locator(".speed").text_content()
    print(f"{count} tokens: {work:.2f} s of work, frames over 50 ms: {slow}; {said}")
    assert work / count < 1e-3, found
    assert len(slow) <= 3, slow
