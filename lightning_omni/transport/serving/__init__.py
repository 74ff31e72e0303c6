"""The process of a parameter server: its start, its supervisor, its saved state on disk, and its HTTP pages."""

from lightning_omni.transport.serving.process import ServerProcess

__all__ = ["ServerProcess"]
