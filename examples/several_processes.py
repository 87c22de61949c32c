"""Generate over two processes by tensor parallelism: each holds half of the heads, and their half of the KV cache.

python examples/several_processes.py    # converts the bundled model, and starts two of
torchrun --nproc-per-node 2 examples/several_processes.py DIR    # DIR was converted with --tp 2
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from bundled import DUO, HERE, MODEL, kv_bytes, kvsurgery, load, scratch, task
from torch import distributed
from torch.distributed import run
from transformers import AutoTokenizer, PreTrainedModel

PROCESSES = 2
NEW = 4  # tokens of an answer


def shared() -> dict[str, Any]:
    """What has `from_pretrained` share a model among the processes."""
    if int(transformers.__version__.split(".")[0]) < 5:
        return {"tp_plan": "auto"}
    from transformers.distributed import DistributedConfig

    return {"distributed_config": DistributedConfig(tp_size=PROCESSES)}


def answer(model: PreTrainedModel) -> tuple[torch.Tensor, int]:
    """The tokens of its answer, and the bytes of the KV cache in this process."""
    tokens = task.prompts(seed=1, count=1, length=1024).tokens
    torch.manual_seed(0)  # the same everywhere: processes that sample have to choose the same tokens
    output = model.generate(tokens, max_new_tokens=NEW, return_dict_in_generate=True)
    return output.sequences[0, tokens.shape[1] :], kv_bytes(output.past_key_values)


def generate(folder: Path) -> None:
    """What each of the processes does."""
    distributed.init_process_group("gloo")
    first, world = distributed.get_rank() == 0, distributed.get_world_size()
    assert world == PROCESSES, f"{world} processes; start {PROCESSES}: torchrun --nproc-per-node {PROCESSES}"
    if first:  # one process by itself; this also copies the code in the folder, which all would do at once
        expected, whole = answer(load(folder))
    distributed.barrier()

    tokens, own = answer(load(folder, **shared()))
    held = [0] * world
    distributed.all_gather_object(held, own)
    if first:
        print(f"{world} processes: {AutoTokenizer.from_pretrained(folder).decode(tokens)}")
        print(f"as one process: {'yes' if tokens.equal(expected) else 'no'}")
        print(f"KV cache of one process: {whole:,} bytes")
        for rank, part in enumerate(held):
            print(f"of process {rank} of {world}: {part:,} bytes, {part / whole:.0%}")
    distributed.destroy_process_group()


def main() -> None:
    with scratch():
        kvsurgery("convert", MODEL, *DUO, "--tp", PROCESSES, "--out", "tiny-tp2")
        words = ["--standalone", "--nproc-per-node", str(PROCESSES), __file__, "tiny-tp2"]
        print("$ torchrun", *(word.replace(str(HERE), "examples") for word in words), flush=True)
        run.main(words)  # what the command torchrun calls


if __name__ == "__main__":
    if len(sys.argv) == 1:
        main()
    else:
        converted = Path(sys.argv[1]).resolve()
        with scratch():
            generate(converted)
