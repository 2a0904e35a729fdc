"""Lets a GPU build of vLLM describe models where there is no GPU: on a login node, or where a plan is made.

vLLM resolves its platform once, when its first module asks. Without a device it finds none and refuses to make any
configuration. Importing this module before the rest of vLLM makes the host the platform then; where a device is,
nothing changes.
"""

from __future__ import annotations

from vllm import platforms

if platforms.current_platform.is_unspecified():
    from vllm.platforms.cpu import CpuPlatform

    platforms._current_platform = CpuPlatform()
