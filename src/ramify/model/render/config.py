"""Configuration of rendering. The default, `auto`, uses the chat template of the model."""

from typing import Annotated, Any, Literal

from pydantic import Field

from ramify.core.config import Config

ToolFormat = Literal["auto", "hermes", "qwen-coder", "llama-3", "mistral", "none"]


class TemplateRendererConfig(Config):
    """Render messages to tokens with the model's chat template."""

    type: Literal["auto", "template"] = "auto"
    """`auto` and `template` use the model's chat template, `family` a hand-written renderer."""
    tool_format: ToolFormat = "auto"
    """The format in which the model writes tool calls; `auto` detects it from the template."""
    template_args: dict[str, Any] = {}
    """Variables for the template, such as `enable_thinking = false`."""
    history: Literal["template", "verbatim"] = "template"
    """`verbatim` never rewrites earlier turns, even if the template would drop their reasoning."""


class FamilyRendererConfig(Config):
    """Render messages to tokens with a hand-written renderer of the `renderers` library."""

    type: Literal["family"] = "family"
    name: str
    """Name of the renderer: `qwen3`, `glm-5`, ..."""
    template_args: dict[str, Any] = {}
    """Options of the renderer, such as `enable_thinking = false`."""


RendererConfig = Annotated[TemplateRendererConfig | FamilyRendererConfig, Field(discriminator="type")]
