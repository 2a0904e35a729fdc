"""Everything that touches vLLM internals; nothing outside this package does."""
