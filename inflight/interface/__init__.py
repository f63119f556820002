"""Messages and abstract base classes that the engine, the executors and the workers share. Imports no torch."""
