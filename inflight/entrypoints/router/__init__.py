"""Several models behind one address: a request's model is loaded when it is first asked for (`inflight serve --models-dir`)."""
