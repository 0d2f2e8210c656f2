"""Has Pythons that tests start import torch as `hasten run` does: without garbage collections, which find nothing.

They are a third of the CPU of a process that imports torch and does little. `tests/conftest.py` puts this folder on
PYTHONPATH; what is to start as a person's Python does has an environment without it (`scripts.environment`).
"""

import gc
import sys
import weakref


class _Torch:
    """Finds torch by the finders behind it, and has it executed while nothing is collected."""

    def find_spec(self, name, path, target=None):
        if name not in ("torch", "torch._dynamo"):
            return None
        for finder in sys.meta_path[sys.meta_path.index(self) + 1 :]:
            spec = finder.find_spec(name, path, target)
            if spec is not None and spec.loader is not None:
                spec.loader.exec_module = _quickly(spec.loader.exec_module, name == "torch")
                return spec
        return None


def _quickly(execute, freezes):
    def exec_module(module):
        collects = gc.isenabled()
        gc.disable()
        try:
            execute(module)
        finally:
            if collects:
                gc.enable()
        if freezes:  # what torch._dynamo brings comes late: by then there are objects that collections must reach
            gc.freeze()
            for finalizer, info in list(weakref.finalize._registry.items()):
                if info.func.__module__ == "torch.library":  # takes apart each library of operators
                    finalizer.atexit = False

    return exec_module


sys.meta_path.insert(0, _Torch())
