"""The process of a parameter server: its start, supervisor, saved state, and HTTP pages."""

from lightning_omni.transport.serving.process import ServerProcess

__all__ = ["ServerProcess"]
