"""A real browser: Chromium as Debian packages it, driven by Playwright."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from tests.late_import import LateModule

playwright: Any = LateModule("playwright.sync_api")

PROGRAM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
HOW = "no browser: apt-get install chromium, pip install playwright"
PATIENCE = 90_000
"""Milliseconds for anything to happen, on a machine that has much else to do."""


def open_browser() -> Iterator[Any]:
    """One, or a word on how to get one."""
    if PROGRAM is None:
        pytest.skip(HOW)
    try:
        started = playwright.sync_playwright().start()
    except ImportError:
        pytest.skip(HOW)
    playwright.expect.set_options(timeout=PATIENCE)
    # Its sandbox does not work for root, as whom tests run in containers.
    arguments = ["--disable-gpu", *(["--no-sandbox"] if os.geteuid() == 0 else [])]
    browser = started.chromium.launch(executable_path=PROGRAM, args=arguments, timeout=PATIENCE)
    yield browser
    browser.close()
    started.stop()


def expect(thing: Any) -> Any:
    """Playwright's: waits until it is so."""
    return playwright.expect(thing)
