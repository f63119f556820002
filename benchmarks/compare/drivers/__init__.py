"""One file per engine: how it is loaded and asked. Only the standard library is imported before the engine itself."""
