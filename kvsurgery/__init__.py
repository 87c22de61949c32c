"""kvsurgery: rewrite a checkpoint for head-level KV caches, offline.

    from kvsurgery import Recipe, convert, revert, verify

    convert("./llama3", "./llama3-duo", "duo.safetensors", Recipe.of(sparsity=0.5, kv_bits=4))
    verify("./llama3-duo")
    revert("./llama3-duo", "./llama3-again")

`inspect` says what a checkpoint is, `HeadProfile` holds the scores of its heads, and `Recipe` everything else that
decides a conversion. Each is imported when it is first used: `import kvsurgery` alone loads nothing.

model --score--> HeadProfile --decide--> Policy --plan--> SurgeryPlan --convert--> checkpoint
"""

from importlib import import_module
from typing import TYPE_CHECKING

from kvsurgery.version import __version__ as __version__

if TYPE_CHECKING:
    from kvsurgery.api import convert as convert
    from kvsurgery.conversion.inspection import inspect as inspect
    from kvsurgery.conversion.revert import revert as revert
    from kvsurgery.conversion.verify import verify as verify
    from kvsurgery.profile.head_profile import HeadProfile as HeadProfile
    from kvsurgery.recipe import Recipe as Recipe

__all__ = ["HeadProfile", "Recipe", "convert", "inspect", "revert", "verify"]

# no module of the package has one of these names, which would hide the function once it is imported
_HOMES = {
    "HeadProfile": "kvsurgery.profile.head_profile",
    "Recipe": "kvsurgery.recipe",
    "convert": "kvsurgery.api",
    "inspect": "kvsurgery.conversion.inspection",
    "revert": "kvsurgery.conversion.revert",
    "verify": "kvsurgery.conversion.verify",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
