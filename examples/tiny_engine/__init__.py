"""A small LLM engine with a paged KV cache, written to show how an engine uses kvxfer."""
