"""The engine's settings: frozen keyword-only dataclasses, one per concern, composed into `EngineConfig`."""
