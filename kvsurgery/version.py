"""The version, which every file that kvsurgery writes names."""

__version__ = "0.2.0.dev0"
