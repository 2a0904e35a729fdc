"""What runs inside Ray actors and vLLM worker processes."""
