"""One rule for every file of a model folder: links out of it are refused, and what is broken is
named.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from quire.errors import ModelFormatError
from quire.frontend.tokenizer import Tokenizer
from quire.models.load import open_model
from tests.frontend.templates import QWEN
from tests.server.random_model import write_model

FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)
Change = Callable[[Path], object]


def _move_away(file: Path) -> None:
    outside = file.parent.parent / f"outside-{file.name}"
    shutil.move(file, outside)
    file.symlink_to(outside)


CHANGES: dict[str, tuple[Change, str]] = {
    "a link out of the folder": (_move_away, "unsafe link"),
    "a link to nowhere": (
        lambda file: (file.unlink(), file.symlink_to("nothing-here")),
        "missing|unsafe",
    ),
    "a link to itself": (
        lambda file: (file.unlink(), file.symlink_to(file.name)),
        "can't be read|unsafe|missing",
    ),
    "a folder": (lambda file: (file.unlink(), file.mkdir()), "missing|not a file"),
    "no text": (
        lambda file: file.write_bytes(b"\xff\xfe{ \x80 }"),
        "UTF-8|JSON|header|read|truncated",
    ),
    "half of it": (
        lambda file: file.write_bytes(file.read_bytes()[: file.stat().st_size // 2]),
        "JSON|header|read|truncated|template|size|expected",
    ),
}


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_model(folder, QWEN)
    return folder


def load(folder: Path) -> None:
    open_model(folder).checkpoint.close()
    Tokenizer.from_hf_folder(folder)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize(("change", "message"), CHANGES.values(), ids=CHANGES.keys())
def test_a_file_that_is_not_right_is_named(
    original: Path, tmp_path: Path, name: str, change: Change, message: str
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(original, folder)
    file = folder / name
    assert file.is_file()
    change(file)
    if name == "chat_template.jinja" and message.startswith("JSON"):
        load(folder)  # half a template is text, too; what is wrong with it shows when it is used
        return
    with pytest.raises(ModelFormatError, match=message) as caught:
        load(folder)
    assert name in str(caught.value)
    assert "\n" not in str(caught.value)


def test_links_inside_the_folder_are_followed(original: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(original, folder)
    for name in FILES:
        (folder / name).rename(folder / f"real-{name}x")
        (folder / name).symlink_to(f"real-{name}x")
    load(folder)
