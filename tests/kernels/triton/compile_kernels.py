"""Compiles Triton kernels for GPUs that need not be here; prints what each takes, as JSON.

A process of its own, as Triton must not be in its interpreter's mode.
"""

from __future__ import annotations

import json
import sys

from tests.kernels.triton.compile_adapters import adapter_kernels
from tests.kernels.triton.compile_attention import attention_kernels
from tests.kernels.triton.compile_latent import latent_kernels
from tests.kernels.triton.compile_recurrent import recurrent_kernels
from tests.kernels.triton.compile_shared_experts import router_rows_kernel, shared_experts_kernels
from tests.kernels.triton.compile_small_batches import small_batch_kernels

if __name__ == "__main__":
    found = {
        "small batches": small_batch_kernels(),
        "attention": attention_kernels(),
        "latent": latent_kernels(),
        "recurrent": recurrent_kernels(),
        "adapters": adapter_kernels(),
        "shared experts": shared_experts_kernels(),
        "router of many rows": router_rows_kernel(),
    }
    json.dump(found, sys.stdout)
