"""What commands say of prompts, texts, needles and passkeys."""

TEXT = "text to hide things in: a file, or a dataset of the Hub, owner/name[:config]"
CHUNK = "tokens of a prompt that are read at once"
DEPTHS = "depths of needles in the text, 0 (start) to 1 (end)"
NEEDLES = (
    "a JSONL file, or a shipped set: word, fact and phrase, from easy to hard; choice and reasoning, which take a "
    "reason; or auto, the hardest set that the original answers in at least half of the trials"
)
PASSKEYS = "number of passkeys in a prompt"
PASSKEY_TOKENS = "random tokens of each passkey"
