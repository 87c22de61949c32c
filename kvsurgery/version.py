"""The version, which every file that kvsurgery writes names, and where kvsurgery comes from."""

__version__ = "0.2.0.dev0"
TOOL = f"kvsurgery {__version__}"  # in the provenance of a profile
HOME: str = ""  # the address where kvsurgery is published; while it is empty, no text sends people to an index for it


def how_to_install(extra: str) -> str:
    """The command that installs an extra of kvsurgery, in words that go after a colon."""
    return f"pip install 'kvsurgery[{extra}]'" if HOME else f"pip install '.[{extra}]' in the clone of kvsurgery"
