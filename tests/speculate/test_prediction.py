"""Drafts by a checkpoint's layer for multi-token prediction: the published definition in plain torch
with transformers' layers, and the same answers as without.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire.assemble import Engine, build_engine
from quire.backends.cpu.kernels import CpuKernels
from quire.checkpoints.sources import resolve
from quire.config import EngineConfig
from quire.engine import make_requests
from quire.errors import InvalidRequestError, ModelFormatError
from quire.models.decoder import Decoder
from quire.models.prediction import Predictor
from quire.sampling_params import SamplingParams
from tests.long_runs import IS_LONG
from tests.random_models import (
    SPECS,
    WITH_STATES,
    Bench,
    Transcript,
    random_decoder,
    random_weights,
)
from tests.test_draft_tokens import EVERYTHING, assert_same, prompts

_BASE: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "initializer_range": 0.15,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_LINEAR: dict[str, Any] = {
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "shared_expert_intermediate_size": 12,
}
_LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 12,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
}
_ATTENTION = "full_attention"


class Kind(NamedTuple):
    """A family as it is published."""

    config: type[Any]
    settings: dict[str, Any]
    layer: dict[str, Any]
    """What the layer's configuration has otherwise."""
    is_behind: bool = False
    """Whether it stands behind the last layer, as in DeepSeek-V3."""

    def model(self, is_layer: bool = False) -> Any:
        settings = {**_BASE, "num_hidden_layers": 2, **self.settings}
        settings |= {"num_hidden_layers": 1, **self.layer} if is_layer else {}
        config = self.config(**settings)
        config._attn_implementation = config._experts_implementation = "eager"
        auto: Any = transformers.AutoModelForCausalLM
        return auto.from_config(config).eval().float()


_HYBRID = {"layer_types": ["linear_attention", _ATTENTION]}
KINDS = {
    "qwen3_next": Kind(
        transformers.Qwen3NextConfig,
        {**_LINEAR, **_EXPERTS, **_HYBRID},
        {"layer_types": [_ATTENTION]},
    ),
    "qwen3_5": Kind(
        transformers.Qwen3_5TextConfig, {**_LINEAR, **_HYBRID}, {"layer_types": [_ATTENTION]}
    ),
    "qwen3_5_moe": Kind(
        transformers.Qwen3_5MoeTextConfig,
        {**_LINEAR, **_EXPERTS, **_HYBRID},
        {"layer_types": [_ATTENTION]},
    ),
    "deepseek_v3": Kind(
        transformers.DeepseekV3Config,
        {**_LATENT, "first_k_dense_replace": 1},
        {"first_k_dense_replace": 0},
        is_behind=True,
    ),
    "glm4_moe": Kind(
        transformers.Glm4MoeConfig,
        {**_LATENT, "num_key_value_heads": 2, "head_dim": 16, "first_k_dense_replace": 1},
        {"first_k_dense_replace": 0},
        is_behind=True,
    ),
    "glm4_moe_lite": Kind(
        transformers.Glm4MoeLiteConfig,
        {**_LATENT, "mlp_layer_types": ["dense", "sparse"]},
        {"mlp_layer_types": ["sparse"]},
        is_behind=True,
    ),
}


class Published:
    """A model and its layer for multi-token prediction, by transformers' modules."""

    def __init__(self, kind: Kind, seed: int) -> None:
        torch.manual_seed(seed)
        self.kind = kind
        self.model, self.layer = kind.model(), kind.model(is_layer=True)
        size = _BASE["hidden_size"]
        self.joined = torch.randn(size, 2 * size) * 0.2
        low = 0.5 if kind.is_behind else -0.5  # weights of which one is taken away
        self.token_norm, self.hidden_norm = (torch.rand(size) + low for _ in range(2))
        for model in (self.model, self.layer):
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    if "norm" in name:
                        start = 0.5 if "linear_attn" in name else low
                        parameter.uniform_(start, start + 1)
                for name, buffer in model.named_buffers():
                    if name.endswith("bias"):
                        buffer.normal_(std=0.3)

    def save(self, folder: Path) -> None:
        self.model.save_pretrained(folder)
        self.layer.save_pretrained(folder / "layer")
        tensors = load_file(folder / "model.safetensors")
        prefix = "model.layers.2." if self.kind.is_behind else "mtp.layers.0."
        for name, tensor in load_file(folder / "layer" / "model.safetensors").items():
            if name.startswith("model.layers.0."):
                tensors[name.replace("model.layers.0.", prefix)] = tensor
            elif name == "model.norm.weight":
                norm = f"{prefix}shared_head.norm" if self.kind.is_behind else "mtp.norm"
                tensors[f"{norm}.weight"] = tensor
        names = (
            [f"{prefix}{one}" for one in ("enorm", "hnorm", "eh_proj")]
            if self.kind.is_behind
            else ["mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc"]
        )
        own = (self.token_norm, self.hidden_norm, self.joined)
        tensors |= {f"{name}.weight": one for name, one in zip(names, own, strict=True)}
        if self.kind.is_behind:  # the model's again
            tensors[f"{prefix}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
            tensors[f"{prefix}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})

    def normed(self, x: Tensor, weight: Tensor) -> Tensor:
        weight = weight if self.kind.is_behind else 1 + weight
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * weight

    @torch.no_grad()
    def drafts(self, token_ids: list[int], count: int) -> list[int]:
        """After tokens of which the model has computed all but the last."""
        model = self.model.model
        hidden = model(torch.tensor([token_ids[:-1]])).last_hidden_state[0]
        known, drafts = list(token_ids), []
        for _ in range(count):
            tokens = self.normed(model.embed_tokens(torch.tensor(known[1:])), self.token_norm)
            joined = torch.cat((tokens, self.normed(hidden, self.hidden_norm)), 1) @ self.joined.T
            seen: list[Tensor] = []
            hook = self.layer.model.norm.register_forward_pre_hook(
                lambda _, inputs, seen=seen: seen.append(inputs[0])
            )
            final = self.layer.model(inputs_embeds=joined[None]).last_hidden_state[0, -1]
            hook.remove()
            passed = seen[0][0, -1] if self.kind.is_behind else final
            drafts.append(int(self.model.lm_head(final).argmax()))
            known.append(drafts[-1])
            hidden = torch.cat((hidden, passed[None]))
        return drafts


def engine_of(folder: Path, **options: Any) -> Engine:
    config: dict[str, Any] = {"device": "cpu", "dtype": "float32", "skip_tokenizer_init": True}
    config |= {"kv_cache_memory": "8MiB", "max_model_len": 256, "speculation": "mtp", **options}
    return build_engine(resolve(str(folder)), EngineConfig(**config))


def answer(engine: Engine, prompt: list[int], most: int) -> list[int]:
    params = SamplingParams(temperature=0, max_tokens=most, ignore_eos=True)
    (request,) = make_requests("a", prompt, params, 0)
    engine.core.add_request(request, 0.0)
    found: list[int] = []
    while engine.core.has_work:
        for update in engine.core.step(0.0):
            assert update.error is None, update.error
            found += update.new_token_ids
    return found


@pytest.mark.parametrize("quantities", [{}, {"max_batched_tokens": 9, "max_num_seqs": 8}])
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=[] if kind in ("qwen3_5", "deepseek_v3") else [pytest.mark.slow])
        for kind in KINDS
    ],
)
def test_drafts_are_those_of_the_published_definition(
    kind: str, quantities: dict[str, int], tmp_path: Path
) -> None:
    published = Published(KINDS[kind], 3)
    published.save(tmp_path)
    engine = engine_of(tmp_path, num_speculative_tokens=2, **quantities)
    prompt = torch.randint(3, 97, (20,), generator=torch.Generator().manual_seed(5)).tolist()
    found = answer(engine, prompt, 8)
    drafted = 0
    for line in engine.step_log:
        for entry in line.step.scheduled:
            if entry.draft_tokens:
                known = entry.start + entry.num_tokens - len(entry.draft_tokens)
                expected = published.drafts([*prompt, *found][:known], len(entry.draft_tokens))
                assert list(entry.draft_tokens) == expected
                drafted += len(expected)
    assert drafted > 3
    plain = engine_of(tmp_path, speculation="off")
    assert answer(plain, prompt, 8) == found


_HYBRIDS = ("delta rule", "deepseek_v3")
SPECS_WITH = {
    "delta rule": replace(
        WITH_STATES["delta rule"], layers=WITH_STATES["delta rule"].layers[1:], passes_on="normed"
    ),
    "deepseek_v3": replace(
        SPECS["deepseek_v3"], layers=SPECS["deepseek_v3"].layers[1:], passes_on="stream"
    ),
}
SCENARIOS: dict[str, dict[str, Any]] = {
    "one batch": {},
    "chunks of 7": {"max_num_seqs": 7, "max_batched_tokens": 9},
    "preempted every third step": {"preempt_every": 3},
    "swapped every third step": {"preempt_every": 3, "num_host_blocks": 64},
    "few blocks": {"num_blocks": 20},
    "no prefix cache": {"prefix_caching": False},
    "nothing recorded": {"recorded": False},
}


def knows_the_answer(decoder: Decoder, weights: dict[str, Any]) -> None:
    """Makes layers add nothing to the residual stream, and the joined vector the token's: then a
    token's successor depends on that token alone, and the layer finds the same one as the model.
    """
    silent = (
        ".output.weight",
        ".output.bias",
        "mlp.down",
        "mlp.down.weight",
        "mlp.shared.down.weight",
    )
    for name, weight in [*decoder.weights.items(), *weights.items()]:
        if name.endswith(silent):
            for part in weight.parts:
                for tensor in part.tensors:
                    tensor.zero_()
        if name == "final_norm" or name.endswith(("token_norm", "hidden_norm")):
            weight.tensor.fill_(1 - decoder.spec.norm_offset)
    joined = weights["joined.weight"].tensor
    joined.zero_()
    joined[:, : len(joined)].fill_diagonal_(1)


class Pair(NamedTuple):
    decoder: Decoder
    predictor: Predictor


def pair(name: str, dtype: torch.dtype, knows: bool = False) -> Pair:
    model = {**SPECS, **WITH_STATES}[name]
    decoder = random_decoder(model, CpuKernels(), dtype)
    weights = random_weights(SPECS_WITH[name], dtype, seed=1)
    if knows:
        knows_the_answer(decoder, weights)
    return Pair(decoder, Predictor(SPECS_WITH[name], decoder, weights))


@pytest.fixture(scope="module", params=_HYBRIDS)
def drawn(request: pytest.FixtureRequest) -> Pair:
    return pair(request.param, torch.bfloat16)


@pytest.fixture(scope="module")
def expected(drawn: Pair) -> Transcript:
    return Bench(drawn.decoder).run(prompts(), EVERYTHING)


def num_drafted(bench: Bench) -> int:
    return sum(len(entry.draft_tokens) for line in bench.log for entry in line.step.scheduled)


@pytest.mark.few(2)
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_no_answer_changes(drawn: Pair, expected: Transcript, scenario: str) -> None:
    bench = Bench(drawn.decoder, predictor=drawn.predictor, num_drafts=3, **SCENARIOS[scenario])
    assert_same(bench.run(prompts(), EVERYTHING), expected)
    assert num_drafted(bench) > 10
    again = bench.run(prompts(), EVERYTHING)  # from the prefix cache
    assert again.tokens == expected.tokens


@pytest.mark.few(1)
@pytest.mark.parametrize("name", _HYBRIDS)
def test_a_layer_that_knows_the_answer_is_always_right(name: str) -> None:
    decoder, predictor = pair(name, torch.float32, knows=True)
    params = [
        SamplingParams(temperature=0, max_tokens=33, ignore_eos=True),
        SamplingParams(temperature=0.9, seed=4, max_tokens=33, ignore_eos=True),
        SamplingParams(temperature=0, max_tokens=33, repetition_penalty=1.4, ignore_eos=True),
    ]
    given = prompts()[: len(params)]
    plain = Bench(decoder).run(given, params)
    bench = Bench(decoder, predictor=predictor, num_drafts=3)
    assert_same(bench.run(given, params), plain)
    assert {len(answer) for answer in plain.tokens.values()} == {33}
    # one token after the prompt, then four at a time
    assert len([line for line in bench.log if line.step.scheduled]) == 1 + 32 // 4


def test_a_stop_token_among_drafts_ends_the_answer_there() -> None:
    decoder, predictor = pair("delta rule", torch.float32, knows=True)
    given = prompts()[:1]
    whole = Bench(decoder).run(given, [SamplingParams(temperature=0.9, seed=1, max_tokens=30)])
    for token in dict.fromkeys(whole.tokens["0"][:7]):
        params = [SamplingParams(temperature=0.9, seed=1, max_tokens=30, stop_token_ids=(token,))]
        found = Bench(decoder, predictor=predictor, num_drafts=3).run(given, params)
        assert found.tokens == Bench(decoder).run(given, params).tokens


def test_it_is_refused_by_name_where_there_is_no_such_layer(tmp_path: Path) -> None:
    kind = KINDS["qwen3_5"]
    kind.model().save_pretrained(tmp_path)
    with pytest.raises(
        InvalidRequestError, match=r"mtp.*no layers for multi-token prediction.*ngram"
    ):
        engine_of(tmp_path)


def test_layers_of_another_form_and_several_are_refused(tmp_path: Path) -> None:
    published = Published(KINDS["qwen3_5"], 1)
    published.save(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    more = {**tensors, "mtp.layers.1.input_layernorm.weight": torch.ones(32)}
    save_file(more, file, {"format": "pt"})
    with pytest.raises(InvalidRequestError, match="several layers"):
        engine_of(tmp_path)
    save_file(
        {one: tensors[one] for one in tensors if one != "mtp.fc.weight"}, file, {"format": "pt"}
    )
    with pytest.raises(InvalidRequestError, match="of qwen3_5_text are not supported"):
        engine_of(tmp_path)


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    published = Published(KINDS["deepseek_v3"], 1)
    published.save(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.2.hnorm.weight"]
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(ModelFormatError, match=r"model\.layers\.2\.hnorm\.weight .* missing"):
        engine_of(tmp_path)


def test_the_log_says_which_tensors_draft(tmp_path: Path, caplog: Any) -> None:
    published = Published(KINDS["qwen3_5"], 1)
    published.save(tmp_path)
    caplog.set_level(logging.INFO)
    engine = engine_of(tmp_path)
    assert "drafts by its layer for multi-token prediction" in engine.description
    assert "left out" not in caplog.text
    engine_of(tmp_path, speculation="off")
    assert "speculation=mtp drafts with them" in caplog.text


def test_it_sleeps_and_wakes(tmp_path: Path) -> None:
    published = Published(KINDS["qwen3_5"], 1)
    published.save(tmp_path)
    engine = engine_of(tmp_path, num_speculative_tokens=3)
    first = answer(engine, [5, 6, 7], 8)
    drafts = [entry.draft_tokens for line in engine.step_log for entry in line.step.scheduled]
    for level in (1, 2):
        engine.sleep(level)
        engine.wake_up()
        count = len(list(engine.step_log))
        assert answer(engine, [5, 6, 7], 8) == first
        again = list(engine.step_log)[count:]
        assert [e.draft_tokens for line in again for e in line.step.scheduled] == drafts


def answers(engine: Engine) -> dict[str, Any]:
    """Tokens and logprobs of several requests at once, greedy and sampled, twice: the second time
    from the prefix cache.
    """
    generator = torch.Generator().manual_seed(7)
    found: dict[str, Any] = {}
    given = [
        torch.randint(3, 97, (size,), generator=generator).tolist() for size in (1, 20, 70, 133)
    ]
    for time in "ab":
        for number, prompt in enumerate(given):
            params = SamplingParams(
                temperature=0.7 * (number % 2),
                seed=number,
                max_tokens=12 + number,
                ignore_eos=True,
                logprobs=2,
            )
            (request,) = make_requests(f"{time}{number}", prompt, params, 0)
            engine.core.add_request(request, 0.0)
        while engine.core.has_work:
            for update in engine.core.step(0.0):
                assert update.error is None, update.error
                of_request = found.setdefault(update.request_id, [])
                of_request += zip(update.new_token_ids, update.logprobs, strict=True)
    return found


def drafts_of(engine: Engine) -> list[tuple[str, tuple[int, ...]]]:
    return [
        (entry.request_id, tuple(entry.draft_tokens))
        for line in engine.step_log
        for entry in line.step.scheduled
        if entry.draft_tokens
    ]


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.parametrize("kind", KINDS if IS_LONG else ["qwen3_next", "deepseek_v3", "glm4_moe"])
def test_two_processes_draft_and_answer_as_one(kind: str, tmp_path: Path) -> None:
    """Each has a part of the layer; every rank makes the same drafts."""
    Published(KINDS[kind], 3).save(tmp_path)
    options: dict[str, Any] = {"max_batched_tokens": 50, "max_num_seqs": 6}
    plain = answers(engine_of(tmp_path, speculation="off", **options))
    options["num_speculative_tokens"] = 3
    alone = engine_of(tmp_path, **options)
    assert answers(alone) == plain
    both = engine_of(tmp_path, tensor_parallel_size=2, **options)
    try:
        assert answers(both) == plain
        drafts = drafts_of(both)
        assert drafts == drafts_of(alone)
        assert len(drafts) > 10
        both.sleep()
        both.wake_up()
        assert answers(both) == plain
    finally:
        both.runner.release()
