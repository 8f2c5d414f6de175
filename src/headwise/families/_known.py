"""Which families there are, which of them a model belongs to, and what the model is for."""

import functools
from typing import Any

from torch import nn

from headwise.errors import ModelError
from headwise.families._architecture import BARE, CAUSAL, MASKED
from headwise.families._family import Family
from headwise.registry import find, names, texts
from headwise.runtime import modeling_headwise

TASKS = texts("headwise.tasks", "AUTO")  # task -> Auto class that loads a model for it


def known() -> list[Family]:
    """All families; their tailored models are known to transformers from then on."""
    found = [find("headwise.families", name).FAMILY for name in names("headwise.families")]
    for family in found:
        for kind in family.kinds:
            _register(family, kind)
    return found


def register() -> None:
    """Make tailored models of all families known to transformers, so that plain `from_pretrained` loads them."""
    known()


@functools.cache
def _register(family: Family, kind: str) -> None:
    """Tell transformers' Auto classes about the tailored models of one kind."""
    import transformers

    try:
        made = family.kinds[kind].tailored_classes(kind)
    except (ImportError, RuntimeError):  # of a package that is installed but does not load
        if not family.package:
            raise
        return
    config = made.pop("AutoConfig")
    transformers.AutoConfig.register(config.model_type, config, exist_ok=True)
    for auto, cls in made.items():
        getattr(transformers, auto).register(config, cls, exist_ok=True)


def family_of(config: Any) -> Family:
    """The family of a configuration; an unsupported one is refused with the list of what is supported."""
    return family_of_type(str(config.model_type).removeprefix("headwise_"))


def family_of_type(kind: str) -> Family:
    """The family of a model_type; an unsupported one is refused with the list of what is supported."""
    for family in known():
        if kind in family.kinds:
            return family
    supported = ", ".join(kind for family in known() for kind in family.kinds)
    raise ModelError(f"models of type '{kind}' are not supported. Supported types: {supported}.")


def task_of(config: Any) -> str:
    """What a model is for, by the head that its configuration names; a bare encoder is for embeddings."""
    family = family_of(config)
    head, anatomy = family.class_name(config), family.anatomy(config)
    ends = {end: auto for auto, end in anatomy.heads.items()}
    if MASKED in ends.values():
        ends["ForPreTraining"] = MASKED
    auto = next((auto for end, auto in ends.items() if head.endswith(end)), None)
    if auto is None and anatomy.roles and head in ("", f"{anatomy.stem}Model"):
        auto = next(iter(ends.values()))  # what a model of two stacks is for without a head, too
    if auto is None and family.shape_of(config).cached and CAUSAL in ends.values():
        auto = CAUSAL
    if auto is None and (head.endswith(anatomy.bare or "Model") or not head):
        auto = BARE
    if auto is None:
        raise ModelError(f"{head} is for none of the tasks {', '.join(TASKS)}. Choose one of them with --task.")
    return next(name for name, wanted in _tasks_of(family).items() if wanted == auto)


def _tasks_of(family: Family) -> dict[str, str]:
    """The tasks that there are for models that read what the family's read."""
    return {name: auto for name, auto in TASKS.items() if name.startswith("image_") == family.images}


def auto_class_of(model: nn.Module) -> str:
    """The name of the Auto class that loads a model like this one."""
    return family_of(model.config).auto_class_of(model)


def auto_class(config: Any, task: str | None) -> str:
    """The Auto class for a task, or for the one that the configuration names."""
    family = family_of(config)
    if task is not None and task not in TASKS:
        raise ModelError(f"no task is called '{task}'. Known: {', '.join(TASKS)}.")
    auto = _tasks_of(family).get(task or task_of(config))
    able = [*family.anatomy(config).heads, *([] if family.shape_of(config).cached else [BARE])]
    if auto is None or auto not in able:
        tasks = ", ".join(name for name, wanted in _tasks_of(family).items() if wanted in able)
        named = task or task_of(config)
        raise ModelError(f"{family.name} models cannot be reshaped for the task {named}, only for: {tasks}.")
    return auto


# Also for models that were saved before configurations carried their anatomy.
modeling_headwise.describe = lambda config: family_of(config).anatomy(config)
