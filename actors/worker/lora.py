"""Does the whole adapter of a run apply to the loaded model? vLLM passes over weights that fit no module in silence."""

from __future__ import annotations

from typing import Any

from actors.worker.depth import Depth, layer_of

ADAPTER_ID = 1


def unapplied_weights(model: Any, depth: Depth | None) -> list[str]:
    """Names of the adapter's modules that no module of the model took; call it once the adapter is loaded.

    Layers that do not run take nothing, and need not.
    """
    manager: Any = model.lora_manager
    adapter = manager.get_adapter(ADAPTER_ID)
    if adapter is None:
        return ["all of it"]

    def idle(name: str) -> bool:
        layer = layer_of(name)
        return depth is not None and layer is not None and depth.n_layers_run <= layer < depth.n_layers

    return sorted(name for name in adapter.loras if name not in manager.modules and not idle(name))
