"""Blocks: user code that runs inside the forward pass, one greenlet per request.

`runtime` is driven by a runner adapter and knows nothing of the interactive client; `engine` owns a vLLM engine that
serves blocks. Nothing here is imported unless an engine or a client is built.
"""
