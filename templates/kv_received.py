"""The attention that tokens receive from the last queries, by which budgeted heads and long prompts choose tokens."""

import torch

from .kv_heads import block_elements
from .kv_softmax import Scoring


def attention_received(
    query: torch.Tensor, keys: torch.Tensor, padding: torch.Tensor, scoring: Scoring, stops: torch.Tensor | None = None
) -> torch.Tensor:
    """Attention that columns get from queries at the last of them, mean over these and over a group's query heads.

    Scores are computed in blocks of keys, and twice if one block does not hold them all.

    Args:
        query: [batch, heads * group, window, head_dim].
        keys: [batch, heads, columns, head_dim].
        padding: int [batch, 1, 1].
        stops: int [batch, heads, 1], the columns that each head has, of which the last ones ask; by default all.

    Returns:
        float32 [batch, heads, columns]; NaN in rows of which a query is padding.
    """
    batch, heads, columns, head_dim = keys.shape
    window = query.shape[2]
    folded_query = query.float().reshape(batch, heads, -1, head_dim)
    column = torch.arange(columns, device=keys.device)
    query_columns = torch.arange(-window, 0, device=keys.device) + (columns if stops is None else stops)

    def scores(block: slice) -> torch.Tensor:
        """[batch, heads, group, window, n]"""
        part = scoring.scores(folded_query @ keys[:, :, block].float().mT)
        visible = (column[block] >= padding[:, None]) & (column[block] <= query_columns[..., None])
        return part.unflatten(2, (-1, window)).masked_fill_(~visible[:, :, None], float("-inf"))

    size = max(1, block_elements(keys) // (batch * heads * max(folded_query.shape[2], head_dim)))
    blocks = [slice(first, first + size) for first in range(0, columns, size)]
    if len(blocks) == 1 and scoring.sinks is None:  # as below, in a third of the time
        return scores(blocks[0]).softmax(-1, dtype=torch.float32).mean((2, 3))
    cached_scores = [scores(block) for block in blocks[: len(blocks) == 1]]
    sums = [part.logsumexp(-1) for part in cached_scores or map(scores, blocks)]
    lse = (sums[0] if cached_scores else torch.stack(sums).logsumexp(0))[..., None]
    if scoring.sinks is not None:
        lse = torch.logaddexp(lse, scoring.sinks.float().view(heads, -1, 1, 1))
    return torch.cat([(part - lse).exp().mean((2, 3)) for part in cached_scores or map(scores, blocks)], -1)
