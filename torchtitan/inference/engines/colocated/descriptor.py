"""vLLM in the trainer's ranks, to the rest of a run: see engines/descriptor.py. It has no actors, so there is nothing
to start and nothing to ask over HTTP."""

from __future__ import annotations

from torchtitan.inference.engines.descriptor import EngineDescriptor


class Colocated(EngineDescriptor):
    """vLLM in the trainer's own processes."""


DESCRIPTOR = Colocated
