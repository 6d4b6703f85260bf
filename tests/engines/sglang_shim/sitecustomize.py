"""Lets SGLang run on a machine without its CUDA-only packages. For tests: nothing here is fast, or complete.

SGLang's CPU path computes with plain torch, but it imports torchvision, whose build for CUDA does not load, and kernels
that exist for GPUs only.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types


class _Torchvision(importlib.abc.MetaPathFinder):
    """Before torchvision is imported: declares the operators that its missing library would, and stubs image files."""

    _kept: list[object] = []  # a library's operators go with it

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name != "torchvision":
            return
        sys.meta_path.remove(self)
        import torch

        library = torch.library.Library("torchvision", "DEF")
        library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        self._kept.append(library)
        for missing in ("torchvision.io", "torchvision.io.image"):
            module = types.ModuleType(missing)
            module.__spec__ = importlib.machinery.ModuleSpec(missing, None, is_package=True)
            module.__path__ = []  # type: ignore[attr-defined]
            # Names are asked for at import, and none is called.
            module.__getattr__ = lambda name: None  # type: ignore[method-assign]
            sys.modules[missing] = module


sys.meta_path.insert(0, _Torchvision())
