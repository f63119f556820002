"""The engine's settings: frozen keyword-only dataclasses, one for each topic, composed into `EngineConfig`."""
