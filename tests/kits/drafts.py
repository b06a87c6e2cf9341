"""A model, a smaller draft for it, and an engine that decodes with the two."""

from __future__ import annotations

from kits.engine import engine, tiny, watched
from rondel.generate.engine.builtin.draft import DraftModel
from rondel.generate.engine.builtin.speculative import SpeculativeDecoder

MODEL = tiny()
LITTLE = dict(
    hidden_size=16,
    intermediate_size=16,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    max_position_embeddings=512,
)


def drafted(model, draft, *, k=3, always=True, **settings):
    return watched(engine(model, speculation=SpeculativeDecoder(k, DraftModel(draft), always=always), **settings))
