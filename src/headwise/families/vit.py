"""ViT: patches, a class token, pre-norm layers."""

from headwise.families._architecture import Architecture
from headwise.families._vision import LAYER, Vision


class ViT(Vision):
    """ViT, bare or with an image classifier."""

    name = "vit"
    kinds = {"vit": Architecture(stem="ViT", body_at="vit", **LAYER)}
    summary = "ViT, and DeiT without distillation"


FAMILY = ViT()
