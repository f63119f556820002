"""The engine above the executor, in five rooms: core, start, request, process, serving. tests/architecture/rooms.py says which
of them may import which.
"""
