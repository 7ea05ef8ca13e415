"""Measures the compiled programs: what XLA made of them (`aot`), what a step costs (`overhead`)."""
