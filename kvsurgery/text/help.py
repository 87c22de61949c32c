"""What commands say of texts, needles and passkeys."""

TEXT = "text to hide things in: a file, or a dataset of the Hub, owner/name[:config]"
DEPTHS = "where needles lie, 0 to 1"
NEEDLES = (
    "a JSONL file, or a shipped set: word, fact and phrase, from easy to hard; choice and reasoning, with a reason; or "
    "auto, the hardest that the original answers in at least half of the trials"
)
PASSKEYS = "passkeys hidden in a prompt"
PASSKEY_TOKENS = "random tokens of each"
