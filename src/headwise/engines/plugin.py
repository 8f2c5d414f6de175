"""Makes vLLM serve our models without --trust-remote-code, where Headwise is installed beside it.

vLLM calls `register` in all of its processes, by the entry point `vllm.general_plugins`. The classes of this package
then stand for the code in a model's folder, which is not run.
"""

BACKEND = "vllm.model_executor.models.transformers:TransformersForCausalLM"  # which runs models of transformers


def register() -> None:
    """Name every decoder that can be cut to vLLM and to transformers."""
    from vllm import ModelRegistry

    from headwise import families

    families.register()
    for family in families.known():
        for kind, anatomy in ({} if family.package else family.kinds).items():
            found = anatomy.tailored_classes(kind).get("AutoModelForCausalLM")
            if found is not None:
                ModelRegistry.register_model(found.__name__, BACKEND)
