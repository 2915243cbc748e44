"""Put the driver's sentences into the exceptions of numba.cuda and cuda.core, which name only a code.

`show_sentences()` puts the sentence (instruction, thread, line) behind the messages of both, in modules that are
imported already and in those that will be.
"""

import importlib.abc
import sys
from collections.abc import Callable

#: Module -> the exception that it raises for a code of the driver.
RAISING = {"numba.cuda.cudadrv.driver": "CudaAPIError", "cuda.core._utils.cuda_utils": "CUDAError"}


def show_sentences(refusal: Callable[[], str]) -> None:
    """Complete the messages from here on.

    Args:
        refusal: returns "NAME: sentence" of the driver's last refusal in this thread, "" for none.
    """
    for name in RAISING:
        if name in sys.modules:
            _complete(sys.modules[name], refusal)
    sys.meta_path.insert(0, _Finder(refusal))


class _Finder(importlib.abc.MetaPathFinder):
    """Finds nothing itself: it changes what the other finders find."""

    def __init__(self, refusal):
        self._refusal = refusal

    def find_spec(self, name, path=None, target=None):
        if name not in RAISING:
            return None
        others = [finder for finder in sys.meta_path if finder is not self]
        found = (finder.find_spec(name, path, target) for finder in others if hasattr(finder, "find_spec"))
        spec = next((one for one in found if one is not None), None)
        if spec is not None and spec.loader is not None:
            self._complete_after(spec.loader)
        return spec

    def _complete_after(self, loader):
        execute = loader.exec_module

        def execute_and_complete(module):
            execute(module)
            _complete(module, self._refusal)

        loader.exec_module = execute_and_complete


def _complete(module, refusal):
    """Give a module's exception a constructor that adds the sentence to a text with the code's name."""
    raised = getattr(module, RAISING[module.__name__])
    construct = raised.__init__

    def completed(self, *arguments):
        name, _, sentence = refusal().partition(": ")
        construct(self, *(f"{one}: {sentence}" if _is_about(one, name, sentence) else one for one in arguments))

    raised.__init__ = completed


def _is_about(argument, name, sentence):
    known = isinstance(argument, str) and name and sentence
    return known and name in argument and sentence not in argument
