from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from transformers.utils import logging

from kvsurgery.profile import origin
from tests.helpers.families import make
from tests.helpers.surgery import Converted, convert_folder

torch.set_num_threads(1)
logging.set_verbosity_error()
logging.disable_progress_bar()


@pytest.fixture(scope="session", autouse=True)
def _own_module_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Remote code is copied to a folder of this run, so that no run sees another's."""
    from transformers import dynamic_module_utils

    modules = str(tmp_path_factory.mktemp("modules"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", modules)
        patch.syspath_prepend(modules)
        yield


@pytest.fixture(scope="session", autouse=True)
def _own_notes(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Where models are is noted in a folder of this run."""
    notes = tmp_path_factory.mktemp("notes")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(origin, "notes_folder", lambda: notes)
        yield


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A stock checkpoint of a family, made once."""
    return cache(lambda family: make(family, tmp_path_factory.mktemp("stock") / f"{family}-stock"))


@pytest.fixture(scope="session")
def mixed(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Converted]:
    """A family's checkpoint converted with half of its heads streaming."""
    return cache(
        lambda family: convert_folder(
            checkpoint(family), tmp_path_factory.mktemp("out") / f"{family}-mixed", sparsity=0.5, quantized=True
        )
    )


@pytest.fixture(scope="session")
def all_full(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Converted]:
    """A family's checkpoint converted with every head full."""
    return cache(
        lambda family: convert_folder(
            checkpoint(family), tmp_path_factory.mktemp("out") / f"{family}-full", sparsity=0.0, quantized=True
        )
    )


@pytest.fixture
def sets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Lets the bundled model answer the named sets of needles that ship, and no others."""
    from kvsurgery.text import needle_sets
    from tests.helpers.needle_sets import write_sets

    def make(*answered: str) -> None:
        monkeypatch.setattr(needle_sets, "FOLDER", tmp_path / "sets")
        write_sets(tmp_path / "sets", answered)

    return make
