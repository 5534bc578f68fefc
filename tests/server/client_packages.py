"""Where the clients are that tests run as programs: agents from npm, and Python packages that would
bring half of PyPI into our own environment. `make clients` installs them; without, their tests are
skipped with a word, and what they send is tested all the same (`test_recorded_clients`).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

FOLDER = Path(os.environ.get("QUIRE_CLIENTS", Path.home() / ".cache" / "quire" / "clients"))
NPM_PACKAGES = (
    "@openai/codex@0.166.0",
    "@anthropic-ai/claude-code@2.1.197",
    "ai@6.0.326",
    "@ai-sdk/openai@3.0.139",
    "zod@4.6.7",
    "@langchain/openai@1.6.0",
    "@langchain/core",
    "ollama@0.6.4",
    "opencode-ai@1.18.33",
    "@earendil-works/pi-coding-agent@0.74.2",
    "@continuedev/cli@1.5.47",
)
PYTHON_PACKAGES = {
    "python": (
        *("litellm", "mcp", "lm-eval[api]", "transformers", "ollama", "guidance"),
        *(
            "autogen-agentchat",
            "autogen-ext[openai]",
            "strands-agents[openai]",
            "mirascope[openai]",
        ),
    ),
    "inspect": ("inspect-ai", "openai"),
}
"""By environment: some don't agree on the version of a package."""
NPM = FOLDER / "npm"
PYTHONS = tuple(FOLDER / name / "bin" / "python" for name in PYTHON_PACKAGES)


def need_npm(name: str) -> Path:
    """The folder of npm's packages; skips where this one is not there."""
    if shutil.which("node") is None:
        pytest.skip("node is not installed")
    if not (NPM / "node_modules" / name).exists():
        pytest.skip(f"{name} is not installed: run `make clients`")
    return NPM


def need_python(module: str) -> str:
    """An interpreter that has the module; skips where there is none."""
    for python in (*map(str, PYTHONS), sys.executable):
        if Path(python).exists():
            look = f"import importlib.util as u; exit(u.find_spec({module!r}) is None)"
            if subprocess.call([python, "-c", look]) == 0:
                return python
    pytest.skip(f"{module} is not installed: run `make clients`")


def main() -> None:
    NPM.mkdir(parents=True, exist_ok=True)
    missing = []
    if shutil.which("npm") is None:
        print("npm is not installed: Codex, Claude Code and all others from npm are left out")
    else:
        install = ["npm", "install", "--no-audit", "--no-fund", "--prefix", str(NPM)]
        missing += _install(install, NPM_PACKAGES)
    for python, packages in zip(PYTHONS, PYTHON_PACKAGES.values(), strict=True):
        if not python.exists():
            subprocess.run([sys.executable, "-m", "venv", str(python.parents[1])], check=True)
        missing += _install([str(python), "-m", "pip", "install", "--quiet"], packages)
    if missing:
        sys.exit(f"not installed, so not tested: {', '.join(missing)}")


def _install(command: list[str], packages: Sequence[str]) -> list[str]:
    """All at once, or else each by itself; returns those that can't be."""
    if subprocess.run([*command, *packages], check=False).returncode == 0:
        return []
    return [one for one in packages if subprocess.run([*command, one], check=False).returncode]


if __name__ == "__main__":
    main()
