"""Models larger than memory: every stage walks the layers with one of them in memory and activations on disk.

`_checkpoint` reads safetensors by tensor and row, `_model` fills a frame without numbers layer by layer, `_store` keeps
what flows between layers. `probe` (with `prices`), `build` and `verify` use them; `source` offers them to the line.
Layers, batches and sums are those of the path in memory, so that moments, cuts and refits come out the same to the bit.
"""
