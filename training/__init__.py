"""Training of the bundled model `tandem-mini` (see training/README.md)."""
