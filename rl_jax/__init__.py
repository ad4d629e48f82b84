"""Asynchronous reinforcement learning for large mixture-of-experts language models."""
