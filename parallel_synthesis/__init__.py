"""parallel_synthesis: exact, provable training of a cache mapper and a synthesizer LoRA. The library never prints."""

__version__ = "0.1.0"
