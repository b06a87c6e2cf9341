"""Block-diffusion language models: text in blocks, each filled in from masks."""
