"""The words around passkeys, which training and evaluation share (Xiao et al. 2024, section 2.2)."""

ORDINALS = (
    "first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth", "eleventh",
    "twelfth", "thirteenth", "fourteenth", "fifteenth", "sixteenth", "seventeenth", "eighteenth", "nineteenth",
    "twentieth",
)  # fmt: skip
OPENING = "Passkeys are hidden in this text. Remember them.\n\n"
HIDDEN = "\nThe {} passkey is:"
ASKED = "\nWhat is the {} passkey? The {} passkey is:"
END = ".\n"
