"""What conversion emits: self-contained modules that need torch and transformers only."""
