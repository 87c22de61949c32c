"""`kvsurgery profile import`: head scores that others published."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from kvsurgery.dimensions import ModelDimensions


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
        click.option("--base-model", help="Model name to record; `convert` starts from it.  [default: SRC]"),
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
    from kvsurgery.cli.profile.saving import save
    from kvsurgery.score.importers import import_duo

    model, name, commit = _model(source, revision)
    save(import_duo(path, model, base_model or name, commit), out)


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
    from kvsurgery.cli.profile.saving import save
    from kvsurgery.score.importers import import_headkv

    model, name, commit = _model(source, revision)
    save(import_headkv(path, model, base_model or name, commit, method), out)


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
    from kvsurgery.score.importers import import_reform

    save(import_reform(name), out)


def _model(source: str, revision: str | None) -> tuple[ModelDimensions, str, str | None]:
    """Dimensions of the model at a folder, a config.json or a Hub id; the name and the commit to record."""
    from kvsurgery.checkpoint.source import read_config
    from kvsurgery.errors import CheckpointError
    from kvsurgery.plan.family import Family

    folder, name = Path(source), source
    if folder.name == "config.json" and folder.is_file():
        folder = folder.parent
        name = str(folder)
    elif not folder.is_dir():
        from kvsurgery import hub

        if not hub.is_repo_id(source):
            raise CheckpointError(f"{source} is no model folder, no config.json and no Hub id")
        folder, revision = hub.fetch_config(source, revision)
    config = read_config(folder)
    return Family.of(config).dimensions(config), name, revision
