"""Pictures of the page for docs/page.md: `python docs/screenshots.py` with Chromium and Playwright,
the small real model, and nothing else to do on the machine.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "pictures"
QUESTION = "Give me three tips for sleeping well, as a numbered list with bold titles."
SHOTS = [
    ("page-talk.png", 1280, 800, "light", ""),
    ("page-phone-dark.png", 390, 760, "dark", ""),
    ("page-watch-dark.png", 1280, 800, "dark", "#tab-watch"),
]


def start_server() -> tuple[subprocess.Popen[bytes], str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "quire", "serve", "--port", str(port)]
    server = subprocess.Popen([*command, "--kv-cache-memory", "64MiB"])
    url = f"http://127.0.0.1:{port}"
    for _ in range(240):
        time.sleep(0.5)
        try:
            urllib.request.urlopen(f"{url}/ready", timeout=2)
        except OSError:
            continue
        return server, url
    server.terminate()
    raise SystemExit("the server did not start")


def take(page: Any, name: str, click: str, is_narrow: bool) -> None:
    if is_narrow:
        page.click("#settings-panel summary")
    page.fill("[name=seed]", "3")
    page.fill("[name=max_tokens]", "120")
    if is_narrow:
        page.click("#settings-panel summary")
    page.fill("#question", QUESTION)
    page.press("#question", "Enter")
    page.locator(".same-answer").wait_for(timeout=120_000)
    page.get_by_text("Verify this answer").click()
    page.locator(".verdict.good").wait_for(timeout=120_000)
    if click:
        page.click(click)
        page.wait_for_timeout(1500)
    page.screenshot(path=FOLDER / name)


def main() -> None:
    from playwright.sync_api import sync_playwright

    server, url = start_server()
    try:
        with sync_playwright() as playwright:
            arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
            browser = playwright.chromium.launch(
                executable_path=shutil.which("chromium"), args=arguments
            )
            for name, width, height, scheme, click in SHOTS:
                page = browser.new_page(
                    viewport={"width": width, "height": height}, color_scheme=scheme
                )
                page.goto(url)
                page.locator("#parameters input").first.wait_for(state="attached")
                take(page, name, click, is_narrow=width < 900)
                page.close()
            browser.close()
    finally:
        server.terminate()
        server.wait()


if __name__ == "__main__":
    main()
