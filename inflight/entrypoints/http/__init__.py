"""What all APIs share: the application, strict bodies, errors, events, and the way from a request to its answer."""
