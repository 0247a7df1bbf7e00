"""Torch-free nouns that every other package shares: errors, configuration, layouts, wire records, logging."""
