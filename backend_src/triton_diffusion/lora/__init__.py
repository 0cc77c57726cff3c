"""LoRA adapters: which there are, which a request wants, and how the rows of a pass get theirs.

`selection` reads what a request wants; `files` finds the adapters and `loading` checks them; before each pass,
`WaveLoras` gives all rows one selection, or `RowLoras` each row its own.
"""

from triton_diffusion.lora.loras import Loras
from triton_diffusion.lora.selection import BASE, LoraSelection

__all__ = ["BASE", "LoraSelection", "Loras"]
