"""The client side of the block language: the module tree, `with` bodies taken from source, and what comes back."""
