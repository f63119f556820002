"""The page that a browser gets: a chat. `web/` has its files, `web/vendor/` the libraries that it uses."""
