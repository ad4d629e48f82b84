"""`--load-format strict`: a checkpoint loads only if it writes every element of every parameter.

vLLM's own loader accepts checkpoints that lack an expert's weight or a scale; what is missing is then whatever the
memory held. Here each floating parameter is filled with NaN before vLLM's loader runs, and none may be left.
"""

import torch
from torch import nn
from vllm.config import ModelConfig
from vllm.config.load import LoadConfig
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

NOT_IN_CHECKPOINTS = (".k_scale", ".v_scale", ".q_scale", ".prob_scale", "_zero_point")
"""Parameters that vLLM fills itself when a checkpoint has none."""
_E4M3_NAN = 0x7F  # and 0xFF: the sign bit does not count
_MAX_LISTED = 12


class StrictLoader(DefaultModelLoader):
    """vLLM's default loader and a count of what it did not write. Later reloads are the transfer engine's to check."""

    def __init__(self, load_config: LoadConfig) -> None:
        load_config.load_format = "auto"  # the default loader finds files by it, and knows only its own formats
        super().__init__(load_config)

    def load_weights(self, model: nn.Module, model_config: ModelConfig) -> None:
        """Load, then check.

        Raises:
            ValueError: names each parameter with elements that were not written, or are NaN in the checkpoint.
        """
        parameters = {
            name: parameter.data
            for name, parameter in model.named_parameters()
            if not name.endswith(NOT_IN_CHECKPOINTS) and parameter.numel() and parameter.is_floating_point()
        }
        for tensor in parameters.values():
            fill_with_nan(tensor)
        super().load_weights(model, model_config)
        faults = [
            f"{name} {list(tensor.shape)}: {missing} of {tensor.numel()} elements"
            for name, tensor in parameters.items()
            if (missing := count_nan(tensor))
        ]
        if faults:
            more = f"; and {len(faults) - _MAX_LISTED} more" if len(faults) > _MAX_LISTED else ""
            raise ValueError(
                f"strict load of {model_config.model}: elements not written by the checkpoint, or NaN in it: "
                f"{'; '.join(faults[:_MAX_LISTED])}{more}; export it again, or find what is missing with "
                "python -m bridge.verify"
            )


def fill_with_nan(tensor: torch.Tensor) -> None:
    """Fill a floating tensor with NaN; FP8 has no fill of its own, so its bytes are set."""
    if tensor.element_size() == 1:
        tensor.view(torch.uint8).fill_(_E4M3_NAN)
    else:
        tensor.fill_(float("nan"))


def count_nan(tensor: torch.Tensor) -> int:
    """Count the NaN of a floating tensor."""
    if tensor.element_size() == 1:
        return int((tensor.view(torch.uint8) & _E4M3_NAN == _E4M3_NAN).sum())
    return int(torch.isnan(tensor).sum())
