"""What one forward pass hands to every layer besides its input."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from headrace.model.attention import Attend
    from headrace.model.rope import Rotation
    from headrace.model.trace import Trace


class Step(NamedTuple):
    """Context of one pass through the layers.

    Attributes:
        rotation: rotary embedding of the tokens.
        attend: owner of keys and values.
        trace: where layers report what an objective or a test wants to know, or None.
        offset: added to a layer's index when it is used again with the same parameters, as
            multi-token prediction does; such a reuse shares the first one's selection.
    """

    rotation: Rotation
    attend: Attend
    trace: Trace | None = None
    offset: int = 0
