"""An OpenAI-compatible HTTP server: one GPU thread, many requests, a prefix cache that fits a recurrent model."""

from .command import main

__all__ = ["main"]
