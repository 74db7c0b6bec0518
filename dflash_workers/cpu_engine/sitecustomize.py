"""Lets torchvision be imported beside a CPU build of torch; Python runs this file at its start.

Part of the stand-in that runs SGLang 0.5.17 on its native PyTorch path (see sgl_kernel beside it);
server.py puts this folder on the engine's PYTHONPATH. The torchvision wheel is a CUDA build, so its
C++ operators can't be loaded here, yet its Python part registers fake kernels for two of them at
import. Their schemas are declared just before that; nothing is ever computed with them, since text
models call neither.
"""

import importlib.abc
import sys

OPERATORS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)


class DeclareBeforeTorchvision(importlib.abc.MetaPathFinder):
    """Finds nothing; declares the operators when somebody first looks for torchvision."""

    library = None  # kept: the declarations end with the object
    seen = False

    def find_spec(self, name, path=None, target=None):
        """None, always: the ordinary finders go on from here."""
        if name == "torchvision" and not self.seen:
            self.seen = True  # first, for torch may look for torchvision itself
            import torch  # heavy, and most processes of this interpreter never need it

            if torch.version.cuda is None:
                self.library = torch.library.Library("torchvision", "FRAGMENT")
                for operator in OPERATORS:
                    self.library.define(operator)
        return None


sys.meta_path.insert(0, DeclareBeforeTorchvision())
