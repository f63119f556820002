"""The embedded chat model: the data, training and evaluation that made inflight/demo/model."""
