"""Images of requests: from a URL, a file or an array to the parts of a request."""
