"""What is handed out: a wheel that needs no source tree, workflows that run the same two commands."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import quire
from tests.skips import skipped_lines

ROOT = Path(__file__).parents[1]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel made from a copy of what git knows, unpacked."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    shutil.copytree(ROOT / "quire", source / "quire", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    # Asked for, not imported: it would replace the distutils that torch may have loaded here.
    try:
        is_there = int(version("setuptools").split(".")[0]) >= 77
    except PackageNotFoundError:
        is_there = False
    if not is_there:
        pytest.skip("setuptools 77 is needed to build a wheel")
    script = "import setuptools.build_meta as backend, sys; print(backend.build_wheel(sys.argv[1]))"
    subprocess.run(
        [sys.executable, "-c", script, str(folder)], cwd=source, check=True, capture_output=True
    )
    wheel = next(folder.glob("*.whl"))
    assert wheel.name == f"quire-{quire.__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site")
    shutil.rmtree(source)
    return folder / "site"


def python(
    installed: Path, *arguments: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=installed.parent,
        env=os.environ | {"PYTHONPATH": str(installed)} | environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.slow
def test_all_that_git_has_of_the_package_is_in_the_wheel(installed: Path) -> None:
    listed = subprocess.run(
        ["git", "ls-files", "quire"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if listed.returncode != 0:
        pytest.skip("no git here")
    for name in listed.stdout.split():
        if (ROOT / name).exists():
            assert (installed / name).exists(), (
                f"{name} is not in the wheel: see package-data in pyproject.toml"
            )


@pytest.mark.slow
def test_the_wheel_answers_without_the_source_tree(installed: Path) -> None:
    """The kernels' sources are the same, so the build is the one in this machine's cache."""
    script = (
        "import quire, torch; from quire.kernels.weights import Weight\n"
        "from quire.backends.cpu.kernels import CpuKernels\n"
        "print(quire.__file__); kernels = CpuKernels()\n"
        "weight = kernels.pack(Weight.dense(torch.eye(32)))\n"
        "print(torch.equal(kernels.linear(torch.ones(1, 32), weight), torch.ones(1, 32)))"
    )
    done = python(installed, "-c", script)
    assert done.returncode == 0, done.stderr
    where, right = done.stdout.split()
    assert Path(where).is_relative_to(installed)
    assert right == "True"
    assert python(installed, "-m", "quire", "--version").stdout == f"quire {quire.__version__}\n"


@pytest.mark.slow
def test_where_no_compiler_is_the_wheel_says_what_to_install(
    installed: Path, tmp_path: Path
) -> None:
    script = "from quire.backends.cpu.build import load_library; load_library()"
    done = python(installed, "-c", script, PATH=str(tmp_path), QUIRE_HOME=str(tmp_path))
    assert "No C++ compiler was found" in done.stderr
    assert "install g++" in done.stderr


def test_versions_agree() -> None:
    assert PROJECT["version"] == quire.__version__
    assert f"## {quire.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_extras_are_those_that_messages_and_docs_name() -> None:
    extras = set(PROJECT["optional-dependencies"])
    assert "gpu" in extras
    texts = [
        path
        for pattern in ("quire/**/*.py", "docs/*.md", "*.md", "examples/*")
        for path in ROOT.glob(pattern)
    ]
    found = [one for path in texts for one in re.findall(r"quire\[([\w,]+)\]", path.read_text())]
    named = {one for several in found for one in several.split(",")}
    assert named <= extras
    assert {"server", "structured", "gpu", "otel"} <= named


def test_the_workflow_runs_our_commands_on_every_python_we_name() -> None:
    workflow = (ROOT / ".github" / "workflows" / "test.yml").read_text()
    versions = [
        line.rpartition(":: ")[2]
        for line in PROJECT["classifiers"]
        if re.search(r":: 3\.\d+$", line)
    ]
    assert versions == ["3.11", "3.12", "3.13"]
    for python_version in versions:
        assert f'"{python_version}"' in workflow
    assert "make run" in workflow
    assert "- run: make test\n" in workflow
    assert "- run: make test-all\n" in workflow


def test_workflows_are_well_formed() -> None:
    """What can be told without GitHub: keys it knows, steps that do one thing, actions of a given
    version.
    """
    yaml = pytest.importorskip("yaml")
    for path in sorted((ROOT / ".github" / "workflows").glob("*.yml")):
        text = path.read_text()
        assert text.count("${{") == text.count("}}")
        workflow = yaml.safe_load(text)
        events = workflow.pop(True)  # "on" is true in YAML
        assert set(events) <= {"push", "pull_request", "workflow_dispatch", "schedule"}
        assert set(workflow) <= {"name", "permissions", "concurrency", "jobs", "env", "defaults"}
        for job in workflow["jobs"].values():
            known = {
                "runs-on",
                "timeout-minutes",
                "strategy",
                "steps",
                "env",
                "needs",
                "if",
                "name",
            }
            assert {"runs-on", "timeout-minutes", "steps"} <= set(job) <= known
            used = set(re.findall(r"matrix\.(\w+)", str(job["steps"])))
            assert used <= set(job.get("strategy", {}).get("matrix", {}))
            for step in job["steps"]:
                assert ("uses" in step) != ("run" in step), step
                assert set(step) <= {"uses", "run", "with", "name", "env", "if", "id", "shell"}
                assert re.fullmatch(r"[\w-]+/[\w-]+@v\d+", step.get("uses", "owner/name@v1"))


def test_issue_templates_ask_for_what_is_needed() -> None:
    yaml = pytest.importorskip("yaml")
    folder = ROOT / ".github" / "ISSUE_TEMPLATE"
    forms = [
        yaml.safe_load(path.read_text())
        for path in sorted(folder.glob("*.yml"))
        if path.stem != "config"
    ]
    assert len(forms) >= 2
    for form in forms:
        assert form["name"]
        assert form["description"]
        assert any(part.get("validations", {}).get("required") for part in form["body"])


def test_skips_are_told_in_three_lines() -> None:
    def skips(*reasons: str) -> list[Any]:
        return [SimpleNamespace(longrepr=("file", 1, f"Skipped: {reason}")) for reason in reasons]

    assert skipped_lines([]) == []
    assert skipped_lines(skips("a", "b", "a")) == ["skipped 2: a", "skipped 1: b"]
    told = skipped_lines(skips(*"aaabbcde"))
    assert told == ["skipped 3: a", "skipped 2: b", "skipped 3: c; d; e"]
