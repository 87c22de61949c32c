"""The strides of a GPU's attention, on a CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F


def lay_out_as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let torch's attention lay heads behind tokens, as its kernels on GPUs do; then heads cannot merge in place."""
    attention = F.scaled_dot_product_attention

    def transposed(*states: torch.Tensor | None, **options: Any) -> torch.Tensor:
        return attention(*states, **options).transpose(1, 2).contiguous().transpose(1, 2)

    monkeypatch.setattr(F, "scaled_dot_product_attention", transposed)
