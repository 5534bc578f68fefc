"""GRPO: a model learns by its own answers which ones are rewarded, here those with many words that
begin with t. On a CPU: `python examples/grpo.py`; docs/training.md says how long its steps took.

Each step samples a group of answers to every prompt, scores them, and makes those likelier that are
better than their group. The trainer must know how likely the sampler found each token. Usually the
two compute different probabilities, and their KL is another number at each step; here it is 0.0,
because `quire.train.logprobs` has the engine's bits. With `--usual-way` transformers computes the
trainer's side, for comparison.

To be quick only the last layers are trained (`--layers`), and one update is made of each sample.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from quire import LLM, RequestOutput, SamplingParams, train

PROMPTS = (
    "Once upon a time there was",
    "In the morning we went",
    "My favourite place is",
    "The old man looked at",
    "Last summer I saw",
    "When it rains",
)


@dataclass
class History:
    """What the plot shows, by step."""

    rewards: list[float] = field(default_factory=list)
    divergences: list[float] = field(default_factory=list)


def reward_of(text: str) -> float:
    """The share of words that begin with t."""
    words = text.lower().split()
    return sum(word.startswith("t") for word in words) / max(len(words), 1)


def advantages_of(rewards: list[float], group: int) -> list[float]:
    """How much better each answer is than the others to its prompt, in standard deviations."""
    found: list[float] = []
    for first in range(0, len(rewards), group):
        own = rewards[first : first + group]
        mean, spread = statistics.fmean(own), statistics.pstdev(own)
        found += [(reward - mean) / (spread + 1e-4) for reward in own]
    return found


def sampled_logprobs(output: RequestOutput) -> Tensor:
    """Of the answer's tokens, as the sampler found them."""
    assert output.logprobs is not None
    return torch.tensor([one.logprob for one in output.logprobs])


def train_step(
    llm: LLM,
    weights: train.Weights,
    optimizer: torch.optim.Optimizer,
    trainer_logprobs: Callable[[list[list[int]], list[int]], list[Tensor]],
    group: int,
    max_tokens: int,
    step: int,
) -> tuple[float, float]:
    """The mean reward of one batch, and the mean KL of sampler and trainer per token."""
    params = [
        SamplingParams(temperature=1.0, max_tokens=max_tokens, logprobs=0, seed=step * 1000 + i)
        for i in range(len(PROMPTS) * group)
    ]
    prompts = [prompt for prompt in PROMPTS for _ in range(group)]
    outputs = llm.generate(prompts, params, progress=False)
    rewards = [reward_of(output.text) for output in outputs]

    sequences = [[*output.prompt_token_ids, *output.token_ids] for output in outputs]
    starts = [len(output.prompt_token_ids) for output in outputs]
    logprobs = trainer_logprobs(sequences, starts)
    # log(p / q) of tokens drawn from p: its mean is the KL
    apart = torch.cat([sampled_logprobs(one) for one in outputs]) - torch.cat(logprobs).detach()

    losses = [
        -advantage * (one - one.detach()).exp().mean()  # the ratio is 1, its gradient is not 0
        for one, advantage in zip(logprobs, advantages_of(rewards, group), strict=True)
    ]
    optimizer.zero_grad()
    torch.stack(losses).mean().backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(weights.parameters(), 1.0)
    optimizer.step()
    weights.update()  # the engine samples with the new weights from here on
    return statistics.fmean(rewards), apart.mean().item()


def usual_way(
    llm: LLM, weights: train.Weights
) -> Callable[[list[list[int]], list[int]], list[Tensor]]:
    """The trainer's side by transformers, with the same tensors in the same dtype."""
    import transformers

    spec, dtype = llm.engine.spec, llm.engine.decoder.dtype
    layer = spec.layers[0]
    assert layer.attention is not None
    assert layer.rope is not None
    heads = layer.attention.heads
    config = transformers.LlamaConfig(
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden_size,
        intermediate_size=layer.mlp.intermediate_size,
        num_hidden_layers=spec.num_layers,
        num_attention_heads=heads.num_heads,
        num_key_value_heads=heads.num_kv_heads,
        head_dim=heads.head_dim,
        max_position_embeddings=spec.max_position,
        rms_norm_eps=spec.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": layer.rope.theta},
        tie_word_embeddings=spec.tie_embeddings,
    )
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()

    def logprobs(sequences: list[list[int]], starts: list[int]) -> list[Tensor]:
        tensors = {name: one.to(dtype) for name, one in weights.tensors.items()}
        found = []
        for tokens, start in zip(sequences, starts, strict=True):
            ids = torch.tensor([tokens])
            output = torch.func.functional_call(model, tensors, (ids,), tie_weights=True)
            scores = output.logits[0, start - 1 : -1].float().log_softmax(-1)
            found.append(scores.gather(1, ids[0, start:, None])[:, 0])
        return found

    return logprobs


def draw(history: History, path: str) -> None:
    """Reward and KL as two curves, in SVG."""
    width, height, left = 640, 180, 90
    parts = []
    curves = (("reward", history.rewards), ("KL(sampler, trainer)", history.divergences))
    for number, (title, values) in enumerate(curves):
        low, high = min(0.0, *values), max(0.0, *values)
        top, span = 30 + number * (height + 50), (high - low) or 1.0
        across = (width - left) / max(len(values) - 1, 1)
        points = " ".join(
            f"{left + i * across:.1f},{top + height * (high - value) / span:.1f}"
            for i, value in enumerate(values)
        )
        parts += [
            f'<text x="{left}" y="{top - 8}">{title}, by step</text>',
            f'<rect x="{left}" y="{top}" width="{width - left}" height="{height}" fill="none" stroke="#bbb"/>',
            f'<text x="{left - 6}" y="{top + 10}" text-anchor="end">{high:.3g}</text>',
            f'<text x="{left - 6}" y="{top + height}" text-anchor="end">{low:.3g}</text>',
            f'<polyline points="{points}" fill="none" stroke="#4878a8" stroke-width="2"/>',
        ]
    size = f'width="{width + 20}" height="{2 * (height + 50)}"'
    with open(path, "w") as file:
        file.write(
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">\n'
        )
        file.write("\n".join(parts) + "\n</svg>\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--group", type=int, default=8, help="answers to each prompt")
    parser.add_argument("--max-tokens", type=int, default=24)
    parser.add_argument("--layers", type=int, default=6, help="how many are trained, the last ones")
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument("--dtype", default="auto", choices=["auto", "bfloat16", "float32"])
    parser.add_argument(
        "--usual-way", action="store_true", help="the trainer's side by transformers"
    )
    parser.add_argument("--plot", default="grpo.svg")
    chosen = parser.parse_args()
    # plain numbers: quantised ones have no gradient
    options = {"quantization": "none", "dtype": chosen.dtype, "max_model_len": 512}
    with LLM(chosen.model, kv_cache_memory="256MiB", **options) as llm:
        weights = train.Weights(llm)
        first = llm.engine.spec.num_layers - chosen.layers
        trained = tuple(f"model.layers.{i}." for i in range(first, llm.engine.spec.num_layers))
        for name, tensor in weights.tensors.items():
            tensor.requires_grad_(name.startswith(trained))
        optimizer = torch.optim.AdamW(weights.parameters(), lr=chosen.learning_rate)

        def own_way(sequences: list[list[int]], starts: list[int]) -> list[Tensor]:
            return train.logprobs(weights, sequences, starts)

        trainer_logprobs = usual_way(llm, weights) if chosen.usual_way else own_way
        history = History()
        for step in range(chosen.steps):
            begin = time.monotonic()
            sizes = chosen.group, chosen.max_tokens, step
            reward, divergence = train_step(llm, weights, optimizer, trainer_logprobs, *sizes)
            history.rewards.append(reward)
            history.divergences.append(divergence)
            seconds = time.monotonic() - begin
            print(
                f"step {step:3}: reward {reward:.3f}, KL {divergence!r}, {seconds:.1f} s",
                flush=True,
            )
    draw(history, chosen.plot)
    print(f"drawn in {chosen.plot}")


if __name__ == "__main__":
    main()
