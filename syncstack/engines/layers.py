"""What an adapter asks of an engine's model, whatever the engine."""

from __future__ import annotations

import torch


def first_parameter(model: torch.nn.Module) -> torch.Tensor | None:
    """A parameter that lies somewhere; None for a model without one."""
    return next((parameter for parameter in model.parameters() if parameter.numel()), None)


def kind_of(thing: object) -> str:
    """The full name of a thing's class: an engine's classes are told by name, because their modules come and go."""
    return f"{type(thing).__module__}.{type(thing).__qualname__}"
