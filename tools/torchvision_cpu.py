"""Let torchvision from the package index load beside a CPU build of torch.

That torchvision is compiled for CUDA. Beside a CPU torch its compiled part does not load, so two
operators are missing and ``import torchvision`` fails. This module defines them when torchvision
is first imported. They can be declared but not called, which is all that timm and transformers
need.

``python tools/torchvision_cpu.py`` copies the module into the environment of that Python, if
torchvision does not load there. A ``.pth`` file then runs it at every start; it imports torch only
when torchvision is imported.
"""

import importlib.util
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

_kept: list[object] = []


def define_operators() -> None:
    """Define the operators of torchvision that are missing."""
    import torch

    if hasattr(torch.ops.torchvision, "nms"):
        return
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    # torch drops the definitions together with the library object
    _kept.append(library)


class TorchvisionFinder:
    """Defines the missing operators before the code of torchvision runs."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """Return the usual spec of torchvision with another loader; nothing for other modules."""
        if name != "torchvision":
            return None
        sys.meta_path.remove(self)  # type: ignore[arg-type]
        try:
            spec = importlib.util.find_spec(name)
        finally:
            sys.meta_path.insert(0, self)  # type: ignore[arg-type]
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                define_operators()
                run(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def install() -> None:
    """Copy this file into the environment, unless torchvision is absent or loads without it."""
    # imported here: this module is loaded at every start of the interpreter
    import shutil
    import subprocess
    import sysconfig
    from pathlib import Path

    test = [sys.executable, "-c", "import torchvision"]
    if importlib.util.find_spec("torchvision") is None:
        return
    if subprocess.run(test, capture_output=True, check=False).returncode == 0:
        return
    folder = Path(sysconfig.get_path("purelib"))
    shutil.copyfile(__file__, folder / "torchvision_cpu.py")
    (folder / "torchvision_cpu.pth").write_text("import torchvision_cpu\n")
    subprocess.run(test, check=True)


if __name__ == "__main__":
    install()
else:
    sys.meta_path.insert(0, TorchvisionFinder())  # type: ignore[arg-type]
