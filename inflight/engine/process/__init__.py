"""The engine core in a process of its own: the program, its sockets, and what starts, watches and replaces it."""
