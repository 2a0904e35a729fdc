"""GPU benchmark: the product's path against plain vLLM and its peers, in one sitting (see `__main__`)."""
