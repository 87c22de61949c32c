"""Text for models to read, to measure their heads and to evaluate them: haystacks, needles, passkeys, turns."""
