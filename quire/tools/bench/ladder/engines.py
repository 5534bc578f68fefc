"""The engines a climb needs, opened when first asked for."""

from __future__ import annotations

from typing import Any, Self

from quire.backends.select import pick_device
from quire.checkpoints.sources import resolve
from quire.kernels.formats import FORMATS
from quire.kernels.ops import Kernels
from quire.llm import LLM
from quire.models.load import open_model
from quire.models.weight_plan import QUANTIZED
from quire.runner.dtypes import pick_dtype
from quire.runner.kv_cache import token_bytes

_BLOCK_SIZE = 16


class LadderEngines:
    """One model with different settings. Each setting has its own weights in memory until `close`."""

    def __init__(
        self, model: str, device: str = "auto", dtype: str = "float32", max_model_len: int = 512
    ) -> None:
        self.model = model
        found = pick_device(device)
        self.device = found.torch_device
        self.dtype = pick_dtype(dtype, found)
        self.max_model_len = max_model_len
        files = open_model(resolve(model).path)
        self.block_formats = files.block_formats()
        files.checkpoint.close()
        self.spec = files.spec
        self._open: dict[tuple[object, ...], LLM] = {}

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    def quantizations(self, kernels: Kernels) -> tuple[str, ...]:
        """How these kernels can run the model with quantised weights: as they are stored, where
        they are stored quantised, else as they can be made from plain numbers.
        """
        if self.block_formats:
            return (
                ("auto",)
                if any(kernels.computes(FORMATS[name]) for name in self.block_formats)
                else ()
            )
        return tuple(name for name, format in QUANTIZED.items() if kernels.computes(format))

    def get(
        self,
        *,
        kernels: str = "auto",
        prefix_caching: bool = False,
        max_num_seqs: int,
        cuda_graphs: bool = False,
        quantization: str = "none",
        speculation: str = "off",
    ) -> LLM:
        """The engine with these settings. Quantised weights are expanded unless asked for: rungs
        are to give the same tokens, and kernels that compute with them as they are round what they
        multiply them with.
        """
        options: dict[str, Any] = {
            "kernels": kernels,
            "prefix_caching": prefix_caching,
            "cuda_graphs": cuda_graphs,
        }
        options |= {"quantization": quantization, "speculation": speculation}
        key = (max_num_seqs, *options.values())
        if key not in self._open:
            # Room for every row at full length, twice: the second half keeps prefixes that nobody
            # uses.
            blocks = 2 * max_num_seqs * -(-self.max_model_len // _BLOCK_SIZE) + 2
            self._open[key] = LLM(
                self.model,
                device=str(self.device),
                dtype=self.dtype_name,
                max_num_seqs=max_num_seqs,
                max_model_len=self.max_model_len,
                max_batched_tokens=max(512, max_num_seqs),
                block_size=_BLOCK_SIZE,
                kv_cache_memory=blocks * token_bytes(self.spec, _BLOCK_SIZE, self.dtype),
                **options,
            )
        return self._open[key]

    def close(self) -> None:
        """Gives the memory of all engines back; `get` opens them again."""
        while self._open:
            self._open.popitem()[1].close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
