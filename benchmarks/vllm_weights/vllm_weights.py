"""A vLLM plugin: ``--load-format random`` fills a model without a checkpoint such that output depends on the context.

vLLM's own ``dummy`` format makes weights, those of the norms included, so small that attention does not matter.
Loaded when this folder is on the path, through the entry point beside it.
"""

from __future__ import annotations

import zlib
from typing import Any

import torch

STD = 0.02


def register() -> None:
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    class RandomModelLoader(DummyModelLoader):
        """The same numbers in every process: each parameter's seed is its name."""

        def load_weights(self, model: torch.nn.Module, model_config: Any) -> None:
            for name, parameter in model.named_parameters():
                if parameter.dim() < 2:
                    parameter.data.fill_(0.0 if name.endswith("bias") else 1.0)
                    continue
                generator = torch.Generator(parameter.device).manual_seed(zlib.crc32(name.encode()))
                parameter.data.normal_(0.0, 1.0 if "embed_tokens" in name else STD, generator=generator)

    register_model_loader("random")(RandomModelLoader)
