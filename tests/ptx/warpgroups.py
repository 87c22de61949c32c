"""wgmma."""

EFFECTS = {}


class Products:
    def __init__(self, grid):
        pass
