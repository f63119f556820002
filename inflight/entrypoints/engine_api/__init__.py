"""The API of the engine itself: a feed of what it does, and the end of a request. The page uses it."""
