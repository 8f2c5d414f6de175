"""Fast inference of decoders: measured attention kernels, a cache that is never copied, decode steps that are replayed.

Not copied into saved models: those stay slow, correct and portable on `runtime` alone. What is not done here (beams,
masks with holes, attention weights) takes the ordinary path.
"""
