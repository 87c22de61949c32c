"""`Request`: a folder or a Hub id to convert, the profiles and the recipe; it fetches what is needed, and plans."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from kvsurgery.conversion.output import check_no_other, check_space
from kvsurgery.conversion.prepared import PreparedConversion
from kvsurgery.errors import CheckpointError, HubError, ProfileError
from kvsurgery.policy.evidence import Evidence
from kvsurgery.profile.head_profile import HeadProfile
from kvsurgery.recipe import Recipe
from kvsurgery.system.repo_id import checkpoint_folder, is_address

if TYPE_CHECKING:
    from kvsurgery.hub.stream import Streamed


@dataclass(frozen=True)
class Request:
    """A checkpoint to convert, its profiles and its recipe.

    Attributes:
        place, revision: a folder, or a Hub id and its branch, tag or commit.
        recipe: how to convert it.
        evidence: what was measured of it.
        from_profile: whether the place is the model that the profile names, as no source was given.
    """

    place: str
    revision: str | None
    recipe: Recipe
    evidence: Evidence
    from_profile: bool = False

    @classmethod
    def of(
        cls, source: str | Path | None, revision: str | None, recipe: Recipe, profiles: Iterable[HeadProfile] = ()
    ) -> Request:
        """A request with these profiles, or else those that the recipe names.

        The recipe then has addresses on the Hub by commit. Without a source, it is the model that the profile was
        measured on. Without a profile of scores, it is the one that budgets follow. Without any, every head stays full
        and the cache is quantized.

        Raises:
            ProfileError: a profile cannot be read, there are two of a kind, or none, and nothing is asked for.
            CheckpointError: there is neither a source nor a profile that names one.
        """
        evidence, recipe = Evidence.read(recipe, profiles)
        profile = evidence.profile
        if profile is None and recipe.cache is None:
            raise ProfileError("no head profile is given; without one, `cache.bits` quantizes the cache of every head")
        from_profile = source is None
        if from_profile:
            if profile is None:
                raise CheckpointError("no checkpoint is given, and no head profile that names one")
            source, revision = _measured_model(profile, revision, recipe)
        return cls(str(source), revision, recipe, evidence, from_profile)

    @property
    def folder(self) -> Path | None:
        """The folder that the place is, None for a Hub id.

        Raises:
            CheckpointError: it is neither.
        """
        with self._origin_of_place():
            return checkpoint_folder(self.place)

    @contextmanager
    def _origin_of_place(self) -> Generator[None]:
        """Where the place cannot be read inside, and no source was given, the error says where the place comes from.

        Raises:
            CheckpointError, HubError: as raised inside.
        """
        try:
            yield
        except (CheckpointError, HubError) as error:
            if not self.from_profile:
                raise
            raise type(error)(f"{error}; SRC was left out, so it is the model that the profile names") from error

    def plan(self, folder: Path, commit: str | None = None) -> PreparedConversion:
        """The conversion of the folder that the place is, or that a Hub id was fetched to."""
        name = self.place if self.folder is None else None
        return PreparedConversion.prepare(folder, self.recipe, self.evidence, name=name, revision=commit)

    def prepare(self, out: Path | None = None) -> PreparedConversion:
        """Plan the conversion. The weights of a Hub id are downloaded only for a folder to fill, after its headers.

        Args:
            out: this folder; before a download, what it holds and the room for it are checked.

        Raises:
            KVSurgeryError: every reason why the conversion cannot be done that headers can show, or the Hub fails.
        """
        if self.folder is not None:
            return self.plan(self.folder)
        from kvsurgery import hub

        with self._origin_of_place():
            if out is None:
                with hub.headers(self.place, self.revision) as remote:
                    return self.plan(remote.folder, remote.commit)
            check_no_other(out)

            def check(folder: Path) -> None:
                check_space(out, self.plan(folder).checkpoint.size)

            return self.plan(*hub.fetch_checkpoint(self.place, self.revision, check))

    def fetched(self, check: Callable[[Path], object]) -> tuple[Path, dict[str, str]]:
        """The folder of a checkpoint that is converted several times, and what `PreparedConversion.prepare` calls it.

        A Hub id is downloaded, after a check of its headers.
        """
        if self.folder is not None:
            return self.folder, {}
        from kvsurgery import hub

        with self._origin_of_place():
            folder, commit = hub.fetch_checkpoint(self.place, self.revision, check)
        return folder, {"name": self.place, "revision": commit}

    @contextmanager
    def streamed(self) -> Generator[tuple[PreparedConversion, Streamed]]:
        """Plan the conversion of a Hub id whose weights are fetched while they are converted, inside the block."""
        from kvsurgery import hub

        with (
            self._origin_of_place(),
            hub.stream_checkpoint(self.place, self.revision, self.plan) as streamed_checkpoint,
        ):
            prepared = self.plan(streamed_checkpoint.folder, streamed_checkpoint.commit)
            yield replace(prepared, checkpoint=streamed_checkpoint.fill(prepared.checkpoint)), streamed_checkpoint


def _measured_model(profile: HeadProfile, revision: str | None, recipe: Recipe) -> tuple[str, str | None]:
    """Where the model is that a profile was measured on: a folder, or a Hub id and its revision."""
    if revision is not None:
        return profile.base_model, revision
    names = (*recipe.profiles, *([recipe.budgets_from] if recipe.budgets_from else []))
    return profile.origin.place(Path(name) for name in names if not is_address(name))
