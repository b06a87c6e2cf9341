"""The engine of block-diffusion language models: fills in blocks of masks where others write token after token."""
