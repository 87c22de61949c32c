# `make .venv-vllm/ready` appends this to torchvision's extension.py. PyPI's compiled operators do not load beside the
# CPU build of torch. Once they have schemas, torchvision's Python code imports; image processors need nothing else.
import torch

_library = torch.library.Library("torchvision", "DEF")
for _name in ("nms", "qnms"):
    _library.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
