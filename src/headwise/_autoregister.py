"""Makes plain `AutoModelForCausalLM.from_pretrained(folder)` work wherever headwise was imported, before or after.

Registration needs transformers and torch, which `import headwise` must not pull in; so it waits until transformers
loads its Auto classes.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType

AUTO = "transformers.models.auto.modeling_auto"


class _ThenRegister(Loader):
    """Runs another loader, then registers our models."""

    def __init__(self, inner: Loader) -> None:
        self.inner = inner

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self.inner.exec_module(module)
        _register()


class _WaitForAuto(MetaPathFinder):
    """Sees the Auto classes being imported, once."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != AUTO:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _ThenRegister(spec.loader)
        return spec


def _register() -> None:
    if "headwise.runtime.modeling_headwise" in sys.modules:
        return  # our models are what is being imported: whoever imports them registers them
    from headwise.runtime import register

    register()


def install() -> None:
    """Register now if transformers is there already, otherwise as soon as it is."""
    if AUTO in sys.modules:
        _register()
    elif not any(isinstance(finder, _WaitForAuto) for finder in sys.meta_path):
        sys.meta_path.insert(0, _WaitForAuto())
