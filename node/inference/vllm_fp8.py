"""vLLM's linear layers with weights that quantization.py rounds to FP8; importing this registers them.

A weight stays as vLLM lays it out before it transposes or packs it: [out, in], contiguous, so that an update in
place finds each row. Its scales are a buffer beside it. On a GPU the inputs of a layer are quantized, too, one
scale per token; on a CPU, and in the embedded engine, they are not.
"""

from typing import Any

import torch
from torch import Tensor, nn
from vllm import _custom_ops as ops  # pyright: ignore
from vllm.model_executor.layers.linear import (  # pyright: ignore
    LinearBase,
    LinearMethodBase,
    UnquantizedLinearMethod,
    register_weight_loader_v2_supported_method,
)
from vllm.model_executor.layers.quantization import register_quantization_config  # pyright: ignore
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig  # pyright: ignore
from vllm.model_executor.parameter import ModelWeightParameter  # pyright: ignore
from vllm.platforms import current_platform  # pyright: ignore

from .quantization import FP8, LINEAR, dequantize
from .vllm_arguments import FP8_METHOD

_Method: Any = LinearMethodBase
_Config: Any = QuantizationConfig


class RowFp8LinearMethod(_Method):
    """Linear layer with FP8 weights [out, in] and fp32 scales [out, 1]."""

    def create_weights(
        self,
        layer: Any,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        *,
        weight_loader: Any,
        **_: Any,
    ) -> None:
        """See LinearMethodBase."""
        rows = sum(output_partition_sizes)
        codes = torch.zeros(rows, input_size_per_partition, dtype=FP8)
        weight = ModelWeightParameter(
            data=codes, input_dim=1, output_dim=0, weight_loader=weight_loader
        )
        layer.register_parameter("weight", weight)
        # no parameter: a checkpoint has none
        scale = torch.ones(
            rows, 1, dtype=torch.float32
        )  # vLLM makes a model in its own default dtype
        layer.register_buffer("weight_scale", scale, persistent=False)

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Compute x [..., in] times the weights, plus `bias` [out], in the type of `x`."""
        if current_platform.is_cpu():
            weight = dequantize(layer.weight, layer.weight_scale[:, 0], x.dtype)
            return nn.functional.linear(x, weight, bias)
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        codes, scales = ops.scaled_fp8_quant(rows, use_per_token_if_dynamic=True)
        product = ops.cutlass_scaled_mm(
            codes, layer.weight.t(), scales, layer.weight_scale, x.dtype, bias
        )
        return product.view(*x.shape[:-1], -1)


class Fp8Config(_Config):
    """Choice of the layers that have FP8 weights, by the rule of quantization.is_quantized()."""

    def get_name(self) -> str:
        """See QuantizationConfig."""
        return FP8_METHOD

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        """See QuantizationConfig; float32 on CPUs only."""
        return [torch.bfloat16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        """Return Ada's: the first GPUs whose tensor cores compute FP8."""
        return 89

    @staticmethod
    def get_config_filenames() -> list[str]:
        """Return none: there is nothing to configure."""
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "Fp8Config":
        """See QuantizationConfig."""
        return cls()

    def get_quant_method(self, layer: Any, prefix: str) -> Any:
        """Return the method of a layer that is called `prefix`; None unless it is a linear layer."""
        if not isinstance(layer, LinearBase):
            return None
        return (
            RowFp8LinearMethod()
            if f"{prefix}.weight".endswith(LINEAR)
            else UnquantizedLinearMethod()
        )


register_weight_loader_v2_supported_method(RowFp8LinearMethod)
register_quantization_config(FP8_METHOD)(Fp8Config)
