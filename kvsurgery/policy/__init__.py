"""What becomes of every KV head: full heads, budgets, and what fits a memory budget."""
