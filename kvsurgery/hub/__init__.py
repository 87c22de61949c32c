"""The Hugging Face Hub: downloads that fetch headers before weights, and uploads in one atomic commit.

Runs on huggingface_hub 0.34 to 2.x.
"""

from kvsurgery.hub.download import fetch_adapter, fetch_checkpoint, fetch_config, headers
from kvsurgery.hub.files import fetch_file
from kvsurgery.hub.stream import stream_checkpoint
from kvsurgery.hub.upload import RemoteFolder, push, pushed_files

__all__ = [
    "RemoteFolder",
    "fetch_adapter",
    "fetch_checkpoint",
    "fetch_config",
    "fetch_file",
    "headers",
    "push",
    "pushed_files",
    "stream_checkpoint",
]
