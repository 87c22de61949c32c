"""`kvsurgery profile compute`: measure the heads of a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from kvsurgery.cli.options import Several, Tokens, flag
from kvsurgery.cli.profile.measurements import KV_BITS, MEASUREMENTS, RLKV_LITE
from kvsurgery.cli.running import (
    CHUNK,
    POSITIVE,
    chosen_dtype,
    device_option,
    dtype_option,
    quiet_transformers,
    revision_option,
    seed_option,
)
from kvsurgery.text import help as says

PROMPTS = ("min_context", "max_context", "passkeys", "passkey_tokens")
GATES = ("loss", "steps", "lr", "reg", "sink", "recent", "batch", "checkpoint", "resume", "curve")
NEEDLES = ("needles", "lengths", "depths")
SAMPLES = {"attention": 50, "reform": 50, KV_BITS: 12, RLKV_LITE: 64}
CONTEXT = {"reform": 8192, KV_BITS: 1024}
ALIKE = ("duo", RLKV_LITE, "attention")  # methods of which all processes compute layers equally often
# the options that a method has, beside those of all
OPTIONS = {
    "duo": (*GATES, "minutes", *PROMPTS),
    RLKV_LITE: (*GATES, "min_context", "max_context", "samples", "answers"),
    "attention": ("samples", *PROMPTS),
    "headkv-r": NEEDLES,
    "headkv-er": NEEDLES,
    "headkv-r2": NEEDLES,
    "reform": ("samples", "context", "chunk"),
    KV_BITS: ("samples", "context", "sink", "recent"),
}


@click.command()
@click.argument("source", metavar="MODEL")
@click.option("--method", required=True, type=click.Choice(list(OPTIONS)), help="Method of measurement.")
@click.option("-o", "--out", required=True, type=click.Path(path_type=Path), help="The profile to write.")
@revision_option
@click.option("--text", help=f"{says.TEXT[0].upper()}{says.TEXT[1:]}.  [default: (generated)]")
@seed_option
@device_option
@dtype_option
@click.option(
    "--min-context",
    type=Tokens(),
    default="1000",
    show_default=True,
    help="duo, attention: shortest prompt; rlkv-lite: shortest prompt with its answer.",
)
@click.option(
    "--max-context",
    type=Tokens(),
    help="duo, attention: longest prompt; rlkv-lite: longest prompt with its answer.  "
    "[default: (32000, or the model's maximum)]",
)
@click.option(
    "--answers",
    type=click.Path(path_type=Path),
    help="rlkv-lite: file of answers (JSON lines): read if it exists, otherwise written after generation.",
)
@click.option("--passkeys", type=POSITIVE, default=10, show_default=True, help=f"duo, attention: {says.PASSKEYS}.")
@click.option(
    "--passkey-tokens",
    type=click.IntRange(min=2),
    default=32,
    show_default=True,
    help=f"duo, attention: {says.PASSKEY_TOKENS}.",
)
@click.option(
    "--loss",
    type=click.Choice(["distill", "lm"]),
    default="distill",
    show_default=True,
    help="duo, rlkv-lite: distill compares last hidden states with the full model's; lm, an ablation, predicts the "
    "next token.",
)
@click.option("--steps", type=int, default=2000, show_default=True, help="duo, rlkv-lite: training steps.")
@click.option(
    "--minutes",
    type=click.FloatRange(0, min_open=True),
    help="duo: time for the training, instead of --steps. It stops earlier once the gates have settled. Contexts "
    "and passkeys are chosen for this time, unless they are given.",
)
@click.option("--lr", type=float, default=0.02, show_default=True, help="duo, rlkv-lite: peak learning rate.")
@click.option(
    "--reg",
    type=float,
    help="duo, rlkv-lite: weight of the mean gate in the loss; a larger weight takes more gates to 0.  "
    "[default: (0.05, or as in the training to resume)]",
)
@click.option(
    "--sink",
    type=int,
    default=64,
    show_default=True,
    help="duo, rlkv-lite, kv-bits: first tokens that streaming heads see.",
)
@click.option(
    "--recent",
    type=int,
    default=256,
    show_default=True,
    help="duo, rlkv-lite, kv-bits: latest tokens that streaming heads see.",
)
@click.option(
    "--batch", type=POSITIVE, default=1, show_default=True, help="duo, rlkv-lite: prompts per step, over all processes."
)
@click.option(
    "--checkpoint", type=click.Path(path_type=Path), help="duo, rlkv-lite: file for the state of the training."
)
@click.option("--resume", is_flag=True, help="duo, rlkv-lite: continue from --checkpoint.")
@click.option(
    "--curve", type=click.Path(path_type=Path), help="duo, rlkv-lite: plot loss and gates over the steps as a PNG."
)
@click.option("--needles", default="auto", show_default=True, help=f"headkv: {says.NEEDLES}.")
@click.option("--lengths", type=Several(Tokens()), help="headkv: tokens of prompts.  [default: (five up to 32000)]")
@click.option("--depths", type=Several(click.FLOAT), help=f"headkv: {says.DEPTHS}.  [default: (ten)]")
@click.option(
    "--samples",
    type=POSITIVE,
    help="attention, reform: number of prompts; rlkv-lite: of answers; kv-bits: of passages of the text.  "
    f"[default: ({SAMPLES['attention']}; rlkv-lite: {SAMPLES[RLKV_LITE]}; kv-bits: {SAMPLES[KV_BITS]})]",
)
@click.option(
    "--context",
    type=Tokens(),
    help="reform: tokens of a prompt; kv-bits: tokens in the cache.  [default: (8K; kv-bits: 1K)]",
)
@click.option("--chunk", type=Tokens(), help=f"reform: {CHUNK}  [default: 2048]")
@click.option(
    "--tp",
    type=int,
    default=1,
    show_default=True,
    help="Number of processes that share the heads and weights of layers.",
)
@click.option(
    "--sp", type=int, default=1, show_default=True, help="Number of processes that share the tokens of a prompt."
)
@click.pass_context
def compute(
    ctx: click.Context,
    source: str,
    method: str,
    out: Path,
    revision: str | None,
    device: str | None,
    dtype: str,
    tp: int,
    sp: int,
    **options: Any,
) -> None:
    """Measure the attention heads of MODEL, a folder or a Hub id, original or converted.

    \b
    duo        DuoAttention's gates, trained to recall passkeys with as few full heads as possible
    rlkv-lite  the same gates, trained on long answers that the model itself generates
    attention  the attention of each head while passkeys are recalled, without training
    headkv-*   how much of a needle's answer comes through each head: copied (r, er) or reasoned about (r2)
    reform     the heads whose states find the tokens that a question needs
    kv-bits    what a quantized cache loses on a text, and how to rotate and clip; --kv-measured takes the file

    Processes started by `torchrun` share the prompts, or with --tp the heads and weights of each layer (tensor
    parallelism). For duo, rlkv-lite and attention they also share the weights (FSDP2), and with --sp the tokens of
    each prompt, for contexts that do not fit one device.

    \b
    kvsurgery profile compute ./llama3 --method duo -o duo.safetensors
    kvsurgery profile compute ./llama3 --method headkv-r2 --text book.txt -o r2.safetensors
    kvsurgery profile compute ./llama3 --method kv-bits --text book.txt -o losses.safetensors
    torchrun --nproc-per-node 8 -m kvsurgery profile compute ./llama3-70b --method duo --batch 8 -o duo.safetensors
    torchrun --nproc-per-node 8 -m kvsurgery profile compute ./llama3-70b --method headkv-r2 --tp 8 -o r2.safetensors
    """
    for name in options:
        foreign = any(name in names for names in OPTIONS.values()) and name not in OPTIONS[method]
        if foreign and ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            raise click.UsageError(f"{flag(name)} does not go with --method {method}; leave it out")
    if options["resume"] and options["checkpoint"] is None:
        raise click.UsageError("--resume goes on from --checkpoint; name it")
    if method == KV_BITS and options["text"] is None:
        raise click.UsageError("--text is missing: --method kv-bits measures on real text")
    if method == RLKV_LITE and options["text"] is not None:
        raise click.UsageError("--text does not go with --method rlkv-lite; give the model's answers with --answers")
    if options["minutes"] is not None:
        _leave_open(ctx, options)
    options["samples"] = options["samples"] or SAMPLES.get(method)
    options["context"] = options["context"] or CONTEXT.get(method)

    from kvsurgery import console
    from kvsurgery.cli.profile.saving import save, save_losses
    from kvsurgery.errors import Interrupted
    from kvsurgery.measure.mesh import Mesh
    from kvsurgery.measure.training import outcome
    from kvsurgery.processes import started_processes
    from kvsurgery.profile.cache_losses import CacheLosses
    from kvsurgery.profile.head_profile import HeadProfile
    from kvsurgery.profile.plots import plot_training

    quiet_transformers()
    (CacheLosses if method == KV_BITS else HeadProfile).check_output(out)
    if "passkeys" in OPTIONS[method] and options["loss"] == "distill":
        _check_passkeys(options)
    _check_files(options)
    with started_processes(device) as processes:
        mesh = Mesh(processes, tp, sp)
        alike = method in ALIKE
        if not alike and (sp > 1 or tp not in (1, processes.world)):
            raise click.UsageError(f"--method {method} goes with --tp {processes.world} or none, and not with --sp")
        if method == KV_BITS and tp > 1:
            raise click.UsageError("processes that measure kv-bits share the passages; leave --tp out")
        dtype = chosen_dtype(dtype, source, device, revision)
        measured = mesh.load(source, revision, dtype=dtype, sharded=alike)
        try:
            with console.step_progress(f"measuring {method}") as advance:
                profile, history = MEASUREMENTS[method](measured, mesh, advance, options)
        except KeyboardInterrupt:
            kept = options["checkpoint"] is not None
            raise Interrupted(f"--resume goes on from {options['checkpoint']}" if kept else "nothing is kept") from None
        if processes.rank == 0:
            if isinstance(profile, HeadProfile):
                for line in outcome(profile) if history is not None else ():
                    console.stderr.print(line)
                save(profile, out)
            else:
                save_losses(profile, out)
            if history is not None and options["curve"]:
                plot_training(history, options["curve"])
                console.stderr.print(f"wrote {options['curve']}")


def _leave_open(ctx: click.Context, options: dict[str, Any]) -> None:
    """Leave out the defaults of what follows from the time."""
    if ctx.get_parameter_source("steps") is ParameterSource.COMMANDLINE:
        raise click.UsageError("--minutes chooses --steps; leave one of them out")
    for name in ("min_context", "passkeys"):
        if ctx.get_parameter_source(name) is not ParameterSource.COMMANDLINE:
            options[name] = None


def _check_passkeys(options: dict[str, Any]) -> None:
    """Refuse passkeys that the shortest prompt cannot hold, whatever the words around them are."""
    from kvsurgery.errors import ProfileError

    count, size = options["passkeys"], options["passkey_tokens"]
    if None in (count, options["min_context"]):
        return
    if options["min_context"] <= (least := 2 * count * size):
        raise ProfileError(
            f"{count} passkeys of {size} tokens, hidden and recalled, take more than {least} tokens; give a longer "
            "--min-context, or fewer or shorter passkeys"
        )


def _check_files(options: dict[str, Any]) -> None:
    """Refuse files that cannot be read or written, before the model is loaded."""
    from kvsurgery.figure import check_picture
    from kvsurgery.files import check_file
    from kvsurgery.measure.own_answers import read_answers
    from kvsurgery.measure.training_state import TrainingState
    from kvsurgery.text.haystack import check_text
    from kvsurgery.text.needle_sets import AUTO, read_set

    check_text(options["text"])
    if options["needles"] != AUTO:
        read_set(options["needles"])
    if (answers := options["answers"]) is not None:
        if answers.exists():
            read_answers(answers)
        else:
            check_file(answers)
    if (checkpoint := options["checkpoint"]) is not None:
        check_file(checkpoint)
        if options["resume"]:
            TrainingState.require(checkpoint)
        else:
            TrainingState.refuse_to_replace(checkpoint)
    if options["curve"] is not None:
        check_picture(options["curve"])
