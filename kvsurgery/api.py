"""Converting from Python, in one call."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from kvsurgery.conversion.convert import ConvertReport
from kvsurgery.conversion.convert import convert as write
from kvsurgery.conversion.engine import JOBS
from kvsurgery.conversion.request import Request
from kvsurgery.profile.head_profile import HeadProfile
from kvsurgery.profile.loading import load_scores
from kvsurgery.recipe import Recipe


def convert(
    source: str | Path | None,
    out: str | Path,
    profile: HeadProfile | str | Path | None = None,
    recipe: Recipe = Recipe(),
    *,
    revision: str | None = None,
    overwrite: bool = False,
    jobs: int = JOBS,
    progress: Callable[[int], None] | None = None,
) -> ConvertReport:
    """Convert a checkpoint according to a head profile. A run that was interrupted goes on when it is repeated.

    Args:
        source: a folder, or a Hub id, which is downloaded; None: the model that the profile was measured on.
        out: the folder to fill.
        profile: a head profile, its file or its address on the Hub, in place of those that the recipe names. Without
            any, every head keeps every token, and the recipe's `cache` quantizes it.
        recipe: everything else that decides the conversion.
        revision: branch, tag or commit of a Hub id.
        overwrite: replace another conversion in this folder; files of anyone else are never removed.
        jobs: threads.
        progress: called with weight bytes done, from any thread.

    Raises:
        PolicyError: the recipe cannot be followed with this model and profile.
        ProfileError: a profile cannot be read, is of another model, or there is none and no `cache`.
        CheckpointError, UnsupportedModel: the source is malformed, or surgery does not cover it.
        OutputError: `out` cannot be used or written, or holds something else.
        HubError: the Hub cannot be reached, or refuses.
    """
    if profile is not None and not isinstance(profile, HeadProfile):
        profile = load_scores(profile)
    request = Request.of(source, revision, recipe, [] if profile is None else [profile])
    prepared = request.prepare(Path(out))
    files = prepared.emitted.files
    return write(prepared.checkpoint, prepared.plan, out, files, overwrite=overwrite, jobs=jobs, progress=progress)
