"""Load the renderer of a model directory."""

from functools import partial
from pathlib import Path

from ramify.model.images import load_image_family
from ramify.model.render.base import Renderer
from ramify.model.render.config import FamilyRendererConfig, TemplateRendererConfig
from ramify.model.render.model_files import ModelFiles
from ramify.model.render.tokenizer import Tokenizer


def load_renderer(model: str | Path, config: TemplateRendererConfig | FamilyRendererConfig | None = None) -> Renderer:
    """Load the renderer of a model directory, offline and without torch."""
    files = ModelFiles.read(Path(model))
    tokenizer = Tokenizer(files.directory)
    named = tokenizer.token_to_id(files.special_tokens.get("eos_token", ""))
    eos_ids = files.eos_ids if named is None or named in files.eos_ids else (*files.eos_ids, named)
    config = config or TemplateRendererConfig()
    if isinstance(config, FamilyRendererConfig):
        from ramify.model.render.family_renderer import FamilyRenderer

        return FamilyRenderer(tokenizer, config.name, config.template_args, eos_id=eos_ids[0] if eos_ids else None)

    from ramify.model.render.template import ChatTemplate
    from ramify.model.render.template_renderer import TemplateRenderer

    template = ChatTemplate(files.templates, special_tokens=files.special_tokens, template_args=config.template_args)
    return TemplateRenderer(
        tokenizer,
        template,
        eos_ids=eos_ids,
        tool_format=config.tool_format,
        history=config.history,
        load_image_family=partial(load_image_family, files.directory),
    )
