"""SGLang as a node's engine: its server, started and watched by ours (docs/sglang.md)."""
