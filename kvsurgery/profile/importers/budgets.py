"""Import a table of budgets in tokens, one for each KV head."""

from __future__ import annotations

from pathlib import Path

from kvsurgery.errors import ProfileError
from kvsurgery.profile.head_profile import HeadProfile
from kvsurgery.profile.importers.files import check_kv_heads, origin, parse_table, read
from kvsurgery.profile.methods import MAX_BUDGET
from kvsurgery.profile.profiled_model import ProfiledModel


def import_budgets(path: str | Path, model: ProfiledModel) -> HeadProfile:
    """Read a table of layers x KV heads, tab-separated: the tokens of a prompt that each head keeps.

    Raises:
        ProfileError: the file is unreadable, not such a table, or of another shape.
    """
    path = Path(path)
    raw = read(path)
    budgets = parse_table(path, raw, _tokens)
    check_kv_heads(path, budgets.shape, model)
    return model.profile(budgets, "budgets", origin("budgets", path, raw))


def _tokens(path: Path, number: int, cell: str) -> float:
    if not cell.isascii() or not cell.isdecimal() or len(cell) > 9 or int(cell) > MAX_BUDGET:
        raise ProfileError(
            f"{path}, line {number}: {cell[:40]!r} is not a budget; budgets are whole numbers of tokens, at most "
            f"{MAX_BUDGET}"
        )
    return int(cell)
