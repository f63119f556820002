"""The engine's settings: frozen keyword-only dataclasses, one a concern, composed into `EngineConfig`."""
