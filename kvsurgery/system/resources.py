"""The folders of family patches and emitted templates.

They lie at the top level of a checkout, beside this package, which has a link to each; a wheel holds them inside it.
"""

from pathlib import Path

PATCHES = Path(__file__).parent.parent / "patches"
TEMPLATES = Path(__file__).parent.parent / "templates"
