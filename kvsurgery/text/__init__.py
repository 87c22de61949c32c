"""Texts to measure heads and to evaluate models: haystacks, needles, passkeys, turns."""
