"""Lets torchvision be imported beside a CPU build of torch, for tests only: put this folder on PYTHONPATH.

The registry's torchvision is built for CUDA. Its operators cannot load beside a CPU torch, and it then refuses to be
imported because they are unknown. No test calls them, so it is enough that they have been declared.
"""

import torch

SIGNATURES = {
    "nms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "roi_align": "(Tensor input, Tensor rois, float spatial_scale, int pooled_height, int pooled_width, "
    "int sampling_ratio, bool aligned) -> Tensor",
}

if torch.version.cuda is None:
    library = torch.library.Library("torchvision", "DEF")
    for name, signature in SIGNATURES.items():
        library.define(name + signature)
