"""Push a converted model to the Hub, and load it from there.

python examples/push.py you/tiny-duo    # your account, by `hf auth login` or HF_TOKEN
python examples/push.py                 # no account: a Hub on this machine, that of the tests
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def repository() -> Generator[str]:
    """The repository that was asked for, or one of a Hub on the loopback."""
    if len(sys.argv) > 1:
        yield sys.argv[1]
        return
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from tests.helpers.hub_handler import USER
    from tests.helpers.hub_server import serve

    with serve() as hub, tempfile.TemporaryDirectory() as home:
        os.environ |= hub.client_environment(Path(home))
        yield f"{USER}/tiny-duo"


def main(repo_id: str) -> None:
    # imported here, since huggingface_hub reads where the Hub is when it is imported
    from bundled import DUO, MODEL, kvsurgery, scratch, task
    from transformers import AutoModelForCausalLM

    with scratch():
        kvsurgery("convert", MODEL, *DUO, "--out", "tiny-duo")
        kvsurgery("push", "tiny-duo", repo_id)

        model = AutoModelForCausalLM.from_pretrained(repo_id, trust_remote_code=True).eval()
        questions = task.prompts(seed=5, count=4, length=512)
        print(f"{repo_id} is {type(model).__name__} from {type(model).__module__.rsplit('.')[-1]}")
        print(f"recall of the model from the Hub: {task.exact_match(model, questions):.0%}")


if __name__ == "__main__":
    with repository() as repo_id:
        main(repo_id)
