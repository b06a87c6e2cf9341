"""The engine of block-diffusion language models: fills in blocks of masks where others write token after token."""

BLOCK_ENGINE = "rondel.generate.engine.blocks.engine:BlockEngine"  # by name: who serves other text does not import it
