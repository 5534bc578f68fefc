"""What has left a window is given back on a GPU, too, where kernels read 512 keys at a time."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.support import DEVICE
from tests.gpu.test_families import gpu_spec, make_kernels
from tests.random_models import random_decoder
from tests.test_windows import check_long_answers

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", ["mistral", "gemma2", "gemma3_text", "cohere2", "gpt_oss"])
def test_long_answers_are_exact_and_hold_less(family: str, dtype: torch.dtype) -> None:
    decoder = random_decoder(
        gpu_spec(family), make_kernels("triton", dtype), dtype, device=str(DEVICE)
    )
    check_long_answers(decoder, num_prompt=900, num_new=60)
