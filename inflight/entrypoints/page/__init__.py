"""The page that a browser gets: a chat, and a view of the engine. `web/` has its files, `web/vendor/` its libraries."""
