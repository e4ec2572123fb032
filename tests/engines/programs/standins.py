"""What SGLang's imports need of torchvision beside torch for CPUs: its operators, declared and not there.

Imported first, in each process.  Beside torch for CUDA, torchvision has its operators itself.
"""

from __future__ import annotations

import torch

_ROIS = "Tensor input, Tensor rois, float spatial_scale, int pooled_height, int pooled_width"
_ALIGNED = f"{_ROIS}, int sampling_ratio, bool aligned"
_SIZES = "int batch_size, int channels, int height, int width"
_BACK = "Tensor grad, Tensor rois"
_DEFORM = (
    "Tensor input, Tensor weight, Tensor offset, Tensor mask, Tensor bias, int stride_h, int stride_w, int pad_h, int pad_w, "
    "int dilation_h, int dilation_w, int groups, int offset_groups, bool use_mask"
)
_POOLED = "float spatial_scale, int pooled_height, int pooled_width"

_library = torch.library.Library("torchvision", "DEF")
for _schema in (
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    f"roi_align({_ALIGNED}) -> Tensor",
    f"_roi_align_backward({_BACK}, {_POOLED}, {_SIZES}, int sampling_ratio, bool aligned) -> Tensor",
    f"roi_pool({_ROIS}) -> (Tensor, Tensor)",
    f"_roi_pool_backward({_BACK}, Tensor argmax, {_POOLED}, {_SIZES}) -> Tensor",
    f"ps_roi_align({_ROIS}, int sampling_ratio) -> (Tensor, Tensor)",
    f"_ps_roi_align_backward({_BACK}, Tensor channel_mapping, {_POOLED}, int sampling_ratio, {_SIZES}) -> Tensor",
    f"ps_roi_pool({_ROIS}) -> (Tensor, Tensor)",
    f"_ps_roi_pool_backward({_BACK}, Tensor channel_mapping, {_POOLED}, {_SIZES}) -> Tensor",
    f"deform_conv2d({_DEFORM}) -> Tensor",
    f"_deform_conv2d_backward(Tensor grad, {_DEFORM}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
):
    if torch.version.cuda is None:
        _library.define(_schema)
