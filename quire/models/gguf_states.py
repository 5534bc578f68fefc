"""GGUF files of families with layers that keep states: what their tensors are called there, which
keys they must have, and what no such file says. The entries stand in `families.py`.
"""

from __future__ import annotations

LFM2_GGUF_NAMES = {
    "mixer_input": "shortconv.in_proj",
    "convolution": "shortconv.conv",
    "mixer_output": "shortconv.out_proj",
}
LFM2_GGUF_SETTINGS = {"block_auto_adjust_ff_dim": False, "conv_bias": False}
SOFTMAX_GATING, SIGMOID_GATING = 1, 2
"""What GGUF files call experts whose scores are a softmax, or sigmoids."""
STATE_SPACE_KEYS = tuple(
    f"ssm.{one}"
    for one in ("conv_kernel", "inner_size", "state_size", "time_step_rank", "group_count")
)
STATE_SPACE_GGUF_NAMES = {
    "mixer_input": "ssm_in",
    "convolution": "ssm_conv1d",
    "mixer_log_rate": "ssm_a",
    "mixer_time_bias": "ssm_dt.bias",
    "mixer_skip": "ssm_d",
    "mixer_norm": "ssm_norm",
    "mixer_output": "ssm_out",
}
FALCON_H1_GGUF_SETTINGS = {"mamba_norm_before_gate": False, "mamba_proj_bias": False}
"""Its many factors are already multiplied with the weights."""
QWEN3_NEXT_GGUF_NAMES = {
    "mlp_norm": "post_attention_norm",
    "mixer_qkv": "attn_qkv",
    "mixer_gate": "attn_gate",
    "mixer_gates": "ssm_ba",
    "convolution": "ssm_conv1d",
    "mixer_log_rate": "ssm_a",
    "mixer_time_bias": "ssm_dt.bias",
    "mixer_norm": "ssm_norm",
    "mixer_output": "ssm_out",
}
NEMOTRON_H_GGUF_NAMES = STATE_SPACE_GGUF_NAMES | {"mlp_norm": "attn_norm"}
NEMOTRON_H_GGUF_SETTINGS = {"hidden_act": "relu2", "mlp_bias": False, "use_bias": False}
