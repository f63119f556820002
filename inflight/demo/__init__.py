"""The small chat model that ships with Inflight: its data, its training and its evaluation."""
