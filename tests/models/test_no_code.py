"""A model's folder may bring Python files and ask for them to be used. They are never opened."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from quire import LLM, SamplingParams
from tests.frontend.templates import QWEN
from tests.server.random_model import write_model


def test_code_that_comes_with_a_model_is_not_run(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    write_model(folder, QWEN)
    mark = tmp_path / "it ran"
    code = f"open({str(mark)!r}, 'w').close()\n"
    for name in (
        "modeling_own",
        "configuration_own",
        "tokenization_own",
        "__init__",
        "conftest",
        "sitecustomize",
    ):
        (folder / f"{name}.py").write_text(code)
    classes = {"AutoConfig": "configuration_own.Own", "AutoModelForCausalLM": "modeling_own.Own"}
    for file, wanted in {
        "config.json": {"auto_map": classes, "trust_remote_code": True},
        "tokenizer_config.json": {"auto_map": {"AutoTokenizer": ["tokenization_own.Own", None]}},
        "generation_config.json": {"custom_generate": "modeling_own.py", "trust_remote_code": True},
    }.items():
        path = folder / file
        found = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps(found | wanted))
    with LLM(str(folder), kv_cache_memory="4MiB", dtype="float32") as llm:
        assert llm.generate("ab", SamplingParams(max_tokens=2, ignore_eos=True))[0].token_ids
    assert not mark.exists()
    # it would have left its mark
    subprocess.run([sys.executable, folder / "modeling_own.py"], check=True)
    assert mark.exists()
