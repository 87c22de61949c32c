"""`kvsurgery profile compute`: measure the heads of a model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvsurgery.cli.help import MEASUREMENT, basic, in_group, in_options
from kvsurgery.cli.options import Grouped
from kvsurgery.cli.profile.saving import out_option
from kvsurgery.cli.running import (
    POSITIVE,
    check_revision,
    chosen_dtype,
    device_option,
    dtype_option,
    quiet_transformers,
    reserve,
    revision_option,
    seed_option,
    trust_remote_code_option,
    with_value,
)
from kvsurgery.cli.settings import foreign_options, given_settings, setting_options
from kvsurgery.errors import ProfileError
from kvsurgery.measure.methods import METHODS, Method

if TYPE_CHECKING:
    from kvsurgery.measure.mesh import Mesh
    from kvsurgery.measure.methods.method import Measurement


@click.command(cls=Grouped)
@click.argument("source", metavar="MODEL")
@in_group(
    MEASUREMENT,
    basic(
        click.option(
            "--method",
            default="duo",
            show_default=True,
            type=click.Choice(list(METHODS)),
            help="Measurement method.",
        ),
    ),
    out_option,
    seed_option,
)
@setting_options(METHODS, MEASUREMENT)
@revision_option
@basic(device_option)
@dtype_option
@trust_remote_code_option
@click.option(
    "--tp",
    type=POSITIVE,
    default=1,
    show_default=True,
    help="Number of processes that share the heads and weights of layers.",
)
@click.option(
    "--sp", type=POSITIVE, default=1, show_default=True, help="Number of processes that share the tokens of a prompt."
)
@click.pass_context
def compute(
    ctx: click.Context,
    source: str,
    method: str,
    out: Path,
    seed: int,
    revision: str | None,
    device: str | None,
    dtype: str,
    trust_remote_code: bool,
    tp: int,
    sp: int,
    **settings: Any,
) -> None:
    """Measure the attention heads of MODEL, a folder or a Hub id, original or converted.

    \b
    duo        DuoAttention's gates, trained to recall passkeys with as few full heads as possible
    rlkv-lite  the same gates, trained on long answers that the model itself generates
    attention  the attention of each head while passkeys are recalled, without training
    headkv-*   how much of a needle's answer comes through each head: copied (r, er) or reasoned about (r2)
    reform     the heads whose states find the tokens that a question needs
    kv-bits    the loss of a quantized cache on a text, and how to rotate and clip; pass the file as --kv-measured

    Processes started by `torchrun` share the prompts, or with --tp the heads and weights of each layer (tensor
    parallelism). For duo, rlkv-lite and attention they also share the weights (FSDP2), and with --sp the tokens of
    each prompt, for contexts that do not fit one device.

    To continue an interrupted measurement by attention, headkv-* or reform in one process, run the same command
    again. For duo and rlkv-lite, use --checkpoint, and continue with --resume.

    \b
    kvsurgery profile compute ./llama3 --minutes 60 -o duo.safetensors
    kvsurgery profile compute ./llama3 --method attention -o attention.safetensors
    kvsurgery profile compute ./llama3 --method headkv-r2 --text book.txt -o r2.safetensors
    kvsurgery profile compute ./llama3 --method kv-bits --text book.txt -o losses.safetensors
    torchrun --nproc-per-node 8 -m kvsurgery profile compute ./llama3-70b --method duo --batch 8 -o duo.safetensors
    torchrun --nproc-per-node 8 -m kvsurgery profile compute ./llama3-70b --method headkv-r2 --tp 8 -o r2.safetensors
    """
    configured_method = _configured_method(ctx, method, seed)

    from kvsurgery.system.files import check_new_file
    from kvsurgery.system.locks import reserved_file

    check_revision(source, revision)
    reserve(reserved_file(out))
    check_new_file(out)
    configured_method.check()
    if configured_method.kept is not None:
        reserve(reserved_file(configured_method.kept))
    quiet_transformers()
    configured_method.check_state()

    from kvsurgery.cli.profile.saving import remember
    from kvsurgery.display import console
    from kvsurgery.errors import Interrupted, KVSurgeryError, TooLittleTime
    from kvsurgery.measure.mesh import Mesh
    from kvsurgery.measure.methods.method import Reporter, SampledMethod
    from kvsurgery.system.processes import started_processes

    with started_processes(device) as processes:
        mesh = Mesh(processes, tp, sp)
        _check_sharing(configured_method, mesh)
        if processes.device == "cpu":
            configured_method = configured_method.on_cpu()
        dtype = chosen_dtype(dtype, source, device, revision)
        if isinstance(configured_method, SampledMethod) and processes.world == 1:
            configured_method = replace(configured_method, kept=out.with_name(f"{out.name}.samples.jsonl"))
        try:
            with console.step_progress(f"measuring {method}") as advance:
                first_reporter = Reporter(advance, lambda line: console.stderr.print(in_options(line)))
                reporter = first_reporter if processes.rank == 0 else Reporter()
                reporter.progress(0, None, f"loading {source}")
                measured = mesh.load(
                    source,
                    revision,
                    dtype=dtype,
                    sharded=configured_method.shared == "weights",
                    trust_remote_code=trust_remote_code,
                )
                reporter.progress(0, None, "preparing prompts")  # the estimate excludes loading
                measurement = configured_method.measure(measured, mesh, reporter)
        except TooLittleTime as error:
            raise ProfileError(f"{error}: {with_value('--minutes', error.minutes)}") from None
        except KVSurgeryError:
            if isinstance(configured_method, SampledMethod) and processes.rank == 0:
                configured_method.drop_plan()
            raise
        except KeyboardInterrupt:
            kept = configured_method.kept
            hint = f"{configured_method.way_on} continues from {kept}" if kept and kept.is_file() else "nothing is kept"
            raise Interrupted(in_options(hint)) from None
        if processes.rank == 0:
            measurement.result.save(out)  # before anything is imported that may have been upgraded meanwhile
            remember(measurement.result, source)
            if isinstance(configured_method, SampledMethod) and configured_method.kept:
                configured_method.kept.unlink(missing_ok=True)
            _show(measurement, out, source, revision)


def _configured_method(ctx: click.Context, name: str, seed: int) -> Method:
    """The method with the settings from the command line.

    Raises:
        UsageError: a setting belongs to other methods, or settings contradict each other.
    """
    for option, _ in foreign_options(ctx, METHODS, [name]):
        raise click.UsageError(f"{option} does not apply to --method {name}; leave it out")
    try:
        return METHODS[name](name=name, seed=seed, **given_settings(ctx, METHODS[name]))
    except ProfileError as error:
        raise click.UsageError(in_options(str(error))) from error


def _check_sharing(method: Method, mesh: Mesh) -> None:
    """Refuse --tp and --sp for methods that cannot split heads or tokens over processes."""
    world = mesh.processes.world
    if method.shared != "weights" and (mesh.sp > 1 or mesh.tp not in (1, world)):
        raise click.UsageError(f"--method {method.name} takes --tp {world} or no --tp, and no --sp")
    if method.shared == "nothing" and mesh.tp > 1:
        raise click.UsageError(f"processes that measure {method.name} share the passages; leave --tp out")


def _show(measurement: Measurement, out: Path, source: str, revision: str | None) -> None:
    """Describe the written file, and plot the training if there was one."""
    from kvsurgery.cli.profile.saving import show_saved, show_saved_losses
    from kvsurgery.display import console
    from kvsurgery.measure.training import outcome
    from kvsurgery.profile.head_profile import HeadProfile
    from kvsurgery.profile.plots import plot_training

    if isinstance(measurement.result, HeadProfile):
        if measurement.history is not None:
            for line in outcome(measurement.result, measurement.history):
                console.stderr.print(in_options(line))
        show_saved(measurement.result, out, source, revision)
    else:
        show_saved_losses(measurement.result, out, source, revision)
    if measurement.history is not None and measurement.curve is not None:
        plot_training(measurement.history, measurement.curve)
        console.stderr.print(f"wrote {measurement.curve}")
