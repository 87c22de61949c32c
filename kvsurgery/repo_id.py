"""Telling Hub ids from paths, without importing what talks to the Hub."""

import re


def is_repo_id(source: str) -> bool:
    """Whether a source that is not a local folder can be a Hub repository: `name` or `owner/name`."""
    return re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", source) is not None
