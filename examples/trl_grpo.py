"""GRPO by TRL's own trainer, with Quire for the answers and for their logprobs: `pip install trl`, then
`python examples/trl_grpo.py FOLDER`, a folder in Hugging Face's layout or the name of such a model.

`GRPOTrainer` asks its `rollout_func` for answers: `roll_out` has Quire sample them with the weights that
the trainer has by then. That is all it needs, and `--usual-way` does no more: the trainer computes their
logprobs by transformers, which are near those that Quire sampled with. Without it `QuireTrainer` takes
them from `quire.train.logprobs`: the same bits, so that `sampling_kl` is 0.0 at every step.

The reward is that of grpo.py: the share of words that begin with t.
"""

from __future__ import annotations

import argparse
import tempfile
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from quire import LLM, SamplingParams, train

PROMPTS = (
    "Once upon a time there was",
    "In the morning we went",
    "My favourite place is",
    "The old man looked at",
    "Last summer I saw",
    "When it rains",
)


def reward_of(completions: list[str], **_others: Any) -> list[float]:
    """The share of words that begin with t."""
    answers = [text.lower().split() for text in completions]
    return [sum(word.startswith("t") for word in one) / max(len(one), 1) for one in answers]


class QuireTrainer(GRPOTrainer):
    """Samples by Quire, and scores by Quire unless `usual_way` leaves that to transformers."""

    def __init__(self, llm: LLM, usual_way: bool, **options: Any) -> None:
        super().__init__(rollout_func=QuireTrainer.roll_out, **options)
        self.llm, self.usual_way = llm, usual_way
        self.sampled: dict[tuple[int, ...], Tensor] = {}
        """By tokens of prompt and answer: the answer's logprobs."""
        # the trainer's own parameters: the engine takes their numbers over, here and after each step
        self.weights = train.Weights(llm, dict(self.model.state_dict(keep_vars=True)))
        self.add_callback(UpdateWeights(self.weights))

    @staticmethod
    def roll_out(prompts: list[str], trainer: QuireTrainer) -> dict[str, Any]:
        """One answer for each prompt: TRL repeats a prompt for as many as it wants."""
        config, step = trainer.args, trainer.state.global_step
        assert config.temperature == 1.0, "logprobs are those of temperature 1"
        params = [
            SamplingParams(
                temperature=1.0,
                max_tokens=config.max_completion_length,
                logprobs=0,
                seed=step * 1000 + number,
            )
            for number in range(len(prompts))
        ]
        outputs = trainer.llm.generate(prompts, params, progress=False)
        logprobs = [[token.logprob for token in one.logprobs or ()] for one in outputs]
        trainer.sampled = {
            (*one.prompt_token_ids, *one.token_ids): torch.tensor(own)
            for one, own in zip(outputs, logprobs, strict=True)
        }
        return {
            "prompt_ids": [list(one.prompt_token_ids) for one in outputs],
            "completion_ids": [list(one.token_ids) for one in outputs],
            "logprobs": logprobs,
        }

    def _get_per_token_logps_and_entropies(
        self,
        model: Any,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        **options: Any,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """TRL's batches have prompts padded on the left, and answers padded on the right to
        `logits_to_keep`; so has what it gets back.
        """
        sequences = [
            ids[mask.bool()].tolist() for ids, mask in zip(input_ids, attention_mask, strict=True)
        ]
        starts = attention_mask[:, :-logits_to_keep].sum(1).tolist()
        if self.usual_way:
            found = super()._get_per_token_logps_and_entropies(
                model, input_ids, attention_mask, logits_to_keep, **options
            )
        else:
            own = train.logprobs(self.weights, sequences, starts)
            padded = [torch.nn.functional.pad(one, (0, logits_to_keep - len(one))) for one in own]
            logps = torch.stack(padded).to(input_ids.device)
            # its mean over sampled tokens is the entropy; only TRL's `top_entropy_quantile` needs each
            found = logps, -logps.detach(), None
        self._log_divergence(sequences, starts, found[0].detach())
        return found

    def _log_divergence(self, sequences: list[list[int]], starts: list[int], logps: Tensor) -> None:
        """log(p / q) of tokens drawn from p: its mean is the KL of sampler and trainer."""
        apart = [
            self.sampled[tuple(ids)] - own[: len(ids) - start].cpu()
            for ids, start, own in zip(sequences, starts, logps, strict=True)
        ]
        self._metrics["train"]["sampling_kl"].append(torch.cat(apart).mean().item())


class UpdateWeights(TrainerCallback):
    """Gives the engine the trainer's weights after each step of the optimizer."""

    def __init__(self, weights: train.Weights) -> None:
        self.weights = weights

    def on_step_end(self, *_state: Any, **_objects: Any) -> None:
        self.weights.update()


class PrintStep(TrainerCallback):
    def on_log(self, _args: Any, state: Any, _control: Any, logs: dict[str, Any], **_: Any) -> None:
        if "reward" in logs:
            numbers = f"reward {logs['reward']:.3f}, sampling_kl {logs['sampling_kl']!r}"
            print(f"step {state.global_step - 1:3}: {numbers}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="HuggingFaceTB/SmolLM2-135M-Instruct")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--group", type=int, default=8, help="answers to each prompt")
    parser.add_argument("--max-tokens", type=int, default=16)
    parser.add_argument("--layers", type=int, default=4, help="how many are trained, the last ones")
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument("--dtype", default="auto", choices=["auto", "bfloat16", "float32"])
    parser.add_argument("--usual-way", action="store_true", help="logprobs by transformers")
    chosen = parser.parse_args()

    model = AutoModelForCausalLM.from_pretrained(chosen.model, dtype=torch.float32)
    first = model.config.num_hidden_layers - chosen.layers
    trained = tuple(f"model.layers.{i}." for i in range(first, model.config.num_hidden_layers))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith(trained))
    options = {"quantization": "none", "dtype": chosen.dtype, "max_model_len": 512}
    with (
        LLM(chosen.model, kv_cache_memory="256MiB", **options) as llm,
        tempfile.TemporaryDirectory() as folder,
    ):
        config = GRPOConfig(
            output_dir=folder,
            max_steps=chosen.steps,
            per_device_train_batch_size=len(PROMPTS) * chosen.group,
            num_generations=chosen.group,
            max_completion_length=chosen.max_tokens,
            learning_rate=chosen.learning_rate,
            lr_scheduler_type="constant",
            bf16=False,  # of the trainer's own forward, which would be another model than Quire's
            use_cpu=not torch.cuda.is_available(),
            gradient_checkpointing=False,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        trainer = QuireTrainer(
            llm,
            chosen.usual_way,
            model=model,
            args=config,
            reward_funcs=reward_of,
            train_dataset=Dataset.from_dict({"prompt": list(PROMPTS)}),
            processing_class=AutoTokenizer.from_pretrained(chosen.model),
            callbacks=[PrintStep()],
        )
        trainer.remove_callback(PrinterCallback)  # ours is shorter
        trainer.train()


if __name__ == "__main__":
    main()
