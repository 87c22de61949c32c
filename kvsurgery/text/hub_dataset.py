"""Rows of datasets on the Hub, with the library `datasets`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from kvsurgery.errors import TextError
from kvsurgery.system.repo_id import is_repo_id
from kvsurgery.version import how_to_install


def dataset_of(source: str) -> tuple[str, str | None] | None:
    """Parse `owner/name` or `owner/name:configuration` into dataset and configuration; None for anything else.

    Some datasets have no owner.
    """
    dataset, colon, config = source.partition(":")
    if not is_repo_id(dataset) or (colon and not re.fullmatch(r"[^/\\:]+", config)):
        return None
    if "." in dataset and "/" not in source:  # the name of a file that is not there
        return None
    return dataset, config or None


def require_datasets(dataset: str) -> None:
    """Check that the library `datasets`, which reads datasets of the Hub, is installed.

    Raises:
        TextError: it is not installed.
    """
    try:
        import datasets  # noqa: F401
    except ImportError as error:
        raise TextError(
            f"{dataset} is not a local file; to read it as a dataset of the Hub: {how_to_install('eval')}"
        ) from error


def dataset_rows(dataset: str, config: str | None, split: str) -> Iterator[dict[str, Any]]:
    """Stream the rows of a split in order; only rows that are read are downloaded.

    Args:
        config: a configuration of the dataset; None for the only one, or the default.

    Raises:
        TextError: `datasets` is not installed, the dataset cannot be read, or needs a configuration.
    """
    require_datasets(dataset)
    from datasets import load_dataset

    try:
        yield from load_dataset(dataset, config, split=split, streaming=True)
    except Exception as error:  # whatever the library or the network raises
        reason, *more_lines = (str(error) or type(error).__name__).splitlines()
        if reason.startswith("Config name is missing"):  # the second line names those that there are
            message = f"dataset {dataset} has several configurations; give one, as {dataset}:NAME."
            raise TextError(" ".join([message, *more_lines[:1]])) from error
        raise TextError(
            f"{dataset} is not a local file, and as a dataset of the Hub it cannot be read: {reason}"
        ) from error
