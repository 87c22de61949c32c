"""`kvsurgery profile import`: head scores that others published."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click


@click.group("import")
def import_group() -> None:
    """Turn head scores published by others into a head profile.

    \b
    kvsurgery profile import duo ./full_attention_heads.tsv --model ./llama3 -o duo.safetensors
    kvsurgery profile import headkv ./Llama-3-8B-Instruct_R.json --model ./llama3 -o r.safetensors
    kvsurgery profile import reform Qwen/Qwen2.5-7B-Instruct -o reform.safetensors
    """


def _import_options(command: Any) -> Any:
    for option in (
        click.option("--revision", help="Branch, tag or commit of the model; for a Hub id its commit is recorded."),
        click.option("--base-model", help="Model name to record; `convert` starts from it.  [default: (SRC)]"),
        click.option("-o", "--out", required=True, type=click.Path(path_type=Path), help="The profile to write."),
        click.option(
            "--model",
            "source",
            metavar="SRC",
            required=True,
            help="The model that was measured: a folder, a config.json or a Hub id. Only its config is read.",
        ),
    ):
        command = option(command)
    return command


@import_group.command()
@click.argument("path", type=click.Path(path_type=Path))
@_import_options
def duo(path: Path, source: str, out: Path, base_model: str | None, revision: str | None) -> None:
    """DuoAttention gates, one per KV head.

    PATH is full_attention_heads.tsv or its folder: a line per layer, and on it a gate per KV head, tab-separated. The
    sink and recent sizes they were trained with are read from the config.json beside it. Scores are clipped to [0, 1].

    \b
    kvsurgery profile import duo ./Mistral-7B-Instruct-v0.2/full_attention_heads.tsv \\
        --model mistralai/Mistral-7B-Instruct-v0.2 -o duo.safetensors
    """
    from kvsurgery.cli.profile.measured import Measured
    from kvsurgery.cli.profile.saving import save
    from kvsurgery.profile.importers import import_duo

    model = Measured.read(source, revision)
    save(import_duo(path, model.dimensions, base_model or model.name, model.revision, model.windows), out)


@import_group.command()
@click.argument("path", type=click.Path(path_type=Path))
@click.option(
    "--method",
    type=click.Choice(["headkv-r", "headkv-er", "headkv-r2"]),
    default="headkv-r",
    show_default=True,
    help="What was measured, which the file does not say: retrieval (copying, also Retrieval_Head's files), "
    "enhanced retrieval, or retrieval-reasoning scores (*_R2.json).",
)
@_import_options
def headkv(path: Path, method: str, source: str, out: Path, base_model: str | None, revision: str | None) -> None:
    """HeadKV or Retrieval_Head scores, one per query head.

    PATH is JSON, {"layer-head": [score of each trial, ...]}; a head's score is the mean over its trials. Heads keep
    their own scores; `convert --group-reduce` says how those of a group become one.

    \b
    kvsurgery profile import headkv ./Llama-3-8B-Instruct_R2.json \\
        --method headkv-r2 --model ./llama3 -o r2.safetensors
    """
    from kvsurgery.cli.profile.measured import Measured
    from kvsurgery.cli.profile.saving import save
    from kvsurgery.profile.importers import import_headkv

    model = Measured.read(source, revision)
    name = base_model or model.name
    save(import_headkv(path, model.dimensions, name, model.revision, method, model.windows), out)


@import_group.command()
@click.argument("name", metavar="MODEL")
@click.option("-o", "--out", required=True, type=click.Path(path_type=Path), help="The profile to write.")
def reform(name: str, out: Path) -> None:
    """The embedding heads that REFORM's paper chose for a model.

    MODEL is one of Mistral-Nemo-Instruct-2407, Qwen2.5-7B-Instruct, Qwen2.5-Coder-1.5B-Instruct,
    Qwen2.5-Coder-7B-Instruct and Pixtral-12B-2409, with or without its owner on the Hub.

    \b
    kvsurgery profile import reform Qwen/Qwen2.5-7B-Instruct -o reform.safetensors
    """
    from kvsurgery.cli.profile.saving import save
    from kvsurgery.profile.importers import import_reform

    save(import_reform(name), out)
