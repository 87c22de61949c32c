"""Default lengths of long prompts, and the depths at which needles lie in them."""

DEPTHS = tuple(round(place / 9, 2) for place in range(10))
COUNT, SHORTEST_PROMPT, LONGEST_PROMPT = 5, 1_000, 32_000  # how many lengths, and tokens of the first and the last
ROOM = 128  # tokens left for the answer where lengths go up to the model's maximum


def default_lengths(max_context: int) -> tuple[int, ...]:
    """Five lengths of a prompt in tokens, from 1,000 to 32,000, or to the longest that leaves room for an answer."""
    longest = max(1, min(LONGEST_PROMPT, max_context - ROOM))
    shortest = min(SHORTEST_PROMPT, longest)
    return tuple(shortest + (longest - shortest) * place // (COUNT - 1) for place in range(COUNT))
