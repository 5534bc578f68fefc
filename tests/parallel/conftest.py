"""A small model that several tests share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.server.random_model import write_model

TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


@pytest.fixture(scope="session")
def random_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_model(folder, TEMPLATE)
    return folder
