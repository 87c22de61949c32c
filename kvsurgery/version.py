"""The version, which every file that kvsurgery writes names."""

__version__ = "0.2.0.dev0"
TOOL = f"kvsurgery {__version__}"  # in the provenance of a profile
