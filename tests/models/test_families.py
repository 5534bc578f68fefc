"""Every family against transformers: float32 logits within 1e-4 and the same 64 greedy tokens, on
small random models whose options are drawn over all that the spec can say.
"""

from __future__ import annotations

import math
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.backends.cpu.kernels import CpuKernels
from quire.kernels.reference import ReferenceKernels
from quire.models.families import FAMILIES
from quire.models.load import open_model
from tests.decoding import all_logits, greedy, load_decoder
from tests.long_runs import short_or_long
from tests.models.test_recurrent_families import RECURRENT

NUM_LAYERS = st.integers(1, 3)


@st.composite
def rope(draw: st.DrawFn) -> dict[str, Any]:
    theta = draw(st.sampled_from([10_000.0, 500_000.0]))
    kind = draw(st.sampled_from(["default", "linear", "llama3", "yarn"]))
    parameters: dict[str, Any] = {"rope_theta": theta, "rope_type": kind}
    if kind != "default":
        parameters["factor"] = draw(st.sampled_from([2.0, 4.0, 8.0]))
    if kind in ("llama3", "yarn"):
        parameters["original_max_position_embeddings"] = draw(st.sampled_from([32, 64]))
    if kind == "llama3":
        parameters |= {
            "low_freq_factor": 1.0,
            "high_freq_factor": draw(st.sampled_from([2.0, 4.0])),
        }
    if kind == "yarn":
        extras: dict[str, Any] = draw(
            st.sampled_from(
                [
                    {},
                    {"beta_fast": 16.0, "beta_slow": 2.0},
                    {"mscale": 1.0, "mscale_all_dim": 0.5},
                    {"attention_factor": 1.2, "truncate": False},
                ]
            )
        )
        parameters |= extras
    return parameters


@st.composite
def common(draw: st.DrawFn) -> dict[str, Any]:
    kv_heads = draw(st.sampled_from([1, 2, 3]))
    heads = kv_heads * draw(st.sampled_from([1, 2, 3]))
    return {
        "vocab_size": draw(st.sampled_from([61, 128])),
        "hidden_size": heads * 2 * draw(st.sampled_from([4, 9])),
        "intermediate_size": draw(st.sampled_from([24, 40])),
        "num_hidden_layers": draw(NUM_LAYERS),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": draw(st.sampled_from([8, 12, 16])),
        "max_position_embeddings": 512,
        "rms_norm_eps": draw(st.sampled_from([1e-5, 1e-6])),
        "tie_word_embeddings": draw(st.booleans()),
        "rope_parameters": draw(rope()),
        "initializer_range": 0.2,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }


WINDOW = st.sampled_from([None, 5, 16, 33])


@st.composite
def window_layers(draw: st.DrawFn, base: dict[str, Any]) -> dict[str, Any]:
    window = draw(WINDOW)
    return {
        "use_sliding_window": window is not None,
        "sliding_window": window,
        "max_window_layers": draw(st.integers(0, base["num_hidden_layers"])),
    }


@st.composite
def experts(draw: st.DrawFn, base: dict[str, Any]) -> dict[str, Any]:
    num_experts = draw(st.sampled_from([3, 8]))
    return {
        "num_experts": num_experts,
        "num_experts_per_tok": draw(st.integers(1, num_experts)),
        "moe_intermediate_size": draw(st.sampled_from([8, 20])),
        "norm_topk_prob": draw(st.booleans()),
        "decoder_sparse_step": draw(st.integers(1, 2)),
        "mlp_only_layers": draw(
            st.lists(st.integers(0, base["num_hidden_layers"] - 1), max_size=1)
        ),
    }


@st.composite
def config(draw: st.DrawFn, family: str) -> Any:
    base = draw(common())
    if family == "llama":
        extra = {"attention_bias": draw(st.booleans()), "mlp_bias": draw(st.booleans())}
        return transformers.LlamaConfig(**base, **extra)
    if family == "smollm3":
        window = draw(WINDOW)
        layers = [draw(st.integers(0, 1)) for _ in range(base["num_hidden_layers"])]
        return transformers.SmolLM3Config(
            **base,
            no_rope_layers=layers,
            use_sliding_window=window is not None,
            sliding_window=window,
            attention_bias=draw(st.booleans()),
        )
    if family == "mistral":
        return transformers.MistralConfig(**base, sliding_window=draw(WINDOW))
    if family == "mixtral":
        return transformers.MixtralConfig(
            **base,
            sliding_window=draw(WINDOW),
            num_local_experts=4,
            num_experts_per_tok=draw(st.integers(1, 4)),
        )
    windows = draw(window_layers(base))
    if family == "qwen2":
        return transformers.Qwen2Config(**base, **windows)
    if family == "qwen2_moe":
        return transformers.Qwen2MoeConfig(
            **base,
            **windows,
            **draw(experts(base)),
            shared_expert_intermediate_size=12,
            qkv_bias=draw(st.booleans()),
        )
    bias = {"attention_bias": draw(st.booleans())}
    if family == "qwen3":
        return transformers.Qwen3Config(**base, **windows, **bias)
    if family == "qwen3_moe":
        return transformers.Qwen3MoeConfig(**base, **windows, **draw(experts(base)), **bias)
    made, options = NEWER[family]
    drawn = {name: draw(option) for name, option in options.items()}
    # What a family's configuration does not know, or fixes otherwise.
    if family in ("phi3", "cohere2", "starcoder2"):
        base.pop("head_dim")
    if family in ("cohere2", "starcoder2"):
        base.pop("rms_norm_eps")
    if family in ("gemma3_text", "olmo3"):
        local = {"rope_theta": draw(st.sampled_from([1000.0, 10_000.0])), "rope_type": "default"}
        base["rope_parameters"] = {
            "full_attention": base["rope_parameters"],
            "sliding_attention": local,
        }
    if family in ("glm", "glm4", "glm4_moe", "phi3", "hunyuan_v1_dense"):
        base["rope_parameters"] = {"rope_theta": 10_000.0, "rope_type": "default"}
    if family in ("glm", "glm4", "glm4_moe"):
        base["head_dim"] = draw(st.sampled_from([8, 16]))  # half of it is rotated
        base["rope_parameters"]["partial_rotary_factor"] = 0.5
    if family == "phi3":
        base["rope_parameters"] |= {"partial_rotary_factor": 1.0} | draw(long_rope(base))
        base["original_max_position_embeddings"] = 8
    if family == "granitemoehybrid":
        base |= {"layer_types": ["attention"] * base["num_hidden_layers"], "mamba_n_heads": 2}
    if family == "hunyuan_v1_dense" and drawn.pop("alpha"):
        base["rope_parameters"] = {
            "rope_theta": 10_000.0,
            "rope_type": "dynamic",
            "alpha": 50.0,
            "factor": 1.0,
        }
    return made(**base | drawn)


@st.composite
def long_rope(draw: st.DrawFn, base: dict[str, Any]) -> dict[str, Any]:
    """Two lists of factors. The longest sequence may be longer than the original context, so all
    sequences get the long ones; transformers looks at each, which is the same where a prompt is
    long.
    """
    if not draw(st.booleans()):
        return {}
    pairs = base["hidden_size"] // base["num_attention_heads"] // 2
    factors = {
        f"{kind}_factor": [1.0 + 0.3 * i * size for i in range(pairs)]
        for kind, size in (("long", 2), ("short", 1))
    }
    return {"rope_type": "longrope", "original_max_position_embeddings": 8, **factors}


SCALE = st.sampled_from([1.0, 0.5, 3.0])
LAYERS = st.sampled_from([4, 6])
MULTIPLIERS: dict[str, Any] = {
    "embedding_multiplier": SCALE,
    "logits_scaling": SCALE,
    "residual_multiplier": SCALE,
    "attention_multiplier": st.sampled_from([0.1, 0.5]),
    "attention_bias": st.booleans(),
}
GEMMA: dict[str, Any] = {
    "sliding_window": st.sampled_from([5, 16, 33]),
    "query_pre_attn_scalar": st.sampled_from([8, 20]),
    "attn_logit_softcapping": st.sampled_from([None, 2.0]),
    "final_logit_softcapping": st.sampled_from([None, 5.0]),
    "attention_bias": st.booleans(),
}
FEW_EXPERTS: dict[str, Any] = {
    "num_local_experts": st.sampled_from([3, 8]),
    "num_experts_per_tok": st.integers(1, 3),
}
DEEPSEEK_EXPERTS: dict[str, Any] = {
    "n_routed_experts": st.sampled_from([4, 8]),
    "num_experts_per_tok": st.integers(1, 4),
    "moe_intermediate_size": st.sampled_from([8, 20]),
    "n_shared_experts": st.integers(1, 2),
    "first_k_dense_replace": st.integers(0, 2),
    "routed_scaling_factor": SCALE,
    "norm_topk_prob": st.booleans(),
}
NEWER: dict[str, tuple[Any, dict[str, Any]]] = {
    "gemma2": (transformers.Gemma2Config, GEMMA),
    "gemma3_text": (
        transformers.Gemma3TextConfig,
        GEMMA | {"num_hidden_layers": LAYERS, "attn_logit_softcapping": st.none()},
    ),
    "phi3": (transformers.Phi3Config, {"sliding_window": WINDOW}),
    "olmo2": (transformers.Olmo2Config, {"attention_bias": st.booleans()}),
    "olmo3": (
        transformers.Olmo3Config,
        {"sliding_window": st.sampled_from([5, 16]), "num_hidden_layers": LAYERS},
    ),
    "granite": (transformers.GraniteConfig, MULTIPLIERS | {"mlp_bias": st.booleans()}),
    "granitemoe": (transformers.GraniteMoeConfig, MULTIPLIERS | FEW_EXPERTS),
    "granitemoehybrid": (
        transformers.GraniteMoeHybridConfig,
        MULTIPLIERS
        | {
            "num_local_experts": st.sampled_from([0, 4]),
            "num_experts_per_tok": st.just(2),
            "shared_intermediate_size": st.sampled_from([8, 12]),
            "position_embedding_type": st.sampled_from(["rope", None]),
        },
    ),
    "granitemoeshared": (
        transformers.GraniteMoeSharedConfig,
        MULTIPLIERS | FEW_EXPERTS | {"shared_intermediate_size": st.sampled_from([0, 12])},
    ),
    "glm": (transformers.GlmConfig, {"attention_bias": st.booleans()}),
    "glm4": (transformers.Glm4Config, {"attention_bias": st.booleans()}),
    "glm4_moe": (
        transformers.Glm4MoeConfig,
        DEEPSEEK_EXPERTS | {"use_qk_norm": st.booleans(), "attention_bias": st.booleans()},
    ),
    "cohere2": (
        transformers.Cohere2Config,
        {
            "sliding_window": st.sampled_from([5, 16]),
            "num_hidden_layers": LAYERS,
            "logit_scale": SCALE,
            "attention_bias": st.booleans(),
        },
    ),
    "starcoder2": (
        transformers.Starcoder2Config,
        {"sliding_window": WINDOW, "use_bias": st.booleans()},
    ),
    "seed_oss": (
        transformers.SeedOssConfig,
        {
            "attention_bias": st.booleans(),
            "attention_out_bias": st.booleans(),
            "mlp_bias": st.booleans(),
        },
    ),
    "ernie4_5": (transformers.Ernie4_5Config, {"use_bias": st.booleans()}),
    "hunyuan_v1_dense": (
        transformers.HunYuanDenseV1Config,
        {"alpha": st.booleans(), "attention_bias": st.booleans()},
    ),
}
"""Families that differ from Llama in few words: their configuration, and what is drawn for it."""


def random_model(config: Any, seed: int) -> Any:
    """A transformers model with every parameter random: biases and norms too, which start out as 0
    and 1.
    """
    torch.manual_seed(seed)
    config._attn_implementation = config._experts_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config).eval().float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "sinks" in name:
                parameter.normal_(std=0.3)
            elif "norm" in name:
                parameter.uniform_(0.5, 1.5)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(std=0.3)
    return model


def reference_logits(model: Any, tokens: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.tensor([tokens])).logits[0].float()


def check_greedy(model: Any, prompt: list[int], answer: list[int]) -> None:
    """The answer is what transformers would choose: at each position, given all before it, its own
    argmax.
    """
    logits = reference_logits(model, prompt + answer)
    assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == answer


def check_family(family: str, data: st.DataObject) -> None:
    settings_ = data.draw(config(family))
    seed = data.draw(st.integers(0, 1000))
    model = random_model(settings_, seed)
    generator = torch.Generator().manual_seed(seed)
    length = data.draw(st.sampled_from([1, 15, 16, 17, 70]))
    if settings_.rope_parameters.get("rope_type") == "longrope":
        length = max(length, 15)
    prompt = torch.randint(settings_.vocab_size, (length,), generator=generator).tolist()
    with TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        files = open_model(Path(folder))
        decoder = load_decoder(files, ReferenceKernels(), torch.float32, torch.device("cpu"))
        fast = load_decoder(files, CpuKernels(), torch.float32, torch.device("cpu"))
    assert files.spec.num_parameters == sum(
        math.prod(weight.shape) for weight in decoder.weights.values()
    )
    expected = reference_logits(model, prompt)
    torch.testing.assert_close(all_logits(decoder, prompt), expected, atol=1e-4, rtol=0)
    if files.spec.head_shapes[0].head_dim % 8 == 0:  # what users get; it takes no other sizes
        torch.testing.assert_close(all_logits(fast, prompt), expected, atol=1e-4, rtol=0)
    check_greedy(model, prompt, greedy(decoder, prompt, 64))


@pytest.mark.few(6)
@pytest.mark.soak
@pytest.mark.parametrize(
    "family", [one.name for one in FAMILIES if one.name not in ("gpt_oss", *RECURRENT)]
)
def test_family_matches_transformers(family: str) -> None:
    @settings(max_examples=short_or_long(4, 30))
    @given(st.data())
    def check(data: st.DataObject) -> None:
        check_family(family, data)

    check()
