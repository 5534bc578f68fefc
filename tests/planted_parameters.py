"""A program for `test_parameter_tables.py`: adds a line to each table before anything else of Quire is
imported, and prints where it is found, as JSON.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import quire.config
import quire.field_checks as check
import quire.sampling_params
from quire.errors import InvalidRequestError


@dataclass(frozen=True, slots=True)
class SamplingParams(quire.sampling_params.SamplingParams):
    planted_p: float = check.real(0.25, 0.0, 0.75, help="Planted for a test.")


@dataclass(frozen=True, slots=True)
class EngineConfig(quire.config.EngineConfig):
    planted_size: int = check.whole(3, 1, 8, help="Planted in the engine.")


def plant() -> None:
    quire.sampling_params.SamplingParams = SamplingParams  # type: ignore[misc]
    quire.config.EngineConfig = EngineConfig  # type: ignore[misc]


def refusal(make: Any, **given: Any) -> str:
    try:
        make(**given)
    except InvalidRequestError as error:
        return str(error)
    return "nothing was refused"


COMMANDS = (
    "run --help",
    "chat --help",
    "serve --help",
    "batch --help",
    "bench serve --help",
    "serve --print-config",
    "run x --planted-p 2",
    "run x --planted-size 9",
)


def on_the_command_line(*commands: str) -> dict[str, str]:
    from typer.testing import CliRunner

    from quire.cli.main import app

    runs = {command: CliRunner().invoke(app, command.split()) for command in commands}
    return {command: f"{run.output} {run.exception or ''}" for command, run in runs.items()}


async def at_the_server() -> dict[str, Any]:
    import httpx

    from quire.observe.request_records import RecordBook
    from quire.server.app import create_app
    from quire.server.config import ServerConfig

    service = SimpleNamespace(
        config=ServerConfig(),
        client=SimpleNamespace(engines=[None]),
        records=RecordBook(),
        metrics=SimpleNamespace(http_request=lambda path, status: None),
        ready=SimpleNamespace(fingerprint="fp", max_model_len=8),
        tokenizer=SimpleNamespace(sampling_defaults={}),
        is_draining=False,
        counts=None,
    )
    transport = httpx.ASGITransport(create_app(service))  # type: ignore[arg-type]
    async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
        api = (await client.get("/openapi.json")).json()
        about = (await client.get("/page/about")).json()
    bodies = {path: one.get("post", {}).get("requestBody") for path, one in api["paths"].items()}
    schemas = api["components"]["schemas"].values()
    bodies["Ollama's options"] = [one for one in schemas if find("num_predict", one)]
    found = {path: find("planted_p", body) for path, body in bodies.items()}
    return {"schemas": found, "form": about["settings"]}


def find(name: str, tree: Any) -> Any:
    """What stands under a name, however deep."""
    if isinstance(tree, dict) and name in tree:
        return tree[name]
    inside = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ()
    return next(filter(None, (find(name, one) for one in inside)), None)


def in_the_docs() -> dict[str, str]:
    sys.path.insert(0, str(Path(__file__).parents[1] / "docs"))
    update = importlib.import_module("update")
    return {what: update.quote_parameters(what, Path()) for what in ("sampling", "engine")}


def main() -> None:
    plant()
    importlib.import_module("quire.cli.main")
    libraries = sorted({"torch", "pydantic", "fastapi"} & sys.modules.keys())
    found = {
        "command line": on_the_command_line(*COMMANDS),
        "imported for options": libraries,
        "docs": in_the_docs(),
        "refused": [refusal(SamplingParams, planted_p=1.0), refusal(EngineConfig, planted_size=0)],
        **asyncio.run(at_the_server()),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
