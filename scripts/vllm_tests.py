"""Runs vLLM's own tests of its server against Quire, from a checkout of vLLM:

    pip install pytest-asyncio
    python scripts/vllm_tests.py path/to/vllm                       # all, with a count
    python scripts/vllm_tests.py path/to/vllm -k test_tokenize -x   # what else pytest takes
    QUIRE_MODEL=path/to/model python scripts/vllm_tests.py path/to/vllm     # with another model than SmolLM2

Nothing of vLLM is installed or needed but its `tests` folder: where they start `vllm serve`, `quire
serve` is started with SmolLM2 under the name that the test gives its model. What else they import
of vLLM is not there, and whoever asks for it fails. Cases that never talk to a server are left out.

docs/clients.md has the count, and why each of the others differs.
"""

from __future__ import annotations

import atexit
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from quire import __version__  # noqa: E402
from quire.checkpoints.download import ALIASES, fetch_alias  # noqa: E402
from tests.server.harness import free_port  # noqa: E402

for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
    del sys.modules[name]  # vLLM's package has the same name
sys.path.remove(str(ROOT))

MODEL = os.environ.get("QUIRE_MODEL", "smollm2")
ENTRYPOINTS = "tests/entrypoints/"
FILES = (
    "openai/test_chunked_prompt.py",
    "openai/test_return_token_ids.py",
    "openai/test_return_tokens_as_ids.py",
    "openai/chat_completion/test_batched_chat_completions.py",
    "openai/chat_completion/test_chat.py",
    "openai/chat_completion/test_chat_completion.py",
    "openai/chat_completion/test_chat_echo.py",
    "openai/chat_completion/test_chat_logit_bias_validation.py",
    "openai/chat_completion/test_completion_with_function_calling.py",
    "openai/chat_completion/test_enable_force_include_usage.py",
    "openai/chat_completion/test_include_reasoning.py",
    "openai/chat_completion/test_logprob_token_ids.py",
    "openai/chat_completion/test_root_path.py",
    "openai/completion/test_completion.py",
    "openai/completion/test_prompt_validation.py",
    "openai/completion/test_token_in_token_out.py",
    "openai/models/test_models.py",
    "openai/responses/test_basic.py",
    "openai/responses/test_function_call.py",
    "openai/responses/test_simple.py",
    "openai/responses/test_stateful.py",
    "openai/responses/test_structured_output.py",
    "anthropic/test_messages.py",
    "serve/instrumentator/test_basic.py",
    "serve/instrumentator/test_orca_metrics.py",
    "serve/instrumentator/test_uds.py",
    "serve/middleware/test_optional_middleware.py",
    "serve/tokenize/test_tokenization.py",
    "pooling/embed/test_online.py",
    "serve/instrumentator/test_metrics.py",
)
"""Those that start a server of a model for text. Left out: images, sound, adapters, gpt-oss (20
GB), rerankers, classifiers, and what runs inside of vLLM without a server.
"""

_MODEL_NAME = r'"((?!application/|v1/|typeof/)[A-Za-z][\w.-]+/[\w.-]+)"'
_CONTEXT = 8192
"""Many answers have no limit but this."""
_START_SECONDS = 180
_CASE_SECONDS = 150


class InternalsError(Exception):
    """A test asks for something that only vLLM has inside."""


class Missing:
    """Stands for anything of vLLM that is no part of its server's API: it may be imported, not
    used.
    """

    def __init__(self, name: str) -> None:
        self.__name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        return (lambda: False) if name == "is_rocm" else Missing(f"{self.__name}.{name}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and callable(args[0]) and not kwargs:
            return args[0]  # a decorator
        raise InternalsError(f"{self.__name} is a part of vLLM itself")

    def __or__(self, other: Any) -> Any:
        return other

    __ror__ = __or__

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        return (object,)


class _MissingModules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Makes `import vllm.anything` work."""

    def find_spec(self, name: str, *_: Any) -> importlib.machinery.ModuleSpec | None:
        is_ours = name.partition(".")[0] == "vllm" or name in ("tests.utils", "tests.conftest")
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if is_ours else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _MissingModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        for name, value in _PROVIDED.get(module.__name__, {}).items():
            setattr(module, name, value)


class _MissingModule(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Missing(f"{self.__name__}.{name}")


class QuireServer:
    """In the place of vLLM's `RemoteOpenAIServer`. Starting one takes longer than most tests do, so
    all whose settings don't matter are one, which knows every model's name.
    """

    DUMMY_API_KEY = "token-abc123"
    _running: ClassVar[dict[tuple[str, ...], tuple[int, subprocess.Popen[bytes]]]] = {}

    def __init__(self, model: str, vllm_serve_args: Sequence[str], **options: Any) -> None:
        if not self._running:
            self._start(())
        arguments = _translated(model, vllm_serve_args)
        if arguments not in self._running:
            self._start(arguments)
        self.port, self.proc = self._running[arguments]
        self.host = "127.0.0.1"
        self.uds = None
        self.show_hidden_metrics = False
        self.url_root = f"http://{self.host}:{self.port}"

    def _start(self, arguments: tuple[str, ...]) -> None:
        port = (
            int(arguments[arguments.index("--port") + 1]) if "--port" in arguments else free_port()
        )
        names = [part for name in _model_names() for part in ("--served-model-name", name)]
        command = [
            sys.executable,
            "-m",
            "quire",
            "serve",
            MODEL,
            *(arguments or names),
            "--port",
            str(port),
        ]
        command += ["--kv-cache-memory", "128MiB", "--max-model-len", str(_CONTEXT)]
        command += ["--speculation", "ngram"]  # the same answers, sooner
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        process = subprocess.Popen(
            command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        atexit.register(_stop, process)
        self._running[arguments] = port, process
        _wait_until_up(f"http://127.0.0.1:{port}/health", process)

    def __enter__(self) -> QuireServer:
        return self

    def __exit__(self, *_: object) -> None:
        """It goes on, for the next."""

    def url_for(self, *parts: str) -> str:
        return "/".join([self.url_root, *(part.strip("/") for part in parts if part)])

    def get_client(self, **options: Any) -> Any:
        import openai

        return openai.OpenAI(
            base_url=self.url_for("v1"),
            api_key=self.DUMMY_API_KEY,
            max_retries=0,
            **_in_time(options),
        )

    def get_async_client(self, **options: Any) -> Any:
        import openai

        url = self.url_for("v1")
        return openai.AsyncOpenAI(
            base_url=url, api_key=self.DUMMY_API_KEY, max_retries=0, **_in_time(options)
        )

    def get_client_anthropic(self, **options: Any) -> Any:
        import anthropic

        return anthropic.Anthropic(
            base_url=self.url_root, api_key=self.DUMMY_API_KEY, max_retries=0, **_in_time(options)
        )

    def get_async_client_anthropic(self, **options: Any) -> Any:
        import anthropic

        url = self.url_root
        return anthropic.AsyncAnthropic(
            base_url=url, api_key=self.DUMMY_API_KEY, max_retries=0, **_in_time(options)
        )


def _in_time(options: dict[str, Any]) -> dict[str, Any]:
    return {"timeout": 120, **options}


def _translated(model: str, given: Sequence[str]) -> tuple[str, ...]:
    """vLLM's arguments as ours: none, if the common server will do. Those about kernels, memory and
    lengths have nothing to say here.
    """
    arguments: list[str] = []
    words = [
        part for word in given for part in (word.split("=", 1) if word.startswith("--") else [word])
    ]
    for place, word in enumerate(words):
        if word in ("--api-key", "--port"):
            arguments += [word, words[place + 1]]
        elif word == "--no-enable-prefix-caching":
            arguments.append("--no-prefix-caching")
        elif word == "--served-model-name":
            for name in words[place + 1 :]:
                if name.startswith("--"):
                    break
                arguments += ["--served-model-name", name]
    return (*arguments, "--served-model-name", model) if arguments else ()


def _model_names() -> list[str]:
    """What tests call their models."""
    sources = [Path(ENTRYPOINTS + name).read_text() for name in FILES]
    sources += [
        path.read_text()
        for path in {Path(ENTRYPOINTS + name).parent / "conftest.py" for name in FILES}
        if path.exists()
    ]
    return sorted({name for source in sources for name in re.findall(_MODEL_NAME, source)})


def _wait_until_up(url: str, process: subprocess.Popen[bytes]) -> None:
    import httpx

    end = time.monotonic() + _START_SECONDS
    while time.monotonic() < end:
        if process.poll() is not None:
            raise RuntimeError(f"quire serve ended with {process.returncode}")
        try:
            if httpx.get(url, timeout=5).status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.2)
    raise TimeoutError("quire serve did not start")


def _stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
        process.wait(60)


def _get_tokenizer(*_: Any, **__: Any) -> Any:
    from transformers import AutoTokenizer

    if MODEL != "smollm2":
        return AutoTokenizer.from_pretrained(MODEL)
    path = fetch_alias(ALIASES["smollm2"])
    return AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)


class _NoHub:
    """Adapters are named on the command line, and left out there."""

    @staticmethod
    def snapshot_download(**_: Any) -> str:
        return os.devnull


def _own_file(name: str) -> Any:
    """A file of the checkout that needs nothing else of vLLM: what it reads is our answer."""
    spec = importlib.util.spec_from_file_location(name, Path(name.replace(".", "/") + ".py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


_PROVIDED: dict[str, dict[str, Any]] = {
    "tests.utils": {"RemoteOpenAIServer": QuireServer, "ROCM_EXTRA_ARGS": [], "VLLM_PATH": Path()},
    "vllm.tokenizers": {"get_tokenizer": _get_tokenizer},
    "vllm.transformers_utils.repo_utils": {"hf_api": _NoHub},
    "vllm.version": {"__version__": __version__, "_prev_minor_version": lambda: "0.0"},
    "vllm.utils.network_utils": {"get_open_port": free_port},
}


class Count:
    """What became of each case."""

    def __init__(self) -> None:
        self.cases: dict[str, str] = {}
        self.reasons: dict[str, str] = {}

    def pytest_collection_modifyitems(self, items: list[pytest.Function]) -> None:
        """Cases that never talk to a server test something that is vLLM's own."""
        items[:] = [item for item in items if _talks(item)]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self) -> Iterator[None]:
        signal.alarm(_CASE_SECONDS)
        try:
            return (yield)
        finally:
            signal.alarm(0)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if (report.when == "call" or report.outcome != "passed") and self.cases.get(
            report.nodeid
        ) != "failed":
            self.cases[report.nodeid] = report.outcome
            self.reasons[report.nodeid] = _reason(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.cases[report.nodeid] = "failed"
            self.reasons[report.nodeid] = _reason(report)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        for name, outcome in self.cases.items():
            if outcome != "passed":
                short = name.removeprefix(ENTRYPOINTS)
                terminalreporter.write_line(f"{outcome}: {short}: {self.reasons[name]}")
        counts = Counter(self.cases.values())
        terminalreporter.write_line(f"{counts['passed']} of {len(self.cases)} cases passed")


def _reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    lines = [
        line.removeprefix("E ").strip()
        for line in report.longreprtext.splitlines()
        if line.startswith("E ")
    ]
    return (lines[0] if lines else report.longreprtext.strip().rpartition("\n")[2])[:200]


def _talks(item: pytest.Function) -> bool:
    fixtures = {
        "server",
        "client",
        "async_client",
        "remote_server",
        "server_with_store",
        "openai_client",
    }
    starts = "RemoteOpenAIServer(" in inspect.getsource(item.function)
    return starts or not fixtures.isdisjoint(item.fixturenames)


def _too_long(*_: Any) -> None:
    raise TimeoutError(f"the case took longer than {_CASE_SECONDS} s")


def main(checkout: str, *more: str) -> int:
    os.chdir(checkout)
    sys.path.insert(0, str(Path.cwd()))
    sys.meta_path.insert(0, _MissingModules())
    for name in ("tests.utils", "tests.conftest"):  # before pytest looks for them
        importlib.import_module(name)
    _own_file("vllm.utils.serial_utils")
    files = [word for word in more if word.startswith("tests/")] or [
        ENTRYPOINTS + name for name in FILES
    ]
    options = [
        "-p",
        "pytest_asyncio",
        "-o",
        "asyncio_mode=strict",
        "-p",
        "no:cacheprovider",
        "--no-header",
        "-q",
    ]
    options += [
        "--confcutdir",
        ENTRYPOINTS,
        "--rootdir",
        ".",
        "-c",
        os.devnull,
        "-W",
        "ignore",
        "--tb",
        "short",
    ]
    options += ["--show-capture", "no", "--continue-on-collection-errors"]
    signal.signal(signal.SIGALRM, _too_long)
    if "--collect-only" not in more:
        QuireServer("", ())  # the one that most cases share
    return int(
        pytest.main(
            [*options, *files, *(word for word in more if word not in files)], plugins=[Count()]
        )
    )


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("error: give the path of a checkout of vLLM")
    sys.exit(main(*sys.argv[1:]))
