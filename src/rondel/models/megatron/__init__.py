"""Models as Megatron-Core stores them, to and from the names of Hugging Face;
neither direction needs Megatron or a GPU."""
