"""scripts/nano_vllm.py: with a checkout of nano-vllm if QUIRE_NANO_VLLM names one; its parts always,
on a Qwen3 written below under nano-vllm's names of files and classes.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from quire.outputs import Logprob, RequestOutput, TokenLogprobs
from scripts import nano_vllm
from scripts.nano_vllm import NanoAnswer, compare, make_prompts, nano_answers, quire_answers

CHECKOUT = os.environ.get("QUIRE_NANO_VLLM")
NEW_TOKENS = 3

MODEL = """
import torch
import torch.distributed as dist
import triton
import triton.language as tl
from flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.utils.context import CONTEXT
from torch import nn
from torch.nn import functional as F


@triton.jit
def write_cache(width: tl.constexpr):
    raise AssertionError("there is no cache")


class Packed(nn.Linear):
    def __init__(self, inputs, **sizes):
        assert (dist.get_rank(), dist.get_world_size()) == (0, 1)
        super().__init__(inputs, sum(sizes.values()), bias=False)
        self.sizes = sizes
        self.weight.weight_loader = self.load

    def load(self, parameter, weight, name):
        places = dict(zip(self.sizes, parameter.data.split(list(self.sizes.values()))))
        places[name].copy_(weight)


class Attention(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.width, self.theta = c.head_dim, c.rope_parameters["rope_theta"]
        q, kv = c.num_attention_heads * self.width, c.num_key_value_heads * self.width
        self.qkv_proj = Packed(c.hidden_size, q=q, k=kv, v=kv)
        self.o_proj = nn.Linear(q, c.hidden_size, bias=False)
        self.q_norm = RMSNorm(self.width, c.rms_norm_eps)
        self.k_norm = RMSNorm(self.width, c.rms_norm_eps)

    def rotated(self, positions, x):
        exponents = torch.arange(0, self.width, 2) / self.width
        angles = (positions[:, None] / self.theta**exponents)[:, None]
        turned = torch.complex(*x.chunk(2, -1)) * torch.polar(torch.ones_like(angles), angles)
        return torch.cat([turned.real, turned.imag], -1)

    def forward(self, positions, x):
        packed = self.qkv_proj(x).unflatten(-1, (-1, self.width))
        q, k, v = packed.split([size // self.width for size in self.qkv_proj.sizes.values()], 1)
        q = self.rotated(positions, self.q_norm(q))
        k = self.rotated(positions, self.k_norm(k))
        ends, longest = CONTEXT["ends"], CONTEXT["longest"]
        seen = flash_attn_varlen_func(
            q, k, v,
            max_seqlen_q=longest, cu_seqlens_q=ends, max_seqlen_k=longest, cu_seqlens_k=ends,
            softmax_scale=self.width**-0.5, causal=True, block_table=None,
        )
        return self.o_proj(seen.flatten(1))


class Mlp(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.gate_up_proj = Packed(c.hidden_size, gate=c.intermediate_size, up=c.intermediate_size)
        self.down_proj = nn.Linear(c.intermediate_size, c.hidden_size, bias=False)

    @torch.compile
    def forward(self, x):
        gate, up = self.gate_up_proj(x).chunk(2, -1)
        return self.down_proj(F.silu(gate) * up)


class Layer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.self_attn = Attention(c)
        self.mlp = Mlp(c)
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)

    def forward(self, positions, x):
        x, residual = self.input_layernorm(x, torch.zeros_like(x))
        x, residual = self.post_attention_layernorm(self.self_attn(positions, x), residual)
        return residual + self.mlp(x)


class Model(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size)
        self.layers = nn.ModuleList(Layer(c) for _ in range(c.num_hidden_layers))
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps)


class Qwen3ForCausalLM(nn.Module):
    packed_modules_mapping = {
        **{f"{name}_proj": ("qkv_proj", name) for name in "qkv"},
        **{f"{name}_proj": ("gate_up_proj", name) for name in ("gate", "up")},
    }

    def __init__(self, config):
        super().__init__()
        self.model = Model(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, token_ids, positions):
        x = self.model.embed_tokens(token_ids)
        for layer in self.model.layers:
            x = layer(positions, x)
        return self.model.norm(x)

    def compute_logits(self, x):
        return self.lm_head(x[CONTEXT["ends"][1:].long() - 1])
"""

NORM = """
import torch
from torch import nn


class RMSNorm(nn.Module):
    def __init__(self, size, eps):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size))

    @torch.compile
    def forward(self, x, residual=None):
        wide = x.float()  # x itself, if it is float32
        if residual is not None:
            wide += residual.float()
            residual = wide.to(x.dtype)
        wide *= (wide.square().mean(-1, keepdim=True) + self.eps).rsqrt()
        normed = wide.to(x.dtype) * self.weight
        return normed if residual is None else (normed, residual)
"""

CONTEXT = """
CONTEXT = {}


def set_context(is_prefill, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k):
    assert is_prefill
    assert cu_seqlens_q.equal(cu_seqlens_k)
    CONTEXT.update(ends=cu_seqlens_q, longest=max(max_seqlen_q, max_seqlen_k))
"""

LOADER = """
from pathlib import Path

from safetensors.torch import load_file


def load_model(model, folder):
    (file,) = Path(folder).glob("*.safetensors")
    for name, weight in load_file(file).items():
        for part, (packed, place) in model.packed_modules_mapping.items():
            if part in name:
                parameter = model.get_parameter(name.replace(part, packed))
                parameter.weight_loader(parameter, weight, place)
                break
        else:
            model.get_parameter(name).data.copy_(weight)
"""

FILES = {
    "__init__.py": 'raise AssertionError("the engine is not wanted")\n',
    "models/qwen3.py": MODEL,
    "layers/layernorm.py": NORM,
    "utils/context.py": CONTEXT,
    "utils/loader.py": LOADER,
}

FAULTS = {
    "another scale": ("self.width**-0.5", "self.width**-0.49"),
    "another base of the rope": ('["rope_theta"]', '["rope_theta"] * 1.01'),
    "a norm left out": ("self.rotated(positions, self.k_norm(k))", "self.rotated(positions, k)"),
    "a NaN": ("return self.lm_head(", 'return float("nan") * self.lm_head('),
}


def write_checkout(folder: Path, before: str = "", after: str = "") -> Path:
    for name, text in FILES.items():
        path = folder / "nanovllm" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.replace(before, after) if before else text)
    return folder


@pytest.fixture(autouse=True)
def _short_answers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if not request.node.get_closest_marker("slow"):
        monkeypatch.setattr(nano_vllm, "NEW_TOKENS", NEW_TOKENS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    nano_vllm.write_model(folder)
    return folder


@pytest.fixture
def ours(folder: Path) -> list[RequestOutput]:
    return quire_answers(folder, make_prompts())


@pytest.mark.slow
@pytest.mark.skipif(CHECKOUT is None, reason="QUIRE_NANO_VLLM names no checkout of nano-vllm")
def test_answers_are_those_of_nano_vllm(capsys: pytest.CaptureFixture[str]) -> None:
    assert CHECKOUT is not None
    assert nano_vllm.main([CHECKOUT]) == 0
    assert capsys.readouterr().out.startswith("8 of 8 answers equal, 256 positions compared\n")


def test_the_script_says_how_many_answers_are_equal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert nano_vllm.main([str(write_checkout(tmp_path))]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"8 of 8 answers equal, {8 * NEW_TOKENS} positions compared"
    assert len(lines) == 2


def test_the_script_fails_where_answers_differ(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkout = write_checkout(tmp_path, "return self.lm_head(", "return -self.lm_head(")
    assert nano_vllm.main([str(checkout)]) == 1
    out = capsys.readouterr().out
    assert out.startswith("0 of 8 answers equal, 8 positions compared\n")
    assert out.count("error: ") == 16  # of each answer's first token: its logprob, and the token


@pytest.mark.few(2)
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_the_model_is_noticed(
    name: str, tmp_path: Path, folder: Path, ours: list[RequestOutput]
) -> None:
    before, after = FAULTS[name]
    assert MODEL.count(before) == 1
    theirs = nano_answers(write_checkout(tmp_path, before, after), folder, make_prompts())
    assert compare(ours, theirs).faults


def test_norms_that_change_their_inputs_are_given_copies(
    tmp_path: Path,
    folder: Path,
    ours: list[RequestOutput],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    checkout = write_checkout(tmp_path)
    assert not compare(ours, nano_answers(checkout, folder, make_prompts())).faults
    monkeypatch.setattr(nano_vllm, "_to_float64", lambda _, inputs: inputs)
    assert compare(ours, nano_answers(checkout, folder, make_prompts())).faults


def test_what_was_replaced_is_back_afterwards(tmp_path: Path, folder: Path) -> None:
    def state() -> list[object]:
        names = [
            name for name in sys.modules if name.startswith(("nanovllm", "flash_attn", "triton"))
        ]
        functions = (torch.compile, dist.get_rank, dist.get_world_size, torch.get_num_threads())
        return [*functions, {name: sys.modules[name] for name in names}]

    before = state()
    nano_answers(write_checkout(tmp_path), folder, make_prompts()[:1])
    assert state() == before


def test_attention_to_a_cache_is_refused() -> None:
    q = torch.zeros(3, 2, 8)
    ends = torch.tensor([0, 3])
    given = {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "max_seqlen_q": 3, "max_seqlen_k": 3}
    attend = nano_vllm.flash_attn_varlen_func
    attend(q, q, q, **given, softmax_scale=1.0, causal=True)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="without a cache"):
        attend(q, q, q, **given, softmax_scale=1.0, causal=True, block_table=ends)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="only causal"):
        attend(q, q, q, **given, softmax_scale=1.0, causal=False)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="the longest of"):
        attend(q, q, q, **{**given, "max_seqlen_k": 4}, softmax_scale=1.0, causal=True)  # type: ignore[arg-type]


def answer_of(output: RequestOutput, token: int, logprobs: Sequence[float]) -> RequestOutput:
    """That answers with one token."""
    top = tuple(Logprob(place, value, 1, b"") for place, value in enumerate(logprobs))
    scored = TokenLogprobs(token, logprobs[token], 1, b"", top)
    only = replace(output.completions[0], token_ids=(token,), logprobs=(scored,))
    return replace(output, completions=(only,))


def test_another_token_is_a_fault_only_where_candidates_are_clearly_apart(
    ours: list[RequestOutput],
) -> None:
    def compared(logprobs: Sequence[float]) -> nano_vllm.Comparison:
        theirs = NanoAnswer((1,), torch.tensor([logprobs], dtype=torch.float64))
        return compare([answer_of(ours[0], 0, logprobs)], [theirs])

    close = compared((-1.0, -1.00005, -3.0))
    assert (close.num_equal, close.faults) == (0, ())
    assert close.smallest_distance == pytest.approx(5e-5)
    (fault,) = compared((-1.001, -1.0, -3.0)).faults
    assert fault == (
        "prompt of 1 tokens (number 0), answer token 0: 0 by Quire, 1 by nano-vllm, 1.0e-03 apart"
    )


def test_another_folder_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        nano_vllm.main([str(tmp_path)])
    assert ended.value.code == 2
    assert "give the folder of a checkout" in capsys.readouterr().err
