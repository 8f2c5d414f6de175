"""Makes plain `AutoModelForCausalLM.from_pretrained(folder)` load tailored models in any process that imports headwise.

Why implicit: whoever loads a model by its Auto class calls no function of ours, and the order of imports must not
matter. Transformers has no entry point for that; `headwise.families.register()` is the same step, made explicit.
Why an import hook: registering needs transformers and torch, which take seconds and which `import headwise` must not
load. So it waits until transformers has loaded its Auto classes, registers, and removes itself.
"""

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

AUTO = "transformers.models.auto.modeling_auto"


class _WaitForAuto(MetaPathFinder):
    """Watches imports of transformers until the Auto classes are among them.

    These may be imported by one that our models need and that is itself half done; so it waits for the outermost.
    """

    depth = 0

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name.partition(".")[0] != "transformers":
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        spec = next((spec for finder in others if (spec := finder.find_spec(name, path, target))), None)
        if spec is not None and spec.loader is not None:
            spec.loader = _Counted(spec.loader, self)
        return spec

    def look(self) -> None:
        """Register once all that was begun is done."""
        if not self.depth and AUTO in sys.modules and self in sys.meta_path:
            sys.meta_path.remove(self)
            _register()


class _Counted(Loader):
    """Runs another loader and counts how many imports are unfinished."""

    def __init__(self, inner: Loader, waiting: _WaitForAuto) -> None:
        self.inner, self.waiting = inner, waiting

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self.inner  # the module keeps its usual loader
        if module.__spec__ is not None:
            module.__spec__.loader = self.inner
        self.waiting.depth += 1
        try:
            self.inner.exec_module(module)
        finally:
            self.waiting.depth -= 1
        self.waiting.look()


def _register() -> None:
    if "headwise.families" in sys.modules or "headwise.runtime.modeling_headwise" in sys.modules:
        return  # our models are what is being imported: whoever imports them registers them
    from headwise.families import register

    register()


def install() -> None:
    """Register now if transformers is there already, otherwise as soon as it is."""
    if AUTO in sys.modules:
        _register()
    elif not any(isinstance(finder, _WaitForAuto) for finder in sys.meta_path):
        sys.meta_path.insert(0, _WaitForAuto())
