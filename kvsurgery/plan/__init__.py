"""Planning: what a model family's tensors are, and which bytes a policy moves."""
