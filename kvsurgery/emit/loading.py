"""What loads a converted checkpoint: the call of transformers and its packages, or an engine alone."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kvsurgery.checkpoint.quantization import Quantization
from kvsurgery.emit.config import auto_class


def loading_lines(config: Mapping[str, Any], folder: Path) -> Iterator[str]:
    """How the checkpoint in a folder, with this converted config, is loaded."""
    quantization = Quantization.of(config)
    if quantization is not None and not quantization.layout.transformers:
        yield f"transformers computes something else with {quantization.layout.title}; serve the folder with vLLM:"
        yield f"vllm serve {shlex.quote(str(folder))}"
        return
    yield f"Load it with: {auto_class(config)}.from_pretrained({json.dumps(str(folder))}, trust_remote_code=True)"
    if quantization is not None and quantization.layout.packages:
        yield f"Its weights, {quantization.layout.title}, also need {' and '.join(quantization.layout.packages)}"
