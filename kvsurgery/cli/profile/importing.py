"""`kvsurgery profile import`: turn published head scores into profiles."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvsurgery.cli.help import HelpGroup
from kvsurgery.cli.profile.saving import out_option

if TYPE_CHECKING:
    from kvsurgery.profile.head_profile import HeadProfile
    from kvsurgery.profile.profiled_model import ProfiledModel


@click.group("import", cls=HelpGroup)
def import_group() -> None:
    """Turn published head scores into a head profile.

    A PATH is a local file, or a file on the Hub: hf://owner/repo/path, with @revision at the end for a branch, tag or
    commit, or the URL of its page. The profile records the commit.

    \b
    kvsurgery profile import duo ./full_attention_heads.tsv --model ./llama3 -o duo.safetensors
    kvsurgery profile import headkv ./Llama-3-8B-Instruct_R.json --model ./llama3 -o r.safetensors
    kvsurgery profile import kvzip ./llama3.1-8b-*.pt --model ./llama3 -o kvzip.safetensors
    kvsurgery profile import duo hf://owner/profiles/llama3 --model ./llama3 -o duo.safetensors
    kvsurgery profile import reform Qwen/Qwen2.5-7B-Instruct -o reform.safetensors
    """


def _import_options(command: Any) -> Any:
    """Add the options for the model that was scored and for the output file."""
    for option in (
        click.option("--revision", help="Branch, tag or commit of the model; for a Hub id its commit is recorded."),
        click.option(
            "--base-model",
            help="Model name to record; `convert` uses it if SRC is not given.  [default: (that of SRC)]",
        ),
        out_option,
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


def _save(
    importer: Callable[[Sequence[Path], ProfiledModel], HeadProfile],
    sources: Sequence[str],
    options: dict[str, Any],
    *,
    inside: str | None = None,
    beside: str | None = None,
) -> None:
    """Import files for the model that the options name, and write a profile.

    Args:
        sources: paths, or addresses of files on the Hub.
        inside, beside: as in `hub.fetch_file`.
    """
    from dataclasses import asdict, replace

    from kvsurgery.cli.profile.saving import remember, show_saved
    from kvsurgery.errors import ProfileError
    from kvsurgery.profile.head_profile import HeadProfile
    from kvsurgery.profile.loading import local_file
    from kvsurgery.profile.profiled_model import ProfiledModel
    from kvsurgery.system.files import check_new_file

    check_new_file(options["out"])
    model = ProfiledModel.read(options["source"], options["revision"])
    files, origins = [], []
    for source in sources:
        path, hub_file = local_file(source, inside=inside, beside=beside)
        if HeadProfile.recognizes(path):
            raise ProfileError(f"{source} is already a head profile; pass it to `kvsurgery convert --profile`")
        files.append(path)
        origins += [asdict(hub_file)] if hub_file else []
    if options["base_model"]:
        model = replace(model, name=options["base_model"], fingerprint=None)
    profile = importer(files, model)
    if origins:
        profile = replace(profile, provenance={**profile.provenance, "hub": origins})
    profile.save(options["out"])
    remember(profile, options["source"])
    show_saved(profile, options["out"], options["source"], options["revision"])


@import_group.command()
@click.argument("path")
@_import_options
def duo(path: str, **options: Any) -> None:
    """DuoAttention's gates, one per KV head.

    PATH is full_attention_heads.tsv or its folder: a line per layer, and on it a gate per KV head, tab-separated. The
    sink and recent sizes they were trained with are read from the config.json beside it. Scores are clipped to [0, 1].

    \b
    kvsurgery profile import duo ./Mistral-7B-Instruct-v0.2/full_attention_heads.tsv \\
        --model mistralai/Mistral-7B-Instruct-v0.2 -o duo.safetensors
    """
    from kvsurgery.profile.importers.duo import GATES_FILE, import_duo

    _save(lambda files, model: import_duo(files[0], model), [path], options, inside=GATES_FILE, beside="config.json")


@import_group.command()
@click.argument("path")
@_import_options
def rlkv(path: str, **options: Any) -> None:
    """RLKV's gates for reasoning models, one per KV head.

    PATH is adapter_weights.tsv or its folder: a line per layer, and on it a gate per KV head, tab-separated. Scores are
    clipped to [0, 1]. The recorded sink and recent sizes, 128 and 256, are those of RLKV's training.

    \b
    kvsurgery profile import rlkv ./head_dist/rlkv/Llama-3.1-8B-R1/.../adapter_weights.tsv \\
        --model deepseek-ai/DeepSeek-R1-Distill-Llama-8B -o rlkv.safetensors
    """
    from kvsurgery.profile.importers.rlkv import GATES_FILE, import_rlkv

    _save(lambda files, model: import_rlkv(files[0], model), [path], options, inside=GATES_FILE)


@import_group.command()
@click.argument("path")
@click.option(
    "--method",
    type=click.Choice(["headkv-r", "headkv-er", "headkv-r2"]),
    default="headkv-r",
    show_default=True,
    help="Kind of the scores, which the file does not record: retrieval (copying, also Retrieval_Head's files), "
    "enhanced retrieval, or retrieval-reasoning (*_R2.json).",
)
@_import_options
def headkv(path: str, method: str, **options: Any) -> None:
    """HeadKV's or Retrieval_Head's scores, one per query head.

    PATH is JSON, {"layer-head": [score of each trial, ...]}; a head's score is the mean over its trials. The profile
    has a score for each query head; `convert --group-reduce` reduces them to one score for each KV head.

    \b
    kvsurgery profile import headkv ./Llama-3-8B-Instruct_R2.json \\
        --method headkv-r2 --model ./llama3 -o r2.safetensors
    """
    from kvsurgery.profile.importers.headkv import import_headkv

    _save(lambda files, model: import_headkv(files[0], model, method), [path], options)


@import_group.command()
@click.argument("paths", metavar="PATH...", nargs=-1, required=True)
@_import_options
def kvzip(paths: tuple[str, ...], **options: Any) -> None:
    """KVzip's head scores, one per KV head.

    Each PATH is a .pt file with a tensor of layers x KV heads, measured on one text. With several files, a head gets
    its largest score, as in KVzip.

    \b
    kvsurgery profile import kvzip ./utils/head_score/llama3.1-8b-*.pt --model ./llama3.1 -o kvzip.safetensors
    """
    from kvsurgery.profile.importers.kvzip import import_kvzip

    _save(import_kvzip, paths, options)


@import_group.command("wg-kv")
@click.argument("path")
@_import_options
def wg_kv(path: str, **options: Any) -> None:
    """WG-KV's shares of kept tokens, one per KV head.

    PATH is a *_retain_ratio.tsv: a line per layer, and on it a share per KV head, tab-separated.

    \b
    kvsurgery profile import wg-kv ./patterns/Llama-3.1-8B-Instruct/0.5_retain_ratio.tsv \\
        --model ./llama3.1 -o wg-kv.safetensors
    """
    from kvsurgery.profile.importers.wg_kv import import_wg_kv

    _save(lambda files, model: import_wg_kv(files[0], model), [path], options)


@import_group.command("lu-kv")
@click.argument("path")
@click.option("--keep", type=click.IntRange(1, 99), required=True, help="Percentage of the cache to keep.")
@_import_options
def lu_kv(path: str, keep: int, **options: Any) -> None:
    """LU-KV's shares of kept tokens, one per KV head.

    PATH is a .npy file of 99 x layers x KV heads: the share that each head loses when 1%, 2%, ... 99% of the cache are
    removed. --keep chooses one of the 99. Shares decide how `convert --budget` divides the tokens among the heads.

    \b
    kvsurgery profile import lu-kv ./llama-3.1-8b/ea_0.02_sink4_win1_llama_avg_ratio.npy --keep 20 \\
        --model ./llama3.1 -o lu-kv.safetensors
    """
    from kvsurgery.profile.importers.lu_kv import import_lu_kv

    _save(lambda files, model: import_lu_kv(files[0], model, keep), [path], options)


@import_group.command()
@click.argument("path")
@_import_options
def budgets(path: str, **options: Any) -> None:
    """Budgets in tokens, one per KV head.

    PATH is a table: a line per layer, and on it a whole number of tokens per KV head, tab-separated. `convert` gives
    every head exactly its budget; --budget scales all budgets to another mean.

    \b
    kvsurgery profile import budgets ./budgets.tsv --model ./llama3.1 -o budgets.safetensors
    """
    from kvsurgery.profile.importers.budgets import import_budgets

    _save(lambda files, model: import_budgets(files[0], model), [path], options)


@import_group.command()
@click.argument("path")
@click.option("--entry", help="The model in the file.  [default: (the one with the name of --model, or the only one)]")
@click.option("--heads", help="The list of heads in the file.  [default: (the only one)]")
@_import_options
def flexicache(path: str, entry: str | None, heads: str | None, **options: Any) -> None:
    """FlexiCache's unstable heads: score 1, all others 0.

    PATH is JSON, {model: {name of a list: [[layer, KV head], ...]}}.

    \b
    kvsurgery profile import flexicache ./model_unstable_heads_data.json --model ./llama3.1 \\
        --entry meta-llama/Llama-3.1-8B-Instruct --heads unstable-64-profile-gov_report-topk-64 \\
        -o flexicache.safetensors
    """
    from kvsurgery.profile.importers.flexicache import import_flexicache

    _save(lambda files, model: import_flexicache(files[0], model, entry, heads), [path], options)


@import_group.command()
@click.argument("path")
@_import_options
def rtpurbo(path: str, **options: Any) -> None:
    """RTPurbo's retrieval heads: score 1, all other query heads 0.

    PATH is the config.json of an RTPurbo checkpoint or its folder: its `headwise_config` has 0 or 1 for each query
    head, and the sink and recent sizes of the other heads. RTPurbo trains the weights for these heads: convert its
    checkpoint, not the model that it was made from. `convert --group-reduce max` keeps every retrieval head.

    \b
    kvsurgery profile import rtpurbo ./qwen3-rtpurbo/config.json --model ./qwen3-rtpurbo -o rtpurbo.safetensors
    """
    from kvsurgery.profile.importers.rtpurbo import import_rtpurbo

    _save(lambda files, model: import_rtpurbo(files[0], model), [path], options, inside="config.json")


@import_group.command()
@click.argument("name", metavar="MODEL")
@out_option
def reform(name: str, out: Path) -> None:
    """The embedding heads that REFORM's paper chose for a model.

    MODEL is one of Mistral-Nemo-Instruct-2407, Qwen2.5-7B-Instruct, Qwen2.5-Coder-1.5B-Instruct,
    Qwen2.5-Coder-7B-Instruct and Pixtral-12B-2409, with or without its owner on the Hub.

    \b
    kvsurgery profile import reform Qwen/Qwen2.5-7B-Instruct -o reform.safetensors
    """
    from kvsurgery.cli.profile.saving import show_saved
    from kvsurgery.profile.importers.reform import import_reform
    from kvsurgery.system.files import check_new_file

    check_new_file(out)
    profile = import_reform(name)
    profile.save(out)
    show_saved(profile, out)
