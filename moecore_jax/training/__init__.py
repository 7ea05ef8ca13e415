"""Training of the demo model: generated text, tokenizer, packed batches, optax trainer, export."""
